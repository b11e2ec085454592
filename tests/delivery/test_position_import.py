# SPDX-License-Identifier: Apache-2.0
"""The position of a session whose consumers nats-server's listener has moved on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mqtt_nats.delivery import position_import
from mqtt_nats.delivery.position_import import import_position
from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.protocol.position import SessionPosition
from mqtt_nats.sessions.record import claimed
from mqtt_streams.api import RequestTimeout
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.sessions import Conflict, Draining
from tests.delivery.fakes import FakeDeliveryServices, FakeReceiver, Side
from tests.harness.doubles import stands_for
from tests.sessions.fakes import as_client

QOS1 = b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n"


@stands_for(PositionWriter)
class FakeWriter:
    """Stands for `PositionWriter`: a position in memory."""

    fake_stores = True

    def __init__(self, client: object, expected: int) -> None:
        self.ledger = SessionPosition()
        self.live: set[str] = set()
        self.fake_expected = expected

    async def flush(self) -> bool:
        return self.fake_stores

    def end_if_moved(self) -> None:
        """Nobody is told."""


class Setup:
    """A session with subscriptions at QoS 1 on ``a`` and at QoS 2 on ``b``; messages alternate between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.services = FakeDeliveryServices()
        self.client = FakeReceiver(self.services, "me")
        self.side: Any = Side()
        self.saved: list[str] = []
        self.refuses = False
        monkeypatch.setattr(position_import, "save_record", self._save)
        monkeypatch.setattr(position_import, "PositionWriter", FakeWriter)
        self.record, self.v5 = claimed(self.client.record)
        self.inbox = self.services.fake_inbox
        for qos, subject in enumerate("ab", 1):
            self.record.subs[subject] = qos
            self.record.cons[subject] = subscription_consumer(
                self.client.hash, subject, name_nuid=subject, deliver_nuid=subject, max_ack_pending=10
            )
        for number in range(10):
            self.inbox.put(f"$MQTT.msgs.{'ab'[number % 2]}", b"x", QOS1)

    async def _save(self, client: object, epoch: int) -> int:
        if self.refuses:
            raise Conflict("me")
        self.saved.append(self.v5.pos)
        return epoch

    def consumer(self, subject: str, delivered: int, floor: int, pending: int, **more: Any) -> str:
        consumer = self.record.cons[subject]
        self.inbox.consumers[MESSAGES][consumer.durable_name] = {
            "name": consumer.durable_name,
            "config": consumer.to_config(),
            "delivered": {"consumer_seq": 1, "stream_seq": delivered},
            "ack_floor": {"consumer_seq": 1, "stream_seq": floor},
            "num_ack_pending": pending,
            "num_pending": 0,
            **more,
        }
        return consumer.durable_name

    async def imported(self) -> set[str]:
        return await import_position(as_client(self.client), self.side, 7)


async def test_nothing_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each subscription begins after what its consumer has delivered, and the session at the first of them."""
    setup = Setup(monkeypatch)
    names = {setup.consumer("a", 9, 9, 0), setup.consumer("b", 4, 4, 0)}
    assert await setup.imported() == names
    writer = setup.side.position_writer
    assert (writer.ledger.reached, writer.ledger.pending, writer.live) == (4, {}, names)
    assert setup.v5.start == {"a": 10}
    assert (writer.fake_expected, setup.saved, setup.side.resumed_from) == (7, [setup.v5.pos], 4)


async def test_what_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages of the subscription behind the acknowledgement floor, at the QoS of both; other topics are not."""
    setup = Setup(monkeypatch)
    setup.consumer("a", 10, 3, 3)
    setup.consumer("b", 10, 8, 1)
    assert len(await setup.imported()) == 2
    assert setup.side.position_writer.ledger.pending == {5: 1, 7: 1, 9: 1, 10: 1}


@pytest.mark.parametrize("why", ["acknowledged", "gone", "draining", "replaced", "paused", "ahead", "overlap"])
async def test_consumers_that_have_to_deliver(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Of three messages behind the floor two are pending, and nobody says which; or one that is ahead has some."""
    setup = Setup(monkeypatch)
    setup.consumer(
        "a", 9, 3, 2 if why == "acknowledged" else 3, **({"pause_remaining": 1 << 40} if why == "paused" else {})
    )
    if why != "gone":
        setup.consumer("b", 4, 4, 0)
    if why == "overlap":  # which of two delivers a message must not change
        setup.record.cons["b"] = replace(setup.record.cons["b"], filter_subject="$MQTT.msgs.*")
        setup.consumer("a", 9, 9, 0)
    if why == "draining":
        setup.v5.draining.append(Draining("other", "$MQTT.msgs.c", 1, 9))
    if why == "replaced":
        setup.side.replace_stream(3)
    assert await setup.imported() == set()
    assert (setup.saved, setup.side.position_writer) == ([], None)


@pytest.mark.parametrize("where", ["record", "position"])
async def test_somebody_else_has_the_session(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    setup = Setup(monkeypatch)
    setup.consumer("a", 9, 9, 0)
    setup.consumer("b", 4, 4, 0)
    setup.refuses = where == "record"
    monkeypatch.setattr(FakeWriter, "fake_stores", where == "record")
    with pytest.raises(RequestTimeout):
        await setup.imported()
    assert setup.client.taken is setup.refuses
