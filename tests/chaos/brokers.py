# SPDX-License-Identifier: Apache-2.0
"""Brokers for the same script: each keeps its port and its store when it is killed and started again."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tests.chaos.experiment import Setting
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.process import LoggedProcess
from tests.harness.waiting import eventually, free_port

_START_WAIT = 30.0  # seconds

_MOSQUITTO = """\
listener {port} 127.0.0.1
allow_anonymous true
user root
persistence true
persistence_location {directory}/
autosave_interval 1
max_queued_messages 0
set_tcp_nodelay true
log_dest stderr
"""


class Broker(Protocol):
    """A broker that runs."""

    @property
    def ports(self) -> list[int]:
        """Where clients connect."""

    def kill(self) -> None:
        """End all of it at once (SIGKILL)."""

    def start(self) -> None:
        """Start it, and wait until it accepts clients."""


class Whole:
    """A gateway and its nats-server, which die together."""

    def __init__(self, server: NatsServer, gateway: Gateway) -> None:
        self.server = server
        self.gateway = gateway

    @property
    def ports(self) -> list[int]:
        """The gateway's."""
        return [self.gateway.port]

    def kill(self) -> None:
        """Both."""
        self.gateway.kill()
        self.server.kill()

    def start(self) -> None:
        """Both."""
        self.server.start()
        self.gateway.start()


class Listener:
    """nats-server with its own MQTT listener."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server

    @property
    def ports(self) -> list[int]:
        """The listener's."""
        return [self.server.mqtt_port]

    def kill(self) -> None:
        """The server."""
        self.server.kill()

    def start(self) -> None:
        """The server."""
        self.server.start()
        eventually(lambda: _accepts(self.server.mqtt_port), _START_WAIT, what="nats-server's MQTT listener")


class Mosquitto:
    """mosquitto, which saves its database every second."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.process = LoggedProcess("mosquitto", directory / "log")
        self._configuration = directory / "mosquitto.conf"
        text = _MOSQUITTO.format(port=self.port, directory=directory)
        self._configuration.write_text(text, encoding="utf-8")

    @property
    def ports(self) -> list[int]:
        """Its listener."""
        return [self.port]

    def kill(self) -> None:
        """The broker."""
        self.process.discard()

    def start(self) -> None:
        """The broker."""
        program = mosquitto()
        assert program is not None
        self.process.start([program, "-c", str(self._configuration)])
        eventually(lambda: _accepts(self.port), _START_WAIT, what="mosquitto")


def mosquitto() -> str | None:
    """Where mosquitto is; None when it is not installed."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def _accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def whole(setting: Setting, *arguments: str) -> Whole:
    """One gateway and one nats-server."""
    server = setting.nats()
    return Whole(server, setting.gateway(server.url, *arguments))


def listener(setting: Setting) -> Listener:
    """nats-server's own listener."""
    return Listener(setting.nats(mqtt=True))


def start_mosquitto(setting: Setting) -> Mosquitto:
    """mosquitto."""
    directory = setting.fresh("mosquitto")
    broker = Mosquitto(directory)
    setting.on_close(broker.kill)
    broker.start()
    return broker


def others() -> dict[str, Callable[[Setting], Broker]]:
    """The brokers beside ours that are installed here: name → what starts one."""
    found: dict[str, Callable[[Setting], Broker]] = {"nats-server's listener": listener}
    if mosquitto() is not None:
        found["mosquitto"] = start_mosquitto
    return found


async def started(start: Callable[[Setting], Broker], setting: Setting) -> Broker:
    """A broker that runs."""
    return await asyncio.to_thread(start, setting)
