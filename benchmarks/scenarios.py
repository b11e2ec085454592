# SPDX-License-Identifier: Apache-2.0
"""The scenarios: who publishes to whom, with which windows."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["throughput", "latency", "connections", "drain"]

WINDOW = 20
"""Unacknowledged messages of a QoS 1 or 2 publisher."""

OUTSTANDING = 100_000
"""Deliveries outstanding in the whole scenario, which bounds what a broker has to queue."""


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
    """Connections, or queued messages for ``drain``."""
    properties: bytes = b""
    """Of every message, encoded (5.0)."""

    @property
    def outstanding(self) -> int:
        """``lag``, or where that is 0, this publisher's part of `OUTSTANDING`, 20 to 2,000 (QoS 1, 2: 200).

        Less at QoS 1 and 2, where ``window`` already paces the publisher and a short run should not only fill queues.
        """
        links = self.subscribers * (1 if self.subscribers == self.publishers else self.publishers)
        return self.lag or max(
            20, min(200 if self.qos else 2000, OUTSTANDING // links, 10_000 // self.publishers * self.subscribers)
        )


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


SCENARIOS: tuple[Scenario, ...] = (
    *_grid(),
    Scenario(
        "monitor",
        "fan-out 1→100, QoS 1, durable, beside one `#` subscriber",
        subscribers=100,
        qos=1,
        durable=True,
        monitor=True,
    ),
    Scenario(
        "drain", "drain of 50,000 queued, QoS 1, durable", "drain", qos=1, durable=True, window=100, clients=50_000
    ),
    Scenario("connections", "5,000 clients connect and subscribe", "connections", clients=5000),
    Scenario("latency-q0", "latency at 2,000/s, QoS 0", "latency", rate=2000),
    Scenario("latency-q1", "latency at 2,000/s, QoS 1", "latency", rate=2000, qos=1, window=2000),
)


_TEXT = b"\x03\x00\x0atext/plain"  # Content Type
_USER = b"\x26\x00\x04site\x00\x05north"

WITH_PROPERTIES: tuple[Scenario, ...] = tuple(
    Scenario(
        f"pairs10-q{qos}-properties",
        f"10 pairs, batched, QoS {qos}, content type and user property",
        publishers=10,
        subscribers=10,
        qos=qos,
        properties=_TEXT + _USER,
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
