# SPDX-License-Identifier: Apache-2.0
"""Connections to the admin listener that do not come to speak TLS."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from contextlib import ExitStack

import pytest

from mqtt_nats.admin import connections, handshakes
from mqtt_nats.admin.handshakes import Handshakes
from tests.harness.waiting import aeventually

MANY = 20
ROOM = 3


def ended(clients: list[socket.socket]) -> int:
    """How many have been closed."""
    count = 0
    for client in clients:
        client.setblocking(False)
        try:
            count += client.recv(1) == b""
        except BlockingIOError:
            pass
        except ConnectionResetError:
            count += 1
    return count


async def test_a_handshake_that_is_ended_before_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """More have come at once than there is room for: their sockets are closed, and not by chance."""
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", ROOM)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=MANY))
        listening.setblocking(False)
        clients = [stack.enter_context(socket.create_connection(listening.getsockname())) for _ in range(MANY)]
        found = Handshakes(listening, context, asyncio.Protocol)
        assert await aeventually(lambda: ended(clients) == MANY - ROOM, 5)
        found.close()
        assert await aeventually(lambda: ended(clients) == MANY, 5)


async def test_too_many_open_files(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The log says it; who waits is accepted when there is room again."""
    monkeypatch.setattr(handshakes, "ACCEPT_RETRY_S", 0.05)
    full = True

    class Listening(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if full:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    with ExitStack() as stack:
        listening = stack.enter_context(Listening())
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        client = stack.enter_context(socket.create_connection(listening.getsockname()))
        found = Handshakes(listening, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), asyncio.Protocol)
        assert await aeventually(lambda: "accepting is paused: Too many open files" in caplog.text)
        full = False
        client.sendall(b"this is no TLS")
        assert await aeventually(lambda: ended([client]) == 1, 5)
        found.close()
