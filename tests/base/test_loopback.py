# SPDX-License-Identifier: Apache-2.0
"""Packets within one machine are not paced, whatever its congestion control does with those that leave it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtt_nats.base import loopback
from mqtt_nats.base.loopback import unpace

LINUX = hasattr(socket, "TCP_CONGESTION")
ALL = (b"",)
"""As if all that there are paced."""


def control(one: socket.socket) -> bytes:
    return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def allowed() -> list[bytes]:
    return Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_bytes().split()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


@pytest.mark.skipif(not LINUX, reason="only Linux has more than one congestion control for a socket to choose from")
def test_what_is_accepted_is_like_the_listener(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "PACED", ALL)
    unpace(listening, "127.0.0.1")
    assert control(listening) == loopback.UNPACED
    with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
        assert control(accepted) == loopback.UNPACED


@pytest.mark.skipif(not LINUX, reason="only Linux has more than one congestion control for a socket to choose from")
@pytest.mark.parametrize(
    ("host", "changed"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%lo", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_where(listening: socket.socket, monkeypatch: pytest.MonkeyPatch, host: str, changed: bool) -> None:
    """Connections to other machines are left as the system has them."""
    monkeypatch.setattr(loopback, "PACED", ALL)
    former = control(listening)
    others = [one for one in allowed() if one != former] or [former]
    monkeypatch.setattr(loopback, "UNPACED", others[0])
    unpace(listening, host)
    assert control(listening) == (others[0] if changed else former)


@pytest.mark.skipif(not LINUX, reason="only Linux has more than one congestion control for a socket to choose from")
def test_what_does_not_pace_stays(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "PACED", (b"none",))
    former = control(listening)
    unpace(listening, "127.0.0.1")
    assert control(listening) == former


def test_what_cannot_be_changed_stays(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "PACED", ALL)
    monkeypatch.setattr(loopback, "UNPACED", b"no such thing")
    unpace(listening, "127.0.0.1")
    listening.close()
    unpace(listening, "127.0.0.1")
