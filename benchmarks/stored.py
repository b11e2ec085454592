# SPDX-License-Identifier: Apache-2.0
"""Scenarios about what a broker has stored: a queue that waits for its subscriber, and retained messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from benchmarks import proc
from benchmarks.generator import answers, packets
from benchmarks.generator.clients import Client, Connection, Greeting, Loop, Publisher, Subscriber, connect_all
from benchmarks.generator.packets import PUBACK, DeliveryError, Layout, Verifier
from benchmarks.job import CONNECT_TIMEOUT, LINGER, ROOT, Job, Meter
from benchmarks.scenarios import Scenario

_RETAIN: Final = 1
_DIGITS: Final = 6  # of the number in a topic

_PROBE: Final = 0.05  # seconds between two looks at the memory


def drain(job: Job, scenario: Scenario) -> dict[str, object]:
    """Messages per second that a durable subscriber gets which was away while they were published."""
    total = job.clients or scenario.clients
    address, topic = (job.host, job.port), f"{ROOT}/00000"
    layout = job.layout(scenario, topic, scenario.qos)
    loop = Loop(layout.size)
    absent = Client("sub00000", topic, scenario.qos, False, job.version)
    connect_all(loop, address, [absent], timeout=CONNECT_TIMEOUT)
    loop.close()
    loop = Loop(layout.size)
    try:
        (greeting,) = connect_all(loop, address, [Client("pub00000", version=job.version)], timeout=CONNECT_TIMEOUT)
        publisher = Publisher(greeting, layout, 0, [], window=scenario.window, lag=scenario.window, stamp_every=total)
        publisher.limit = total
        loop.ready.add(publisher)
        _until(loop, lambda: publisher.acked, total, "published")
        meter = Meter(job.processes)
        (greeting,) = connect_all(loop, address, [replace(absent, topic_filter="")], timeout=CONNECT_TIMEOUT)
        if not greeting.present:
            raise DeliveryError("the session of the durable subscriber was lost")
        subscriber = Subscriber(greeting, Verifier(layout), [])
        _until(loop, lambda: subscriber.verifier.expected[0], total, "received")
        meter.stop()
        end = time.monotonic() + LINGER
        while time.monotonic() < end:
            loop.turn(0.05)
        if subscriber.verifier.expected[0] != total:
            raise DeliveryError("more messages arrived than were sent")
    finally:
        loop.close()
    return meter.result(total, {"rate": total / meter.seconds})


class Filler(Connection):
    """Publishes ``total`` retained messages at QoS 1, each on a topic of its own."""

    def __init__(self, greeting: Greeting, layout: Layout, total: int, window: int) -> None:
        super().__init__(greeting.loop, greeting.sock, greeting.name)
        self.layout, self.total = layout, total
        self.window = min(window, greeting.limits.receive_maximum if greeting.limits else window)
        self.sent = self.acked = 0
        self.loop.add(self)

    def pump(self) -> None:
        """Send what the window allows."""
        out = bytearray()
        while self.sent < min(self.total, self.acked + self.window):
            out += numbered(self.layout, self.sent)
            self.sent += 1
        if out:
            self.send(out)

    def readable(self) -> None:
        end = self.fill()
        short = used = end & ~3
        if self.layout.version == 5:
            short, used = answers.shorten(self.loop.buffer, end)
        packets.ack_count(PUBACK, self.loop.buffer, short // 4, self.acked)
        self.acked += short // 4
        self.keep(used, end)
        self.pump()


def numbered(layout: Layout, number: int) -> bytes:
    """The retained PUBLISH with this number in topic, packet id and payload."""
    packet = bytearray(layout.template)
    packet[0] |= _RETAIN
    packet[layout.packet_id - _DIGITS : layout.packet_id] = b"%0*d" % (_DIGITS, number)
    packet[layout.packet_id : layout.packet_id + 2] = (number % packets.PID_PERIOD + 1).to_bytes(2)
    packet[layout.source : layout.source + 4] = number.to_bytes(4)
    return bytes(packet)


class Collector(Connection):
    """Takes retained messages in any order, each once, and acknowledges them."""

    def __init__(self, greeting: Greeting, layout: Layout, total: int) -> None:
        super().__init__(greeting.loop, greeting.sock, greeting.name)
        self.layout = layout
        self.missing = set(range(total))
        self.loop.add(self)
        if greeting.rest:
            self.loop.buffer[: len(greeting.rest)] = greeting.rest
            self._handle(len(greeting.rest))

    def readable(self) -> None:
        self._handle(self.fill())

    def _handle(self, end: int) -> None:
        layout, data = self.layout, self.loop.buffer
        count = end // layout.size
        for start in range(0, count * layout.size, layout.size):
            topic = bytes(data[start + layout.packet_id - _DIGITS : start + layout.packet_id])
            number = int.from_bytes(data[start + layout.source : start + layout.source + 4])
            if data[start] & ~packets.DUP != layout.head[0] | _RETAIN or topic != b"%0*d" % (_DIGITS, number):
                raise DeliveryError(f"unexpected packet {bytes(data[start : start + 24]).hex(' ')}")
            if number not in self.missing:
                raise DeliveryError(f"retained message {number} came again")
            self.missing.remove(number)
        if count:
            self.send(packets.acks(PUBACK, layout, data, 0, count))
        self.keep(count * layout.size, end)


def retained(job: Job, scenario: Scenario) -> dict[str, object]:
    """Retained messages per second to one subscriber whose filter matches all, and how much memory that takes."""
    total = job.clients or scenario.clients
    address = (job.host, job.port)
    layout = job.layout(scenario, f"{ROOT}/{0:0{_DIGITS}}", scenario.qos)
    loop = Loop(layout.size)
    try:
        (greeting,) = connect_all(loop, address, [Client("filler", version=job.version)], timeout=CONNECT_TIMEOUT)
        filler = Filler(greeting, layout, total, 200)
        filler.pump()
        _until(loop, lambda: filler.acked, total, "published")
        before = {label: proc.resident_bytes(pid) for label, pid in job.processes.items()}
        highest = dict(before)
        looked = 0.0

        def received() -> int:
            nonlocal looked
            if (now := time.monotonic()) - looked > _PROBE:
                looked = now
                for label, pid in job.processes.items():
                    highest[label] = max(highest[label], proc.resident_bytes(pid))
            return total - len(collector.missing)

        meter = Meter(job.processes)
        reader = Client("collector", f"{ROOT}/+", scenario.qos, version=job.version)
        (greeting,) = connect_all(loop, address, [reader], timeout=CONNECT_TIMEOUT)
        collector = Collector(greeting, layout, total)
        _until(loop, received, total, "received")
        meter.stop()
    finally:
        loop.close()
    growth = {label: (highest[label] - before[label]) / 1e6 for label in before}
    metrics = {"rate": total / meter.seconds, "growth": sum(growth.values())}
    if len(growth) > 1:
        metrics |= {f"growth {label}": value for label, value in growth.items()}
    return meter.result(total, metrics)


def _until(loop: Loop, count: Callable[[], int], total: int, what: str) -> None:
    until = time.monotonic() + CONNECT_TIMEOUT
    while count() < total:
        if time.monotonic() > until:
            raise DeliveryError(f"only {count()} of {total} messages {what} within {CONNECT_TIMEOUT:.0f} s")
        loop.turn(0.05)
