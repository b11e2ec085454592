# SPDX-License-Identifier: Apache-2.0
"""A session that reads what it has missed: pages, what has no place yet, losses, and the end of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import cast

import orjson
import pytest

from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.shared_reader import catch_up
from mqtt_nats.shared_reader.catch_up import CatchUpReader
from mqtt_nats.shared_reader.catch_up_places import PLACES
from mqtt_nats.shared_reader.reader_session import ReaderHandover
from mqtt_streams.api import ApiError
from mqtt_streams.messages import STREAM as MESSAGES
from tests.delivery.fakes import FakePositionWriter
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeClient
from tests.shared_reader.fakes import (
    FakeReaderServices,
    FakeReaderSide,
    FakeSessions,
    as_sessions,
    live_binding,
    member_of,
)

pytestmark = pytest.mark.sources

QOS1 = b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n"
QOS0 = b"NATS/1.0\r\nNmqtt-Pub:0\r\n\r\n"
END = b"NATS/1.0 404 No Messages\r\n\r\n"


class Setup:
    """A session at sequence 10, its catch-up reader, and what JetStream brings it."""

    def __init__(self, *subjects: str, missed: bool = True, begins: bool = True) -> None:
        self.services = FakeReaderServices()
        self.live = FakeSessions(self.services, position=10)
        self.member = member_of(self.services, "client", *subjects)
        self.live.members[self.member.client] = self.member
        self.machine = self.member.side.machine
        for _ in range(10):
            self.services.fake_inbox.put("$MQTT.msgs.a")
        self.reader = CatchUpReader(as_sessions(self.live), self.member, 10, missed=missed)
        if begins:
            self.reader.begin()
        self.place = 0

    @property
    def consumers(self) -> dict[str, dict[str, object]]:
        return self.services.fake_inbox.consumers[MESSAGES]

    async def made(self, count: int = 1) -> None:
        """Wait until its consumer was made so many times, and a page was asked for."""
        name = f".CONSUMER.CREATE.{MESSAGES}."
        await aeventually(lambda: sum(name in one for one in self.services.fake_inbox.asked) == count and self.requests)
        self.place = 0

    @property
    def requests(self) -> list[dict[str, int]]:
        """The pages that were asked for."""
        frames = [frame for frame in self.services.fake_link.out if b".CONSUMER.MSG.NEXT." in frame]
        return [orjson.loads(frame.split(b"\r\n")[1]) for frame in frames]

    def bring(
        self, sequence: int, *, pending: int = 5, payload: bytes = b"x", headers: bytes = QOS1, gap: bool = False
    ) -> None:
        """The next message of the page."""
        self.place += 2 if gap else 1
        (name,) = self.consumers
        reply = f"$JS.ACK.{MESSAGES}.{name}.1.{sequence}.{self.place}.{10**18}.{pending}".encode()
        self._arrive(b"$MQTT.msgs.a", payload, headers, reply)

    def status(self, headers: bytes) -> None:
        self._arrive(b"", b"", headers, b"")

    def _arrive(self, subject: bytes, payload: bytes, headers: bytes, reply: bytes) -> None:
        handler = self.services.fake_link.handlers[max(self.services.fake_link.handlers)]
        handler(subject, reply, headers, payload)


@pytest.fixture
async def setup(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    monkeypatch.setattr(catch_up, "PAUSE", 0.0)
    found = Setup("a")
    await found.made()
    yield found
    found.reader.end()
    await found.services.tasks.fake_settle()


async def test_the_first_page_has_one_message(setup: Setup) -> None:
    """The next ones have as many as a megabyte holds of its size."""
    (config,) = [one["config"] for one in setup.consumers.values()]
    assert isinstance(config, dict)
    assert (config["opt_start_seq"], config["filter_subjects"]) == (11, ["$MQTT.msgs.a"])
    assert [one["batch"] for one in setup.requests] == [1]
    setup.bring(11, payload=b"x" * 9999)
    assert [one["batch"] for one in setup.requests] == [1, catch_up.PAGE_BYTES // (9999 + catch_up.KEPT_OVERHEAD)]
    assert (setup.live.fake_given, setup.reader.position) == ([11], 11)


async def test_small_messages_come_a_thousand_at_a_time(setup: Setup) -> None:
    """The next page is asked for when half of one is left."""
    setup.bring(11)
    assert [one["batch"] for one in setup.requests] == [1, catch_up.PAGE]
    for sequence in range(12, 12 + catch_up.PAGE // 2 - 1):
        setup.bring(sequence)
    assert len(setup.requests) == 2
    setup.bring(999)
    assert [one["batch"] for one in setup.requests] == [1, catch_up.PAGE, catch_up.PAGE // 2]


async def test_what_has_no_place_in_the_window_waits(setup: Setup) -> None:
    """It is not taken: the position does not move before a place is free."""
    setup.machine.limit = 0
    setup.bring(11)
    setup.bring(12)
    assert (setup.live.fake_given, setup.reader.position) == ([], 10)
    setup.machine.limit = 2
    assert setup.machine.on_room is not None
    setup.machine.on_room()
    assert (setup.live.fake_given, setup.reader.position) == ([11, 12], 12)


async def test_a_session_that_waits_for_its_client_leaves_its_place(setup: Setup) -> None:
    """Others need not wait for that client."""
    free = setup.live.places.free
    setup.bring(11)
    assert setup.live.places.free == free
    setup.machine.limit = 0
    setup.bring(12)
    setup.bring(13)
    assert (setup.live.places.free, setup.live.slow) == (free + 1, {setup.reader})


async def test_many_sessions_that_wait_for_their_clients_share_the_memory(setup: Setup) -> None:
    """Each asks for less: so many that wait keep no more bytes in all than 64 did."""
    setup.live.slow.update(cast(CatchUpReader, object()) for _ in range(6400))
    setup.bring(11)
    share = catch_up.SLOW_BYTES // 6400
    assert [one["batch"] for one in setup.requests] == [1, share // catch_up.KEPT_OVERHEAD]
    assert setup.requests[-1]["max_bytes"] == share + setup.services.nats.store.max_payload


async def test_a_session_that_has_fallen_behind_reads_when_its_client_has_taken_what_waits() -> None:
    waiting = Setup("a", begins=False)
    waiting.machine.limit = 0
    (binding,) = waiting.member.side.bindings.values()
    waiting.machine.arrived(binding.source, 9, 1, b"", None, 1)
    assert waiting.machine.crowd == 1
    waiting.reader.begin()
    for _ in range(3):
        await asyncio.sleep(0)
    assert (waiting.consumers, waiting.live.places.free) == ({}, PLACES)
    waiting.machine.limit = 2
    assert waiting.machine.on_room is not None
    waiting.machine.on_room()
    await waiting.made()
    waiting.reader.end()
    await waiting.services.tasks.fake_settle()


async def test_a_session_waits_for_a_place() -> None:
    """Until another one has read what it has missed."""
    waiting = Setup("a", begins=False)
    while waiting.live.places.free:
        assert await waiting.live.places.take(waiting.reader)
    waiting.reader.begin()
    await asyncio.sleep(0)
    assert not waiting.consumers
    waiting.live.places.leave()
    await waiting.made()
    waiting.reader.end()
    await waiting.services.tasks.fake_settle()
    assert waiting.live.places.free


async def test_nothing_overtakes_what_waits(setup: Setup) -> None:
    setup.machine.limit = 0
    setup.bring(11)
    setup.machine.limit = 2
    setup.bring(12)
    assert setup.live.fake_given == []
    assert setup.machine.on_room is not None
    setup.machine.on_room()
    assert setup.live.fake_given == [11, 12]


async def test_what_is_not_for_clients_is_passed_over(setup: Setup) -> None:
    setup.bring(11, headers=QOS0)
    assert (setup.live.fake_given, setup.reader.position) == ([], 11)


async def test_a_session_of_several_subscriptions_has_them_looked_up(setup: Setup) -> None:
    setup.member.side.bindings["b"] = live_binding("b")
    setup.reader.broken()
    await setup.made(2)
    await aeventually(lambda: len(setup.consumers) == 1)  # the former one is deleted afterwards
    setup.bring(11)
    assert (setup.live.fake_given, setup.live.fake_through) == ([], [11])


async def test_a_message_that_a_session_cannot_take_ends_that_session(setup: Setup) -> None:
    setup.live.fake_refuses = True
    setup.bring(11)
    assert setup.live.fake_failed == [11]


# -- losses -------------------------------------------------------------------------------------------


async def test_a_missing_message_has_the_reader_made_again_behind_the_position(setup: Setup) -> None:
    setup.bring(11)
    (former,) = setup.consumers
    setup.bring(13, gap=True)
    assert setup.live.fake_given == [11]
    await setup.made(2)
    await aeventually(lambda: former not in setup.consumers)
    (config,) = [one["config"] for one in setup.consumers.values()]
    assert isinstance(config, dict)
    assert config["opt_start_seq"] == 12


@pytest.mark.parametrize("status", [b"NATS/1.0 409 Consumer Deleted\r\n\r\n", b"NATS/1.0 503\r\n\r\n"])
async def test_a_page_that_fails(setup: Setup, status: bytes) -> None:
    setup.status(status)
    await setup.made(2)


async def test_a_page_that_reaches_its_limit_of_bytes_is_followed_by_another(setup: Setup) -> None:
    setup.status(b"NATS/1.0 409 Message Size Exceeds MaxBytes\r\n\r\n")
    assert len(setup.requests) == 2
    setup.status(b"NATS/1.0 204 Batch Completed\r\n\r\n")
    assert len(setup.requests) == 2


async def test_silence(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was asked for does not come."""
    monkeypatch.setattr(catch_up, "SILENCE", 0.01)
    setup.bring(11)
    setup.services.clock.now = asyncio.get_running_loop().time()
    await setup.made(2)


async def test_what_waits_is_forgotten_with_the_reader_and_read_again(setup: Setup) -> None:
    setup.machine.limit = 0
    setup.bring(11)
    setup.reader.broken()
    await setup.made(2)
    await aeventually(lambda: len(setup.consumers) == 1)
    setup.machine.limit = 2
    setup.bring(11)
    assert setup.live.fake_given == [11]


async def test_jetstream_refuses_the_reader(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves its place to others, and is created once JetStream takes it; the session keeps its position."""
    monkeypatch.setattr(catch_up, "REFUSED_PAUSE_S", 0.01)
    free, places = setup.live.places.free, list[int]()

    def refuse(subject: str) -> None:
        if ".CONSUMER.CREATE." in subject and len(places) < 3:
            places.append(setup.live.places.free)
            raise ApiError(400, 10026, "maximum consumers limit reached")

    setup.services.fake_inbox.before = refuse
    setup.reader.broken()
    await aeventually(lambda: len(places) == 3)
    assert (places, setup.member.client.alive) == ([free] * 3, True)
    await cast("FakeClient", setup.member.client).fake_work()
    assert "JetStream refuses the reader" in caplog.text
    await setup.made(5)
    await aeventually(lambda: len(setup.consumers) == 1, what="the former reader is deleted")
    setup.bring(11)
    assert setup.live.fake_given == [11]


@pytest.mark.parametrize(
    ("code", "busy", "dormant"), [(10026, False, []), (10026, True, ["hash_n"]), (10013, False, ["hash_n"])]
)
async def test_a_reader_that_is_refused_leaves_its_place(
    setup: Setup, code: int, busy: bool, dormant: list[str]
) -> None:
    """Where the account has too many consumers, the dormant ones of the session go: the position replaces them.

    A job that is under way may wait for long: it is tried again at the next refusal.
    """
    client, side = cast("FakeClient", setup.member.client), cast("FakeReaderSide", setup.member.side)
    side.position_writer = cast("PositionWriter", FakePositionWriter())
    (binding,) = side.bindings.values()
    binding.lie_dormant()
    setup.consumers.clear()
    setup.consumers[binding.consumer.durable_name] = {}

    def refuse(subject: str) -> None:
        if ".CONSUMER.CREATE." in subject:
            raise ApiError(400, code, "on purpose")

    free = setup.live.places.free
    setup.services.fake_inbox.before = refuse
    client.busy = busy
    setup.reader.broken()
    await aeventually(lambda: setup.live.places.free == free + 1)
    await client.fake_work()
    assert list(setup.consumers) == dormant


async def test_a_reader_that_fails_leaves_its_place_and_its_session(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """The places are few; the next connection goes on from the session's position."""

    def fail(subject: str) -> None:
        if ".CONSUMER.CREATE." in subject:
            raise ValueError("on purpose")

    free = setup.live.places.free
    setup.services.fake_inbox.before = fail
    setup.reader.broken()
    await setup.services.tasks.fake_settle()
    assert setup.live.places.free == free + 1
    assert [str(error) for error in cast("FakeClient", setup.member.client).fake_ended] == ["internal error"]
    assert setup.services.fake_link.handlers == {}
    assert "on purpose" in caplog.text


@pytest.mark.parametrize("handing_over", [True, False])
async def test_all_subscriptions_have_ended(setup: Setup, handing_over: bool) -> None:
    """Nothing is kept back for it any more, and the shared reader looks for none of its filters."""
    if handing_over:
        setup.live.interest.put(setup.member)
        setup.member.begin_handover(ReaderHandover(10))
    setup.member.side.bindings.clear()
    setup.reader.broken()
    await aeventually(lambda: setup.live.fake_ended)
    assert (setup.member.handover, setup.member.filters) == (None, [])
    assert +setup.live.reader.wanted == {}


async def test_its_end(setup: Setup) -> None:
    """Its consumer goes, and what still comes is nobody's."""
    setup.reader.end()
    assert setup.machine.on_room is None
    await aeventually(lambda: not setup.consumers)
    assert setup.services.fake_link.handlers == {}
    assert setup.live.fake_given == []


# -- the shared reader --------------------------------------------------------------------------------


async def test_a_session_that_has_caught_up_is_handed_over(setup: Setup) -> None:
    setup.services.fake_inbox.put("$MQTT.msgs.a")
    setup.live.reader.position = 11
    setup.bring(11, pending=0)
    await aeventually(lambda: setup.live.fake_caught_up)
    ((handover, position),) = setup.live.fake_caught_up
    assert (position, handover.overfull, setup.member.filters) == (11, False, ["a"])
    await aeventually(lambda: not setup.consumers)


async def test_what_is_stored_before_the_shared_reader_is_read_first(setup: Setup) -> None:
    """The session is not handed over while something is left between it and the shared reader."""
    setup.services.fake_inbox.put("$MQTT.msgs.a")
    setup.services.fake_inbox.put("$MQTT.msgs.a")
    setup.live.reader.position = 12
    setup.bring(11, pending=0)
    await aeventually(lambda: setup.live.reader.fake_asked)
    assert setup.live.fake_caught_up == []
    setup.bring(12, pending=0)
    await aeventually(lambda: setup.live.fake_caught_up)
    assert setup.live.fake_caught_up[0][1] == 12


async def test_nothing_is_left(setup: Setup) -> None:
    setup.status(END)
    await aeventually(lambda: setup.live.fake_caught_up)
    assert setup.live.fake_caught_up[0][1] == 10


async def test_a_session_that_is_handed_over_leaves_its_place(setup: Setup) -> None:
    """Others read meanwhile: the change of the shared reader's filters may take a second."""
    places, changed = list[int](), asyncio.Event()
    ready = setup.live.reader.ready

    async def later() -> int:
        places.append(setup.live.places.free)
        await changed.wait()
        return await ready()

    setup.live.reader.ready = later  # type: ignore[method-assign]
    free = setup.live.places.free
    setup.status(END)
    await aeventually(lambda: places)
    assert places == [free + 1]
    changed.set()
    await aeventually(lambda: setup.live.fake_caught_up)


async def test_a_session_that_waits_to_ask_is_handed_over_all_the_same(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands that are handed over at once, the last one waits; to read again alone would cost much more."""
    monkeypatch.setattr(catch_up, "HANDOVER", 0.05)
    loop, head = asyncio.get_running_loop(), setup.services.head
    ask, begun = head.nothing_left, loop.time()

    async def later(subjects: Sequence[str], position: int, since: int) -> bool:
        await aeventually(lambda: loop.time() > begun + 0.2)
        return await ask(subjects, position, since)

    monkeypatch.setattr(head, "nothing_left", later)
    setup.services.fake_inbox.put("$MQTT.msgs.other")
    setup.live.reader.position = 11
    setup.status(END)
    await aeventually(lambda: setup.live.fake_caught_up)
    assert sum(".CONSUMER.CREATE." in one for one in setup.services.fake_inbox.asked) == 1


async def test_a_message_that_comes_while_a_session_waits_to_ask_is_counted(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is about the position before the wait, and may say that the message is left."""
    monkeypatch.setattr(catch_up, "HANDOVER", 0.05)
    loop, head = asyncio.get_running_loop(), setup.services.head
    ask, begun, waiting = head.nothing_left, loop.time(), asyncio.Event()

    async def later(subjects: Sequence[str], position: int, since: int) -> bool:
        waiting.set()
        await aeventually(lambda: loop.time() > begun + 0.2)
        return await ask(subjects, position, since)

    monkeypatch.setattr(head, "nothing_left", later)
    setup.services.fake_inbox.put("$MQTT.msgs.a")
    setup.live.reader.position = 11
    setup.status(END)
    await waiting.wait()
    setup.bring(11, pending=0)
    await aeventually(lambda: setup.live.fake_caught_up)
    assert sum(".CONSUMER.CREATE." in one for one in setup.services.fake_inbox.asked) == 1


async def test_a_handover_for_which_messages_do_not_come_begins_again(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "HANDOVER", 0.05)
    setup.services.fake_inbox.put("$MQTT.msgs.a")
    setup.live.reader.position = 11
    setup.status(END)
    await setup.made(2)
    assert (setup.member.handover, setup.live.fake_caught_up) == (None, [])


async def test_a_handover_that_fails_begins_again(setup: Setup) -> None:
    """The shared reader has lost a message meanwhile, or kept back too many: they are read here."""
    ready = setup.live.reader.ready

    async def spoil() -> int:
        assert setup.member.handover is not None
        setup.member.handover.overfull = setup.live.reader.fake_asked == 0
        return await ready()

    setup.live.reader.ready = spoil  # type: ignore[method-assign]
    setup.status(END)
    await setup.made(2)
    assert (setup.member.handover, setup.live.fake_caught_up) == (None, [])
    setup.status(END)
    await aeventually(lambda: setup.live.fake_caught_up)


@pytest.mark.parametrize("missed", [False, True])
async def test_what_was_missed_is_looked_for_first(missed: bool) -> None:
    """A session that has missed nothing needs no reader of its own."""
    setup = Setup("a", missed=False)
    if missed:
        setup.services.fake_inbox.put("$MQTT.msgs.a")
        setup.live.reader.position = 11
        await setup.made()
        assert not setup.live.fake_caught_up
        assert not setup.live.reader.fake_asked  # its filters are not changed before the rest is read
        setup.reader.end()
    else:
        await aeventually(lambda: setup.live.fake_caught_up)
        assert setup.live.fake_caught_up[0][1] == 10
        assert not setup.consumers
