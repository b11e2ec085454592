# SPDX-License-Identifier: Apache-2.0
"""Job of the load generator: one run, with its scenario and its result."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks import proc
from benchmarks.generator.clients import Client, Greeting, Loop, connect_all
from benchmarks.generator.packets import Layout
from benchmarks.natsclients import NatsGreeting, layout_of
from benchmarks.scenarios import Scenario, Side

CONNECT_TIMEOUT: Final = 60.0
"""Seconds for clients to connect and subscribe, and for messages to be stored or sent."""
CROWD_TIMEOUT: Final = 180.0
"""Seconds for thousands of them to do so."""
LINGER: Final = 0.1
"""Seconds for messages that must not come."""

ROOT: Final = "bench"
"""First level of all topics."""


@dataclass(frozen=True)
class Job:
    """Run of a scenario against one broker. Times in seconds; ``processes``: label → pid of the broker."""

    scenario: str
    host: str
    port: int
    payload: int = 128
    seconds: float = 2.0
    warmup: float = 0.5
    processes: dict[str, int] = field(default_factory=dict)
    clients: int = 0
    """Replaces the scenario's number of connections or queued messages."""
    version: int = 4
    """Of MQTT: 4 for 3.1.1, 5 for 5.0."""
    subscribers_port: int = 0
    """Where subscribers connect, if it is another server."""
    nats_port: int = 0
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the scenario that have another value."""

    def layout(self, scenario: Scenario, topic: str, qos: int, side: Side = "") -> Layout:
        """The PUBLISH packets on a topic, or what stands for them on the ``side`` of NATS clients."""
        payload = scenario.payload or self.payload
        if side and side == scenario.nats:
            return layout_of(topic, payload, received=side == "subscribers")
        return Layout(topic, payload, qos, scenario.properties if self.version == 5 else None)

    def connect(self, loop: Loop, scenario: Scenario, clients: list[Client], side: Side) -> list[Greeting]:
        """Connect the clients of one side and subscribe them."""
        if side == scenario.nats:
            address, kind = (self.host, self.nats_port), NatsGreeting
            return connect_all(loop, address, clients, timeout=CONNECT_TIMEOUT, kind=kind)
        port = self.subscribers_port if side == "subscribers" and self.subscribers_port else self.port
        return connect_all(loop, (self.host, port), clients, timeout=CROWD_TIMEOUT)


class Meter:
    """CPU time of the broker's processes and of this process over a stretch of time."""

    def __init__(self, processes: dict[str, int]) -> None:
        self._processes = processes
        self._begin = self._read()
        self._machine = proc.machine_seconds()
        self.began = time.monotonic()
        self.cpu: dict[str, float] = {}
        self.seconds = 0.0

    def _read(self) -> dict[str, float]:
        return {label: proc.cpu_seconds(pid) for label, pid in self._processes.items()} | {
            "generator": time.process_time()
        }

    def stop(self) -> None:
        """End the stretch."""
        self.seconds = time.monotonic() - self.began
        self.cpu = {label: value - self._begin[label] for label, value in self._read().items()}
        self._machine = proc.machine_seconds() - self._machine

    def result(self, count: int, metrics: dict[str, float]) -> dict[str, object]:
        """The job's result for ``count`` deliveries."""
        return {
            "metrics": metrics,
            "count": count,
            "cpu": {label: value * 1000 / max(count, 1) for label, value in self.cpu.items()},
            "generator_busy": self.cpu["generator"] / self.seconds,
            "broker_busy": sum(self.cpu[label] for label in self._processes) / self.seconds,
            "other_busy": max(0.0, self._machine - sum(self.cpu.values())) / self.seconds,
        }
