# SPDX-License-Identifier: Apache-2.0
"""What a service manager is told: start, signs of life, end."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from typing import Self

import pytest

from mqtt_nats.config import systemd
from tests.conftest import GatewayFactory
from tests.harness.nats import NatsServer

WATCHDOG = "300000"
"""Microseconds: three signs of life in that time."""


class Manager:
    """The socket of a service manager."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def receive(self) -> str:
        """The next state."""
        return self.socket.recv(1024).decode()

    def receive_until(self, wanted: str) -> set[str]:
        """The states until one of them is ``wanted``."""
        found = {self.receive()}
        while wanted not in found:
            found.add(self.receive())
        return found


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:  # shorter than tmp_path: a socket's path has 107 bytes at most
        yield f"{directory}/notify"


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["one process", "workers"])
def test_a_gateway_tells_start_signs_of_life_and_end(
    nats_server: NatsServer, gateway_factory: GatewayFactory, address: str, workers: tuple[str, ...]
) -> None:
    with Manager(address) as manager:
        env = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": WATCHDOG}
        gateway = gateway_factory(nats_server, *workers, env=env)
        assert manager.receive_until("READY=1") <= {"READY=1", "WATCHDOG=1"}
        for _ in range(3):
            assert manager.receive() == "WATCHDOG=1"
        gateway.process.send(signal.SIGTERM)
        assert manager.receive_until("STOPPING=1") <= {"STOPPING=1", "WATCHDOG=1"}
        assert gateway.wait() == 0


def test_a_gateway_does_not_need_a_service_manager(
    nats_server: NatsServer, gateway_factory: GatewayFactory, address: str
) -> None:
    """Nobody listens on the socket."""
    gateway = gateway_factory(nats_server, env={"NOTIFY_SOCKET": address})
    assert gateway.term() == 0


@pytest.mark.parametrize(
    ("variables", "interval"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "3000000"}, 1.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_the_interval(variables: dict[str, str], interval: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert systemd.watchdog_interval() == interval


@pytest.mark.skipif(
    not hasattr(socket, "AF_UNIX") or os.uname().sysname != "Linux", reason="abstract names are Linux's"
)
def test_an_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"mqtt-nats-test-{os.getpid()}"
    with Manager(f"\0{name}") as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        systemd.notify("READY=1")
        assert manager.receive() == "READY=1"
