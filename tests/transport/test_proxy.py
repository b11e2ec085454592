# SPDX-License-Identifier: Apache-2.0
"""Proxies: whom they speak for is who the client is, and nobody else may say it."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import NamedTuple

import pytest

from mqtt_nats.base.logs import FAILURES
from tests.backbone.certificates import Authority
from tests.base.support import PATIENCE, Inside, running
from tests.conftest import Logged
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually
from tests.transport.support import NAME, tls, trusting
from tests.transport.test_proxy_header import IPV4, second
from tests.transport.web import Framed, request

FIRST = b"PROXY TCP4 192.0.2.7 198.51.100.1 40312 1883\r\n"
SECOND = second(0x11, IPV4)
LOCAL = second(0x00, b"", command=0x20)
DENIED = b"PROXY TCP4 203.0.113.9 198.51.100.1 40312 1883\r\n"
ABROAD = b"PROXY TCP6 2001:db8::7 2001:db8::1 40312 1883\r\n"

PROXIES = {"proxy_protocol": ["127.0.0.0/8", "10.1.2.3"]}
TIMEOUT = 2.0


class Setup(NamedTuple):
    inside: Inside
    trust: ssl.SSLContext

    def port(self, kind: str) -> int:
        """Of a listener: the four types, then strangers, few."""
        return self.inside.ports[["tcp", "tls", "ws", "wss", "strangers", "few"].index(kind)]


@pytest.fixture(scope="module")
def setup(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    authority = Authority(tmp_path_factory.mktemp("proxy"))
    pair = authority.issue(NAME)
    with running(
        nats_server.url,
        PROXIES,
        tls(pair, **PROXIES),
        {"type": "ws", **PROXIES},
        {**tls(pair, **PROXIES), "type": "wss"},
        {"proxy_protocol": ["10.0.0.0/8"]},
        {"max_connections_per_address": 1, **PROXIES},
        addresses=("deny 203.0.113.0/24", "allow all"),
        connect_timeout=TIMEOUT,
    ) as inside:
        yield Setup(inside, trusting(authority))


class Proxied(Raw):
    """MQTT by hand, behind a header, TLS and WebSocket as the listener wants it."""

    def __init__(self, setup: Setup, kind: str, header: bytes) -> None:
        super().__init__(setup.port(kind), patience=PATIENCE)
        try:
            self.send(header)
            if kind in ("tls", "wss"):
                self.socket = setup.trust.wrap_socket(self.socket, server_hostname=NAME)
            if kind in ("ws", "wss"):
                framed = Framed(self.socket)
                framed.upgrade()
                self.socket = framed  # type: ignore[assignment]
        except BaseException:
            self.close()
            raise


@pytest.mark.parametrize("kind", ["tcp", "tls", "ws", "wss"])
@pytest.mark.parametrize(
    ("header", "host", "peer"),
    [
        (FIRST, "192.0.2.7", "192.0.2.7:40312"),
        (SECOND, "192.0.2.7", "192.0.2.7:40312"),
        (ABROAD, "2001:db8::7", "2001:db8::7:40312"),
        (LOCAL, "127.0.0.1", ""),
        (b"PROXY UNKNOWN\r\n", "127.0.0.1", ""),
    ],
    ids=["first", "second", "IPv6", "LOCAL", "UNKNOWN"],
)
def test_who_the_client_is(setup: Setup, kind: str, header: bytes, host: str, peer: str) -> None:
    with Proxied(setup, kind, header) as client:
        client.send(raw.connect(f"{kind}-{len(header)}"))
        assert client.expect(raw.CONNACK).body == b"\0\0"
        found = setup.inside.client(f"{kind}-{len(header)}").connection
        assert found.host == host
        assert not peer or found.peer == peer
        client.ping()


def test_header_and_connect_in_one_write_and_byte_by_byte(setup: Setup) -> None:
    with Raw(setup.port("tcp")) as client:
        client.send(SECOND + raw.connect() + raw.packet(0xC0))
        client.expect(raw.CONNACK)
        client.expect(raw.PINGRESP)
    with Raw(setup.port("tcp")) as client:
        for byte in FIRST + raw.connect():
            client.send(bytes((byte,)))
        client.expect(raw.CONNACK)


def closes(port: int, data: bytes) -> None:
    with closing(socket.create_connection(("127.0.0.1", port), PATIENCE)) as plain:
        try:
            plain.sendall(data)
            assert plain.recv(100) == b""
        except ConnectionError:
            pass


@pytest.mark.parametrize("kind", ["tcp", "tls", "ws"])
@pytest.mark.parametrize(
    "data",
    [
        raw.connect("no-header"),
        request(),
        bytes.fromhex("16030100a5010000a1030300") + bytes(100),
        b"PROXY TCP4 192.0.2.7\r\n" + raw.connect(),
        SECOND[:12] + b"\x22" + SECOND[13:] + raw.connect(),
        DENIED + raw.connect(),
        b"PROXY " + b"x" * 200,
    ],
    ids=["CONNECT", "GET", "TLS", "line", "version", "denied", "endless"],
)
def test_what_is_closed(setup: Setup, kind: str, data: bytes) -> None:
    """Without a good header nothing is answered."""
    closes(setup.port(kind), data)
    eventually(lambda: setup.inside.connections == 0, PATIENCE)


LONG = {
    "second": SECOND[:14] + (4000).to_bytes(2, "big") + bytes(4000),
    "first": FIRST[:-2] + b" " * 4000 + b"\r\n",
    "no header": raw.connect("no-header"),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_proxy_that_sends_no_good_header_is_named(setup: Setup, logged: Logged, kind: str) -> None:
    """Counted each time; logged once for a while, whoever connects how often."""
    before = FAILURES["proxy_header"]
    for _ in range(5):
        closes(setup.port("tcp"), LONG[kind] + raw.connect())
    eventually(lambda: FAILURES["proxy_header"] - before == 5, PATIENCE)
    lines = [line for line in logged.messages if "PROXY protocol (setting `proxy_protocol`)" in line]
    assert len(lines) == 1
    assert "the proxy 127.0.0.1 does not send a header" in lines[0]


def test_a_connection_that_says_nothing_is_no_warning(setup: Setup, logged: Logged) -> None:
    """A check of a load balancer."""
    before = FAILURES["handshake"]
    with Raw(setup.port("tcp")) as client:
        client.socket.shutdown(socket.SHUT_WR)
        assert client.expect_closed(PATIENCE) == []
    eventually(lambda: FAILURES["handshake"] == before + 1, PATIENCE)
    assert not [line for line in logged.messages if "PROXY protocol" in line]


@pytest.mark.parametrize("data", [b"", FIRST[:20], SECOND[:20]])
def test_a_header_that_does_not_come(setup: Setup, data: bytes) -> None:
    begun = time.monotonic()
    closes(setup.port("tcp"), data)
    assert time.monotonic() - begun > TIMEOUT / 2
    with Raw(setup.port("tls")) as client:
        client.send(data)
        client.socket.shutdown(socket.SHUT_WR)
        assert client.expect_closed(PATIENCE) == []
    eventually(lambda: setup.inside.connections == 0, PATIENCE)


def test_strangers_may_not_say_who_they_are(setup: Setup) -> None:
    for data in (FIRST + raw.connect(), raw.connect()):
        with Raw(setup.port("strangers")) as client:
            client.send(data)
            assert client.expect_closed(PATIENCE) == []


def test_limits_are_those_of_the_client(setup: Setup) -> None:
    """One connection of each address behind the same proxy."""
    first: Callable[[], Proxied] = lambda: Proxied(setup, "few", FIRST + raw.connect())  # noqa: E731
    with first() as one, Proxied(setup, "few", ABROAD + raw.connect()) as two:
        one.expect(raw.CONNACK)
        two.expect(raw.CONNACK)
        with first() as three:
            assert three.expect_closed(PATIENCE) == []
    eventually(lambda: setup.inside.connections == 0, PATIENCE)
    with first() as one:
        one.expect(raw.CONNACK)


def test_a_5_0_client_behind_a_proxy(setup: Setup) -> None:
    with Proxied(setup, "tcp", SECOND + raw5.connect("five")) as client:
        assert raw5.answer(client.expect(raw.CONNACK)).reason == 0


def test_a_denied_address_costs_no_handshake(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without a proxy too: closed at once, whatever the listener speaks."""
    pair = Authority(tmp_path_factory.mktemp("denied")).issue(NAME)
    denied = {"addresses": ["deny 127.0.0.0/8", "allow all"]}
    kinds = (denied, tls(pair, **denied), {"type": "ws", **denied}, {**tls(pair, **denied), "type": "wss"})
    with running(nats_server.url, *kinds) as inside:
        for port in inside.ports:
            with Raw(port, patience=PATIENCE) as client:
                assert client.expect_closed() == []
        assert inside.connections == 0
