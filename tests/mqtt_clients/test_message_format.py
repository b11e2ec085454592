# SPDX-License-Identifier: Apache-2.0
"""How `sub` prints a message."""

from __future__ import annotations

import json
import re

import pytest

from mqtt_nats.codec import Properties
from mqtt_nats.mqtt_clients.message_format import FIELDS, FormatError, MessageFormat, as_json
from mqtt_nats.mqtt_clients.subscriber import Message

PROPERTIES = Properties(
    content_type="text",
    correlation_data=b"4\xff",
    message_expiry_interval=60,
    payload_format_indicator=1,
    user_property=[("a", "b"), ("a", "c")],
    response_topic="r",
    subscription_identifier=[1, 2],
)


def message(payload: bytes = b"on", properties: Properties | None = None, qos: int = 1, topic: str = "a/b") -> Message:
    return Message(topic, payload, qos, True, 7 if qos else 0, properties or Properties())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", b""),
        ("%t %p (QoS %q)", b"a/b on (QoS 1)"),
        ("%%%r%m %l %x", b"%17 2 6f6e"),
        ("%C|%E|%F|%P|%R|%S", b"text|60|1|a:b a:c|r|1 2"),
        ("%D", b"4\xff"),
        (r"a\n\t\0\e\\", b"a\n\t\0\x1b\\"),
        (r"\x\q", rb"\x\q"),
        ("a\\", b"a\\"),
        ("ü\udcff", b"\xc3\xbc\xff"),
    ],
)
def test_letters_stand_for_parts_of_a_message(text: str, line: bytes) -> None:
    assert MessageFormat(text).line(message(properties=PROPERTIES)) == line


def test_what_a_message_does_not_have_is_empty() -> None:
    assert MessageFormat("%C%D%E%F%P%R%S|%m").line(message(qos=0)) == b"|0"


def test_times() -> None:
    line = MessageFormat("%I %U").line(message()).decode()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} \d+\.\d{6}", line)


def test_on_a_terminal_controls_in_names_are_escaped_and_the_payload_is_printed_as_it_is() -> None:
    shape = MessageFormat("%t %C %p")
    named = message(b"\x1b[1m", topic="a\x1b]0;x\x07\x9b\nb", properties=Properties(content_type="\u202etxt"))
    assert shape.line(named) == "a\x1b]0;x\x07\x9b\nb \u202etxt \x1b[1m".encode()
    assert shape.line(named, on_terminal=True) == b"a\\x1b]0;x\\x07\\x9b\\nb \\u202etxt \x1b[1m"


def test_json_has_no_controls() -> None:
    line = MessageFormat("%j").line(message("x\x9by".encode(), topic="a\u202eb")).decode()
    assert line.isprintable()
    assert json.loads(line)["payload"] == "x\x9by"
    assert json.loads(line)["topic"] == "a\u202eb"


def test_a_payload_is_printed_as_it_is() -> None:
    assert MessageFormat("%p").line(message(b"\xff\0\n")) == b"\xff\0\n"


@pytest.mark.parametrize(("text", "letter"), [("%z", "%z"), ("a%", "%"), ("%%%", "%"), ("% ", "% ")])
def test_a_letter_that_stands_for_nothing(text: str, letter: str) -> None:
    with pytest.raises(FormatError) as found:
        MessageFormat(text)
    assert str(found.value).startswith(f"{letter} stands for nothing; there are ")
    assert all(f"%{one}" in str(found.value) for one in FIELDS)


def test_json() -> None:
    found = json.loads(as_json(message(properties=PROPERTIES)))
    assert found.pop("tst")
    assert found == {
        "topic": "a/b",
        "qos": 1,
        "retain": 1,
        "payloadlen": 2,
        "mid": 7,
        "payload": "on",
        "properties": {
            "content-type": "text",
            "correlation-data": "4\ufffd",
            "message-expiry-interval": 60,
            "payload-format-indicator": 1,
            "user-property": [["a", "b"], ["a", "c"]],
            "response-topic": "r",
            "subscription-identifier": [1, 2],
        },
    }
    found = json.loads(as_json(message(b"\xff", qos=0)))
    assert (found["payload_hex"], "payload" in found, "mid" in found, "properties" in found) == (
        "ff",
        False,
        False,
        False,
    )
    assert "\n" not in as_json(message(b"a\nb"))
