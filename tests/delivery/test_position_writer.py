# SPDX-License-Identifier: Apache-2.0
"""Writing a position: one write at a time, what waits for it, and somebody else who has written."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.backbone.pending_stores import PendingStore, TooLarge
from mqtt_nats.codec import QuotaExceeded
from mqtt_nats.delivery import position_writer
from mqtt_nats.delivery.position_writer import POSITIONS_PER_ROUND, PositionWriter, write_changed_positions
from mqtt_nats.protocol.ack_tokens import OWED, TAKEN
from mqtt_nats.protocol.durable_sender import packet_id
from mqtt_streams.api import ApiError, RequestTimeout
from mqtt_streams.positions import Position, position_subject
from mqtt_streams.sessions import PREFIX, V5
from tests.delivery.fakes import FakeDeliveryServices, FakeReceiver, FakeWriterSide
from tests.harness.waiting import aeventually
from tests.sessions.fakes import as_client

pytestmark = pytest.mark.sources

WRONG = ApiError(400, 10071, "wrong last sequence: 7")


class Setup:
    """The writer of a session that counts in a stream, after a position of sequence 5."""

    def __init__(self) -> None:
        self.services = FakeDeliveryServices()
        self.client = FakeReceiver(self.services, v5=V5(pos="position", generation="stream"))
        self.side = self.client.durable_side = FakeWriterSide(self.client)
        self.writer = self.side.position_writer = PositionWriter(as_client(self.client), 5)
        self.ledger = self.writer.ledger

    @property
    def writes(self) -> list[tuple[bytes, bytes, bytes, PendingStore]]:
        return self.services.fake_store.fake_put

    def expected(self) -> list[bytes]:
        """The sequences that the writes are to follow."""
        return [headers.removesuffix(b"\r\n\r\n").rpartition(b":")[2] for _, headers, _, _ in self.writes]

    def answer(self, sequence: int) -> None:
        """The last write was stored."""
        self.writes[-1][3].stored(b'{"stream":"$MQTT_pos","seq":%d}' % sequence)


@pytest.fixture
async def setup() -> Setup:
    return Setup()


async def test_the_whole_position_is_written_behind_the_one_before(setup: Setup) -> None:
    setup.writer.live = {"two", "one"}
    setup.writer.unsent = [6]
    setup.ledger.reached = 9
    setup.ledger.add_pending(7, 2)
    setup.writer.write()
    ((target, _, payload, _),) = setup.writes
    assert target == b"HPUB %b " % position_subject(setup.client.hash).encode()
    wanted = Position("position", "stream", ["one", "two"], False, 9, {7: 2}, {}, 0, [6], "gateway0", -1)
    assert payload == wanted.encode()
    assert setup.expected() == [b"5"]
    assert not setup.ledger.dirty


async def test_there_is_one_write_at_a_time(setup: Setup) -> None:
    setup.writer.write()
    setup.writer.write()
    setup.writer.write()
    assert len(setup.writes) == 1
    setup.answer(6)
    assert setup.expected() == [b"5", b"6"]
    setup.answer(7)
    assert len(setup.writes) == 2


async def test_the_last_word_of_a_connection_that_has_ended_in_order(setup: Setup) -> None:
    setup.writer.most = 8
    setup.writer.clean = True
    setup.writer.write()
    assert b'"most":8' in setup.writes[0][2].replace(b" ", b"")


# -- who waits ----------------------------------------------------------------------------------------


async def test_who_flushes_waits_for_a_write_that_begins_afterwards(setup: Setup) -> None:
    setup.writer.write()
    waiting = asyncio.create_task(setup.writer.flush())
    await asyncio.sleep(0)
    setup.answer(6)
    await asyncio.sleep(0)
    assert not waiting.done()
    setup.answer(7)
    assert await waiting


async def test_a_flush_begins_at_once(setup: Setup) -> None:
    """Writes of changed positions have nothing left to do then."""
    flushed = setup.writer.begin_flush()
    assert not setup.ledger.dirty
    assert len(setup.writes) == 1
    setup.answer(6)
    assert await flushed
    assert len(setup.writes) == 1


async def test_nobody_waits_for_a_writer_that_has_given_up(setup: Setup) -> None:
    waiting = asyncio.create_task(setup.writer.flush())
    await asyncio.sleep(0)
    writers = setup.client.delivery.writers
    setup.ledger.change()
    assert writers.following() == [setup.writer]
    setup.writer.give_up()
    assert not await waiting
    assert not await setup.writer.flush()
    setup.writer.write()
    writers.changed(setup.ledger)
    assert (len(setup.writes), writers.following()) == (1, [])


# -- steps --------------------------------------------------------------------------------------------


async def test_pubrel_waits_for_the_position_that_owes_it(setup: Setup) -> None:
    setup.writer.write()
    setup.ledger.receive(50, 7)
    setup.answer(6)  # of the write that began before
    assert setup.side.fake_released == []
    assert len(setup.writes) == 2  # at once: the client waits
    setup.answer(7)
    assert setup.side.fake_released == [(50, OWED + b"50")]


async def test_an_identifier_is_free_after_a_position_without_it(setup: Setup) -> None:
    setup.ledger.receive(50, 7)
    setup.writer.write()
    setup.answer(6)
    setup.ledger.complete(OWED + b"50")
    assert setup.side.fake_machine.fake_freed == []
    setup.writer.write()
    setup.answer(7)
    assert setup.side.fake_machine.fake_freed == [50]


async def test_a_message_whose_record_owes_pubrel(setup: Setup) -> None:
    setup.ledger.add_pending(7, 2)
    assert setup.ledger.complete(TAKEN + b"7", packet_id(7))
    setup.writer.write()
    setup.answer(6)
    assert setup.side.fake_machine.fake_confirmed == [packet_id(7)]


async def test_a_complete_message_is_forgotten(setup: Setup) -> None:
    setup.ledger.add_pending(7, 1)
    setup.ledger.complete(TAKEN + b"7")
    assert setup.ledger.pending == {}


async def test_after_the_end_of_the_client_nothing_is_sent(setup: Setup) -> None:
    setup.ledger.receive(50, 7)
    setup.writer.write()
    setup.client.alive = False
    setup.answer(6)
    assert setup.side.fake_released == []


async def test_a_hurry_writes_once_in_a_turn(setup: Setup) -> None:
    setup.writer.hurry()
    setup.writer.hurry()
    assert setup.writes == []
    await asyncio.sleep(0)
    assert len(setup.writes) == 1


async def test_what_may_have_been_sent_before_is_so_until_the_consumers_have_brought_it(setup: Setup) -> None:
    setup.writer.perhaps = 9
    setup.side.fake_machine.fake_past = 8
    setup.writer.write()
    assert setup.writer.perhaps == 9
    setup.side.fake_machine.fake_past = 9
    setup.answer(6)
    setup.writer.write()
    assert setup.writer.perhaps == 0


# -- somebody else has written ------------------------------------------------------------------------


async def refused(setup: Setup, position: bytes, *, owner: bool) -> None:
    """The write is refused, since this position is stored, by whoever."""
    setup.writer.write()
    sequence = setup.services.fake_inbox.put(position_subject(setup.client.hash), position or setup.writes[0][2])
    assert setup.client.record is not None
    setup.client.epoch = setup.services.fake_inbox.put(PREFIX + setup.client.hash, setup.client.record.encode())
    if not owner:
        setup.client.epoch -= 1
    setup.writes[0][3].failed(WRONG)
    await setup.services.tasks.fake_settle()
    assert sequence == 1


async def test_its_own_write_from_before_nats_was_lost(setup: Setup) -> None:
    await refused(setup, b"", owner=True)
    assert not setup.writer.lost
    setup.writer.write()
    assert setup.expected() == [b"5", b"1"]


async def test_an_earlier_owner_that_was_late_is_overwritten(setup: Setup) -> None:
    await refused(setup, b"{}", owner=True)
    assert setup.expected() == [b"5", b"1"]
    assert setup.writes[1][2] == setup.writes[0][2]


async def test_the_session_has_moved(setup: Setup) -> None:
    flushing = asyncio.create_task(setup.writer.flush())
    await asyncio.sleep(0)
    await refused(setup, b"{}", owner=False)
    assert not await flushing
    assert setup.writer.lost
    assert setup.client.fake_ended == ["taken over"]


async def test_a_last_position_is_not_written_over_another(setup: Setup) -> None:
    """The connection has ended: the next owner has written."""
    setup.writer.strict = True
    await refused(setup, b"{}", owner=True)
    assert (setup.writer.lost, setup.writer.moved) == (True, True)
    setup.writer.end_if_moved()
    assert setup.client.fake_ended == ["taken over"]


async def test_who_has_written_is_asked_until_there_is_an_answer(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [RequestTimeout("no answer")]

    def fail(subject: str) -> None:
        if failures:
            raise failures.pop()

    setup.services.fake_inbox.before = fail
    await refused(setup, b"", owner=True)
    assert (failures, setup.writer.lost) == ([], False)


async def test_another_refusal_ends_the_connection(setup: Setup) -> None:
    setup.writer.write()
    setup.writes[0][3].failed(ApiError(503, 10077, "maximum bytes exceeded"))
    assert setup.writer.lost
    assert "maximum bytes exceeded" in str(setup.client.fake_ended[0])
    setup.writer.end_if_moved()  # it has not moved
    assert len(setup.client.fake_ended) == 1


async def test_a_position_that_is_too_large_ends_the_connection(setup: Setup) -> None:
    setup.services.fake_store.fake_error = TooLarge("2 MB")
    setup.writer.write()
    assert setup.writer.lost
    assert isinstance(setup.client.fake_ended[0], QuotaExceeded)


# -- all of them --------------------------------------------------------------------------------------


async def test_changed_positions_are_written_by_and_by(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position_writer, "WRITE_ROUNDS_PER_S", 1000)
    other = FakeReceiver(setup.services, "other", V5(pos="p"))
    PositionWriter(as_client(other), 0)
    setup.ledger.change()
    keeping = asyncio.create_task(write_changed_positions(setup.client.delivery.writers))
    await aeventually(lambda: setup.writes)
    keeping.cancel()
    assert [target for target, *_ in setup.writes] == [b"HPUB %b " % position_subject(setup.client.hash).encode()]


def test_changed_positions_have_their_turn_in_order() -> None:
    """A position that has not changed costs nothing, and one that changes again and again keeps no other waiting."""
    services = FakeDeliveryServices()
    clients = [FakeReceiver(services, f"c{number}", V5(pos="p")) for number in range(POSITIONS_PER_ROUND + 2)]
    writers = clients[0].delivery.writers
    for client in clients:
        client.delivery.writers = writers
    each = [PositionWriter(as_client(client), 0) for client in clients]
    assert writers.following() == []
    for one in each:
        one.ledger.add_pending(1, 1)
        one.ledger.done(1)
    assert writers.following() == each[:POSITIONS_PER_ROUND]
    for one in each[:POSITIONS_PER_ROUND]:
        one.ledger.begin()
    each[0].ledger.add_pending(2, 1)
    each[-1].give_up()
    assert writers.following() == [each[-2], each[0]]
    each[-1].ledger.change()
    assert writers.following() == []
