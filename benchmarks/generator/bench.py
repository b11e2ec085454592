# SPDX-License-Identifier: Apache-2.0
"""Publishers and subscribers that load a broker for a while, verify what comes, and say how fast it was.

Publishers and subscribers in equal number are pairs; otherwise one side has one, and each message goes to, or comes
from, all of the other. Every subscriber has to get every message of its publishers once and in order.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.generator.clients import Client, Greeting, LoadError, Loop, Publisher, Subscriber, connect_all
from benchmarks.generator.packets import DeliveryError, Layout, Verifier

PATIENCE: Final = 60.0
"""Seconds in which clients are connected."""

SETTLED: Final = 45.0
"""Seconds in which everything has arrived after the last publish."""

LINGER: Final = 0.2
"""Seconds in which nothing more may come."""

OUTSTANDING: Final = 100_000
"""Deliveries that are on their way at most, so that a broker need not queue without end."""

Told = Callable[[float, float], None]
"""Told the seconds since the beginning, and the deliveries per second since it was told last."""


@dataclass(frozen=True)
class Plan:
    """Load to generate. ``version``: 4 for MQTT 3.1.1, 5 for 5.0."""

    host: str
    port: int
    publishers: int = 10
    subscribers: int = 10
    qos: int = 0
    payload: int = 128
    """Bytes."""
    seconds: float = 10.0
    window: int = 20
    """Messages of a publisher that are not acknowledged (QoS 1 and 2)."""
    rate: float = 0.0
    """Messages per second of all publishers; 0: as many as the windows allow."""
    durable: bool = False
    """Subscribers have sessions that outlive their connection; they are ended afterwards."""
    version: int = 4
    user: str | None = None
    password: str = ""
    topic: str = "bench"
    """Before the topics of the messages; something of this run's own follows."""

    def __post_init__(self) -> None:
        if self.publishers != self.subscribers and 1 not in (self.publishers, self.subscribers):
            raise ValueError("there have to be as many publishers as subscribers, or one of either")
        if not self.topic or any(sign in self.topic for sign in "+#\0"):
            raise ValueError(f"topic: {self.topic!r} is no topic")

    @property
    def pairs(self) -> bool:
        """Whether each publisher has a subscriber of its own."""
        return self.publishers == self.subscribers

    @property
    def lag(self) -> int:
        """Messages of a publisher that have not reached every subscriber."""
        links = self.subscribers * (1 if self.pairs else self.publishers)
        return max(20, min(200 if self.qos else 2000, OUTSTANDING // links))


@dataclass(frozen=True)
class Outcome:
    """Results of a run: rates per second, delays in seconds."""

    joined: float
    """Seconds in which all clients were connected and subscribed."""
    seconds: float
    published: float
    delivered: float
    octets: float
    """Bytes of payload that were delivered, per second."""
    delays: dict[str, float]
    """From publish to delivery: ``p50``, ``p90``, ``p99`` and ``max``; nothing for less than 100 of them."""


class _Run:
    """The clients of one run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.samples: list[int] = []
        self._name = secrets.token_hex(4)
        self._root = f"{plan.topic}/{self._name}"
        properties = b"" if plan.version == 5 else None
        layout = Layout(f"{self._root}/00000", plan.payload, plan.qos, properties)
        self.loop = Loop(layout.size)
        self.subscribers: list[Subscriber] = []
        self.publishers: list[Publisher] = []
        self._clients: list[Client] = []
        self.joined = 0.0
        """Seconds in which all were connected."""

    def join(self) -> None:
        """Connect and subscribe everybody."""
        plan = self.plan
        properties = b"" if plan.version == 5 else None
        began = time.monotonic()
        filters = [self._topic(number if plan.pairs else 0) for number in range(plan.subscribers)]
        if plan.publishers > plan.subscribers:
            filters = [f"{self._root}/+"]
        self._clients = [
            self._client(f"sub-{number}", topic_filter=each, qos=plan.qos, clean=not plan.durable)
            for number, each in enumerate(filters)
        ]
        for number, greeting in enumerate(self._connected(self._clients)):
            layout = Layout(self._topic(number if plan.pairs else 0), plan.payload, plan.qos, properties)
            verifier = Verifier(layout, first=number) if plan.pairs else Verifier(layout, plan.publishers)
            self.subscribers.append(Subscriber(greeting, verifier, self.samples))
        for number, greeting in enumerate(self._connected([self._client(f"pub-{n}") for n in range(plan.publishers)])):
            readers = [self.subscribers[number]] if plan.pairs else self.subscribers
            publisher = Publisher(
                greeting,
                Layout(self._topic(number), plan.payload, plan.qos, properties),
                number,
                [(each.done, 0 if plan.pairs else number) for each in readers],
                window=plan.window,
                lag=plan.lag,
                stamp_every=1 if plan.rate else 16,
                paced=bool(plan.rate),
            )
            self.publishers.append(publisher)
            for each in readers:
                each.read_from(publisher)
        self.joined = time.monotonic() - began

    def _topic(self, publisher: int) -> str:
        return f"{self._root}/{publisher:05}"

    def _client(self, name: str, topic_filter: str = "", qos: int = 0, clean: bool = True) -> Client:
        plan = self.plan
        client_id = f"mqtt-nats-bench-{self._name}-{name}"
        return Client(client_id, topic_filter, qos, clean, plan.version, plan.user, plan.password)

    def _connected(self, clients: list[Client]) -> list[Greeting]:
        return connect_all(self.loop, (self.plan.host, self.plan.port), clients, timeout=PATIENCE)

    @property
    def delivered(self) -> int:
        """Messages that all subscribers have received."""
        return sum(sum(each.verifier.expected) for each in self.subscribers)

    @property
    def published(self) -> int:
        """Messages that all publishers have sent."""
        return sum(each.sent for each in self.publishers)

    def go(self, seconds: float, told: Told | None) -> None:
        """Publish for a while, and longer while nothing has arrived, as others may keep the machine busy.

        Raises:
            DeliveryError: nothing arrives in SETTLED more.
        """
        begun = time.monotonic()
        before = self.delivered
        last, former = begun, before
        step = self._paced() if self.plan.rate else None
        if step is None:
            self.loop.ready.update(self.publishers)
        while (left := begun + seconds - (now := time.monotonic())) > 0 or self.delivered == before:
            if left < -SETTLED:
                raise DeliveryError(f"nothing has arrived in {seconds + SETTLED:g} s")
            if told is not None and now - last >= 1:
                count = self.delivered
                told(now - begun, (count - former) / (now - last))
                last, former = now, count
            wait = 0.05 if step is None else step()
            self.loop.turn(min(left, wait) if left > 0 else wait)

    def _paced(self) -> Callable[[], float]:
        """Send what is due; returns how long nothing is due."""
        period = 1 / self.plan.rate
        due = time.monotonic()
        turn = 0

        def step() -> float:
            nonlocal due, turn
            while (wait := due - time.monotonic()) <= 0:
                publisher = self.publishers[turn % len(self.publishers)]
                if not publisher.send_some(1):
                    return 0.001  # the broker is behind; what is due is sent later
                turn += 1
                due += period
            return min(wait, 0.05)

        return step

    def settle(self) -> None:
        """Send no more, and verify that everything arrives and nothing else.

        Raises:
            DeliveryError: that is not so.
        """
        for publisher in self.publishers:
            publisher.stop()
        until = time.monotonic() + SETTLED
        while not all(publisher.settled() for publisher in self.publishers):
            if time.monotonic() > until:
                due = sum(publisher.sent * len(publisher.lanes) for publisher in self.publishers)
                raise DeliveryError(
                    f"{due - self.delivered:,} of {due:,} deliveries are missing {SETTLED:.0f} s after the last publish"
                )
            self.loop.turn(0.05)
        total = self.delivered
        until = time.monotonic() + LINGER
        while time.monotonic() < until:
            self.loop.turn(0.05)
        if self.delivered != total:
            raise DeliveryError("more messages arrived than were sent")

    def close(self) -> None:
        """Disconnect everybody; sessions end."""
        self.loop.close()
        if self.plan.durable and self.subscribers:
            loop = Loop()
            clients = [replace(each, topic_filter="", clean=True) for each in self._clients]
            try:
                connect_all(loop, (self.plan.host, self.plan.port), clients, timeout=PATIENCE)
            finally:
                loop.close()


@contextmanager
def _running(plan: Plan) -> Iterator[_Run]:
    run = _Run(plan)
    try:
        run.join()
        yield run
    finally:
        run.close()


def measure(plan: Plan, told: Told | None = None) -> Outcome:
    """Load a broker.

    Raises:
        LoadError: the broker refuses, ends a connection or does not answer in time.
        DeliveryError: what was received is not what was sent.
    """
    with _running(plan) as run:
        begun = time.monotonic()
        run.go(plan.seconds, told)
        seconds = time.monotonic() - begun
        published, delivered = run.published, run.delivered
        samples = list(run.samples)
        run.settle()
    delays = {}
    if len(samples) >= 100:
        cuts = statistics.quantiles(samples, n=100)
        found = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(samples)}
        delays = {name: value / 1e9 for name, value in found.items()}
    rate = delivered / seconds
    return Outcome(run.joined, seconds, published / seconds, rate, rate * plan.payload, delays)


__all__ = ["DeliveryError", "LoadError", "Outcome", "Plan", "measure"]
