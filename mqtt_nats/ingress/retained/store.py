# SPDX-License-Identifier: Apache-2.0
"""Retained messages: how they are stored, replaced and removed.

A tombstone is an empty message in the stream that replaces a removed retained message, and is deleted a little later.
nats-server's MQTT listeners read tombstones by consumers of their own. A listener that does not get a tombstone before
its deletion keeps the old message. So each tombstone stays a second. Why: docs/internals/ingress.md#tombstones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import IgnoredStore, PendingStore
from mqtt_nats.codec import QuotaExceeded
from mqtt_nats.ingress.retained.deferral import consider
from mqtt_streams.retained import retained_subject, set_block, tombstone_block
from mqtt_streams.stored import up_to

if TYPE_CHECKING:
    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.ingress.publish import Publisher
    from mqtt_nats.ingress.publish_properties import Extras
    from mqtt_nats.pubsub.routing_table import Route
    from mqtt_nats.sessions.services import Services
    from mqtt_streams.api import ApiError
    from mqtt_streams.stores import Streams

log = logging.getLogger("mqtt_nats.broker")

ORPHANED: Final = b"Nats-TTL:60s\r\n"
"""TTL of a tombstone, in case its gateway dies before it removes the tombstone."""

TOMBSTONE_READ_S: Final = 1.0
"""Seconds after which every listener has read a tombstone."""


class Removal(PendingStore):
    """The deletion of a tombstone, for which ``parent`` waits."""

    __slots__ = ("_ack", "_parent")

    def __init__(self, parent: PendingStore, ack: bytes) -> None:
        self._parent, self._ack = parent, ack

    def stored(self, ack: bytes) -> None:
        """Finish the parent: the place of the tombstone is free."""
        self._parent.stored(self._ack)

    def failed(self, error: ApiError) -> None:
        """Finish the parent: the retained message is removed, and the tombstone is gone or ends by its TTL."""
        self._parent.stored(self._ack)


class Tombstones:
    """Tombstones that this gateway has stored; no other gateway deletes them."""

    __slots__ = ("_at_once", "_ended", "_nats", "_request", "_waiting")

    def __init__(self, nats: NatsLinks, request: bytes, *, at_once: bool) -> None:
        """``request``: subject of requests that delete one; ``at_once``: the number of messages is limited."""
        self._nats, self._request, self._at_once = nats, request, at_once
        self._ended = False
        self._waiting: deque[tuple[float, bytes]] = deque()

    def add(self, subject: str, sequence: int, parent: PendingStore | None, ack: bytes) -> None:
        """Delete a tombstone soon, or at once where the number of retained messages is limited: it takes a place.

        Args:
            subject: of the tombstone in the stream.
            sequence: of the tombstone.
            parent: operation to which the removal of the retained message belongs; it is done when the place is free.
            ack: PubAck of the tombstone.
        """
        removal = up_to(subject, sequence)
        if self._at_once:
            self._remove(removal, IgnoredStore() if parent is None else Removal(parent, ack))
            self._nats.link.kick()
            return
        if parent is not None:
            parent.stored(ack)
        if self._ended:
            self._remove(removal, IgnoredStore())
            self._nats.link.kick()
            return
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(TOMBSTONE_READ_S, self._flush)
        self._waiting.append((loop.time() + TOMBSTONE_READ_S, removal))

    def delete_all(self) -> None:
        """Delete all tombstones, and later ones at once: the gateway ends."""
        self._ended = True
        while self._waiting:
            self._remove(self._waiting.popleft()[1], IgnoredStore())
        self._nats.link.kick()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._waiting and self._waiting[0][0] <= now:
            self._remove(self._waiting.popleft()[1], IgnoredStore())
        self._nats.link.kick()
        if self._waiting:
            loop.call_at(self._waiting[0][0], self._flush)

    def _remove(self, removal: bytes, operation: PendingStore) -> None:
        self._nats.store.call(self._request, removal, operation)


class RetainedStores:
    """The stores of retained messages of one account: those that are not acknowledged, and what is withheld.

    Args:
        limited: the number of retained messages is limited.
    """

    def __init__(self, services: Services, *, limited: bool) -> None:
        self.services = services
        self.tombstones = Tombstones(services.nats, services.streams.purge_retained, at_once=limited)
        self.storing: set[PendingStore] = set()
        """Stores that are not acknowledged."""
        self.withholding: set[Publisher] | None = None
        """Clients whose ownership must be checked before withheld stores go on; None = no stores are withheld."""
        self._stored = asyncio.Event()

    def begin_withholding(self) -> set[Publisher]:
        """Withhold stores of retained messages; return the clients whose ownership must be checked, none yet."""
        doubted: set[Publisher] = set()
        self.withholding = doubted
        return doubted

    def end_withholding(self) -> None:
        """Let stores of retained messages go on."""
        self.withholding = None

    def begin(self, operation: PendingStore) -> None:
        """Note the store of a retained message."""
        self.storing.add(operation)

    def store_ended(self, operation: PendingStore) -> None:
        """Note that the store of a retained message has ended."""
        self.storing.discard(operation)
        self._stored.set()

    async def stored_so_far(self) -> None:
        """Wait until all retained messages stored by this gateway before this call can be read."""
        pending = set(self.storing)
        while pending := pending & self.storing:
            self._stored.clear()
            await self._stored.wait()


def may_retain(client: Publisher, size: int, qos: int) -> bool:
    """Whether a payload of ``size`` bytes may be retained; otherwise the message is published without RETAIN.

    Raises:
        QuotaExceeded: it may not be retained, and its acknowledgement can have a reason code.
    """
    most = client.services.settings.max_retained_size
    if most is None or size <= most:
        return True
    if client.version == 5 and qos:
        raise QuotaExceeded(f"retained messages have at most {most} bytes")
    not_retained(client, f"it has {size} bytes, more than {most}")
    return False


def not_retained(client: Publisher, why: str) -> None:
    """Count a message that is published but not retained, without a reason code for its client."""
    client.services.counters.not_retain()
    log.debug("%s: a message is not retained: %s", client, why)


def store_retained(
    client: Publisher,
    route: Route,
    payload: bytes,
    qos: int,
    operation: PendingStore,
    known_by: bytes,
    more: Extras | None = None,
) -> None:
    """Retain a message, or with an empty payload remove the retained message of the topic; ``known_by``: see `retain`.

    [MQTT-3.3.1-5] [MQTT-3.3.1-7] [MQTT-3.3.1-10] [MQTT-3.3.1-11]; called for RETAIN publishes only [MQTT-3.3.1-12].
    [MQTT-3.3.1-5] [MQTT-3.3.1-6] [MQTT-3.3.1-7] [MQTT-3.3.1-8] (5.0)
    """
    lines = client.sender_header
    if more is not None:
        lines += more.lines + more.ttl
    retain(client.ingress.retained, route, payload, qos, operation, lines, known_by)


def tombstone_subject(route: Route, payload: bytes) -> str:
    """Return the subject of the tombstone in the stream, empty if the payload is not: then no tombstone is stored."""
    return "" if payload else retained_subject(route.subject)


def retain(
    stores: RetainedStores,
    route: Route,
    payload: bytes,
    qos: int,
    operation: PendingStore,
    lines: bytes,
    known_by: bytes = b"",
) -> None:
    """Retain a message with these header lines, or with an empty payload remove the retained message of the topic.

    Args:
        known_by: header line with the id of the message, which the copies for subscribers have, too: subscribers do
            not get one of them after the other. By the id of a release the stream also recognises a repetition, also
            of a removal: a late repetition would remove a newer message.
    """
    services = stores.services
    if payload:
        headers = set_block(route.topic, qos << 1 | 1, services.identity.id, known_by + lines)
    else:
        headers = tombstone_block(route.topic, services.identity.id, known_by + ORPHANED)
    target = b"HPUB %b " % retained_subject(route.subject).encode()
    if services.registry.unchecked or stores.withholding is not None:
        consider(stores, operation)
    services.path.store.put(target, headers, payload, operation)
    stores.begin(operation)


async def is_retained(streams: Streams, subject: str, payload: bytes, since_ns: int) -> bool:
    """Whether a message, or a newer one of its subject, is retained; an empty payload leaves nothing retained.

    Args:
        since_ns: time of the message in nanoseconds since 1970, by nats-server's clock.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    found = await streams.retained.get(subject)
    return not payload if found is None else found.time_ns >= since_ns
