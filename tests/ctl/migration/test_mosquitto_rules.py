# SPDX-License-Identifier: Apache-2.0
"""ACL files of mosquitto as rules of a gateway: the order in which they are asked, and lines that are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.ctl.migration.findings import Migration
from mqtt_nats.ctl.migration.mosquitto_rules import read_rules


def rules(tmp_path: Path, text: str) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """The rules, and kind and subject of the findings."""
    path = tmp_path / "acl"
    path.write_text(text, encoding="utf-8")
    migration = Migration()
    found = read_rules(path, migration)
    return found, [(one.kind, one.subject) for one in migration.findings]


def test_denials_come_first_and_patterns_last(tmp_path: Path) -> None:
    found, _ = rules(
        tmp_path,
        "# a comment\n\ntopic read public/#\npattern write %u/out\nuser ann\ntopic a/#\ntopic deny a/secret\n"
        "topic write b\ntopic readwrite c\npattern deny x/%c\n",
    )
    assert found == [
        {"effect": "allow", "anonymous": True, "access": "subscribe", "topics": ["public/#"]},
        {"effect": "deny", "user": "ann", "access": "both", "topics": ["a/secret"]},
        {"effect": "allow", "user": "ann", "access": "both", "topics": ["a/#", "c"]},
        {"effect": "allow", "user": "ann", "access": "publish", "topics": ["b"]},
        {"effect": "deny", "access": "both", "topics": ["x/%c"]},
        {"effect": "allow", "access": "publish", "topics": ["%u/out"]},
    ]


def test_a_user_may_come_twice_and_a_topic_too(tmp_path: Path) -> None:
    found, _ = rules(tmp_path, "user ann\ntopic a\nuser bob b\ntopic read x y\nuser ann\ntopic c\ntopic a\n")
    assert found == [
        {"effect": "allow", "user": "ann", "access": "both", "topics": ["a", "c"]},
        {"effect": "allow", "user": "bob b", "access": "subscribe", "topics": ["x y"]},
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("user", "user"),
        ("topic", "topic"),
        ("pattern  ", "pattern"),
        ("acl_file x", "acl_file"),
        ("topic a/#/b", "a/#/b"),
        ("topic read a+", "a+"),
        ("topic $share/g/a", "$share/g/a"),
        ("topic deny %u/a", "%u/a"),
        ("topic %c", "%c"),
    ],
)
def test_a_line_that_cannot_be_a_rule_is_left_out_and_named(tmp_path: Path, line: str, what: str) -> None:
    found, findings = rules(tmp_path, f"{line}\ntopic ok\n")
    assert [one["topics"] for one in found] == [["ok"]]
    assert findings == [("missing", what), ("moved", "ok")]


@pytest.mark.parametrize(("line", "topic"), [("topic read", "read"), ("topic deny", "deny")])
def test_a_word_alone_is_a_topic(tmp_path: Path, line: str, topic: str) -> None:
    """As mosquitto reads it."""
    found, _ = rules(tmp_path, line)
    assert found == [{"effect": "allow", "anonymous": True, "access": "both", "topics": [topic]}]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="acl"):
        read_rules(tmp_path / "acl", Migration())
