# SPDX-License-Identifier: Apache-2.0
"""``ctl publish`` and ``ctl retained``."""

from __future__ import annotations

import re
from base64 import b64encode

import pytest

from tests.ctl.conftest import Fleet
from tests.harness.raw5 import Raw5


def test_publish(fleet: Fleet) -> None:
    with Raw5.open(fleet.two.port, "c-reader") as client:
        assert client.subscribed(("news/#", 2)) == (2,)
        assert fleet.text("publish", "news/a", "hello") == "5 B published on news/a at QoS 0\n"
        assert client.message(b"hello").qos == 0
        done = fleet.json("publish", "news/b", "twice", "--qos", "2")
        assert (done["topic"], done["bytes"], done["qos"], done["retain"]) == ("news/b", 5, 2, False)
        assert client.receive_message(b"twice").qos == 2
        fleet.text("publish", "news/c", "-", stdin=b"\xff\0")
        assert client.message().payload == b"\xff\0"
        fleet.text("publish", "news/d", b64encode(b"\xfe").decode(), "--base64")
        assert client.message().payload == b"\xfe"
        fleet.text("publish", "news/e")
        assert client.message().payload == b""


def test_retained(fleet: Fleet) -> None:
    for name in ("front", "back"):
        fleet.text("publish", f"doors/{name}", f"{name} is shut", "--retain", "--qos", "1")
    fleet.text("publish", "doors/raw", "-", "--retain", stdin=b"\xff\x1b")
    found = fleet.json("retained", "list", "doors/#")["retained"]
    assert [(one["topic"], one["qos"], one["bytes"]) for one in found] == [
        ("doors/back", 1, 12),
        ("doors/front", 1, 13),
        ("doors/raw", 0, 2),
    ]
    text = fleet.text("retained", "list", "doors/+", "--limit", "1")
    assert re.search(r"^doors/back +1 +12 B ", text, re.MULTILINE), text
    assert text.rstrip().endswith("1 of 3 are shown")
    one = fleet.json("retained", "get", "doors/front")
    assert (one["text"], one["payload"]) == ("front is shut", b64encode(b"front is shut").decode())
    assert fleet.text("retained", "get", "doors/front").endswith("\nfront is shut\n")
    assert fleet.json("retained", "get", "doors/raw")["text"] is None
    assert "/xs= (Base64)" in fleet.text("retained", "get", "doors/raw")
    with Raw5.open(fleet.two.port, "c-doors") as client:
        assert client.subscribed(("doors/back", 0)) == (0,)
        client.message(b"back is shut")
        assert fleet.text("retained", "delete", "doors/back") == "1 retained message removed\n"
        assert client.message().payload == b""  # subscribers see it
    would = fleet.json("retained", "delete", "doors/#", "--dry-run")
    assert would["topics"] == ["doors/front", "doors/raw"]
    assert fleet.text("retained", "delete", "doors/#") == "2 retained messages removed\n"
    assert fleet.json("retained", "list", "doors/#")["retained"] == []


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("publish", "a/#", "x"), 1, "'a/#' is no topic name"),
        (("publish", "$MQTT/x", "x"), 1, "'$MQTT/x': "),
        (("publish", "a", "x", "--qos", "3"), 2, "qos: "),
        (("publish", "a", "x", "--qos", "one"), 2, "qos: "),
        (("publish", "a", "*", "--base64"), 1, "it is not Base64"),
        (("publish", "a" * 70_000, "x"), 1, "more than 65535 bytes"),
        (("publish",), 2, "Missing argument"),
        (("retained", "get", "nothing/here"), 1, "nothing is retained on nothing/here"),
        (("retained", "get", "a/+"), 1, "is no topic name"),
        (("retained", "delete", "nothing/#"), 1, "nothing is retained on nothing/#"),
        (("retained", "list", "a/#/b"), 1, "is no topic filter"),
    ],
)
def test_bad_input(fleet: Fleet, arguments: tuple[str, ...], status: int, text: str) -> None:
    done = fleet.run(*arguments)
    assert done.status == status, done.text
    assert text in done.text


def test_a_message_that_is_too_large(fleet: Fleet) -> None:
    done = fleet.run("publish", "large", "-", stdin=bytes(8 * 1024 * 1024))
    assert done.status == 1
    assert done.text.startswith("the request is too large: NATS takes 8,388,608 bytes")
