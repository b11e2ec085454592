# SPDX-License-Identifier: Apache-2.0
"""What is published: options for payload and properties, and lines of standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import click

from mqtt_nats.codec import Properties
from mqtt_nats.mqtt_clients.errors import ClientError

READ_BYTES: Final = 64 * 1024

LINE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Maximum bytes of a line of standard input."""

Command = Callable[..., Any]

_PAYLOAD: Final = (
    click.option("-m", "--message", help="The payload."),
    click.option(
        "-f",
        "--file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="The content of this file is the payload.",
    ),
    click.option("-s", "--stdin-file", is_flag=True, help="Standard input is the payload."),
    click.option("-n", "--null-message", is_flag=True, help="The payload is empty."),
)
_LINES = click.option("-l", "--stdin-line", is_flag=True, help="Each line of standard input is a message.")
_PROPERTIES: Final = (
    click.option("--expiry", type=click.IntRange(1, 0xFFFF_FFFF), help="Seconds until the message expires."),
    click.option("--content-type", help="Content type."),
    click.option("--correlation-data", help="Correlation data."),
    click.option("--user-property", multiple=True, metavar="NAME=VALUE", help="User property; may be repeated."),
    click.option("--utf8", is_flag=True, help="Payload format indicator 1: the payload is text."),
)


def payload_options(*, lines: bool) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of payload and properties; ``lines``: also ``--stdin-line``."""

    def decorate(command: Command) -> Command:
        for option in reversed((*_PAYLOAD, *((_LINES,) if lines else ()), *_PROPERTIES)):
            command = option(command)
        return command

    return decorate


def payload_of(given: dict[str, Any]) -> bytes | None:
    """Return the payload; None: each line of standard input is one. UsageError unless exactly one option says so."""
    sources = ["message", "file", "stdin_file", "null_message", *(("stdin_line",) if "stdin_line" in given else ())]
    chosen = [name for name in sources if given[name] not in (None, False)]
    if len(chosen) != 1:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sources)
        raise click.UsageError(f"exactly one of {flags} says what is published")
    if given["message"] is not None:
        return os.fsencode(given["message"])
    if given["null_message"]:
        return b""
    if given["stdin_file"]:
        return standard_input().read()
    if given["file"] is None:
        return None
    try:
        content: bytes = given["file"].read_bytes()
    except OSError as error:
        raise ClientError(f"{given['file']} cannot be read: {error.strerror}") from None
    return content


def standard_input() -> BinaryIO:
    """Return standard input. ClientError when it is closed: another file may have its descriptor."""
    if sys.stdin is None:
        raise ClientError("standard input is closed")
    return sys.stdin.buffer


def properties_of(given: dict[str, Any], response_topic: str | None) -> Properties | None:
    """Return the properties of the message. UsageError for one that has no legal form, or in MQTT 3.1.1."""
    found = Properties()
    if given["expiry"] is not None:
        found["message_expiry_interval"] = given["expiry"]
    if given["content_type"] is not None:
        found["content_type"] = given["content_type"]
    if given["correlation_data"] is not None:
        found["correlation_data"] = os.fsencode(given["correlation_data"])
    if given["user_property"]:
        found["user_property"] = [_pair(text) for text in given["user_property"]]
    if given["utf8"]:
        found["payload_format_indicator"] = 1
    if response_topic is not None:
        found["response_topic"] = response_topic
    if found and given["mqtt_version"] == 4:
        names = ", ".join(name.replace("_", " ") for name in found)
        raise click.UsageError(f"properties are for MQTT 5.0: {names}")
    return found or None


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise click.UsageError(f"--user-property is NAME=VALUE, not {text!r}")
    return name, value


class LineReader:
    """Lines of a file descriptor, as they arrive; the last one may have no line end."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.ended = False
        self._rest = b""

    def lines(self) -> Iterator[bytes]:
        """Read once, and yield the lines that are complete. ClientError for a line above `LINE_BYTES_MAX`."""
        data = os.read(self.descriptor, READ_BYTES)
        *complete, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise ClientError(f"a line of standard input has more than {LINE_BYTES_MAX:,} bytes")
        yield from complete
        if not data:
            self.ended = True
            if self._rest:
                yield self._rest
