# SPDX-License-Identifier: Apache-2.0
"""Canary clients in a process of their own: they measure what the clients of a gateway notice of a flood.

``python -m tests.attacks.canary PORT`` prints ``ready`` when its clients have subscribed, and publishes until a line
comes from standard input. It then prints one JSON object, a :class:`Report`.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.harness.waiting import eventually

ROOT: Final = Path(__file__).parents[2]

INTERVAL_S: Final = 0.02
"""Time between two messages."""

PATIENCE_S: Final = 60.0
"""Time in which messages arrive after the flood, and clients are let in."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the canaries saw. Delays are seconds from publish to arrival, over all subscribers and QoS levels."""

    sent: int
    missing: int
    repeated: int
    disconnections: list[str]
    median: float
    high: float
    """99th percentile."""
    highest: float


class _Subscriber:
    """Notes when each message arrives."""

    def __init__(self, port: int, name: str, *, durable: bool, version: MQTTProtocolVersion) -> None:
        self.arrived: dict[int, float] = {}
        self.repeated = 0
        self.disconnections: list[str] = []
        self.client = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            name,
            clean_session=None if version is MQTTProtocolVersion.MQTTv5 else not durable,
            protocol=version,
        )
        self.client.on_message = self._message
        _connect(self, port, durable=durable)

    def _message(self, client: Any, userdata: Any, message: mqtt.MQTTMessage) -> None:
        number = int(message.payload)
        if number in self.arrived:
            self.repeated += message.qos != 1
        else:
            self.arrived[number] = time.monotonic()


class _Publisher:
    """Publishes a message with the next number at the next QoS."""

    def __init__(self, port: int, name: str) -> None:
        self.sent: dict[int, float] = {}
        self.disconnections: list[str] = []
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, name)
        self.client.max_queued_messages_set(0)
        self.client.max_inflight_messages_set(1000)
        _connect(self, port, durable=False)

    def publish(self, topic: str, number: int) -> None:
        self.sent[number] = time.monotonic()
        self.client.publish(topic, b"%d" % number, number % 3)


def _connect(canary: _Subscriber | _Publisher, port: int, *, durable: bool) -> None:
    client = canary.client
    ready = threading.Event()

    def connected(*_: Any) -> None:
        ready.set()

    def disconnected(_client: Any, _userdata: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        canary.disconnections.append(str(reason))

    client.on_connect = connected
    client.on_disconnect = disconnected
    if client.protocol is MQTTProtocolVersion.MQTTv5:
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = 600 if durable else 0
        client.connect("127.0.0.1", port, clean_start=not durable, properties=properties)
    else:
        client.connect("127.0.0.1", port)
    client.loop_start()
    assert ready.wait(PATIENCE_S), "a canary was not let in"


def main(port: int) -> None:
    """Publish until a line comes from standard input, then print the report."""
    name = f"canary-{time.time_ns():x}"
    subscribers = [
        _Subscriber(port, f"{name}-{version.name}-{durable}", durable=durable, version=version)
        for version in (MQTTProtocolVersion.MQTTv311, MQTTProtocolVersion.MQTTv5)
        for durable in (False, True)
    ]
    for one in subscribers:
        granted = threading.Event()
        one.client.on_subscribe = lambda *_, granted=granted: granted.set()
        one.client.subscribe(f"{name}/+", 2)
        assert granted.wait(PATIENCE_S), "a canary has no SUBACK"
    publisher = _Publisher(port, f"{name}-publisher")
    ended = threading.Event()
    threading.Thread(target=_wait, args=(ended,), daemon=True).start()
    print("ready", flush=True)
    for number in itertools.count():
        publisher.publish(f"{name}/{number % 3}", number)
        if ended.wait(INTERVAL_S):
            break
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and any(len(one.arrived) < len(publisher.sent) for one in subscribers):
        time.sleep(0.05)
    print(json.dumps(asdict(_report(publisher, subscribers))), flush=True)


def _wait(ended: threading.Event) -> None:
    sys.stdin.readline()
    ended.set()


def _report(publisher: _Publisher, subscribers: list[_Subscriber]) -> Report:
    sent = dict(publisher.sent)
    delays = sorted(when - sent[number] for one in subscribers for number, when in one.arrived.items())
    return Report(
        len(sent),
        sum(len(sent.keys() - one.arrived.keys()) for one in subscribers),
        sum(one.repeated for one in subscribers),
        publisher.disconnections + [text for one in subscribers for text in one.disconnections],
        delays[len(delays) // 2],
        delays[len(delays) * 99 // 100],
        delays[-1],
    )


class Canaries:
    """The process of the canaries, from outside."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.canary", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        line = self._output.readline()
        assert line == "ready\n", f"the canaries do not start: {line!r}"

    def report(self) -> Report:
        """End the canaries; what they saw."""
        assert self._process.stdin is not None
        self._process.stdin.write("end\n")
        self._process.stdin.flush()
        found = Report(**json.loads(self._output.readline()))
        eventually(lambda: self._process.poll() is not None, PATIENCE_S, what="the end of the canaries")
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._output.close()
        if self._process.stdin is not None:
            self._process.stdin.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
