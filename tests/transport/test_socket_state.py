# SPDX-License-Identifier: Apache-2.0
"""The socket of a client: its address, whether the client has closed it, and the listener that counts it."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from typing import cast

import pytest

from mqtt_nats.base.admission import CONNACK_REFUSAL
from mqtt_nats.transport.socket_state import (
    ESTABLISHED,
    LAST_DATA_RECEIVED,
    ClientSocket,
    address,
    is_closed,
    silence,
)
from tests.harness.doubles import stands_for
from tests.harness.waiting import eventually

pytestmark = pytest.mark.sources

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has tcp_info in this form")


@stands_for(socket.socket)
class FakeSocket:
    """Stands for `socket`: the `tcp_info` that the system tells."""

    family = socket.AF_INET

    def __init__(self, info: bytes | None) -> None:
        self._info = info

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        if self._info is None:
            raise OSError("bad file descriptor")
        return self._info[:size]


@stands_for(asyncio.Transport)
class FakeTransport:
    """Stands for `Transport`: what is known of the socket, and how often somebody has asked."""

    def __init__(self, peer: object = None, raw: object = None) -> None:
        self.fake_known = {"peername": peer, "socket": raw}
        self.fake_asked: list[str] = []

    def get_extra_info(self, name: str) -> object:
        self.fake_asked.append(name)
        return self.fake_known[name]


def as_transport(fake: FakeTransport) -> asyncio.Transport:
    """The fake, for what wants a transport."""
    return cast("asyncio.Transport", fake)


def socket_of(fake: FakeTransport | None) -> ClientSocket:
    """The socket of a client with this transport."""
    found = ClientSocket()
    found.transport = None if fake is None else as_transport(fake)
    return found


# -- the address ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "found"),
    [
        (("192.0.2.1", 5), ("192.0.2.1", 5)),
        (("2001:db8::1", 5, 0, 0), ("2001:db8::1", 5, 0, 0)),
        ("", None),  # a socket of the file system
        ("/run/gateway.sock", None),
        (("192.0.2.1",), None),
        (None, None),  # closed by now
        ((), None),
    ],
)
def test_the_address_of_the_peer(peer: object, found: object) -> None:
    assert address(as_transport(FakeTransport(peer))) == found
    assert address(None) is None


def test_host_and_peer_are_those_of_the_socket() -> None:
    transport = FakeTransport(("192.0.2.1", 5))
    found = socket_of(transport)
    assert (found.host, found.peer) == ("192.0.2.1", "192.0.2.1:5")
    assert [found.host for _ in range(3)] == ["192.0.2.1"] * 3
    assert transport.fake_asked == ["peername"] * 2, "each request is a system call"


def test_the_host_is_known_after_the_socket_was_closed() -> None:
    transport = FakeTransport(("192.0.2.1", 5))
    found = socket_of(transport)
    assert found.host == "192.0.2.1"
    transport.fake_known["peername"] = None
    assert (found.host, found.peer) == ("192.0.2.1", "192.0.2.1")


def test_a_client_without_an_address_is_unknown() -> None:
    for transport in (None, FakeTransport("")):
        found = socket_of(transport)
        assert (found.host, found.peer) == ("", "unknown")


def test_a_proxy_names_the_address_of_the_client() -> None:
    """Also where the address of the proxy was asked for before."""
    found = socket_of(FakeTransport(("192.0.2.9", 5)))
    assert found.host == "192.0.2.9"
    found.name_source(("198.51.100.1", 7))
    assert (found.host, found.peer) == ("198.51.100.1", "198.51.100.1:7")


# -- what the system tells ------------------------------------------------------------------------------


def info(milliseconds: int, state: bytes = ESTABLISHED) -> bytes:
    """The beginning of `tcp_info`."""
    return state + bytes(LAST_DATA_RECEIVED - 1) + milliseconds.to_bytes(4, sys.byteorder) + bytes(100)


@LINUX
@pytest.mark.parametrize(
    ("raw", "closed", "silent"),
    [
        (FakeSocket(info(1500)), False, 1.5),
        (FakeSocket(info(0, b"\x08")), True, 0.0),  # CLOSE_WAIT
        (FakeSocket(None), True, None),  # the socket is closed here
        (None, False, None),  # it has gone with its transport
    ],
)
def test_a_closed_connection_is_noticed_without_a_read(
    raw: FakeSocket | None, closed: bool, silent: float | None
) -> None:
    transport = as_transport(FakeTransport(raw=raw))
    assert (is_closed(transport), silence(transport)) == (closed, silent)
    assert socket_of(FakeTransport(raw=raw)).hung_up is closed


def test_a_socket_of_the_file_system_tells_nothing() -> None:
    raw = FakeSocket(info(1500, b"\x08"))
    raw.family = socket.AF_UNIX
    transport = as_transport(FakeTransport(raw=raw))
    assert (is_closed(transport), silence(transport)) == (False, None)


def test_a_system_without_tcp_info_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_INFO", raising=False)
    transport = as_transport(FakeTransport(raw=FakeSocket(info(1500, b"\x08"))))
    assert (is_closed(transport), silence(transport)) == (False, None)


def test_a_connection_without_a_socket_has_ended() -> None:
    assert socket_of(None).hung_up


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            yield client, accepted


@LINUX
def test_linux_tells_that_the_client_has_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    """Although nobody has read the bytes that the client sent before."""
    client, accepted = pair
    transport = as_transport(FakeTransport(raw=accepted))
    assert not is_closed(transport)
    assert 0 <= (silence(transport) or 0.0) < 60
    client.sendall(b"not read")
    client.close()
    assert eventually(lambda: is_closed(transport))


# -- the listener that counts the connection --------------------------------------------------------------


def test_a_connection_is_uncounted_once() -> None:
    left: list[str] = []
    found = socket_of(None)
    found.uncount()
    found.count(lambda: left.append("left"), CONNACK_REFUSAL)
    assert found.admission is CONNACK_REFUSAL
    found.uncount()
    found.uncount()
    assert left == ["left"]
