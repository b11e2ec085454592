# SPDX-License-Identifier: Apache-2.0
"""PUBLISH packets for one subscriber: subscription identifiers, topic aliases, size limit, remaining expiry.

Such a packet is encoded when it is written, so that a topic alias is never given in a packet that is not sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.base import server_clock as natstime
from mqtt_nats.codec import matches
from mqtt_nats.hooks.calls import dropped
from mqtt_nats.messages.message import Message, Stored, encoded_id, expired, tailored
from mqtt_streams.subjects import subject_to_topic

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.protocol.inflight import Delivery
    from mqtt_nats.protocol.overlap import Overlap
    from mqtt_nats.pubsub.routing_table import Choice

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


def encode_publish(
    client: Client, message: Message | Stored, qos: int, identifier: int, *, ids: bytes, retain: bool, dup: bool = False
) -> bytes:
    """Return a PUBLISH packet for one client; empty when it must not be sent: expired, or too large for the client.

    [MQTT-3.3.2-5] [MQTT-3.1.2-24] [MQTT-3.1.2-25] (5.0); an expired message that was sent before (DUP) is sent again.
    """
    now = natstime.now()
    if not dup and expired(message, now):
        dropped(client, message.key[2:].decode(), qos, "expired", message.identity)
        return b""
    version = client.version
    limit = client.terms.maximum_packet_size
    alias, known = 0, False
    aliases = client.outgoing
    # A packet that may be dropped must not set an alias; a packet that is dropped for its size gets none.
    if aliases is not None and (qos or not client.outlet.clogged):
        size = len(message.key) + len(message.payload) + len(message.body) + len(ids) + 32
        if size <= limit:
            alias, known = aliases.give(message.key)
    data = tailored(
        message, version, qos, identifier, now, ids=ids, retain=retain, dup=dup, alias=alias, named=not known
    )
    if len(data) > limit:
        dropped(client, message.key[2:].decode(), qos, "too large", message.identity)
        return b""
    return data


def encode_for_subscriber(
    client: Client, message: Message | Stored, qos: int, choice: Choice | None = None
) -> Callable[[int], bytes]:
    """Return a function that encodes a message for its packet identifier; empty: denied, expired or too large."""
    ids = choice.ids if choice is not None else b""
    retain = message.retain or (choice is not None and choice.kept and message.kept)

    granted = choice.qos if choice is not None else qos

    def late(identifier: int) -> bytes:
        if client.checks_each and client.withheld(message.key, granted, message.identity):
            return b""
        return encode_publish(client, message, qos, identifier, ids=ids, retain=retain)

    return late


def subscriber_properties(
    client: Client, overlap: Overlap[Any], message: Stored, delivery: Delivery
) -> tuple[bytes, bool]:
    """Return subscription identifiers for a stored message, and whether RETAIN stays [MQTT-3.3.4-4] (5.0).

    A 3.1.1 bridge gets the publisher's RETAIN flag.
    """
    options = client.options
    if client.version != 5:
        return b"", client.bridge and message.kept
    if delivery.sequence < 0:  # a retained message, or one of a group, comes by one subscription only
        return encoded_id(delivery.source.identifier), delivery.source.kept and message.kept
    if not options:
        return b"", False
    own = message.sender == client.client_id
    identifiers, kept = overlap.extras(message.subject, delivery.sequence, own)
    topic = subject_to_topic(message.subject)
    for found, wanted in options.items():  # subscriptions at QoS 0 have no consumer, so `overlap` lacks them
        if not client.filters[found] and not (own and wanted.no_local) and matches(found.text, topic):
            kept = kept or wanted.retain_as_published
            if wanted.identifier is not None:
                identifiers.append(wanted.identifier)
    return b"".join(map(encoded_id, identifiers)), kept and message.kept
