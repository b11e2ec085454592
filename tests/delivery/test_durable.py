# SPDX-License-Identifier: Apache-2.0
"""One client's durable delivery: the packets of its messages, its acknowledgements, and its subscriptions."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import cast

import pytest

from mqtt_nats.delivery import durable
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.delivery.slow_clients import SlowClient
from mqtt_nats.messages.message import Stored
from mqtt_nats.messages.terms import TERMS
from mqtt_nats.protocol.ack_tokens import RECORD, TAKEN, assigned
from mqtt_nats.protocol.durable_sender import packet_id
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.ports import NOWHERE
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.consumers import backstop
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.positions import decode, position_subject
from mqtt_streams.pubrel import CONSUMER_PREFIX, pubrel_block, pubrel_subject
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.sessions import Draining
from tests.delivery.fakes import FakeBuffer, FakeDeliveryServices, FakeReceiver
from tests.harness.nats import ROOT
from tests.sessions.fakes import as_client, v5_of

pytestmark = pytest.mark.sources

PUBACK, PUBREC = 4, 5


class Setup:
    """A session with subscriptions, whose messages readers bring."""

    def __init__(self, *subjects: str, qos: int = 2) -> None:
        self.services = FakeDeliveryServices()
        self.client = FakeReceiver(self.services)
        self.client.options = 0
        self.side = self.client.durable_side = DurableDelivery(as_client(self.client))
        self.bindings: dict[str, ConsumerBinding] = {}
        self.side.listen_for_pubrels(b"pubrels")
        self.writer = PositionWriter(as_client(self.client), 0)
        self.side.store_position_with(self.writer)
        for subject in subjects:
            self.add(subject, qos)
        self.side.start()

    def add(self, subject: str, qos: int = 2, *, start: int = 1, removed: bool = False) -> ConsumerBinding:
        nuid = f"n{len(self.bindings)}"
        consumer = subscription_consumer(
            "hash", subject, name_nuid=nuid, deliver_nuid=nuid, max_ack_pending=10, start_seq=1
        )
        source = SubscriptionState(qos, start)
        found = self.bindings[subject] = self.side.add(subject, consumer, source, removed=removed)
        self.side.machine.drop_hold(source, SubscriptionState.RETURNING)
        return found

    @property
    def write_buffer(self) -> FakeBuffer:
        return cast("FakeBuffer", self.client.write_buffer)

    def message(self, sequence: int, qos: int = 1) -> Stored:
        headers = b"NATS/1.0\r\nNmqtt-Pub:%d\r\n\r\n" % qos
        return self.services.path.recent.message(sequence, b"%d" % 10**18, b"$MQTT.msgs.a", headers, b"%d" % sequence)

    def bring(self, sequence: int, qos: int = 1, reply: bytes = b"") -> None:
        """A message of the subscription of "a", from a reader unless a token of another kind is given."""
        source = self.bindings["a"].source
        if not reply:
            self.writer.ledger.add_pending(sequence, qos)
        reply = reply or TAKEN + b"%d" % sequence
        self.side.machine.arrived(source, sequence, 1, reply, self.message(sequence, qos), qos)

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


# -- what readers bring -------------------------------------------------------------------------------


async def test_a_message_is_sent_under_the_identifier_of_its_sequence(setup: Setup) -> None:
    setup.bring(7)
    (packet,) = packets(setup)
    assert packet == b"\x32\x06\x00\x01a" + packet_id(7).to_bytes(2) + b"7"
    assert (setup.services.counters.sent[1], setup.services.counters.sent_bytes[1]) == (1, 1)


async def test_a_packet_that_all_subscribers_share(setup: Setup) -> None:
    for _ in range(2):
        setup.side.send_shared(setup.message(7), 1)
    first, second = packets(setup)
    assert first is second
    assert first == b"\x32\x06\x00\x01a" + packet_id(7).to_bytes(2) + b"7"
    assert (setup.services.counters.sent[1], setup.services.counters.sent_bytes[1]) == (2, 2)
    assert (setup.write_buffer.dirty, setup.write_buffer.round.fake_added) == (True, 1)


async def test_a_client_that_does_not_read(setup: Setup) -> None:
    setup.write_buffer.clogged, setup.write_buffer.dirty = True, False
    setup.side.send_shared(setup.message(7), 1)
    assert (setup.write_buffer.fake_held, setup.write_buffer.dirty) == (8, False)


async def test_puback_completes_a_message_in_the_position(setup: Setup) -> None:
    setup.bring(7)
    assert setup.writer.ledger.pending == {7: 1}
    setup.side.machine.acknowledged(PUBACK, [packet_id(7)])
    assert (setup.writer.ledger.pending, setup.acked()) == ({}, [])


async def test_what_other_consumers_deliver_is_acknowledged_to_jetstream(setup: Setup) -> None:
    """Those of groups, say; with a confirmation where something waits for that."""
    setup.side.ack(b"$JS.ACK.s.c.1.3.1.1.0")
    assert (setup.acked(), setup.services.fake_store.fake_called) == ([3], [])
    setup.side.ack(b"$JS.ACK.s.c.1.4.1.1.0", 9)
    assert setup.acked() == []
    assert [subject for subject, *_ in setup.services.fake_store.fake_called] == [b"$JS.ACK.s.c.1.4.1.1.0"]


# -- subscriptions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize(("resumed", "start", "since"), [(0, 1, 0), (40, 1, 40), (40, 50, 49)])
async def test_readers_serve_a_subscription_after_the_position_and_its_start(
    resumed: int, start: int, since: int, removed: bool
) -> None:
    """The loss of its consumer is noticed, if it has one."""
    setup = Setup()
    setup.side.resume_from(resumed)
    binding = setup.add("a", start=start, removed=removed)
    assert (binding.since, binding.source.last, binding.removed) == (since, since, removed)
    assert binding.source.is_served
    assert (binding.consumer.durable_name in setup.services.registry.attached) is not removed
    assert setup.side.machine.sources == [binding.source]
    owner, qos = setup.side.overlap.owner("a", since + 1, False)
    assert (owner, qos) == (binding, 2)


@pytest.mark.parametrize(
    ("consumerless", "writer", "name", "exists"),
    [
        (False, False, "here", True),
        (True, False, "here", False),
        (True, True, "here", True),
        (True, True, "there", False),
    ],
)
async def test_whether_a_consumer_may_exist(
    setup: Setup, consumerless: bool, writer: bool, name: str, exists: bool
) -> None:
    """Of a session without consumers those may that its position names: their gateway may have died too soon."""
    v5_of(setup.client).consumerless = consumerless
    setup.writer.expect_consumers(["here"])
    if not writer:
        setup.side.position_writer = None
    assert setup.side.may_exist(name) is exists


async def test_consumers_get_the_present_expiry_and_window_of_their_session(setup: Setup) -> None:
    """As many messages as before, or as the listener's setting says; never more than the client takes."""
    record = setup.client.record
    assert record is not None
    consumer = setup.bindings["a"].consumer
    record.cons = {"large": replace(consumer, max_ack_pending=50), "small": replace(consumer, max_ack_pending=3)}
    v5_of(setup.client).expiry = 60
    setup.client.terms = replace(TERMS, receive_maximum=40)
    setup.side.adapt_consumers()
    found = {key: (one.max_ack_pending, one.inactive_threshold) for key, one in record.cons.items()}
    assert found == {"large": (40, backstop(60)), "small": (10, backstop(60))}
    assert setup.side.window() == 10


async def test_the_machine_knows_how_far_the_reader_is(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.client.delivery.feed, "reached", lambda _: 30)
    setup.side.settle()
    assert (setup.side.machine.reached, setup.bindings["a"].source.last) == (30, 30)
    setup.side.begin_stall(SlowClient())
    monkeypatch.setattr(setup.client.delivery.feed, "reached", lambda _: 40)
    setup.side.settle()
    assert (setup.side.machine.reached, setup.bindings["a"].source.last) == (30, 30), "no reader serves it"


async def test_a_client_stops_reading_and_reads_again(setup: Setup) -> None:
    setup.side.begin_stall(stall := SlowClient())
    assert (setup.side.stalled, setup.side.stall) == (True, stall)
    assert setup.side in setup.client.delivery.waiting, "the periodic check looks at it"
    setup.side.end_stall()
    assert (setup.side.stalled, setup.side.stall, setup.side.live) == (False, None, True)


# -- QoS 2 --------------------------------------------------------------------------------------------


async def test_pubrel_leaves_when_the_position_has_it(setup: Setup) -> None:
    setup.bring(7, qos=2)
    packets(setup)
    setup.side.machine.acknowledged(PUBREC, [packet_id(7)])
    assert packets(setup) == []
    await asyncio.sleep(0)  # it is written in the next turn
    ((target, _, payload, operation),) = setup.services.fake_store.fake_put
    position = decode(payload)
    assert position is not None
    assert target == b"HPUB %b " % position_subject(setup.client.hash).encode()
    assert position.released == {packet_id(7): 7}
    operation.stored(b'{"seq":1}')
    assert packets(setup) == [b"\x62\x02" + packet_id(7).to_bytes(2)]


async def test_pubrel_of_a_group_leaves_when_its_record_is_stored(setup: Setup) -> None:
    setup.bring(7, 2, assigned(3, b"$JS.ACK.s.c.1.7.1.1.0", 0.0))
    packets(setup)
    setup.side.machine.acknowledged(PUBREC, [packet_id(7)])
    ((target, headers, _, operation),) = setup.services.fake_store.fake_put
    assert target == b"HPUB %b " % pubrel_subject(setup.client.hash).encode()
    assert headers == pubrel_block(packet_id(7), 7)
    assert packets(setup) == []
    operation.stored(b'{"seq":1}')
    assert packets(setup) == [b"\x62\x02" + packet_id(7).to_bytes(2)]


async def test_the_first_pubrel_record_waits_for_its_consumer(setup: Setup) -> None:
    """JetStream keeps no record for which there is no consumer."""
    setup.side.listen_for_pubrels(b"")
    setup.bring(7, 2, assigned(3, b"$JS.ACK.s.c.1.7.1.1.0", 0.0))
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
    for sequence in (7, 8):
        setup.bring(sequence, 2, assigned(sequence, b"", 0.0))
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
    setup.bring(7, 2, assigned(3, b"", 0.0))
    setup.side.machine.acknowledged(PUBREC, [packet_id(7)])
    setup.services.fake_store.fake_put[0][3].stored(b'{"seq":1}')
    setup.side.pubrel_arrived(b"", b"$JS.ACK.record", pubrel_block(packet_id(7), 7), b"")
    assert setup.side.machine.releases[packet_id(7)].records == [RECORD + b"$JS.ACK.record"]


# -- acknowledgements of other kinds ------------------------------------------------------------------


async def test_tokens_stand_for_records_and_positions(setup: Setup) -> None:
    """A record goes later, a message of the shared reader leaves the position."""
    setup.writer.ledger.add_pending(7, 1)
    setup.side.ack(TAKEN + b"7")
    assert setup.writer.ledger.pending == {}
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


# -- the end ----------------------------------------------------------------------------------------


async def test_the_next_owner_finds_nobody_on_the_deliver_subject_of_records(setup: Setup) -> None:
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
    assert (setup.services.registry.attached, setup.side.overlap.matching("a", 9, False)) == ({}, [])
    assert setup.services.stream.consumers == -1


async def test_a_removed_consumer_is_not_counted(setup: Setup) -> None:
    binding = setup.bindings["a"]
    binding.remove()
    await setup.side.remove([binding.consumer.durable_name])
    assert setup.services.stream.consumers == 0


async def test_the_position_forgets_consumers_that_are_gone(setup: Setup) -> None:
    """Otherwise it would grow with each subscription that ends while this connection lasts."""
    position_writer = setup.writer
    name = setup.bindings["a"].consumer.durable_name
    position_writer.live.add(name)
    position_writer.expect_consumers([name, "other"])
    await setup.side.remove([name])
    assert (position_writer.live, position_writer.present) == (set(), {"other"})


@pytest.mark.parametrize("kind", ["usual", "lowered", "past"])
async def test_only_messages_that_others_wait_for_cost_a_look(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A session may have thousands of subscriptions, and each of its messages may have waited."""
    looks: list[object] = []
    monkeypatch.setattr(durable, "release_waiting_for", lambda side, source: looks.append(source))
    setup = Setup("a")
    source = SubscriptionState(1, 1, end=9 if kind == "lowered" else None, whole=kind == "lowered")
    setup.side.add_past()
    sent = setup.side.past if kind == "past" else source
    assert sent is not None
    setup.side.report_sent(sent)
    assert looks == ([] if kind == "usual" else [sent])
