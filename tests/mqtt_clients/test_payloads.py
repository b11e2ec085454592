# SPDX-License-Identifier: Apache-2.0
"""What `pub` publishes: its payload, its properties, and lines of standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from mqtt_nats.mqtt_clients import payloads
from mqtt_nats.mqtt_clients.errors import ClientError
from mqtt_nats.mqtt_clients.payloads import LineReader, payload_of, properties_of, standard_input

NOTHING = {"message": None, "file": None, "stdin_file": False, "null_message": False}
PLAIN = {
    "expiry": None,
    "content_type": None,
    "correlation_data": None,
    "user_property": (),
    "utf8": False,
    "mqtt_version": 5,
}


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe; a test may close the second."""
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


def test_the_payload_is_what_one_option_names(tmp_path: Path) -> None:
    path = tmp_path / "payload"
    path.write_bytes(b"\xff\0")
    assert payload_of(NOTHING | {"message": "on"}) == b"on"
    assert payload_of(NOTHING | {"message": ""}) == b""
    assert payload_of(NOTHING | {"message": "\udcff"}) == b"\xff"
    assert payload_of(NOTHING | {"null_message": True}) == b""
    assert payload_of(NOTHING | {"file": path}) == b"\xff\0"
    assert payload_of(NOTHING | {"stdin_line": True}) is None


@pytest.mark.parametrize("given", [{}, {"message": "a", "null_message": True}, {"message": "", "stdin_line": True}])
def test_exactly_one_option_names_the_payload(given: dict[str, Any]) -> None:
    with pytest.raises(click.UsageError, match="exactly one of --message, --file, --stdin-file, --null-message"):
        payload_of(NOTHING | given)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"cannot be read: (No such|Is a directory)"):
        payload_of(NOTHING | {"file": tmp_path})


def test_standard_input_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ClientError, match="standard input is closed"):
        standard_input()


def test_properties() -> None:
    given = PLAIN | {
        "expiry": 60,
        "content_type": "text",
        "correlation_data": "42",
        "user_property": ("a=b=c", "a="),
        "utf8": True,
    }
    assert properties_of(given, "answers") == {
        "message_expiry_interval": 60,
        "content_type": "text",
        "correlation_data": b"42",
        "user_property": [("a", "b=c"), ("a", "")],
        "payload_format_indicator": 1,
        "response_topic": "answers",
    }
    assert properties_of(PLAIN, None) is None
    assert properties_of(PLAIN | {"mqtt_version": 4}, None) is None


def test_properties_that_cannot_be() -> None:
    with pytest.raises(click.UsageError, match="--user-property is NAME=VALUE, not 'ab'"):
        properties_of(PLAIN | {"user_property": ("ab",)}, None)
    with pytest.raises(click.UsageError, match=r"properties are for MQTT 5\.0: content type, response topic"):
        properties_of(PLAIN | {"content_type": "text", "mqtt_version": 4}, "answers")


def test_lines_come_as_they_are_complete(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    reader = LineReader(reading)
    os.write(writing, b"one\ntwo\nthr")
    assert list(reader.lines()) == [b"one", b"two"]
    os.write(writing, b"ee\n\nlast")
    assert list(reader.lines()) == [b"three", b""]
    os.close(writing)
    assert not reader.ended
    assert list(reader.lines()) == [b"last"]
    assert reader.ended


def test_input_that_ends_with_a_line_end_has_no_further_line(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.write(writing, b"one\n")
    os.close(writing)
    reader = LineReader(reading)
    assert [*reader.lines(), *reader.lines()] == [b"one"]
    assert reader.ended


def test_a_line_is_bounded(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "LINE_BYTES_MAX", 10)
    reading, writing = pipe
    os.write(writing, b"0123456789")
    reader = LineReader(reading)
    assert list(reader.lines()) == []
    os.write(writing, b"x")
    os.close(writing)
    with pytest.raises(ClientError, match="a line of standard input has more than 10 bytes"):
        list(reader.lines())
