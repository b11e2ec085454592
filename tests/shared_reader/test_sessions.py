# SPDX-License-Identifier: Apache-2.0
"""Durable sessions that the shared reader serves: when a session may become one, and what one may do to the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions import message_stream
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.sessions.message_stream import StreamHead
from mqtt_nats.shared_reader import housekeeping as upkeep
from mqtt_nats.shared_reader.promotion import Promotion, left
from mqtt_streams.messages import subscription_consumer
from tests.sessions.fakes import FakeInbox, as_inbox

MOST = upkeep.CROWD_MOST


class Head(StreamHead):
    """The head of a stream with one replica, unless a test says otherwise."""

    def __init__(self) -> None:
        super().__init__(as_inbox(FakeInbox()))
        self.replicated = False


@pytest.mark.parametrize(("following", "passed"), [(7, False), (10, False), (11, True), (None, True)])
async def test_a_consumer_on_a_server_that_lags(
    monkeypatch: pytest.MonkeyPatch, following: int | None, passed: bool
) -> None:
    """That it has nothing left is what the leader of the stream says, and not its own server, which has not all yet."""
    head = Head()
    asked: list[tuple[str, int]] = []

    async def get_next(_: object, stream: str, subject: str, start: int) -> Any:
        asked.append((subject, start))
        return None if following is None else SimpleNamespace(seq=following)

    monkeypatch.setattr(message_stream, "get_next", get_next)
    source = SubscriptionState(1, 3, 100)
    source.last = 6
    consumer = subscription_consumer("hash", "a", name_nuid="n", deliver_nuid="d", max_ack_pending=100, start_seq=3)
    attachment = ConsumerBinding("a", consumer, source)
    joining = Promotion([attachment], 10)
    assert await left(head, joining, [attachment]) == ([] if passed else [attachment])
    assert asked == [("$MQTT.msgs.a", 7)]
    source.last = 10
    assert not await left(head, joining, [attachment])
    assert len(asked) == 1


async def test_a_leader_that_does_not_count_all_of_it_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says that nothing is left is asked again when it has decided something."""
    head = Head()
    found: list[Any] = [None, SimpleNamespace(seq=7)]
    decided: list[int] = []

    async def get_next(*_: object) -> Any:
        return found.pop(0)

    async def state() -> dict[str, Any]:
        decided.append(len(found))
        return {}

    head.replicated = True
    monkeypatch.setattr(head, "state", state)
    monkeypatch.setattr(message_stream, "get_next", get_next)
    consumer = subscription_consumer("hash", "a", name_nuid="n", deliver_nuid="d", max_ack_pending=100, start_seq=3)
    attachment = ConsumerBinding("a", consumer, SubscriptionState(1, 3, 100))
    assert await left(head, Promotion([attachment], 10), [attachment]) == [attachment]
    assert (decided, found) == ([1], [])


@dataclass(eq=False)
class Someone:
    """A client."""

    number: int
    durable_side: Any


@pytest.mark.parametrize(("crowds", "behind"), [((MOST, MOST), []), ((9, MOST + 1), [1])])
async def test_who_is_behind_already_leaves_others_where_they_are(crowds: tuple[int, int], behind: list[int]) -> None:
    """Of two sessions the second is live; much may wait in the other one until its client has acknowledged it."""
    given_back: list[int] = []
    live: Any = SimpleNamespace(
        allowed=True,
        reader=SimpleNamespace(refused=0),
        returning=set(),
        reached=lambda side: 0,
        begin=lambda client, side, now: None,
        give_back=lambda client, side: given_back.append(client.number),
        members={},
    )
    for number, crowd in enumerate(crowds):
        side = SimpleNamespace(live=number == 1, machine=SimpleNamespace(crowd=crowd, reached=0))
        live.members[Someone(number, side)] = SimpleNamespace(side=side, renewal=math.inf)
    live.registry = SimpleNamespace(clients=dict(enumerate(live.members)))
    upkeep.look(live)
    assert given_back == behind
