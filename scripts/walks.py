# SPDX-License-Identifier: Apache-2.0
"""Modules that a running gateway enters for one event each: traced in the pure build, with real packets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from tests.harness.nats import ProcessNatsServer
from tests.harness.raw5 import CONNACK, SESSION_EXPIRY, Raw5, connect, prop
from tests.harness.waiting import eventually, free_port

PATIENCE_S: Final = 30.0
PAUSE_S: Final = 1.5
"""Seconds of the trace after the last packet of an event: positions are stored about once a second."""

SETTLE_S: Final = 6.0
"""Seconds after a start or the end of a connection, before the next trace."""

KEPT: Final = prop(SESSION_EXPIRY, 600)


class TracedGateway:
    """A gateway process of a source tree that tells which modules it enters. It runs the pure build.

    Args:
        root: the source tree.
        nats: URL of nats-server.
        port: TCP port for MQTT clients.
    """

    def __init__(self, root: Path, nats: str, port: int) -> None:
        paths = os.pathsep.join(map(str, (root, root / "streams", root / "spark")))
        program = Path(__file__).with_name("traced_gateway.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program), "serve", "--nats", nats, "--listen", f"127.0.0.1:{port}"],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def entered(self, event: Callable[[], object]) -> set[str]:
        """Cause an event and return the modules that were entered until PAUSE_S after it."""
        self._order("start")
        event()
        return set(self._order(f"stop {PAUSE_S}"))

    def settle(self) -> None:
        """Wait for the end of what earlier events have caused."""
        self._order(f"stop {SETTLE_S}")

    def _order(self, order: str) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        answer: list[str] = json.loads(self._process.stdout.readline())
        return answer

    def end(self) -> None:
        """End the process and wait for it."""
        with self._process:
            self._process.terminate()


def traced(root: Path, folder: Path) -> dict[str, int]:
    """Return the number of modules of a source tree that are entered at each event.

    `folder`: for the store and the log of a nats-server that is started for it.
    """
    server = ProcessNatsServer(folder)
    server.start()
    port = free_port()
    gateway = TracedGateway(root, server.url, port)
    try:
        return _count(gateway, port)
    finally:
        gateway.end()
        server.stop()


def _count(gateway: TracedGateway, port: int) -> dict[str, int]:
    eventually(partial(_listens, port), PATIENCE_S)
    with (
        Raw5.open(port, "publisher") as publisher,
        Raw5.open(port, "regular") as regular,
    ):
        regular.subscribed(("q/0", 0), ("q/1", 1), ("q/2", 2))
        with Raw5.open(port, "durable", KEPT) as durable:
            durable.subscribed(("d/1", 1))
            for qos in (0, 1, 2):
                _publish(publisher, regular, f"q/{qos}", qos)
            _publish(publisher, durable, "d/1", 1)
            events: dict[str, Callable[[], object]] = {
                f"PUBLISH at QoS {qos}, clean subscriber": partial(_publish, publisher, regular, f"q/{qos}", qos)
                for qos in (0, 1, 2)
            }
            events["PUBLISH at QoS 1, durable subscriber"] = partial(_publish, publisher, durable, "d/1", 1)
            events["SUBSCRIBE, clean"] = partial(regular.subscribed, ("new/1", 1))
            events["SUBSCRIBE, durable"] = partial(durable.subscribed, ("new/2", 1))
            gateway.settle()
            counts = {name: len(gateway.entered(event)) for name, event in events.items()}
        for _ in range(3):
            publisher.deliver("d/1", b"missed")
        gateway.settle()
        with Raw5(port) as client:
            counts["CONNECT with resume, 3 missed messages"] = len(gateway.entered(partial(_resume, client)))
    return counts


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _publish(publisher: Raw5, subscriber: Raw5, topic: str, qos: int) -> None:
    publisher.deliver(topic, b"x", qos=qos)
    subscriber.receive_message(b"x")


def _resume(client: Raw5) -> None:
    client.send(connect("durable", KEPT, clean=False))
    assert client.answer(CONNACK).reason == 0
    for _ in range(3):
        client.receive_message(b"missed")
