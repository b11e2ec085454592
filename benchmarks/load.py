# SPDX-License-Identifier: Apache-2.0
"""The load generator's process: one job as JSON on standard input, one result as JSON on standard output.

A result has ``error`` (a sentence), or what was measured: ``metrics`` by name, ``cpu`` seconds per 1,000 deliveries (or
connections) by process, and ``generator_busy``, ``broker_busy`` and ``other_busy``, the parts of one CPU that they and
the rest of the machine took.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from benchmarks import proc
from benchmarks.generator.clients import (
    Client,
    Holder,
    Idle,
    LoadError,
    Loop,
    Publisher,
    Subscriber,
    connect_all,
)
from benchmarks.generator.packets import DeliveryError, Verifier
from benchmarks.job import CONNECT_TIMEOUT, CROWD_TIMEOUT, LINGER, ROOT, Job, Meter
from benchmarks.natsclients import NatsPublisher, NatsSubscriber
from benchmarks.scenarios import Scenario, select
from benchmarks.stored import drain, retained

DRAIN_TIMEOUT = 45.0
"""Longer than the 30 s after which nats-server repeats a PUBREL that its listener has lost track of."""

SETTLE = 1.0
"""Seconds that a broker gets to come to rest before its memory is read."""

_BASELINE_CLIENTS = 100

_EACH = 1000
"""Filters of one client that holds others."""
_AT_ONCE = 100
"""Filters in one SUBSCRIBE."""


class Traffic:
    """Connected publishers and subscribers of a scenario."""

    def __init__(self, job: Job, scenario: Scenario) -> None:
        self.job, self.scenario = job, scenario
        self.samples: list[int] = []
        self.crowd: dict[str, float] = {}
        """How many of those who stand by have joined per second, the memory (KB) and CPU (µs) of each."""
        layout = job.layout(scenario, self.topic(0), scenario.qos, "subscribers")
        self.loop = Loop(layout.size)
        self.subscribers: list[Subscriber] = []
        self.publishers: list[Publisher] = []
        pairs = scenario.publishers == scenario.subscribers
        version, clean = job.version, not scenario.durable
        self._crowd()
        filters = [self.topic(i if pairs else 0) for i in range(scenario.subscribers)]
        if scenario.publishers > scenario.subscribers:
            filters = [f"{ROOT}/+"] * scenario.subscribers
        clients = [Client(f"sub{i:05}", each, scenario.qos, clean, version) for i, each in enumerate(filters)]
        receiver = NatsSubscriber if scenario.nats == "subscribers" else Subscriber
        for i, greeting in enumerate(job.connect(self.loop, scenario, clients, "subscribers")):
            layout = job.layout(scenario, self.topic(i if pairs else 0), scenario.qos, "subscribers")
            verifier = Verifier(layout, first=i) if pairs else Verifier(layout, scenario.publishers)
            self.subscribers.append(receiver(greeting, verifier, self.samples))
        self.monitors: list[Subscriber] = []
        if scenario.monitor:
            plain = job.layout(scenario, self.topic(0), 0)
            clients = [Client("monitor", "#", version=version)]
            for greeting in job.connect(self.loop, scenario, clients, "subscribers"):
                self.monitors.append(Subscriber(greeting, Verifier(plain, scenario.publishers), []))
        clients = [Client(f"pub{i:05}", version=version) for i in range(scenario.publishers)]
        sender = NatsPublisher if scenario.nats == "publishers" else Publisher
        for i, greeting in enumerate(job.connect(self.loop, scenario, clients, "publishers")):
            readers = [self.subscribers[i]] if pairs else self.subscribers + self.monitors
            self.publishers.append(
                sender(
                    greeting,
                    job.layout(scenario, self.topic(i), scenario.qos, "publishers"),
                    i,
                    [(each.done, 0 if pairs else i) for each in readers],
                    window=scenario.window,
                    lag=scenario.outstanding,
                    stamp_every=1 if scenario.kind == "latency" else 16,
                )
            )
            for each in readers:
                each.publishers += (self.publishers[-1],)

    def _crowd(self) -> None:
        """Connect those who only stand by, and those who have subscribed something else."""
        job, scenario, loop = self.job, self.scenario, self.loop
        before, meter = resident(job), Meter(job.processes)
        clients = [Client(f"idle{i:05}", f"idle/{i:05}", version=job.version) for i in range(scenario.idle)]
        for greeting in connect_all(loop, (job.host, job.port), clients, timeout=CROWD_TIMEOUT):
            loop.add(Idle(loop, greeting.sock, greeting.name))
        names = [f"other/{i:06}" for i in range(scenario.filters)]
        parts = [names[at : at + _EACH] for at in range(0, len(names), _EACH)]
        clients = [Client(f"holder{i:05}", version=job.version) for i in range(len(parts))]
        greetings = connect_all(loop, (job.host, job.port), clients, timeout=CROWD_TIMEOUT)
        holders = [Holder(greeting, part, _AT_ONCE) for greeting, part in zip(greetings, parts, strict=True)]
        until = time.monotonic() + CROWD_TIMEOUT
        while any(each.left for each in holders):
            if time.monotonic() > until:
                raise LoadError(f"{scenario.filters} filters not subscribed after {CROWD_TIMEOUT:.0f} s")
            loop.turn(0.05)
        if count := scenario.idle + scenario.filters:
            meter.stop()
            self.crowd["joined"] = count / meter.seconds
            self.crowd["memory"] = (resident(job) - before) / 1024 / count
            self.crowd["effort"] = sum(meter.cpu[label] for label in job.processes) * 1e6 / count

    @staticmethod
    def topic(publisher: int) -> str:
        """Topic of a publisher; all have the same length."""
        return f"{ROOT}/{publisher:05}"

    def delivered(self) -> int:
        """Messages that all subscribers (but a monitor) have received."""
        return sum(sum(each.verifier.expected) for each in self.subscribers)

    def run(self, seconds: float, step: Callable[[], float]) -> None:
        """Turn the loop for ``seconds``; ``step`` is called every turn and answers how long to wait at most."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.loop.turn(min(left, step()))

    def flow(self, seconds: float, step: Callable[[], float]) -> int:
        """``run``, and longer while nothing has arrived, as others may keep the machine busy; returns what has.

        Raises:
            DeliveryError: nothing arrives in DRAIN_TIMEOUT more.
        """
        before = self.delivered()
        self.run(seconds, step)
        until = time.monotonic() + DRAIN_TIMEOUT
        while (count := self.delivered() - before) == 0:
            if time.monotonic() > until:
                raise DeliveryError(f"nothing has arrived in {seconds + DRAIN_TIMEOUT:g} s")
            self.loop.turn(min(0.05, step()))
        return count

    def settle(self) -> None:
        """Send no more, wait for what is outstanding, and verify that everything has arrived and nothing more comes."""
        for publisher in self.publishers:
            publisher.limit = publisher.sent
        until = time.monotonic() + DRAIN_TIMEOUT
        while not all(publisher.settled() for publisher in self.publishers):
            if time.monotonic() > until:
                raise DeliveryError(self._missing())
            self.loop.turn(0.05)
        total = self.delivered()
        self.run(LINGER, lambda: 0.05)
        if self.delivered() != total:
            raise DeliveryError("more messages arrived than were sent")

    def _missing(self) -> str:
        sent = sum(publisher.sent * len(publisher.lanes) for publisher in self.publishers)
        got = sum(sum(each.verifier.expected) for each in self.subscribers + self.monitors)
        unacked = sum(publisher.sent - publisher.acked for publisher in self.publishers) if self.scenario.qos else 0
        unreleased = self.delivered() - sum(sum(each.done) for each in self.subscribers)
        return (
            f"{DRAIN_TIMEOUT:.0f} s after the last publish {sent - got} of {sent} deliveries are missing, "
            f"{unacked} publishes not acknowledged, {unreleased} deliveries not released (PUBREL)"
        )


def resident(job: Job) -> int:
    """Bytes of memory that the broker's processes take."""
    return sum(proc.resident_bytes(pid) for pid in job.processes.values())


def percentiles(samples: list[int]) -> dict[str, float]:
    """Median and 99th percentile in µs of delivery times in ns; nothing for fewer than 100 samples."""
    if len(samples) < 100:
        return {}
    cuts = statistics.quantiles(samples, n=100)
    return {"p50": cuts[49] / 1000, "p99": cuts[98] / 1000}


def throughput(job: Job, scenario: Scenario) -> dict[str, object]:
    """Deliveries per second while publishers send as fast as the windows allow."""
    with _closing(Traffic(job, scenario)) as traffic:
        traffic.loop.ready.update(traffic.publishers)
        traffic.flow(job.warmup, lambda: 0.05)
        traffic.samples.clear()
        meter = Meter(job.processes)
        count = traffic.flow(job.seconds, lambda: 0.05)
        meter.stop()
        samples = percentiles(traffic.samples)
        traffic.settle()
        return meter.result(count, {"rate": count / meter.seconds, **samples, **traffic.crowd})


def latency(job: Job, scenario: Scenario) -> dict[str, object]:
    """Delivery time of messages sent one by one at a fixed rate, however long the earlier ones take."""
    with _closing(Traffic(job, scenario)) as traffic:
        publisher = traffic.publishers[0]
        publisher.paced = True
        period = 1 / scenario.rate
        due = time.monotonic()

        def step() -> float:
            nonlocal due
            while (wait := due - time.monotonic()) <= 0:
                if not publisher.send_some(1):
                    raise LoadError(f"{scenario.outstanding} messages outstanding at {scenario.rate} per second")
                due += period
            return wait

        traffic.flow(job.warmup, step)
        traffic.samples.clear()
        meter = Meter(job.processes)
        count = traffic.flow(job.seconds, step)
        meter.stop()
        samples = percentiles(traffic.samples)
        traffic.settle()
        return meter.result(count, samples)


def connections(job: Job, scenario: Scenario) -> dict[str, object]:
    """Clients that connect and subscribe (one filter each) per second, and what memory each then costs."""
    total = job.clients or scenario.clients
    loop = Loop()
    version = job.version
    clients = [Client(f"idle{i:05}", f"{ROOT}/{i:05}", version=version) for i in range(_BASELINE_CLIENTS + total)]
    address = (job.host, job.port)

    def join(some: list[Client]) -> None:
        for greeting in connect_all(loop, address, some, timeout=CONNECT_TIMEOUT):
            loop.add(Idle(loop, greeting.sock, greeting.name))

    def memory() -> dict[str, int]:
        until = time.monotonic() + SETTLE
        while (left := until - time.monotonic()) > 0:
            loop.turn(left)
        return {label: proc.resident_bytes(pid) for label, pid in job.processes.items()}

    try:
        join(clients[:_BASELINE_CLIENTS])
        before = memory()
        meter = Meter(job.processes)
        join(clients[_BASELINE_CLIENTS:])
        meter.stop()
        kilobytes = {label: (value - before[label]) / 1024 / total for label, value in memory().items()}
    finally:
        loop.close()
    metrics = {"connects": total / meter.seconds, "memory": sum(kilobytes.values())}
    if len(kilobytes) > 1:
        metrics |= {f"memory {label}": value for label, value in kilobytes.items()}
    return meter.result(total, metrics)


@contextmanager
def _closing(traffic: Traffic) -> Iterator[Traffic]:
    try:
        yield traffic
    finally:
        traffic.loop.close()


_RUN: dict[str, Callable[[Job, Scenario], dict[str, object]]] = {
    "throughput": throughput,
    "latency": latency,
    "connections": connections,
    "drain": drain,
    "retained": retained,
}


def main() -> None:
    """Do the job on standard input."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.disable()
    job = Job(**json.load(sys.stdin))
    (scenario,) = select([job.scenario], version=job.version)
    scenario = replace(scenario, **job.changes)
    try:
        result = _RUN[scenario.kind](job, scenario)
    except (LoadError, DeliveryError) as error:
        result = {"error": str(error)}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
