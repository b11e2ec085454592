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
from mqtt_nats.sessions.record import claimed
from mqtt_streams.api import NoResponders
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.gateway_subjects import LEFT
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.positions import decode
from mqtt_streams.pubrel import pubrel_block
from mqtt_streams.sessions import V5
from tests.delivery.fakes import FakeDeliveryServices, FakePositionWriter, FakeReceiver, Side, as_receiver
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


class Left:
    """A session that has left, with a consumer of a subscription; a PUBREL is owed."""

    def __init__(self, *, consumerless: bool = False) -> None:
        self.services = FakeDeliveryServices()
        self.client = FakeReceiver(self.services, v5=V5(pos="position", consumerless=consumerless))
        self.writer = FakePositionWriter()
        self.writer.ledger.reach(41)
        self.writer.ledger.add_pending(30, 1)
        self.writer.ledger.released[9] = 8
        self.writer.present = {"one"}
        self.consumers = self.services.fake_inbox.consumers[MESSAGES]
        self.consumers["one"] = {}

    async def tell(self, *, epoch: int | None = None) -> None:
        """Tell nats-server's listener where the session is."""
        record, _ = claimed(self.client.record)
        stored = await self.services.streams.sessions.save(record, expected=0)
        self.client.epoch = stored if epoch is None else epoch
        writer = cast(PositionWriter, self.writer)
        await position_handover._for_listener(as_receiver(self.client), writer, [("one", 5)])

    @property
    def pubrels(self) -> list[bytes]:
        return [headers for _, headers, _, _ in self.services.fake_store.fake_put]


@pytest.mark.sources
@pytest.mark.parametrize("resets", [True, False])
async def test_the_listener_finds_the_consumers_of_a_session_at_its_position(resets: bool) -> None:
    """And its owed PUBRELs; consumers of a nats-server before 2.14 stay where they are."""
    left = Left()
    left.client.delivery.resets = resets
    await left.tell()
    assert left.consumers["one"].get("delivered") == ({"stream_seq": 29} if resets else None)
    assert left.pubrels == [pubrel_block(9, 8)]
    assert left.writer.fake_written == []


@pytest.mark.sources
async def test_consumers_that_a_session_needs_no_more_are_deleted() -> None:
    """The position names none of them then."""
    left = Left(consumerless=True)
    await left.tell()
    assert (left.consumers, left.writer.present, left.writer.fake_written) == ({}, set(), [set()])
    assert left.pubrels == []


@pytest.mark.sources
async def test_a_session_that_another_connection_has_claimed_is_told_to_nobody() -> None:
    """Its consumers show the position of the next owner."""
    left = Left()
    await left.tell(epoch=99)
    assert (left.consumers, left.pubrels) == ({"one": {}}, [])


@pytest.mark.sources
async def test_a_session_without_a_position_has_nothing_to_hand_over() -> None:
    client = FakeReceiver(FakeDeliveryServices())
    side = Side(client=client)
    leave_position(as_receiver(client), cast(DurableDelivery, side))
    assert (side.state, client.delivery.handover.fake_added) == (DeliveryState.ENDED, [])
