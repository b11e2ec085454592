# SPDX-License-Identifier: Apache-2.0
"""A listener at all addresses of a machine: IPv4 and IPv6, on one port."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.settings import Settings
from mqtt_nats.transport import every_address
from mqtt_nats.transport.every_address import expand, listen_everywhere
from tests.conftest import GatewayFactory
from tests.harness.inprocess import running
from tests.harness.nats import NatsServer
from tests.harness.waiting import free_port

TOML = """
[[listeners]]
listen = "*:0"
allow_anonymous = true

[[listeners]]
listen = "*:0"
type = "ws"
allow_anonymous = true

[[listeners]]
listen = "*:0"
proxy_protocol = ["127.0.0.0/8", "::1/128"]
allow_anonymous = true
"""

CONNECT = b"\x10\x0d\0\4MQTT\4\2\0\0\0\1c"
UPGRADE = (
    b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: mqtt\r\n\r\n"
)

pytestmark = pytest.mark.skipif(len(expand("*")) < 2, reason="this machine has no IPv6")


def answer(host: str, port: int, question: bytes = CONNECT) -> bytes:
    with socket.create_connection((host, port), timeout=20) as one:
        one.sendall(question)
        return one.recv(12)


@pytest.mark.processes
def test_both_families_are_served(nats_server: NatsServer, tmp_path: Path) -> None:
    """Without a handshake, as WebSocket and behind a proxy; the free port is the same for both."""
    file = tmp_path / "gateway.toml"
    file.write_text(TOML, encoding="utf-8")
    settings = Settings.load({"nats": nats_server.url}, file)
    with running(settings) as gateway:
        tcp, tcp6, web, web6, proxied, proxied6 = gateway.ports
        assert (tcp, web, proxied) == (tcp6, web6, proxied6)
        for host in ("127.0.0.1", "::1"):
            assert answer(host, tcp) == b"\x20\2\0\0"
            assert answer(host, web, UPGRADE).startswith(b"HTTP/1.1 101")
            assert answer(host, proxied, b"PROXY TCP4 192.0.2.7 192.0.2.1 4321 1883\r\n" + CONNECT) == b"\x20\2\0\0"


def test_workers_share_both(nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "gateway.toml"
    file.write_text(f'workers = 2\n[[listeners]]\nlisten = "*:{port}"\nallow_anonymous = true\n', encoding="utf-8")
    gateway_factory(nats_server, "--config", str(file))
    for host in ("127.0.0.1", "::1"):
        assert answer(host, port) == b"\x20\2\0\0"


def test_the_port_is_in_use() -> None:
    """Also where only the second family has it: no socket is left open."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
            listen_everywhere(port, 5, shared=False)
        with socket.create_server(("0.0.0.0", port)):
            pass


@pytest.mark.parametrize(("host", "family"), [("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6)])
def test_a_machine_with_one_family(monkeypatch: pytest.MonkeyPatch, host: str, family: socket.AddressFamily) -> None:
    monkeypatch.setattr(every_address, "_has", lambda each, _: each == family)
    assert expand("*") == (host,)
    with ExitStack() as stack:
        (found,) = [stack.enter_context(one) for one in listen_everywhere(0, 5, shared=False)]
        assert found.family == family


def test_a_machine_without_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_address, "_has", lambda *_: False)
    with pytest.raises(OSError, match="neither IPv4 nor IPv6"):
        listen_everywhere(0, 5, shared=False)


def test_other_hosts_are_as_before() -> None:
    assert expand("127.0.0.1") == ("127.0.0.1",)
    with pytest.raises(StartupError, match="has one address"):
        Settings.load({"admin_listen": "*:9883", "admin_token": "x" * 40}, None)
