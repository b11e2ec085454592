# SPDX-License-Identifier: Apache-2.0
"""Places of catch-up readers, and what many readers that wait for one read together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mqtt_nats.shared_reader import catch_up, catch_up_places
from mqtt_nats.shared_reader.catch_up import CatchUpReader
from mqtt_nats.shared_reader.reader_session import ReaderSession
from mqtt_streams.api import ApiError, RequestTimeout
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.stored import StoredMessage
from tests.harness.waiting import aeventually
from tests.shared_reader.fakes import FakeReaderServices, FakeSessions, as_sessions, live_binding, member_of

pytestmark = pytest.mark.sources

QOS1 = b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n"
SESSIONS = 8
CREATE = f".CONSUMER.CREATE.{MESSAGES}"
PAGE = f".CONSUMER.MSG.NEXT.{MESSAGES}.unnamed"


class Crowd:
    """Sessions at sequence 10 with a filter each; all places are taken."""

    def __init__(self, *, fewer: int = 0) -> None:
        self.services = FakeReaderServices()
        self.inbox = self.services.fake_inbox
        self.live = FakeSessions(self.services, position=10)
        self.given: dict[str, list[int]] = {}
        self.live.give = self.live.put_through = self._note  # type: ignore[assignment,method-assign]
        self.live.places.free = 0
        for _ in range(10):
            self.inbox.put("$MQTT.msgs.other", headers=QOS1)
        self.members = [self._session(number) for number in range(SESSIONS - fewer)]

    def _note(self, member: ReaderSession, sequence: int, *_: object) -> None:
        self.given.setdefault(member.client.client_id, []).append(sequence)

    def _session(self, number: int) -> ReaderSession:
        member = member_of(self.services, str(number), f"dev.{number}.*")
        self.live.members[member.client] = member
        return member

    def store(self, rounds: int, payload: bytes = b"x") -> None:
        """A message for each session, so many times."""
        for _ in range(rounds):
            for number in range(SESSIONS):
                self.inbox.put(f"$MQTT.msgs.dev.{number}.set", payload, QOS1)
        self.live.reader.position = self.inbox.last[MESSAGES]

    def begin(self, first: int = 10) -> list[CatchUpReader]:
        """Begin to read; ``first``: position of the first session."""
        for number, one in enumerate(self.members):
            reader = CatchUpReader(as_sessions(self.live), one, 10 if number else first)
            self.live.catching[one.side] = reader
            reader.begin()
        return list(self.live.catching.values())

    def asked(self, what: str) -> int:
        """How many requests of a kind there were."""
        return sum(what in one for one in self.inbox.asked)

    def due(self, number: int) -> list[int]:
        """Sequences of the messages for a session."""
        wanted = f"$MQTT.msgs.dev.{number}.set"
        return [one.seq for one in self.inbox.messages[MESSAGES] if one.subject == wanted]

    def all_given(self) -> bool:
        return self.given == {str(number): self.due(number) for number in range(len(self.members))}


@pytest.fixture
async def crowd(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Crowd]:
    monkeypatch.setattr(catch_up_places, "TOGETHER_MIN", SESSIONS)
    found = Crowd()
    yield found
    await _end(found)


async def _end(crowd: Crowd) -> None:
    for one in list(crowd.live.catching.values()):
        one.end()
    for _ in range(SESSIONS):
        crowd.live.places.leave()
    await crowd.services.tasks.fake_settle()
    assert not crowd.inbox.consumers[MESSAGES]


async def test_many_sessions_that_wait_read_together(crowd: Crowd) -> None:
    """Each gets its own messages, in order, and is handed over; one consumer reads for all."""
    crowd.store(3)
    crowd.begin()
    await aeventually(lambda: len(crowd.live.fake_caught_up) == SESSIONS)
    assert crowd.all_given()
    assert {since for _, since in crowd.live.fake_caught_up} == {crowd.inbox.last[MESSAGES]}
    assert (crowd.asked(CREATE), crowd.live.places.free) == (1, 0)


async def test_a_few_wait_for_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up_places, "TOGETHER_MIN", SESSIONS)
    crowd = Crowd(fewer=1)
    crowd.store(1)
    crowd.begin()
    places = crowd.live.places
    await aeventually(lambda: len(places._waiting) == SESSIONS - 1)
    assert (crowd.asked(CREATE), places._reading) == (0, False)
    await _end(crowd)


async def test_a_session_gets_nothing_from_before_its_position(crowd: Crowd) -> None:
    crowd.store(3)
    crowd.begin(first=11)
    await aeventually(lambda: len(crowd.live.fake_caught_up) == SESSIONS)
    assert crowd.given["0"] == crowd.due(0)[1:]


async def test_messages_that_have_no_place_wait_for_the_client(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The position is where the last message was given; acknowledgements make room, however late they come."""
    monkeypatch.setattr(catch_up, "SILENCE", 0.0)
    crowd.store(3)
    slow = crowd.members[0].side.machine
    slow.limit = 0
    readers = crowd.begin()
    await aeventually(lambda: len(crowd.live.fake_caught_up) == SESSIONS - 1)
    assert (readers[0].position, readers[0].waits, crowd.given.get("0")) == (10, False, None)
    slow.limit = 10
    assert slow.on_room is not None
    slow.on_room()
    await aeventually(lambda: len(crowd.live.fake_caught_up) == SESSIONS)
    assert crowd.all_given()
    assert crowd.asked(CREATE) == 1


async def test_a_client_for_which_too_much_waits_reads_alone(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins after what its client was given, when it has a place."""
    monkeypatch.setattr(catch_up_places, "KEPT_BYTES", SESSIONS * 3000)
    crowd.store(3, b"x" * 1000)
    crowd.members[0].side.machine.limit = 0
    (reader, *_) = crowd.begin()
    await aeventually(lambda: len(crowd.live.fake_caught_up) == SESSIONS - 1)
    assert (reader.waits, reader.position, crowd.asked(CREATE)) == (True, 10, 1)
    crowd.live.places.leave()
    await aeventually(lambda: crowd.asked(CREATE) == 2)
    (found,) = crowd.inbox.consumers[MESSAGES].values()
    assert found["config"]["opt_start_seq"] == 11
    assert found["config"]["filter_subjects"] == ["$MQTT.msgs.dev.0.*"]


async def test_a_reader_whose_common_reading_breaks_off_gets_a_free_place(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All readers with a place may have ended meanwhile, so that nobody else would leave one."""
    monkeypatch.setattr(catch_up_places, "KEPT_BYTES", SESSIONS * 3000)
    crowd.store(3, b"x" * 1000)
    slow = crowd.members[0].side.machine
    slow.limit = 0

    def leave(subject: str) -> None:
        if PAGE in subject:
            crowd.live.places.leave()

    crowd.inbox.before = leave
    crowd.begin()
    await aeventually(lambda: crowd.asked(CREATE) == 2)
    assert crowd.live.places.free == 0


async def test_a_reader_that_ends_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that come and go do not fill the queue, and do not count as readers that could read together."""
    monkeypatch.setattr(catch_up_places, "TOGETHER_MIN", SESSIONS)
    crowd = Crowd(fewer=1)
    crowd.store(1)
    readers = crowd.begin()
    places = crowd.live.places
    await aeventually(lambda: len(places._waiting) == SESSIONS - 1)
    for one in readers:
        one.end()
    await aeventually(lambda: not places._waiting)
    await _end(crowd)


async def test_what_waits_for_clients_counts_with_its_headers(crowd: Crowd) -> None:
    """Also small messages, and those of which user properties are the larger part, take memory while they wait."""
    crowd.members[0].side.machine.limit = 0
    reader = CatchUpReader(as_sessions(crowd.live), crowd.members[0], 10)
    reader.begin_together()
    large = QOS1[:-2] + b"Mqtt-User: " + b"x" * 3000 + b"\r\n\r\n"
    for sequence in (11, 12):
        assert reader.bring(StoredMessage("$MQTT.msgs.dev.0.set", sequence, 1, large, b""), 8000)
    assert reader.waiting_bytes == 2 * (len(large) + catch_up.KEPT_OVERHEAD)
    assert not reader.bring(StoredMessage("$MQTT.msgs.dev.0.set", 13, 1, large, b""), 8000)
    reader.end()


async def test_other_work_goes_on_while_many_take_a_page(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page may be for thousands of readers, all of which want each of its messages."""
    monkeypatch.setattr(catch_up_places, "SLICE", SESSIONS)
    taken: list[int] = []
    seen: set[int] = set()

    def count(member: ReaderSession, sequence: int, *_: object) -> None:
        taken.append(sequence)
        asyncio.get_running_loop().call_soon(lambda: seen.add(len(taken)))

    crowd.live.give = crowd.live.put_through = count  # type: ignore[assignment,method-assign]
    for one in crowd.members:
        one.side.bindings.clear()
        one.side.bindings["all"] = live_binding("dev.>")
    crowd.store(1)
    crowd.begin()
    await aeventually(lambda: len(crowd.live.fake_caught_up) == SESSIONS)
    assert len(seen) == len(taken) // SESSIONS == SESSIONS


async def test_other_work_goes_on_while_many_end(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands of readers hands its session over when the common reading ends."""
    monkeypatch.setattr(catch_up_places, "READERS_SLICE", 2)
    ended: list[CatchUpReader] = []
    seen: set[int] = set()

    def end(reader: CatchUpReader, last: int | None) -> None:
        ended.append(reader)
        asyncio.get_running_loop().call_soon(lambda: seen.add(len(ended)))
        of_product(reader, last)

    of_product = CatchUpReader.end_together
    monkeypatch.setattr(CatchUpReader, "end_together", end)
    crowd.store(1)
    crowd.begin()
    await aeventually(lambda: len(crowd.live.fake_caught_up) == SESSIONS)
    assert seen >= set(range(2, SESSIONS + 1, 2))
    assert len(ended) == SESSIONS


async def test_too_many_messages_are_not_read_together(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers wait for their places, until more of them wait."""
    monkeypatch.setattr(catch_up_places, "READ_EACH", 1)
    crowd.store(3)
    readers = crowd.begin()
    await aeventually(lambda: crowd.asked(CREATE) == 1 and crowd.asked(".CONSUMER.DELETE.") == 1)
    assert (all(one.waits for one in readers), crowd.given, crowd.asked(PAGE)) == (True, {}, 0)


async def test_few_read_alone_while_others_read_together(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come meanwhile get two places; the other ones wait for the end of the common reading."""
    monkeypatch.setattr(catch_up_places, "ALONE_MEANWHILE", 2)
    places, found, tasks = crowd.live.places, list[int](), list[asyncio.Task[bool]]()
    crowd.store(1)

    async def come() -> bool:
        taken = await places.take(CatchUpReader(as_sessions(crowd.live), crowd.members[0], 10))
        found.append(len(crowd.live.fake_caught_up))
        return taken

    def free_all(subject: str) -> None:
        if PAGE in subject and not tasks:
            for _ in range(catch_up_places.PLACES):
                places.leave()
            tasks.extend(asyncio.get_running_loop().create_task(come()) for _ in range(4))

    crowd.inbox.before = free_all
    crowd.begin()
    await aeventually(lambda: len(found) == 4)
    assert (found[:2], found[2] > 0) == ([0, 0], True)
    assert all(await asyncio.gather(*tasks))
    assert places.free == catch_up_places.PLACES - 4


async def test_sessions_far_back_are_left_out(crowd: Crowd) -> None:
    crowd.store(3)
    readers = crowd.begin(first=1)
    await aeventually(lambda: len(crowd.live.fake_caught_up) == SESSIONS - 1)
    assert (readers[0].waits, readers[0].position) == (True, 1)


async def test_a_page_that_fails_has_the_readers_wait(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given is not given again."""
    crowd.store(3)

    def refuse(subject: str) -> None:
        if PAGE in subject and crowd.asked(PAGE) == 2:
            raise ApiError(503, 0, "on purpose")

    crowd.inbox.before = refuse
    monkeypatch.setattr(catch_up_places, "PAGE", SESSIONS + 2)
    readers = crowd.begin()
    await aeventually(lambda: crowd.asked(PAGE) == 2 and all(one.waits for one in readers))
    assert [one.position for one in readers][:3] == [19, 20, 13]
    assert not crowd.live.fake_caught_up


async def test_a_session_that_ends_or_changes_meanwhile(crowd: Crowd) -> None:
    """It gets nothing more from the common reading; one with other subscriptions waits for a place."""
    crowd.store(2)
    readers: list[CatchUpReader] = []

    def change(subject: str) -> None:
        if PAGE in subject:
            readers[0].end()
            crowd.members[1].side.bindings["more"] = live_binding("more")
            readers[1].broken()

    crowd.inbox.before = change
    readers += crowd.begin()
    await aeventually(lambda: len(crowd.live.fake_caught_up) == SESSIONS - 2)
    assert sorted(crowd.given) == [str(number) for number in range(2, SESSIONS)]
    assert (readers[0].waits, readers[1].waits) == (False, True)


async def test_other_subscriptions_before_the_common_reading(crowd: Crowd) -> None:
    """The common filter may not stand for them."""
    crowd.store(2)

    def change(subject: str) -> None:
        if CREATE in subject:
            crowd.members[1].side.bindings["more"] = live_binding("more")

    crowd.inbox.before = change
    readers = crowd.begin()
    await aeventually(lambda: len(crowd.live.fake_caught_up) == SESSIONS - 1)
    assert (crowd.given.get("1"), readers[1].waits) == (None, True)


@pytest.mark.parametrize("broken", [False, True])
async def test_the_position_after_the_common_reading(crowd: Crowd, broken: bool) -> None:
    """It is the end of what was read, unless the reader has to begin again."""
    reader = CatchUpReader(as_sessions(crowd.live), crowd.members[0], 10)
    reader.begin_together()
    if broken:
        reader.broken()
    reader.end_together(20)
    assert (reader.waits, reader.position) == ((True, 10) if broken else (False, 20))


@pytest.mark.parametrize("error", [RequestTimeout("on purpose"), ApiError(503, 10008, "no leader")])
async def test_readers_whose_common_reading_failed_read_together_again(crowd: Crowd, error: Exception) -> None:
    """When the next place is left, and as many as before are enough: a failure does not say that they read too much."""
    crowd.store(3)

    def fail_once(subject: str) -> None:
        if PAGE in subject and crowd.asked(PAGE) == 1:
            raise error

    crowd.inbox.before = fail_once
    readers = crowd.begin()
    places = crowd.live.places
    await aeventually(lambda: crowd.asked(PAGE) == 1 and all(one.waits and not one.together for one in readers))
    places.leave()
    await aeventually(lambda: len(crowd.live.fake_caught_up) == SESSIONS)
    assert crowd.all_given()
    assert crowd.asked(CREATE) == 2


async def test_a_reader_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for their places again, and read together when the next place is left."""
    monkeypatch.setattr(catch_up_places, "TOGETHER_MIN", SESSIONS)
    crowd = Crowd()
    crowd.store(3)
    begin, failed = CatchUpReader.begin_together, list[CatchUpReader]()

    def fail_once(reader: CatchUpReader) -> None:
        if not failed and reader.subjects() == ["$MQTT.msgs.dev.3.*"]:
            failed.append(reader)
            raise ValueError("on purpose")
        begin(reader)

    monkeypatch.setattr(CatchUpReader, "begin_together", fail_once)
    readers = crowd.begin()
    await aeventually(lambda: failed and all(one.waits and not one.together for one in readers))
    crowd.live.places.leave()
    await aeventually(lambda: len(crowd.live.fake_caught_up) == SESSIONS)
    assert crowd.all_given()
    with pytest.raises(ValueError, match="on purpose"):
        await _end(crowd)


async def test_readers_that_have_missed_too_much_do_not_ask_again(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that gets a place reads alone; twice as many have to wait before they ask again."""
    monkeypatch.setattr(catch_up_places, "READ_EACH", 1)
    crowd.store(3)
    crowd.begin()
    places = crowd.live.places
    await aeventually(lambda: crowd.asked(CREATE) == 1 and not places._reading)
    places.leave()
    await aeventually(lambda: crowd.asked(CREATE) == 2)
    assert [one.endswith(CREATE) for one in crowd.inbox.asked if CREATE in one] == [True, False]
