# SPDX-License-Identifier: Apache-2.0
"""Which gateway is asked whether it has left a session, and under which names a gateway is asked."""

from __future__ import annotations

from typing import cast

import pytest

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.delivery import position_handover
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.position_handover import PositionHandover, leave_position
from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.delivery.states import DeliveryState
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.api import NoResponders
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.gateway_subjects import LEFT
from mqtt_streams.positions import decode
from mqtt_streams.sessions import V5
from tests.delivery.fakes import FakeDeliveryServices, FakeReceiver, Side, as_receiver
from tests.sessions.fakes import FakeServices, as_services


class Gateway(FakeServices):
    """Services of a gateway that is told about positions; nobody listens on what it asks."""

    def __init__(self) -> None:
        super().__init__()
        self.identity.id = "former00"
        self.fake_asked: list[str] = []
        self.fake_inbox.before = self._ask

    def _ask(self, subject: str) -> None:
        self.fake_asked.append(subject)
        raise NoResponders(subject)


def test_a_gateway_with_another_name_answers_to_both() -> None:
    """It was taken for dead: positions that were written before name it as it was."""
    services = Gateway()
    leaving = PositionHandover(as_services(services))
    services.identity.id = "present0"
    leaving.named()
    subjects = [f"{LEFT}former00".encode(), f"{LEFT}present0".encode()]
    assert list(services.fake_link.fake_subjects.values()) == subjects
    services.nats.reconnect.renew(Phase.REQUESTS)
    assert services.fake_link.fake_renewed == [(b"1", subjects[0]), (b"2", subjects[1])]


@pytest.mark.parametrize("name", ["", "former00", "present0", "a b", "a\r\nPUB x 0", "*", ">", "a.b", "é"])
async def test_who_is_not_asked(name: str) -> None:
    """Itself, and what is no gateway's name: a position may be damaged."""
    services = Gateway()
    leaving = PositionHandover(as_services(services))
    services.identity.id = "present0"
    leaving.named()
    assert not await leaving.elsewhere("client", name)
    assert not services.fake_asked


async def test_a_dead_gateway_does_not_answer() -> None:
    services = Gateway()
    assert not await PositionHandover(as_services(services)).elsewhere("client", "another0")
    assert services.fake_asked == [f"{LEFT}another0"]


@pytest.mark.sources
async def test_the_last_position_is_written_once() -> None:
    """A round of changed positions may come before the task that hands the session over."""
    services = FakeDeliveryServices()
    client = FakeReceiver(services, v5=V5(pos="position"))
    writer = PositionWriter(as_receiver(client), 5)
    writer.ledger.add_pending(7, 1)
    leave_position(as_receiver(client), cast(DurableDelivery, Side(client=client, position_writer=writer)))
    for changed in client.delivery.writers.following():
        changed.write()
    ((_, _, payload, operation),) = services.fake_store.fake_put
    found = decode(payload)
    assert found is not None
    assert (found.clean, found.pending) == (True, {7: 1})
    operation.stored(b'{"stream":"$MQTT_pos","seq":6}')
    await services.tasks.fake_settle()
    assert len(services.fake_store.fake_put) == 1
    assert writer.lost
    assert client.delivery.handover.fake_added == [client.hash]
    assert services.fake_inbox.asked == []


@pytest.mark.sources
@pytest.mark.parametrize("state", [DeliveryState.OPENING, DeliveryState.LIVE, DeliveryState.NOT_READING])
async def test_dormant_consumers_are_set_after_the_last_position(
    monkeypatch: pytest.MonkeyPatch, state: DeliveryState
) -> None:
    """Those that exist, wherever the session was; nothing of it is read any more."""
    client = FakeReceiver(FakeDeliveryServices(), v5=V5(pos="position"))
    writer = PositionWriter(as_receiver(client), 5)
    forgotten: list[object] = []
    told: list[list[tuple[str, int]]] = []
    monkeypatch.setattr(client.delivery.feed, "forget", forgotten.append)

    async def listener(client: object, writer: object, consumers: list[tuple[str, int]]) -> None:
        told.append(consumers)

    monkeypatch.setattr(position_handover, "_for_listener", listener)
    side = Side(state=state, client=client, position_writer=writer)
    for name, start in (("here", 7), ("removed", 8)):
        consumer = ConsumerRef(name, "deliver", "filter", 10)
        side.bindings[name] = binding = ConsumerBinding(name, consumer, SubscriptionState(1, start))
        binding.begin_after(0, removed=name == "removed")
    leave_position(as_receiver(client), cast(DurableDelivery, side))
    assert (side.state, side.live, forgotten) == (DeliveryState.ENDED, False, [client])
    ((*_, operation),) = client.services.fake_store.fake_put
    operation.stored(b'{"stream":"$MQTT_pos","seq":6}')
    await client.services.tasks.fake_settle()
    assert told == [[("here", 7)]]
    assert writer.lost


@pytest.mark.sources
async def test_a_session_without_a_position_has_nothing_to_hand_over() -> None:
    client = FakeReceiver(FakeDeliveryServices())
    side = Side(client=client)
    leave_position(as_receiver(client), cast(DurableDelivery, side))
    assert (side.state, client.delivery.handover.fake_added) == (DeliveryState.ENDED, [])
