# SPDX-License-Identifier: Apache-2.0
"""What a service manager is told: start, signs of life, end."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Self

import pytest

from mqtt_nats.config import systemd
from tests.conftest import GatewayFactory
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually

WATCHDOG = "300000"
"""Microseconds: three signs of life in that time."""


class Manager:
    """The socket of a service manager, which reads what comes."""

    def __init__(self, address: str) -> None:
        self.states: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._reader = threading.Thread(target=self._read)

    def _read(self) -> None:
        while state := self._socket.recv(1024).decode():
            self.states.append(state)

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"", self._socket.getsockname())
        self._reader.join()
        self._socket.close()


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:  # shorter than tmp_path: a socket's path has 107 bytes at most
        yield f"{directory}/notify"


@pytest.mark.long
@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["one process", "workers"])
def test_a_gateway_tells_start_signs_of_life_and_end(
    nats_server: NatsServer, gateway_factory: GatewayFactory, address: str, workers: tuple[str, ...]
) -> None:
    with Manager(address) as manager:
        env = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": WATCHDOG}
        gateway = gateway_factory(nats_server, *workers, env=env)
        eventually(lambda: "READY=1" in manager.states)
        before = len(manager.states)
        eventually(lambda: manager.states[before:].count("WATCHDOG=1") > 2)
        gateway.process.send(signal.SIGTERM)
        assert gateway.wait() == 0
    others = [state for state in manager.states if state != "WATCHDOG=1"]
    assert others == ["READY=1", "STOPPING=1"]


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
    assert manager.states == ["READY=1"]
