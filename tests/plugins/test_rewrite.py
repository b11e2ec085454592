# SPDX-License-Identifier: Apache-2.0
"""Topic rewrite: rules by themselves, and what clients see of them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from mqtt_nats.codec import Will
from mqtt_nats.hooks import ClientView
from mqtt_nats.plugins.names import filled
from mqtt_nats.plugins.rewrite import RewriteOptions, rewritten
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.plugins.conftest import Start
from tests.plugins.fakes import PlainClient

pytestmark = pytest.mark.anyio

RULES: list[dict[str, Any]] = [
    {"filter": "x/#", "regex": "x/y/(.+)", "to": "z/$1"},
    {"filter": "x/#", "regex": "x/(\\w+)/(\\w+)", "to": "$2/$1/$2"},
    {"action": "subscribe", "filter": "mine/#", "regex": "mine/(.*)", "to": "of/%c/$1"},
    {"action": "publish", "filter": "up/+", "regex": "up/(.*)", "to": "users/%u/$1"},
    {"filter": "bad/#", "regex": "bad/(.*)", "to": "$1"},
]


def view(client_id: str = "c", user: str | None = None) -> ClientView:
    return ClientView(PlainClient(client_id, user))


@pytest.mark.parametrize(
    ("topic", "found"),
    [
        ("x/y/a/b", "z/a/b"),
        ("x/y/+/#", "z/+/#"),
        ("x/a/b", "b/a/b"),
        ("x/a/b/c", None),  # the whole topic has to match
        ("y/x/y/a", None),
        ("mine/a", "of/c/a"),
        ("up/a", None),  # who is nobody
    ],
)
def test_the_first_rule_that_is_about_a_topic_counts(topic: str, found: str | None) -> None:
    rules = list(RewriteOptions.model_validate({"rules": RULES}).rules)
    assert rewritten(rules, topic, view()) == found


@pytest.mark.parametrize("name", ["a/b", "+", "#", "a+", "$share", "", "a\0", "a/#"])
def test_names_that_would_mean_more_are_not_put_in(name: str) -> None:
    assert filled("own/%c/x", view(name)) is None
    assert filled("own/%u/x", view("c", name)) is None
    assert filled("own/x", view(name, name)) == "own/x"


def test_names_that_look_like_placeholders_are_names() -> None:
    assert filled("%c-%u", view("%u", "%c")) == "%u-%c"
    assert filled("$1/%c", view("$")) is None
    assert filled("$1/%c", view("c$1")) == "$1/c$1"


@pytest.mark.parametrize("name", ["a$1", "a$0", "x$7", "x$9$9", "a%c", "a%u$1"])
def test_a_name_with_a_placeholder_in_it_is_a_name(name: str) -> None:
    """Nor does a part of the topic become a name; the topic has as many levels as the rule says."""
    rule = [{"filter": "#", "regex": "(.*)/(x)?(.*)", "to": "%c/%u/$1$2/$3"}]
    rules = list(RewriteOptions.model_validate({"rules": rule}).rules)
    assert rewritten(rules, "b/c", view(name, name)) == f"{name}/{name}/b/c"
    assert rewritten(rules, "%u$3/%c", view(name, name)) == f"{name}/{name}/%u$3/%c"


async def test_clients_whose_names_look_like_placeholders(start: Start) -> None:
    """They are served, and each has its own topics."""
    inside = start({"rewrite": {"rules": [{"filter": "own/#", "regex": "own/(.*)", "to": "of/%c/$1"}]}})
    for name in ("x$7", "a$1", "a$0"):
        async with (
            await RawClient.connect(inside.port, name) as old,
            await RawClient5.connect5(inside.port, f"{name}5") as new,
        ):
            for client, own in ((old, name), (new, f"{name}5")):
                assert await client.subscribe("own/+/+", qos=1) == (1,)
                client.publish("own/b/secret", b"x")
                await client.receive(f"of/{own}/b/secret", b"x")


@pytest.mark.parametrize("topic", ["own/a\nb", "own/\n", "own/a\n"])
def test_no_character_evades_a_rule(topic: str) -> None:
    rules = list(RewriteOptions.model_validate({"rules": [{"filter": "#", "regex": "own/(.*)", "to": "of/$1"}]}).rules)
    assert rewritten(rules, topic, view()) == f"of/{topic.removeprefix('own/')}"


async def test_a_result_without_a_level_is_refused(start: Start) -> None:
    """It is not the topic or filter that the client has sent instead, also in a shared subscription."""
    inside = start({"rewrite": {"rules": [{"filter": "bad/#", "regex": "bad/(.*)", "to": "$1"}]}})
    async with await RawClient5.connect5(inside.port, "one") as one:
        assert await one.subscribe("bad/", "$share/g/bad/", "bad/+", qos=1) == (0x8F, 0x8F, 1)
        one.publish5("bad/", b"", 1, packet_id=9)
        await one.expect_refusal(4, 9, 0x90)


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ({"filter": "a/#/b"}, "filter: # is not"),
        ({"regex": "("}, "regex: "),
        ({"to": "$2"}, r"to: \$2 is no group"),
        ({"to": "$0"}, r"to: \$0 is no group"),
        ({"action": "all of it"}, "action"),
        ({"more": 1}, "more"),
    ],
)
def test_rules_that_are_refused(rule: dict[str, Any], wrong: str) -> None:
    given = {"filter": "#", "regex": "(.*)", "to": "$1", **rule}
    with pytest.raises(ValidationError, match=wrong):
        RewriteOptions.model_validate({"rules": [given]})


async def test_what_clients_see(start: Start) -> None:
    inside = start({"rewrite": {"rules": RULES}})
    async with (
        await RawClient5.connect5(inside.port, "one") as one,
        await RawClient.connect(inside.port, "two", will=Will("x/y/will", b"", 0, False)) as two,
    ):
        assert await one.subscribe("x/y/#", "$share/g/mine/s", "mine/m", qos=1) == (1, 1, 1)
        await two.deliver("x/y/a", b"1", 1)  # under its new name for who asked for the old one
        await one.receive("z/a", b"1")
        await two.deliver("of/one/m", b"2", 1)
        await one.receive("of/one/m", b"2")
        await two.deliver("of/one/s", b"3", 1)
        await one.receive("of/one/s", b"3")
        await one.unsubscribe("mine/m", "x/y/#", "$share/g/mine/s")
        for topic in ("of/one/m", "of/one/s", "z/b"):
            await two.deliver(topic, b"", 1)
        await one.quiet()
        one.publish5("bad/$MQTT/x", b"", 1, packet_id=9)
        await one.expect_refusal(4, 9, 0x87)
        assert await one.subscribe("bad/#", "bad/" + "a/" * 128, "bad/$JS/#") == (0, 0x8F, 0x87)
        await one.unsubscribe("bad/#")
        await one.subscribe("z/will")
        two.drop()
        await one.message("z/will", b"", 30.0)
