# SPDX-License-Identifier: Apache-2.0
"""Rules of EMQX as rules of a gateway: none of them allows more than before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqtt_nats.ctl.migration.emqx_rules import LOST, add_stored_rules, read_acl
from mqtt_nats.ctl.migration.findings import Migration

PATH = Path("acl.conf")


def rules(text: str) -> tuple[list[dict[str, Any]], list[tuple[int, str, str]]]:
    """The rules, and line, kind and text of the findings."""
    migration = Migration()
    read_acl(PATH, text, migration)
    return migration.rules or [], [(one.line, one.kind, one.text) for one in migration.findings]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            '{allow, {user, "ann"}, publish, ["a/#"]}.',
            {"effect": "allow", "user": "ann", "access": "publish", "topics": ["a/#"]},
        ),
        (
            '{deny, {ipaddr, "10.0.0.0/8"}, subscribe, ["a", {eq, "b/#"}]}.',
            {"effect": "deny", "address": "10.0.0.0/8", "access": "subscribe", "topics": ["a", {"eq": "b/#"}]},
        ),
        (
            '{allow, {\'and\', [{username, "ann"}, {clientid, "one"}]}, all, ["${username}/${clientid}"]}.',
            {"effect": "allow", "user": "ann", "client": "one", "access": "both", "topics": ["%u/%c"]},
        ),
        (
            '{allow, {user, "a"}, {publish, {retain, true}}, ["t"]}.',
            {"effect": "allow", "user": "a", "access": "publish", "retain": True, "topics": ["t"]},
        ),
        (
            '{allow, all, {subscribe, {qos, 2}}, ["t"]}.',
            {"effect": "allow", "access": "subscribe", "qos": [2], "topics": ["t"]},
        ),
        (
            '{allow, all, {publish, [{retain, all}, {qos, [0, 1]}, {qos, 2}]}, ["t"]}.',
            {"effect": "allow", "access": "publish", "qos": [0, 1, 2], "topics": ["t"]},
        ),
        (
            '{allow, all, {all, [{qos, 1}, {retain, false}]}, ["t"]}.',
            {"effect": "allow", "access": "both", "qos": [1], "retain": False, "topics": ["t"]},
        ),
        (
            '{allow, all, {subscribe, [{qos, 1}, {retain, true}]}, ["t"]}.',
            {"effect": "allow", "access": "subscribe", "qos": [1], "topics": ["t"]},
        ),
        ("{deny, all, subscribe}.", {"effect": "deny", "access": "subscribe", "topics": ["#", "$SYS/#"]}),
    ],
)
def test_a_rule(text: str, rule: dict[str, Any]) -> None:
    assert rules(text)[0] == [rule]


def test_rules_behind_the_one_about_everybody_are_never_asked() -> None:
    found, findings = rules('{deny, all}.\n{allow, {user, "ann"}, publish, ["a"]}.\n')
    assert found == []
    assert [(line, kind) for line, kind, _ in findings] == [(1, "moved"), (2, "not needed")]


def test_nothing_is_allowed_behind_a_denial_that_has_no_counterpart() -> None:
    """Its client would get by a later rule what the denial has kept from it."""
    found, findings = rules(
        '{deny, {client, {re, "^bad"}}, all, ["#"]}.\n{allow, {user, "ann"}, publish, ["a"]}.\n'
        '{deny, {user, "bob"}, publish, ["b"]}.\n'
    )
    assert [(one["effect"], one["user"]) for one in found] == [("deny", "bob")]
    assert [(line, kind) for line, kind, _ in findings] == [(1, "missing"), (2, "missing"), (3, "moved")]
    assert findings[1][2] == LOST


@pytest.mark.parametrize(
    "action",
    [
        "{publish, {retain, maybe}}",
        "{publish, {qos, 3}}",
        "{publish, {qos, []}}",
        "{publish, [{qos}]}",
        "{publish, 5}",
        "{publish, 1, 2}",
        "{publish}",
        "{{publish}, []}",
        "[publish]",
        '"publish"',
        "{send, []}",
    ],
)
def test_an_action_that_is_not_understood(action: str) -> None:
    """One rule is reported with its line, and the rest of the file is read; no wider rule is made of it."""
    found, findings = rules(f'{{allow, all, publish, ["a"]}}.\n{{allow, all, {action}, ["b"]}}.\n')
    assert [one["topics"] for one in found] == [["a"]]
    assert [(line, kind) for line, kind, _ in findings] == [(1, "moved"), (2, "missing")]


@pytest.mark.parametrize("topic", ["a/#/b", "$share/g/a", "${cert_common_name}/a"])
def test_a_topic_without_counterpart_loses_its_rule(topic: str) -> None:
    found, findings = rules(f'{{allow, all, publish, ["{topic}"]}}.')
    assert found == []
    assert findings[0][1] == "missing"


def test_stored_rules_are_in_the_order_in_which_they_are_asked() -> None:
    """Of client ids, then of users, then of all."""
    migration = Migration()
    everybody = {"rules": [{"permission": "deny", "action": "publish", "topic": "a"}]}
    user = {"username": "ann", "rules": [{"permission": "allow", "action": "all", "topic": "b", "qos": "1,2"}]}
    client = {"clientid": "one", "rules": [{"permission": "allow", "action": "publish", "topic": "c", "retain": True}]}
    add_stored_rules(PATH, [everybody, user, client], migration)
    assert migration.rules == [
        {"effect": "allow", "client": "one", "access": "publish", "topics": ["c"], "retain": True},
        {"effect": "allow", "user": "ann", "access": "both", "topics": ["b"], "qos": [1, 2]},
        {"effect": "deny", "access": "publish", "topics": ["a"]},
    ]
