# SPDX-License-Identifier: Apache-2.0
"""Properties of a PUBLISH from a client (5.0): topic alias, checks, and the forms that the copies of a message need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.base import server_clock as natstime
from mqtt_nats.codec import PayloadFormatInvalid, Properties, QuotaExceeded, TopicAliasInvalid
from mqtt_nats.messages.properties import body, from_headers
from mqtt_streams.properties import STAY, header_lines, ttl_line

if TYPE_CHECKING:
    from mqtt_nats.ingress.publish import Publisher

ANSWER_LINE: Final = b"Nmqtt-Answer:1\r\n"
"""Header line of a stored record: NATS clients may answer, since the publisher may publish on its Response Topic."""

OF_RECORD: Final = (
    b"Nmqtt-Pub:",
    b"Nmqtt-Subject:",
    b"Nmqtt-Mapped:",
    b"Nmqtt-Epoch:",
    b"Nmqtt-Id:",
    b"Nmqtt-Client:",
    b"Nmqtt-Answer:",
    b"Nats-",
)
"""Beginnings of the header lines of a held publish that are not properties of the message."""


class Extras(NamedTuple):
    """Properties of a publish (5.0) in the forms that its copies need."""

    lines: bytes
    """Header lines, with the expiry."""
    ttl: bytes
    """TTL header line of the retained copy; empty without an expiry."""
    body: bytes
    """Properties as they stand in a PUBLISH packet."""
    expiry: int
    """Message expiry interval in seconds; -1 = none."""
    born: float
    """Unix time of the publish, from which the expiry counts."""
    reply: bytes = b""
    """Reply subject for NATS clients with a space after it; empty = no answer is wanted."""

    @property
    def stay(self) -> bytes:
        """Header line for the copy in `$MQTT_msgs` [MQTT-4.3.3-7] (5.0); empty without an expiry."""
        return b"Nats-TTL:%ds\r\n" % (self.expiry + STAY) if self.expiry >= 0 else b""

    @property
    def recorded(self) -> bytes:
        """Header lines for a record from which the message is published later, maybe by another gateway."""
        return self.lines + ANSWER_LINE if self.reply else self.lines


def extras(properties: Properties, reply: bytes = b"") -> Extras | None:
    """Return the properties that travel with a message; None when there are none."""
    lines = header_lines(properties)
    if not lines:
        return None
    expiry = properties.get("message_expiry_interval", -1)
    return Extras(lines, ttl_line(properties), body(properties), expiry, natstime.now() if expiry >= 0 else 0.0, reply)


def aged(more: Extras, now: float) -> Extras | None:
    """Return the properties with what is left of the expiry interval at Unix time ``now``; None: it has passed."""
    passed = int(now - more.born)
    if passed < 1:
        return more
    left = more.expiry - passed
    if left <= 0:
        return None
    lines = more.lines.replace(b"Nmqtt-Expiry:%d" % more.expiry, b"Nmqtt-Expiry:%d" % left, 1)  # the first line
    return Extras(lines, ttl_line({"message_expiry_interval": left}), more.body, left, now, more.reply)


def restored(headers: bytes, born: float) -> Extras | None:
    """Return the properties of a held publish from its record's headers; ``born``: Unix time of the record's store."""
    found, expiry = from_headers(headers)
    if not found and expiry < 0:
        return None
    kept = [line for line in headers.split(b"\r\n")[1:] if line and not line.startswith(OF_RECORD)]
    lines = b"".join(line + b"\r\n" for line in kept)
    ttl = ttl_line({"message_expiry_interval": expiry}) if expiry >= 0 else b""
    return Extras(lines, ttl, found, expiry, born)


def unalias(client: Publisher, key: bytes, alias: int) -> bytes:
    """Return the topic of an alias, which the packet may also set [MQTT-3.3.2-7] [MQTT-3.3.2-12] (5.0).

    Raises:
        TopicAliasInvalid: the alias is higher than CONNACK allows, or not known.
        QuotaExceeded: the gateway has no memory for the alias.
    """
    if alias > client.services.settings.topic_alias_maximum:  # [MQTT-3.3.2-9] (5.0)
        # [MQTT-3.2.2-17] [MQTT-3.2.2-18] (5.0)
        raise TopicAliasInvalid(f"topic alias {alias} is above {client.services.settings.topic_alias_maximum}")
    if len(key) > 2:
        if not client.memory.set_alias(alias, key):
            raise QuotaExceeded("the topic aliases take too much memory")
        return key
    known = None if client.memory.aliases is None else client.memory.aliases.get(alias)
    if known is None:
        raise TopicAliasInvalid(f"topic alias {alias} has no topic")
    return known


def may_answer(client: Publisher, topic: str) -> bool:
    """Whether NATS clients may answer on a response topic: only where the client may publish itself."""
    if client.guarded is None:
        return True
    raw = topic.encode()
    return client.guarded.may_publish(len(raw).to_bytes(2) + raw, 0, False)


def described(client: Publisher, properties: Properties, payload: bytes, qos: int) -> Extras | None:
    """Return the properties of a client's publish in the forms that its copies need.

    Raises:
        MqttError: a property is invalid or not permitted.
    """
    reply = b""
    if "response_topic" in properties:
        topic = properties["response_topic"]
        if may_answer(client, topic):
            owner = client.connection.host if client.user is None else f"user {client.user}"
            reply = client.ingress.replying.reply_subject(topic, properties.get("correlation_data"), qos, owner)
    if properties.get("payload_format_indicator") and client.services.settings.validate_payload_format:
        _check_text(payload)
    return extras(properties, reply)


def _check_text(payload: bytes) -> None:
    try:
        payload.decode()
    except UnicodeDecodeError:
        raise PayloadFormatInvalid("the payload is not UTF-8 text") from None
