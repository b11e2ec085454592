# SPDX-License-Identifier: Apache-2.0
"""The scenarios: who publishes to whom, with which windows."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["throughput", "latency", "connections", "drain", "retained"]
Side = Literal["", "publishers", "subscribers"]

WINDOW = 20
"""Unacknowledged messages of a QoS 1 or 2 publisher."""

OUTSTANDING = 100_000
"""Deliveries outstanding in the whole scenario, which bounds what a broker has to queue."""

OUTSTANDING_BYTES = 64 * 1024 * 1024
"""The same in bytes of payload, where a scenario has its own payload."""


@dataclass(frozen=True)
class Scenario:
    """One line of the table.

    ``publishers`` to ``subscribers``: equal numbers are pairs, otherwise one side has one. ``window`` and ``lag`` are
    messages per publisher: unacknowledged (QoS 1, 2), and not yet received by every subscriber.
    """

    name: str
    title: str
    kind: Kind = "throughput"
    publishers: int = 1
    subscribers: int = 1
    qos: int = 0
    durable: bool = False
    window: int = WINDOW
    lag: int = 0
    monitor: bool = False
    """One more clean subscriber to ``#`` at QoS 0."""
    rate: int = 0
    """Messages per second (latency)."""
    clients: int = 0
    """Connections, or queued or retained messages for ``drain`` and ``retained``."""
    payload: int = 0
    """Bytes, in place of the run's."""
    nats: Side = ""
    """Who is a NATS client and no MQTT client."""
    split: bool = False
    """Publishers are on one server of a cluster of two, subscribers on the other."""
    idle: int = 0
    """Connections beside these that only stand by."""
    filters: int = 0
    """Other distinct filters that somebody has subscribed."""
    beside: str = ""
    """The scenario whose rate this one's is compared with."""
    properties: bytes = b""
    """Of every message, encoded (5.0)."""

    @property
    def outstanding(self) -> int:
        """``lag``, or where that is 0, this publisher's part of `OUTSTANDING`, 20 to 2,000 (QoS 1, 2: 200).

        Less at QoS 1 and 2, where ``window`` already paces the publisher and a short run should not only fill queues.
        """
        links = self.subscribers * (1 if self.subscribers == self.publishers else self.publishers)
        large = OUTSTANDING_BYTES // (self.payload or 1) // links
        return self.lag or max(
            20,
            min(200 if self.qos else 2000, OUTSTANDING // links, 10_000 // self.publishers * self.subscribers, large),
        )

    @property
    def behind_nats(self) -> bool:
        """Whether only brokers that are on NATS can do it."""
        return bool(self.nats) or self.split


def _grid() -> list[Scenario]:
    shapes = (
        Scenario("pairs10", "10 pairs, batched", publishers=10, subscribers=10),
        Scenario("pairs500", "500 pairs, 1 outstanding", publishers=500, subscribers=500, window=1, lag=1),
        Scenario("fanout100", "fan-out 1→100", subscribers=100),
        Scenario("fanout1000", "fan-out 1→1000", subscribers=1000),
        Scenario("fanin50", "fan-in 50→1", publishers=50),
    )
    found = []
    for shape in shapes:
        for qos, durable in ((0, False), (1, False), (1, True), (2, False), (2, True)):
            name, title = f"{shape.name}-q{qos}", f"{shape.title}, QoS {qos}"
            if durable:
                name, title = name + "-durable", title + ", durable"
            found.append(replace(shape, name=name, title=title, qos=qos, durable=durable))
    return found


def _payloads() -> Iterator[Scenario]:
    for size, title in ((10 * 1024, "10 KB"), (256 * 1024, "256 KB")):
        for qos in (0, 1):
            yield Scenario(
                f"payload{title.replace(' ', '').lower()}-q{qos}",
                f"10 pairs, {title}, QoS {qos}",
                publishers=10,
                subscribers=10,
                qos=qos,
                payload=size,
            )


def _beyond_mqtt() -> Iterator[Scenario]:
    """NATS clients on one side, and two servers."""
    plain = Scenario("", "", publishers=10, subscribers=10, beside="pairs10-q0")
    yield replace(plain, name="from-nats", title="10 pairs, batched, QoS 0, NATS to MQTT", nats="publishers")
    yield replace(plain, name="to-nats", title="10 pairs, batched, QoS 0, MQTT to NATS", nats="subscribers")
    for qos in (0, 1):
        title = f"10 pairs, batched, QoS {qos}, each side on its own server of a cluster"
        yield replace(plain, name=f"split-q{qos}", title=title, qos=qos, split=True, beside=f"pairs10-q{qos}")


SCENARIOS: tuple[Scenario, ...] = (
    *_grid(),
    Scenario(
        "monitor",
        "fan-out 1→1000, QoS 1, durable, beside one `#` subscriber",
        subscribers=1000,
        qos=1,
        durable=True,
        monitor=True,
        beside="fanout1000-q1-durable",
    ),
    Scenario(
        "drain", "drain of 100,000 queued, QoS 1, durable", "drain", qos=1, durable=True, window=100, clients=100_000
    ),
    Scenario("retained", "100,000 retained messages to one subscriber, QoS 1", "retained", qos=1, clients=100_000),
    *_payloads(),
    *_beyond_mqtt(),
    Scenario("connections", "5,000 clients connect and subscribe", "connections", clients=5000),
    Scenario("latency-q0", "latency at 2,000/s, QoS 0", "latency", rate=2000),
    Scenario("latency-q1", "latency at 2,000/s, QoS 1", "latency", rate=2000, qos=1, window=2000),
)


_TEXT = b"\x03\x00\x0atext/plain"  # Content Type
USER = b"\x26\x00\x04site\x00\x05north"

WITH_PROPERTIES: tuple[Scenario, ...] = tuple(
    Scenario(
        f"pairs10-q{qos}-properties",
        f"10 pairs, batched, QoS {qos}, content type and user property",
        publishers=10,
        subscribers=10,
        qos=qos,
        properties=_TEXT + USER,
    )
    for qos in (0, 1)
)
"""What only 5.0 has."""


def select(patterns: Sequence[str], *, version: int = 4) -> list[Scenario]:
    """Scenarios whose name matches one of the globs, all for none; `ValueError` for a glob without a match.

    ``version`` 5: also those that only MQTT 5.0 has.
    """
    there = SCENARIOS + (WITH_PROPERTIES if version == 5 else ())
    for pattern in patterns:
        if not any(fnmatch.fnmatch(each.name, pattern) for each in there):
            raise ValueError(f"no scenario is called {pattern!r}; there are {', '.join(s.name for s in there)}")
    return [each for each in there if not patterns or any(fnmatch.fnmatch(each.name, p) for p in patterns)]
