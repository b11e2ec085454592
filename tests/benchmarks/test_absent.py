# SPDX-License-Identifier: Apache-2.0
"""The benchmark of absent sessions: a few of them, made, left and back."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from benchmarks import absent, peers
from benchmarks.generator.packets import DeliveryError, Layout

PRESENT = b"\x20\x02\x01\x00"
MESSAGE = bytes(Layout(absent.TOPIC, 128, 1).template)


class Broker(threading.Thread):
    """Answers the CONNECT of connections in turn with CONNACK and so many messages each, and may close it then."""

    def __init__(self, turns: list[tuple[int, bool]]) -> None:
        super().__init__(daemon=True)
        self._turns = turns
        self._server = socket.create_server((peers.HOST, 0))
        self.running = peers.Running(self._server.getsockname()[1], Path())

    def run(self) -> None:
        open_ones = []
        with self._server:
            for messages, closes in self._turns:
                sock, _ = self._server.accept()
                sock.recv(4096)
                sock.sendall(PRESENT + messages * MESSAGE)
                if closes:
                    sock.shutdown(socket.SHUT_WR)
                open_ones.append(sock)
            for sock in open_ones:
                while sock.recv(4096):
                    pass
                sock.close()


def test_a_session_connects_again() -> None:
    """What the lost connection has brought counts, and so may what comes twice then."""
    broker = Broker([(absent.MISSED, False), (4, True), (absent.MISSED, False)])
    broker.start()
    assert absent._return_all(broker.running, 2) == 1
    broker.join(10)
    assert not broker.is_alive()


def test_a_message_that_comes_twice() -> None:
    broker = Broker([(absent.MISSED, False), (absent.MISSED + 1, False)])
    broker.start()
    with pytest.raises(DeliveryError, match="came twice"):
        absent._return_all(broker.running, 2)


@pytest.mark.processes
@pytest.mark.parametrize(("positions", "consumers"), [("consumers", 20), ("records", 0)])
def test_a_few_sessions(monkeypatch: pytest.MonkeyPatch, positions: str, consumers: int) -> None:
    """Each has its messages when it is back; only those with consumers have some while they are absent."""
    monkeypatch.setattr(absent, "IDLE", 0.1)
    row = absent.measure(20, positions, 10)
    assert (row.sessions, row.positions, row.back.sessions) == (20, positions, 10)
    assert row.consumers in (consumers, consumers + 1)  # and the gateway's shared reader
    assert row.records > 500
    assert min(row.made, row.restart[0], row.alone, row.back.took) > 0
    assert 0 < row.back.before.p99 <= row.back.before.longest
    assert 0 < row.back.meanwhile.p99 <= row.back.meanwhile.longest
    text = absent.document([row], "command")
    assert "## Absent sessions" in text
    assert f"| {positions}" in text
    assert f" {row.back.before} " in text
    assert f" {row.back.meanwhile} " in text


@pytest.mark.processes
def test_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records have three replicas; figures of nats-server are those of one of three."""
    monkeypatch.setattr(absent, "IDLE", 0.1)
    monkeypatch.setattr(absent, "SETTLE", 0.5)
    row = absent.measure(20, "records", 10, 3)
    assert (row.servers, row.consumers, row.back.sessions) == (3, 1, 10)
    assert min(row.made, row.records, row.restart[0], row.back.took) > 0
    assert "| 3 " in absent.document([row], "command")
