# SPDX-License-Identifier: Apache-2.0
"""Durable sessions that the shared reader serves: when a session may become one, and what one may do to the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.broker import joining as becoming
from mqtt_nats.broker.attachment import Attachment
from mqtt_nats.broker.joining import Joining, left
from mqtt_nats.broker.live import Live
from mqtt_nats.session.delivery import Source
from mqtt_streams.messages import subscription_consumer


def bench() -> tuple[Live, Any]:
    """The sessions of a gateway, and the gateway."""
    broker: Any = SimpleNamespace(
        settings=SimpleNamespace(max_backlog=None), inbox=None, counters=None, latest=SimpleNamespace(replicated=False)
    )
    return Live(broker), broker


@pytest.mark.parametrize(("following", "passed"), [(7, False), (10, False), (11, True), (None, True)])
async def test_a_consumer_on_a_server_that_lags(
    monkeypatch: pytest.MonkeyPatch, following: int | None, passed: bool
) -> None:
    """That it has nothing left is what the leader of the stream says, and not its own server, which has not all yet."""
    _, broker = bench()
    asked: list[tuple[str, int]] = []

    async def get_next(_: object, stream: str, subject: str, start: int) -> Any:
        asked.append((subject, start))
        return None if following is None else SimpleNamespace(seq=following)

    monkeypatch.setattr(becoming, "get_next", get_next)
    source = Source(1, 3, 100)
    source.last = 6
    consumer = subscription_consumer("hash", "a", name_nuid="n", deliver_nuid="d", max_ack_pending=100, start_seq=3)
    attachment = Attachment("a", consumer, source)
    joining = Joining([attachment], 10)
    assert await left(broker, joining, [attachment]) == ([] if passed else [attachment])
    assert asked == [("$MQTT.msgs.a", 7)]
    source.last = 10
    assert not await left(broker, joining, [attachment])
    assert len(asked) == 1


async def test_a_leader_that_does_not_count_all_of_it_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says that nothing is left is asked again when it has decided something."""
    _, broker = bench()
    found: list[Any] = [None, SimpleNamespace(seq=7)]
    decided: list[int] = []

    async def get_next(*_: object) -> Any:
        return found.pop(0)

    async def state() -> dict[str, Any]:
        decided.append(len(found))
        return {}

    broker.latest = SimpleNamespace(replicated=True, state=state)
    monkeypatch.setattr(becoming, "get_next", get_next)
    consumer = subscription_consumer("hash", "a", name_nuid="n", deliver_nuid="d", max_ack_pending=100, start_seq=3)
    attachment = Attachment("a", consumer, Source(1, 3, 100))
    assert await left(broker, Joining([attachment], 10), [attachment]) == [attachment]
    assert (decided, found) == ([1], [])
