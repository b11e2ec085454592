# SPDX-License-Identifier: Apache-2.0
"""Many sessions without consumers that return together, and read together what they have missed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from mqtt_nats.shared_reader import catch_up_places
from mqtt_nats.shared_reader.sessions import SharedReaderSessions
from tests.base.support import PATIENCE, Inside, running
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually

pytestmark = pytest.mark.sources

SESSIONS = 12
MISSED = 60
WINDOW = 20
TAILS = "a", "+", "#"


@dataclass
class Crowd:
    """Absent sessions that have missed messages, and their gateway."""

    inside: Inside
    feed: SharedReaderSessions
    stack: contextlib.ExitStack

    @property
    def port(self) -> int:
        """For clients."""
        return self.inside.ports[0]

    def connect(self, number: int) -> Raw:
        """Have a client return."""
        return self.stack.enter_context(Raw.connected(self.port, f"crowd{number}", clean=False))

    def wait_for(self, sessions: int) -> None:
        """Wait until at most so many sessions have something left to read."""
        eventually(lambda: self.inside.call(lambda: len(self.feed.catching)) <= sessions, PATIENCE)

    def publish(self, payload: bytes) -> None:
        """Publish to each session."""
        with Raw.connected(self.port) as writer:
            for number in range(SESSIONS):
                writer.send(raw.publish(f"crowd/{number}/a", payload, qos=1, id=number + 1))
            for _ in range(SESSIONS):
                writer.expect(raw.PUBACK, PATIENCE)


@pytest.fixture
def crowd(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    """Sessions that read together when all of them return: there is no place in which one could read alone."""
    monkeypatch.setattr(catch_up_places, "TOGETHER_MIN", SESSIONS)
    monkeypatch.setattr(catch_up_places, "LEFT_OUT", SESSIONS + 1)
    monkeypatch.setattr(catch_up_places, "PLACES", 0)
    monkeypatch.setattr(catch_up_places, "PAGE", 16)
    settings = {"session_positions": "records", "max_inflight": WINDOW}
    with running(nats_server.url, **settings) as inside, contextlib.ExitStack() as stack:
        account = inside.gateway.account
        assert account is not None
        feed = account.delivery.feed
        assert isinstance(feed, SharedReaderSessions)
        crowd = Crowd(inside, feed, stack)
        for number in range(SESSIONS):
            with Raw.connected(crowd.port, f"crowd{number}", clean=False) as client:
                assert client.subscribe((f"crowd/{number}/{TAILS[number % 3]}", 1)) == [1]
                client.send(raw.packet(0xE0))
                client.expect_closed(PATIENCE)
        for text in range(MISSED):
            crowd.publish(b"%d" % text)
        yield crowd
        for number in range(SESSIONS):
            Raw.connected(crowd.port, f"crowd{number}", clean=True).close()


def take(clients: list[Raw], count: int = MISSED) -> list[list[int]]:
    """Messages that each client gets and acknowledges."""
    found: list[list[int]] = [[] for _ in clients]
    for _ in range(count):
        for client, got in zip(clients, found, strict=True):
            one = client.expect(raw.PUBLISH, PATIENCE)
            got.append(int(one.payload))
            client.send(raw.ack(raw.PUBACK, one.id))
    return found


EVERYTHING = [*range(MISSED)]


def test_each_session_gets_its_own_messages(crowd: Crowd) -> None:
    """In order, once, no faster than its client acknowledges."""
    clients = [crowd.connect(number) for number in range(SESSIONS)]
    assert take(clients) == [EVERYTHING] * SESSIONS
    crowd.wait_for(0)
    crowd.publish(b"100")
    assert take(clients, 1) == [[100]] * SESSIONS


def test_others_go_on(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """While clients take or acknowledge nothing, unsubscribe, or are lost; those get their messages later."""
    clients = [crowd.connect(number) for number in range(SESSIONS)]
    deaf, silent, ended, lost, *others = clients
    first = take(others, 1)  # all of them read together by now
    lost.close()
    ended.send(raw.unsubscribe("crowd/2/#"))
    rest = take(others, MISSED - 1)
    assert [[*one, *more] for one, more in zip(first, rest, strict=True)] == [EVERYTHING] * len(others)
    crowd.wait_for(3)
    crowd.publish(b"100")
    assert take(others, 1) == [[100]] * len(others)
    assert ended.ping()[-1].kind == raw.UNSUBACK
    ended.close()
    assert [int(silent.expect(raw.PUBLISH, PATIENCE).payload) for _ in range(WINDOW)] == EVERYTHING[:WINDOW]
    silent.close()
    monkeypatch.setattr(catch_up_places, "TOGETHER_MIN", 1)
    assert take([deaf], MISSED + 1) == [[*EVERYTHING, 100]]
    for number in (1, 3):
        assert take([crowd.connect(number)], MISSED + 1) == [[*EVERYTHING, 100]]
