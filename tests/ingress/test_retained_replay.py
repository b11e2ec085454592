# SPDX-License-Identifier: Apache-2.0
"""A replay is for the subscription that it began with, and what waits for it goes in any case."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.ingress import retained_replay as replaying
from mqtt_nats.ingress.retained_replay import Replay
from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.pubsub.backlog import Gate
from mqtt_nats.pubsub.routing_table import Filter


class Namespace(SimpleNamespace):
    """One that can be a key."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Session:
    """A durable session with one subscription, and its client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = DurableSender(10, SimpleNamespace(ack=lambda reply: None))
        self.saved = 0
        self.record = SimpleNamespace(v5=SimpleNamespace(replay={"a": 1}))
        self.gates: dict[Any, Any] = {}
        self.client: Any = Namespace(
            consumers=SimpleNamespace(machine=self.machine),
            record=self.record,
            epoch=1,
            alive=True,
            gates=self.gates,
            regular_side=None,
            outlet=SimpleNamespace(clogged=False, round=SimpleNamespace(holding=lambda size: None)),
        )

        async def save(*_: object) -> None:
            self.saved += 1

        monkeypatch.setattr(replaying, "save_record", save)

    def replay(self) -> tuple[Replay, SubscriptionState]:
        """A subscription of the same filter as any other, and its replay."""
        source = SubscriptionState(1, 1, 10)
        self.machine.sources.append(source)
        replay = Replay(self.client, "a", "a", "a", 1)
        replay.hold(source)
        return replay, source


async def test_a_replay_says_nothing_of_a_later_subscription(monkeypatch: pytest.MonkeyPatch) -> None:
    """UNSUBSCRIBE and SUBSCRIBE have come while the client was sent the retained messages."""
    session = Session(monkeypatch)
    former, ended = session.replay()
    session.machine.drain(ended)
    _, present = session.replay()
    former.finish()
    former.finish()
    assert (bool(ended.held), bool(present.held)) == (False, True)
    assert former.source is None
    for cursor in (200, None):
        await former._note(cursor)
    assert (session.record.v5.replay, session.saved) == ({"a": 1}, 0)


async def test_what_is_new_goes_also_when_a_replay_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(monkeypatch)
    replay, source = session.replay()
    gate = Gate(Filter("a", (), cast(NatsConnection, None), False), 100)
    gate.hold()
    gate.hold()
    replay.gate = session.gates["a"] = gate
    replay.qos = 0  # nothing is noted in the record
    replay.complete = True
    replay.page = [SimpleNamespace(payload=b"")]  # type: ignore[list-item]

    def send(message: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(replay, "send", send)
    await replaying._run(session.client, gate, [replay])
    assert "a defect" in caplog.text
    assert (source.held, gate.users) == (0, 1)
    assert not replaying._turns
