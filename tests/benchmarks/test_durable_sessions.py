# SPDX-License-Identifier: Apache-2.0
"""Sessions that clients leave behind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks import peers
from benchmarks.durable_sessions import make_absent
from benchmarks.generator.answers import packet_at
from benchmarks.generator.clients import Client, LoadError

CONNECT, DISCONNECT = 0x10, 0xE0


class Broker(threading.Thread):
    """Accepts connections one after the other, answers CONNECT of 5.0, and keeps what clients have sent."""

    def __init__(self, connections: int) -> None:
        super().__init__(daemon=True)
        self._connections = connections
        self._server = socket.create_server((peers.HOST, 0))
        self.port: int = self._server.getsockname()[1]
        self.got: list[list[tuple[int, bytes]]] = []
        """Packets of each connection: first byte and body."""

    def run(self) -> None:
        with self._server:
            for _ in range(self._connections):
                sock, _ = self._server.accept()
                with sock:
                    self.got.append(list(self._packets(sock)))

    def _packets(self, sock: socket.socket) -> Iterator[tuple[int, bytes]]:
        rest = b""
        while data := sock.recv(4096):
            rest += data
            while (found := packet_at(rest, 0, len(rest))) is not None:
                kind, body, end = found
                rest = rest[end:]
                yield kind, body
                if kind == CONNECT:
                    sock.sendall(b"\x20\x03\x00\x00\x00")


def test_clients_are_taken_when_those_before_have_left() -> None:
    """Each of two brokers has the clients of its turns."""
    brokers = Broker(2), Broker(1)
    for one in brokers:
        one.start()

    def clients() -> Iterator[Client]:
        for number in range(3):
            until = time.monotonic() + 10
            while sum(len(one.got) for one in brokers) < number:
                assert time.monotonic() < until
                time.sleep(0.01)
            yield Client(f"name{number}", clean=False, version=5, session_expiry=100 + number)

    assert make_absent([one.port for one in brokers], clients(), at_once=1) > 0
    for one in brokers:
        one.join(10)
    first, second = (one.got for one in brokers)
    for number, got in ((0, first[0]), (1, second[0]), (2, first[1])):
        assert [kind for kind, _ in got] == [CONNECT, DISCONNECT]
        assert f"name{number}".encode() in got[0][1]
        assert (b"\x11" + (100 + number).to_bytes(4)) in got[0][1]


def test_a_client_that_nobody_serves() -> None:
    with pytest.raises(LoadError, match=r"ECONNREFUSED|name: connection lost"):
        make_absent([1], [Client("name")])
