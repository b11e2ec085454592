# SPDX-License-Identifier: Apache-2.0
"""PUBLISH packets for one subscriber: subscription identifiers, topic aliases, size limit, remaining expiry.

Such a packet is encoded when it is written, so that a topic alias is never given in a packet that is not sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from mqtt_nats.base import server_clock as natstime
from mqtt_nats.messages.message import Message, Stored, expired, tailored

if TYPE_CHECKING:
    from mqtt_nats.hooks.events import DropReason
    from mqtt_nats.messages.terms import Terms
    from mqtt_nats.transport.write_buffer import WriteBuffer

# Largest number of topic aliases for one client, also where it allows more: gateway and client remember each of them.
ALIASES_MOST: Final = 256


class Aliases:
    """Topic aliases of packets to one client, for the topics that were used last.

    [MQTT-3.1.2-26] [MQTT-3.1.2-27] [MQTT-3.3.2-11] (5.0)
    """

    __slots__ = ("_given", "_most")

    def __init__(self, maximum: int) -> None:
        self._most = min(maximum, ALIASES_MOST)
        self._given: dict[bytes, int] = {}

    def give(self, key: bytes) -> tuple[int, bool]:
        """Return the alias of a topic, and whether the client knows the alias already."""
        given = self._given
        alias = given.pop(key, 0)
        known = alias > 0
        if not known:
            alias = len(given) + 1 if len(given) < self._most else given.pop(next(iter(given)))
        given[key] = alias
        return alias, known

    def known(self) -> dict[int, bytes]:
        """Return the topics by alias."""
        return {alias: key[2:] for key, alias in self._given.items()}

    def forget(self) -> None:
        """Forget all aliases: the client may not have got the packets that have set them."""
        self._given.clear()


class Subscriber(Protocol):
    """The client that a PUBLISH packet is for: a session."""

    version: int
    write_buffer: WriteBuffer
    terms: Terms
    outgoing: Aliases | None
    checks_each: bool

    def withheld(self, key: bytes, qos: int, message_id: str) -> bool:
        """Whether the rules withhold a message of a subscription of this QoS."""

    def drop(self, topic: str, qos: int, reason: DropReason, message_id: str = "") -> None:
        """Count and announce a message that the client does not get."""


def encode_publish(
    client: Subscriber,
    message: Message | Stored,
    qos: int,
    identifier: int,
    *,
    ids: bytes,
    retain: bool,
    dup: bool = False,
) -> bytes:
    """Return a PUBLISH packet for one client; empty when it must not be sent: expired, or too large for the client.

    [MQTT-3.3.2-5] [MQTT-3.1.2-24] [MQTT-3.1.2-25] (5.0); an expired message that was sent before (DUP) is sent again.
    """
    now = natstime.now()
    if not dup and expired(message, now):
        client.drop(message.key[2:].decode(), qos, "expired", message.identity)
        return b""
    version = client.version
    limit = client.terms.maximum_packet_size
    alias, known = 0, False
    aliases = client.outgoing
    # A packet that may be dropped must not set an alias; a packet that is dropped for its size gets none.
    if aliases is not None and (qos or not client.write_buffer.clogged):
        size = len(message.key) + len(message.payload) + len(message.body) + len(ids) + 32
        if size <= limit:
            alias, known = aliases.give(message.key)
    data = tailored(
        message, version, qos, identifier, now, ids=ids, retain=retain, dup=dup, alias=alias, named=not known
    )
    if len(data) > limit:
        client.drop(message.key[2:].decode(), qos, "too large", message.identity)
        return b""
    return data


def encode_for_subscriber(
    client: Subscriber, message: Message | Stored, qos: int, granted: int, ids: bytes = b"", *, kept: bool = False
) -> Callable[[int], bytes]:
    """Return a function that encodes a message for its packet identifier; empty: denied, expired or too large.

    Args:
        qos: the QoS of the packet.
        granted: the QoS of the subscription.
        ids: subscription identifiers as they stand in the packet.
        kept: whether the subscription gets the RETAIN flag of the publisher.
    """
    retain = message.retain or (kept and message.kept)

    def late(identifier: int) -> bytes:
        if client.checks_each and client.withheld(message.key, granted, message.identity):
            return b""
        return encode_publish(client, message, qos, identifier, ids=ids, retain=retain)

    return late
