# SPDX-License-Identifier: Apache-2.0
"""A gateway that serves MQTT over WebSocket, for several modules of tests."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.backbone.certificates import Authority
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.transport.support import NAME, ports, tls, trusting, write_config

TIMEOUT = 3.0
"""`connect_timeout` of this gateway."""
PACKET = 200_000
"""Its `max_packet_size`."""

EXCHANGE = raw.connect("split") + raw.subscribe(("split/a", 1)) + raw.packet(0xC0)
ANSWERS = [raw.CONNACK, raw.PINGRESP, raw.SUBACK]


class Setup(NamedTuple):
    """A gateway, and the ports of its listeners."""

    gateway: Gateway
    port: int
    few: int
    """Has two connections at most."""
    secure: int
    trust: ssl.SSLContext


@contextlib.contextmanager
def serving(nats_server: NatsServer, directory: Path) -> Iterator[Setup]:
    """A gateway with listeners for WebSocket, which ends in order."""
    authority = Authority(directory)
    config = write_config(
        directory / "gateway.toml",
        {"listen": "127.0.0.1:0", "type": "ws"},
        {"listen": "127.0.0.1:0", "type": "ws", "max_connections": 2},
        {**tls(authority.issue(NAME)), "type": "wss"},
    )
    limits = ("--connect-timeout", str(TIMEOUT), "--max-packet-size", str(PACKET))
    gateway = Gateway(
        directory / "gateway.log",
        nats_server.url,
        arguments=("--config", config, "--log-level", "debug", *limits),
    )
    gateway.start()
    port, few = ports(gateway, "WS")
    (secure,) = ports(gateway, "WSS")
    yield Setup(gateway, port, few, secure, trusting(authority))
    assert gateway.term() == 0
    assert "Traceback" not in gateway.log
    gateway.process.discard()


def greeted(client: Raw, client_id: str = "") -> None:
    client.send(raw.connect(client_id))
    assert client.expect(raw.CONNACK).body == b"\0\0"


def answered(client: Raw) -> None:
    """Everything of EXCHANGE was understood."""
    assert sorted(client.receive().kind for _ in range(3)) == sorted(ANSWERS)  # type: ignore[union-attr]
