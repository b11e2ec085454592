# SPDX-License-Identifier: Apache-2.0
"""Carrying over retained messages, from a running broker to a gateway.

A first subscription, at QoS 0, brings the topics: mosquitto drops retained messages at QoS 1 and 2 beyond those that it
queues for a client (`max_inflight_messages` and `max_queued_messages`, 1,020). Then each message is fetched with its
QoS, by subscriptions to few topics at a time. Messages that arrive without RETAIN are live ones, and are left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import Packet, Publish, Suback, Subscribe, Subscription, Unsubscribe
from mqtt_nats.ctl.migration.transfer.mqtt_client import (
    ANSWER_S,
    Broker,
    MqttConnection,
    connected,
    connected_newest,
)
from mqtt_nats.ctl.migration.transfer.publisher import Carried, Publisher
from mqtt_nats.mqtt_clients.errors import reason_text

QUIET_S: Final = 3.0
"""Seconds without a retained message after which none comes any more."""

TOPICS_FETCHED_TOGETHER: Final = 100
"""Most topics whose messages are fetched together."""

TOPICS_FETCHED_AGAIN: Final = 10
"""The same for topics whose message did not come at first: fewer than any broker queues."""


async def carry_retained(
    old: Broker, new: Broker, filters: Iterable[str], *, replace_all: bool, carried: Carried
) -> None:
    """Publish the retained messages of one broker at another; those that are there already stay.

    Args:
        filters: filters whose retained messages are carried over; `#` has no topics that begin with `$`.
        replace_all: replace retained messages that are there.
        carried: the result, which also shows the progress.

    Raises:
        StartupError: a broker cannot be reached, refuses, or closes the connection.
    """
    wanted = list(filters)
    found, there = await asyncio.gather(_topics(old, wanted), _nothing() if replace_all else _topics(new, wanted))
    carried.kept(len(found & there))
    missing = found - there
    carried.expect(len(missing))
    async with connected_newest(old) as source, connected(new, 5) as target:
        publisher = Publisher(target, carried)
        reader = _Fetcher(source)
        for size in (TOPICS_FETCHED_TOGETHER, TOPICS_FETCHED_AGAIN):
            keys = sorted(missing)
            for at in range(0, len(keys), size):
                async for message in reader.fetch(keys[at : at + size]):
                    missing.discard(message.key)
                    await publisher.publish(message, retain=True)
        carried.removed(len(missing))
        await publisher.finish()


async def _nothing() -> set[bytes]:
    return set()


async def _topics(broker: Broker, filters: Sequence[str]) -> set[bytes]:
    """Return the topics with a retained message, as they are encoded in a packet."""
    async with connected_newest(broker) as connection:
        search = Search(filters)
        await connection.send(Subscribe(1, tuple(Subscription(one, 0) for one in filters)))
        while (left := search.left(time.monotonic())) > 0:
            try:
                packet = await connection.acknowledged(left)
            except TimeoutError:
                continue
            await _advance(connection, search, packet)
        if not search.granted:
            raise StartupError(f"{broker} does not answer SUBSCRIBE")
        return search.found


async def _advance(connection: MqttConnection, search: Search, packet: Packet) -> None:
    if isinstance(packet, Suback) and packet.packet_id == 1:
        for topic_filter, code in zip(search.filters, packet.codes, strict=False):
            if code >= 0x80:
                text = f"refuses the subscription {topic_filter!r}: {reason_text(code)}"
                raise StartupError(f"{connection.broker} {text}")
        search.grant(time.monotonic())
    elif isinstance(packet, Publish) and packet.retain:
        search.add(packet.key, time.monotonic())
    if search.granted and search.found and not search.asked:
        mark = next(iter(search.found))
        search.ask(mark)
        await connection.send(Subscribe(2, (Subscription(mark[2:].decode(), 0),)))


class Search:
    """State of the search for topics: what has come, and for how long more may come.

    A second subscription, to one of the topics, marks the end: its retained message comes behind those of the first at
    brokers that keep the order of a connection. Behind it none may come for `QUIET_S`. Without it, because that topic
    has been cleared, the search waits for `ANSWER_S`.
    """

    def __init__(self, filters: Sequence[str]) -> None:
        self.filters = filters
        self.found: set[bytes] = set()
        self.granted = False
        """Whether SUBACK of the first subscription has come."""
        self._mark: bytes | None = None
        self._marked = False
        self._since = time.monotonic()

    @property
    def asked(self) -> bool:
        """Whether the second subscription has been sent."""
        return self._mark is not None

    def ask(self, mark: bytes) -> None:
        """Note the topic of the second subscription."""
        self._mark = mark

    def grant(self, now: float) -> None:
        """Note SUBACK of the first subscription."""
        self.granted = True
        self._since = now

    def add(self, key: bytes, now: float) -> None:
        """Note a retained message."""
        self.found.add(key)
        self._marked = self._marked or key == self._mark
        self._since = now

    def left(self, now: float) -> float:
        """Return for how many seconds the next retained message is waited for."""
        complete = self.granted and (self._marked or not self.found)
        return self._since + (QUIET_S if complete else ANSWER_S) - now


class _Fetcher:
    """Fetches retained messages with their QoS, by subscriptions to their topics."""

    def __init__(self, connection: MqttConnection) -> None:
        self._connection = connection
        self._last = 0
        """Last packet identifier."""

    async def fetch(self, keys: Sequence[bytes]) -> AsyncIterator[Publish]:
        """Yield the retained message of each topic; those that have not come for `QUIET_S` are left out.

        Raises:
            StartupError: the broker does not answer, or the connection is lost.
        """
        connection, waiting = self._connection, set(keys)
        filters = tuple(key[2:].decode() for key in keys)
        packet_id = self._next()
        await connection.send(Subscribe(packet_id, tuple(Subscription(one, 2) for one in filters)))
        granted, since = False, time.monotonic()
        while waiting or not granted:
            left = since + (QUIET_S if granted else ANSWER_S) - time.monotonic()
            try:
                packet = await connection.acknowledged(max(left, 0))
            except TimeoutError:
                if not granted:
                    raise StartupError(f"{connection.broker} does not answer SUBSCRIBE") from None
                break
            if isinstance(packet, Suback) and packet.packet_id == packet_id:
                granted, since = True, time.monotonic()
            elif isinstance(packet, Publish) and packet.retain and packet.key in waiting:
                waiting.discard(packet.key)
                since = time.monotonic()
                yield packet
        await connection.send(Unsubscribe(self._next(), filters))

    def _next(self) -> int:
        self._last = self._last % 0xFFFF + 1
        return self._last
