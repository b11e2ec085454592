# SPDX-License-Identifier: Apache-2.0
"""The option ``--format`` of ``mqtt-nats sub``: how a message is printed, with the letters of mosquitto_sub."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final

from mqtt_nats.mqtt_clients.subscriber import Message

ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "e": "\x1b", "a": "\a", "\\": "\\"}


def _property(name: str) -> Callable[[Message], str]:
    return lambda message: str(message.properties.get(name, ""))


def _iso_time(message: Message) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


FIELDS: Final[dict[str, tuple[str, Callable[[Message], str | bytes]]]] = {
    "%": ("a percent sign", lambda message: "%"),
    "t": ("topic", lambda message: message.topic),
    "p": ("payload", lambda message: message.payload),
    "x": ("payload as hexadecimal digits", lambda message: message.payload.hex()),
    "l": ("bytes of the payload", lambda message: str(len(message.payload))),
    "q": ("QoS", lambda message: str(message.qos)),
    "r": ("RETAIN: 0 or 1", lambda message: str(int(message.retain))),
    "m": ("packet identifier", lambda message: str(message.packet_id)),
    "C": ("content type", _property("content_type")),
    "D": ("correlation data", lambda message: message.properties.get("correlation_data", b"")),
    "E": ("seconds until the message expires", _property("message_expiry_interval")),
    "F": ("payload format indicator", _property("payload_format_indicator")),
    "P": ("user properties, as NAME:VALUE", lambda message: _user_properties(message)),
    "R": ("response topic", _property("response_topic")),
    "S": ("subscription identifiers", lambda message: _numbers(message)),
    "I": ("time of arrival (ISO 8601)", _iso_time),
    "U": ("time of arrival (seconds since 1970)", lambda message: f"{time.time():.6f}"),
    "j": ("everything as JSON", lambda message: as_json(message)),
}
"""Letter after `%`: meaning, and function that returns the text."""


class FormatError(ValueError):
    """A format has a letter that stands for nothing."""


class MessageFormat:
    """A format, parsed. FormatError for an unknown letter after `%`, or for a `%` at the end."""

    def __init__(self, text: str) -> None:
        self._parts: list[bytes | Callable[[Message], str | bytes]] = []
        literal = ""
        at = 0
        while at < len(text):
            sign, letter = text[at], text[at + 1 : at + 2]
            if sign == "%":
                if letter not in FIELDS:
                    known = ", ".join(f"%{one}" for one in FIELDS)
                    raise FormatError(f"%{letter} stands for nothing; there are {known}")
                self._parts += [_bytes(literal), FIELDS[letter][1]]
                literal = ""
            elif sign == "\\" and letter in ESCAPES:
                literal += ESCAPES[letter]
            else:
                literal += sign
                at -= 1
            at += 2
        self._parts.append(_bytes(literal))

    def line(self, message: Message, on_terminal: bool = False) -> bytes:
        """Return the text of a message, without line end.

        On a terminal, characters that are not printable are escaped in the topic and in properties: a terminal would
        obey the controls that their publisher has chosen. A payload stays as it is.
        """
        shown = _escaped if on_terminal else str
        return b"".join(
            [part if isinstance(part, bytes) else _bytes(_mapped(part(message), shown)) for part in self._parts]
        )


def as_json(message: Message) -> str:
    """Return a message as one line of JSON. A payload that is not UTF-8 is under ``payload_hex``."""
    found: dict[str, Any] = {"tst": _iso_time(message), "topic": message.topic, "qos": message.qos}
    found |= {"retain": int(message.retain), "payloadlen": len(message.payload)}
    if message.qos:
        found["mid"] = message.packet_id
    if message.properties:
        found["properties"] = {name.replace("_", "-"): _plain(value) for name, value in message.properties.items()}
    try:
        found["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        found["payload_hex"] = message.payload.hex()
    text = json.dumps(found, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(found)


def _mapped(value: str | bytes, shown: Callable[[str], str]) -> str | bytes:
    return value if isinstance(value, bytes) else shown(value)


def _escaped(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _plain(value: object) -> object:
    """Return a property's value as JSON has it: bytes as text, user properties as a list of pairs."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _user_properties(message: Message) -> str:
    return " ".join(f"{name}:{value}" for name, value in message.properties.get("user_property", []))


def _numbers(message: Message) -> str:
    return " ".join(map(str, message.properties.get("subscription_identifier", [])))


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode(errors="surrogateescape")
