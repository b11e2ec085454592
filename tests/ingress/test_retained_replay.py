# SPDX-License-Identifier: Apache-2.0
"""A replay is for the subscription that it began with, and what waits for it goes in any case."""

from typing import cast

import pytest

from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.ingress.retained import replay as replaying
from mqtt_nats.ingress.retained.replay import Replay
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.pubsub.backlog import Gate
from mqtt_nats.pubsub.routing_table import Filter
from mqtt_streams.retained import RetainedMessage
from tests.ingress.fakes import FakePublisher, FakePublishingServices, as_publisher
from tests.sessions.fakes import FakeSide, v5_of


class Session:
    """A durable session with one subscription, and its client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved = 0
        fake = FakePublisher(FakePublishingServices())
        side = fake.durable_side = FakeSide(fake)
        self.machine = side.machine
        self.noted = v5_of(fake).replay
        self.noted["a"] = 1
        self.client = as_publisher(fake)

        async def save(*_: object) -> None:
            self.saved += 1

        for name in ("save_record", "save_when_room"):
            monkeypatch.setattr(replaying, name, save)

    def replay(self) -> tuple[Replay, SubscriptionState]:
        """A subscription of the same filter as any other, and its replay."""
        source = SubscriptionState(1, 1)
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
    assert (session.noted, session.saved) == ({"a": 1}, 0)


async def test_what_is_new_goes_also_when_a_replay_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(monkeypatch)
    replay, source = session.replay()
    found = Filter("a", (), cast(NatsConnection, None), False)
    gate = Gate(found, 100)
    gate.hold()
    gate.hold()
    session.client.gates = {found: gate}
    replay.gate = gate
    replay.qos = 0  # nothing is noted in the record
    replay.complete = True
    replay.page = [RetainedMessage("a", 1, b"", b"", 1, 0)]

    def send(message: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(replay, "send", send)
    await replaying._run(session.client, gate, [replay])
    assert "a defect" in caplog.text
    assert (source.held, gate.users) == (0, 1)
    assert not replaying._turns
