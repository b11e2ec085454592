# SPDX-License-Identifier: Apache-2.0
"""Many sessions without consumers that return together, and read together what they have missed."""

from __future__ import annotations

import contextlib

import pytest

from mqtt_nats.shared_reader import catch_up_places
from mqtt_nats.shared_reader.sessions import SharedReaderSessions
from tests.base.support import PATIENCE, running
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually

pytestmark = pytest.mark.sources

SESSIONS = 12
MISSED = 60
TAILS = "a", "+", "#"


def test_each_session_gets_its_own_messages(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, once, no faster than its client acknowledges; there is no place in which one could read alone."""
    monkeypatch.setattr(catch_up_places, "TOGETHER_MIN", SESSIONS)
    monkeypatch.setattr(catch_up_places, "LEFT_OUT", SESSIONS + 1)
    monkeypatch.setattr(catch_up_places, "CATCHING_MOST", 0)
    settings = {"shared_reader": "always", "session_positions": "records", "max_inflight": 20}
    with running(nats_server.url, **settings) as inside, contextlib.ExitStack() as stack:
        port = inside.ports[0]
        account = inside.gateway.account
        assert account is not None
        feed = account.delivery.feed
        assert isinstance(feed, SharedReaderSessions)
        for number in range(SESSIONS):
            with Raw.connected(port, f"crowd{number}", clean=False) as client:
                assert client.subscribe((f"crowd/{number}/{TAILS[number % 3]}", 1)) == [1]
                client.send(raw.packet(0xE0))
                client.expect_closed(PATIENCE)
        with Raw.connected(port) as writer:
            for text in range(MISSED):
                for number in range(SESSIONS):
                    writer.send(raw.publish(f"crowd/{number}/a", b"%d" % text, qos=1, id=number + 1))
                for _ in range(SESSIONS):
                    writer.expect(raw.PUBACK, PATIENCE)
        clients = [
            stack.enter_context(Raw.connected(port, f"crowd{number}", clean=False)) for number in range(SESSIONS)
        ]
        found: list[list[int]] = [[] for _ in clients]
        for _ in range(MISSED):
            for client, got in zip(clients, found, strict=True):
                one = client.expect(raw.PUBLISH, PATIENCE)
                got.append(int(one.payload))
                client.send(raw.ack(raw.PUBACK, one.id))
        assert found == [[*range(MISSED)]] * SESSIONS
        eventually(lambda: not inside.call(lambda: len(feed.catching)), PATIENCE)
        with Raw.connected(port) as writer:
            for number, client in enumerate(clients):
                writer.send(raw.publish(f"crowd/{number}/a", b"new"))
                assert client.expect(raw.PUBLISH, PATIENCE).payload == b"new"
