# SPDX-License-Identifier: Apache-2.0
"""Messages of a session's consumers: what is sent at once, what is not, and the acknowledgements of both sides."""

from __future__ import annotations

import asyncio
import re
from typing import cast

import pytest

from mqtt_nats.delivery import durable
from mqtt_nats.delivery.draining import _has_nothing as has_nothing
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.protocol.ack_tokens import RECORD, TAKEN
from mqtt_nats.protocol.durable_sender import ID_SPACE, packet_id
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.ports import NOWHERE
from mqtt_nats.protocol.position import SessionPosition
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.pubrel import CONSUMER_PREFIX, pubrel_block, pubrel_subject
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.sessions import Draining
from tests.delivery.fakes import FakeBuffer, FakeDeliveryServices, FakeReceiver
from tests.harness.nats import ROOT
from tests.sessions.fakes import as_client, v5_of

pytestmark = pytest.mark.sources

PUBACK, PUBREC, PUBREL, PUBCOMP = 4, 5, 6, 7


class Setup:
    """A session with subscriptions, each with a consumer that delivers to this connection."""

    def __init__(self, *subjects: str, qos: int = 2) -> None:
        self.services = FakeDeliveryServices()
        self.client = FakeReceiver(self.services)
        self.side = self.client.durable_side = DurableDelivery(as_client(self.client))
        self.bindings: dict[str, ConsumerBinding] = {}
        self.side.listen_for_pubrels(b"pubrels")
        for subject in subjects:
            self.add(subject, qos)
        self.side.machine.start()

    def add(self, subject: str, qos: int = 2, end: int | None = None) -> ConsumerBinding:
        nuid = f"n{len(self.bindings)}"
        consumer = subscription_consumer(
            "hash", subject, name_nuid=nuid, deliver_nuid=nuid, max_ack_pending=10, start_seq=1
        )
        source = SubscriptionState(qos, 1, 10, end)
        source.attached(0, 0, False)
        found = self.bindings[subject] = self.side.add(subject, consumer, source)
        return found

    @property
    def write_buffer(self) -> FakeBuffer:
        return cast("FakeBuffer", self.client.write_buffer)

    def bring(
        self, subject: str, sequence: int, place: int, qos: int = 1, *, attempt: int = 1, topic: str = ""
    ) -> None:
        """A delivery of a subscription's consumer."""
        consumer = self.bindings[subject].consumer
        name = consumer.durable_name
        reply = f"$JS.ACK.{MESSAGES}.{name}.{attempt}.{sequence}.{place}.{10**18}.0".encode()
        headers = b"NATS/1.0\r\nNmqtt-Pub:%d\r\n\r\n" % qos
        stored = f"$MQTT.msgs.{topic or subject}".encode()
        handler = self.services.fake_link.handlers[self.bindings[subject].sid]
        handler(stored, reply, headers, b"%d" % sequence)

    def acked(self) -> list[int]:
        """Sequences of the messages that were acknowledged to JetStream since the last look."""
        frames = [frame.split(b" ")[1].split(b".") for frame in self.services.fake_link.out]
        self.services.fake_link.out.clear()
        return [int(tokens[5]) for tokens in frames if tokens[:2] == [b"$JS", b"ACK"]]


def packets(setup: Setup) -> list[bytes]:
    chunks, setup.write_buffer.chunks = setup.write_buffer.chunks, []
    return chunks


@pytest.fixture
async def setup() -> Setup:
    return Setup("a")


# -- what comes from a consumer -----------------------------------------------------------------------


async def test_the_next_message_is_sent_at_once_under_the_identifier_of_its_sequence(setup: Setup) -> None:
    setup.bring("a", 6, 1)  # the first one shows at which place the consumer is
    setup.bring("a", 7, 2)
    _, packet = packets(setup)
    assert packet == b"\x32\x06\x00\x01a" + packet_id(7).to_bytes(2) + b"7"
    assert (setup.services.counters.sent[1], setup.services.counters.sent_bytes[1]) == (2, 2)
    assert (setup.write_buffer.dirty, setup.write_buffer.round.fake_added) == (True, 1)


async def test_puback_acknowledges_to_jetstream(setup: Setup) -> None:
    setup.bring("a", 7, 1)
    assert setup.acked() == []
    setup.side.machine.acknowledged(PUBACK, [packet_id(7)])
    assert setup.acked() == [7]


async def test_a_subscription_of_a_lower_qos(setup: Setup) -> None:
    setup.bindings["a"].source.qos = 1
    setup.bring("a", 7, 1, qos=2)
    assert [packet[0] for packet in packets(setup)] == [0x32]


async def test_a_client_that_does_not_read(setup: Setup) -> None:
    setup.bring("a", 6, 1)
    setup.write_buffer.clogged, setup.write_buffer.dirty = True, False
    setup.bring("a", 7, 2)
    assert (setup.write_buffer.fake_held, setup.write_buffer.dirty) == (8, False)


async def test_a_full_window(setup: Setup) -> None:
    setup.side.machine.limit = 1
    setup.bring("a", 7, 1)
    setup.bring("a", 8, 2)
    assert len(packets(setup)) == 1
    setup.side.machine.acknowledged(PUBACK, [packet_id(7)])
    assert len(packets(setup)) == 1


async def test_a_missing_delivery_has_the_pubrel_consumered_anew(setup: Setup) -> None:
    """What follows is not taken: it comes again, behind the one that was lost."""
    setup.bring("a", 7, 1)
    setup.bring("a", 9, 3)
    binding = setup.bindings["a"]
    assert len(packets(setup)) == 1
    assert binding.missed
    assert binding.sid not in setup.services.fake_link.handlers
    assert setup.client.delivery.reconciling.fake_due == [binding.consumer.durable_name]


async def test_a_redelivery_of_what_is_in_flight_is_not_sent(setup: Setup) -> None:
    setup.bring("a", 7, 1)
    packets(setup)
    setup.bring("a", 7, 2, attempt=2)
    assert packets(setup) == []
    setup.side.machine.acknowledged(PUBACK, [packet_id(7)])
    assert setup.acked() == [7]


async def test_a_redelivery_of_what_is_complete_is_acknowledged_again(setup: Setup) -> None:
    setup.bring("a", 7, 1)
    setup.side.machine.acknowledged(PUBACK, [packet_id(7)])
    packets(setup)
    setup.acked()
    setup.bring("a", 7, 2, attempt=2)
    assert (packets(setup), setup.acked()) == ([], [7])


async def test_what_is_not_for_clients_is_acknowledged(setup: Setup) -> None:
    setup.bring("a", 7, 1, qos=0)
    assert (packets(setup), setup.acked()) == ([], [7])


async def test_a_subject_that_is_no_acknowledgement(setup: Setup) -> None:
    handler = setup.services.fake_link.handlers[setup.bindings["a"].sid]
    handler(b"$MQTT.msgs.a", b"reply", b"", b"")
    assert (packets(setup), setup.services.fake_link.out) == ([], [])


async def test_a_wildcard_does_not_show_inboxes() -> None:
    setup = Setup(">")
    setup.bring(">", 7, 1, topic="_INBOX.x")
    assert (packets(setup), setup.acked()) == ([], [7])


async def test_of_overlapping_subscriptions_one_delivers() -> None:
    """The other acknowledges its copy."""
    setup = Setup("a", "*")
    setup.bring("*", 6, 1, topic="a")
    setup.bring("a", 6, 1)
    assert (len(packets(setup)), setup.acked()) == (1, [6])
    setup.bring("a", 7, 2)
    assert (packets(setup), setup.acked()) == ([], [7])
    setup.bring("*", 7, 2, topic="a")
    assert (len(packets(setup)), setup.acked()) == (1, [])


async def test_what_core_nats_has_brought_is_not_sent_again(setup: Setup) -> None:
    """The subscription was raised from QoS 0."""
    setup.bindings["a"].came = lambda message, sequence: sequence == 7
    setup.bring("a", 6, 1)
    link = setup.services.fake_link
    link.handlers[setup.bindings["a"].sid] = setup.side.arrival(setup.bindings["a"])
    setup.bring("a", 7, 2)
    setup.bring("a", 8, 3)
    assert len(packets(setup)) == 2
    assert setup.acked() == [7]


# -- QoS 2 --------------------------------------------------------------------------------------------


async def test_pubrel_leaves_when_it_is_stored(setup: Setup) -> None:
    setup.bring("a", 7, 1, qos=2)
    packets(setup)
    setup.side.machine.acknowledged(PUBREC, [packet_id(7)])
    ((target, headers, _, operation),) = setup.services.fake_store.fake_put
    assert target == b"HPUB %b " % pubrel_subject(setup.client.hash).encode()
    assert headers == pubrel_block(packet_id(7), 7)
    assert packets(setup) == []
    operation.stored(b'{"seq":1}')
    assert packets(setup) == [b"\x62\x02" + packet_id(7).to_bytes(2)]
    ((reply, _, _),) = setup.services.fake_store.fake_called  # confirmed: the record may go afterwards
    assert reply.split(b".")[5] == b"7"


async def test_the_first_pubrel_record_waits_for_its_consumer(setup: Setup) -> None:
    """JetStream keeps no record for which there is no consumer."""
    setup.side.listen_for_pubrels(b"")
    setup.bring("a", 7, 1, qos=2)
    setup.side.machine.acknowledged(PUBREC, [packet_id(7)])
    store = setup.services.fake_store
    assert store.fake_put == []
    (job,) = setup.client.fake_jobs
    await job
    assert setup.side.has_pubrels
    assert f"{CONSUMER_PREFIX}{setup.client.hash}" in setup.services.fake_inbox.consumers[OUT]
    assert [headers for _, headers, _, _ in store.fake_put] == [pubrel_block(packet_id(7), 7)]
    setup.client.fake_jobs.clear()


async def test_pubrels_leave_in_the_order_of_the_pubrecs(setup: Setup) -> None:
    for place, sequence in enumerate((7, 8), 1):
        setup.bring("a", sequence, place, qos=2)
    packets(setup)
    setup.side.machine.acknowledged(PUBREC, [packet_id(7), packet_id(8)])
    first, second = (operation for *_, operation in setup.services.fake_store.fake_put)
    second.stored(b'{"seq":2}')
    assert packets(setup) == []
    first.stored(b'{"seq":1}')
    assert [packet[2:] for packet in packets(setup)] == [packet_id(one).to_bytes(2) for one in (7, 8)]


async def test_a_record_without_an_identifier_is_acknowledged(setup: Setup) -> None:
    setup.side.pubrel_arrived(b"", b"$JS.ACK.s.c.1.3.1.1.0", b"NATS/1.0\r\n\r\n", b"")
    assert (setup.acked(), setup.side.pubrels_come) == ([3], 1)


async def test_the_delivery_of_a_record_is_part_of_its_exchange(setup: Setup) -> None:
    setup.bring("a", 7, 1, qos=2)
    setup.side.machine.acknowledged(PUBREC, [packet_id(7)])
    setup.services.fake_store.fake_put[0][3].stored(b'{"seq":1}')
    setup.side.pubrel_arrived(b"", b"$JS.ACK.record", pubrel_block(packet_id(7), 7), b"")
    assert setup.side.machine.releases[packet_id(7)].records == [RECORD + b"$JS.ACK.record"]


# -- acknowledgements of other kinds ------------------------------------------------------------------


async def test_tokens_stand_for_records_and_positions(setup: Setup) -> None:
    """A record goes later, a message of the shared reader leaves the position."""

    class Writer:
        ledger = SessionPosition()

    writer = Writer()
    setup.side.position_writer = cast("None", writer)
    writer.ledger.add_pending(7, 1)
    setup.side.ack(TAKEN + b"7")
    assert writer.ledger.pending == {}
    lingering = [setup.side.lingering]
    setup.side.ack(RECORD + b"$JS.ACK.record")
    lingering.append(setup.side.lingering)
    assert [one is None for one in lingering] == [True, False]
    assert setup.services.fake_link.out == []


@pytest.mark.parametrize("deed", ["ConfirmOp", "ledger.complete", "lingering.add"])
def test_one_method_acknowledges(deed: str) -> None:
    """To JetStream with a confirmation, to the position, by a deferred removal."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "mqtt_nats").rglob("*.py")}
    calls = rf"(?<!class )\b{re.escape(deed)}\("
    assert [path.stem for path, text in sources.items() if re.search(calls, text)] == ["durable"]


# -- attaching and the end ----------------------------------------------------------------------------


async def test_a_deliver_subject_is_listened_to_before_the_consumer_uses_it(setup: Setup) -> None:
    binding = setup.bindings["a"]
    former, source = binding.sid, binding.source
    consumer = ConsumerRef(binding.consumer.durable_name, "$MQTT.sub.other", binding.consumer.filter_subject, 10)
    assert setup.side.add("a", consumer, source) is binding
    assert former not in setup.services.fake_link.handlers
    assert setup.services.fake_link.fake_subjects[binding.sid] == b"$MQTT.sub.other"
    assert setup.side.machine.sources == [source]


async def test_new_deliver_subjects_are_in_the_record_but_for_dormant_consumers(setup: Setup) -> None:
    assert setup.client.record is not None
    live = setup.add("live")
    live.source.live = True
    cons = setup.client.record.cons
    cons |= {"a": setup.bindings["a"].consumer, "live": live.consumer}
    setup.side.point_anew()
    assert cons["a"].deliver_subject == "$MQTT.sub.nuid1"
    assert cons["live"].deliver_subject == live.consumer.deliver_subject


async def test_what_is_pending_is_collected(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has come again, or nothing comes for a while."""
    setup = Setup()
    binding = setup.add("a")
    machine = setup.side.machine
    machine.open = False
    binding.source.expected = 1
    collecting = asyncio.create_task(setup.side.collect())
    await asyncio.sleep(0)
    setup.bring("a", 7, 1, attempt=2)
    await asyncio.wait_for(collecting, 5)
    binding.source.expected = 5
    monkeypatch.setattr("mqtt_nats.delivery.durable.COLLECT_PATIENCE", 0.0)
    await asyncio.wait_for(setup.side.collect(), 5)


async def test_a_first_delivery_meanwhile_ends_the_collecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer counted it as pending when it was attached, so nothing else is to come again."""
    monkeypatch.setattr("mqtt_nats.delivery.durable.COLLECT_PATIENCE", 60.0)
    setup = Setup()
    binding = setup.add("a")
    setup.side.machine.open = False
    binding.source.attached(1, 1, False)
    collecting = asyncio.create_task(setup.side.collect())
    await asyncio.sleep(0)
    assert not collecting.done()
    setup.bring("a", 7, 1)
    await asyncio.wait_for(collecting, 5)


async def test_the_next_owner_finds_nobody_on_the_deliver_subjects(setup: Setup) -> None:
    setup.side.pubrel_sid = setup.services.fake_link.subscribe_raw(b"pubrels", setup.side.pubrel_arrived)
    assert setup.services.registry.attached
    setup.side.detach()
    assert setup.services.fake_link.handlers == {}
    assert setup.services.registry.attached == {}


async def test_a_machine_without_a_client_asks_for_nothing(setup: Setup) -> None:
    assert setup.side.close()
    assert setup.side.machine.ports is NOWHERE


async def test_records_of_answered_pubrels_are_acknowledged_first(setup: Setup) -> None:
    setup.side.machine.owe(packet_id(7), 7)
    setup.side.machine.releases[packet_id(7)].comp = True
    assert not setup.side.close()


async def test_consumers_of_ended_subscriptions_that_are_complete_go(setup: Setup) -> None:
    binding = setup.bindings["a"]
    name = binding.consumer.durable_name
    setup.services.fake_inbox.consumers[MESSAGES][name] = {}
    v5_of(setup.client).draining = [Draining(name, binding.consumer.filter_subject, 1, 5)]
    await setup.side.remove([name])
    assert (setup.side.bindings, v5_of(setup.client).draining) == ({}, [])
    assert setup.services.fake_inbox.consumers[MESSAGES] == {}
    assert setup.side.machine.sources == []
    assert setup.services.fake_link.handlers == {}


async def test_the_position_forgets_consumers_that_are_gone(setup: Setup) -> None:
    """Otherwise it would grow with each subscription that ends while this connection lasts."""
    v5_of(setup.client).pos = "position"
    position_writer = PositionWriter(as_client(setup.client), 0)
    setup.side.store_position_with(position_writer)
    name = setup.bindings["a"].consumer.durable_name
    position_writer.live.add(name)
    position_writer.expect_consumers([name, "other"])
    await setup.side.remove([name])
    assert (position_writer.live, position_writer.present) == (set(), {"other"})


# -- what a consumer has left --------------------------------------------------------------------------


def tell(setup: Setup, subject: str, *, pending: int, unacknowledged: int) -> None:
    """Have JetStream tell that a consumer has nothing delivered, and has passed over messages of other topics."""
    state = {"delivered": {"stream_seq": ID_SPACE + 3}, "num_pending": pending, "num_ack_pending": unacknowledged}
    setup.services.fake_inbox.consumers[MESSAGES][setup.bindings[subject].consumer.durable_name] = state


async def test_messages_go_on_once_a_quiet_consumer_has_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer is asked again although no message and no acknowledgement comes: everything waits for it."""
    monkeypatch.setattr(durable, "CONSUMER_STATE_RETRY_S", 0.0)
    setup = Setup("a", "b")
    tell(setup, "b", pending=0, unacknowledged=1)
    setup.bring("a", ID_SPACE + 5, 1)
    for _ in range(3):
        assert len(setup.client.fake_jobs) == 1
        await setup.client.fake_work()
        assert packets(setup) == []
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    tell(setup, "b", pending=0, unacknowledged=0)
    await setup.client.fake_work()
    assert [packet[-1:] for packet in packets(setup)] == [b"6"]
    await asyncio.sleep(0)
    assert setup.client.fake_jobs == []


async def test_a_client_that_has_left_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "CONSUMER_STATE_RETRY_S", 0.0)
    setup = Setup("a", "b")
    tell(setup, "b", pending=1, unacknowledged=0)
    setup.bring("a", ID_SPACE + 5, 1)
    await setup.client.fake_work()
    setup.client.alive = False
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert setup.client.fake_jobs == []


@pytest.mark.parametrize(
    ("pending", "unacknowledged", "nothing"), [(0, 0, True), (0, 1, True), (0, 2, False), (1, 1, False)]
)
async def test_an_ended_subscription_has_nothing_left(
    setup: Setup, pending: int, unacknowledged: int, nothing: bool
) -> None:
    """A message is in flight to the client, and others may be on their way to the gateway."""
    binding = setup.bindings["a"]
    setup.bring("a", 7, 1)
    binding.source.end_at(20)
    tell(setup, "a", pending=pending, unacknowledged=unacknowledged)
    assert await has_nothing(setup.side, binding) is nothing
