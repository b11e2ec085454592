# SPDX-License-Identifier: Apache-2.0
"""The sessions and consumers of one user: what is counted, when notes are read again, and what is refused."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any, cast

import pytest

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.codec import QuotaExceeded
from mqtt_nats.config.settings import Settings
from mqtt_nats.sessions import quotas as module
from mqtt_nats.sessions.quotas import (
    BEGINNING_S,
    NAME_MAX,
    PAUSE_RATIO,
    READ_AGAIN_S,
    READ_FULL_S,
    ROOM_MIN,
    STALE_MAX,
    Quotas,
    holder,
)
from mqtt_streams.api import NoResponders
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.hashing import name_hash
from mqtt_streams.quotas import QuotaStore, Totals, note_subject, quota_of
from mqtt_streams.sessions import V5, Draining, SessionRecord, SessionStore
from mqtt_streams.shared import STREAM
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeInbox, FakeStore

QUOTA, OTHER = quota_of("ann", ""), quota_of("bob", "")
WHO = "user 'ann'"


def record(client_id: str, consumers: int = 0, quota: str = QUOTA) -> SessionRecord:
    names = [f"{client_id}-{number}" for number in range(consumers)]
    cons = {name: ConsumerRef(name, "$MQTT.sub.deliver", "$MQTT.msgs.a", 10) for name in names}
    return SessionRecord(client_id, cons=cons, v5=V5(kind="durable", quota=quota))


class Bench:
    """The quotas of a gateway, what JetStream has of them, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
        self.now = 1000.0
        self.numbers = count()
        self.counted: list[str] = []
        self.js, self.store = FakeInbox(), FakeStore()
        self.sessions = SessionStore(self.js)
        publisher = cast(AckedPublisher, self.store)
        self.quotas = Quotas(Settings(**limits), QuotaStore(self.js), self.sessions, publisher, self.counted.append)
        monkeypatch.setattr(self.quotas, "_now", lambda: self.now)

    async def stored(self, client_id: str, consumers: int = 0, quota: str = QUOTA) -> SessionRecord:
        """A session of another gateway, with its note."""
        found = record(client_id, consumers, quota)
        await self.sessions.save(found, expected=None)
        self.js.put(note_subject(quota, found.key), b"%d" % consumers)
        return found

    def noted(self, quota: str = QUOTA) -> list[str]:
        """Keys of the sessions that have a note."""
        prefix = note_subject(quota, "")
        return [one.removeprefix(prefix) for one in self.js.subjects(STREAM) if one.startswith(prefix)]

    @property
    def reads(self) -> int:
        """How often notes were read."""
        return sum("DIRECT.GET" in one for one in self.js.asked)

    def hold(self, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
        """Keep readings of notes from their end until the event is set."""
        go_on, totals = asyncio.Event(), QuotaStore.totals

        async def held(store: QuotaStore, quota: str, oldest: int) -> Totals:
            found = await totals(store, quota, oldest)
            await go_on.wait()
            return found

        monkeypatch.setattr(QuotaStore, "totals", held)
        return go_on

    async def admits(self, quota: str = QUOTA, client_id: str = "", claim: str = "") -> bool:
        """Whether one more session may begin; the claim is named after the client unless another name is given."""
        try:
            name = client_id or f"new {next(self.numbers)}"
            await self.quotas.admit(claim or name, name_hash(name), quota, WHO)
        except QuotaExceeded:
            return False
        return True

    async def reserve(self, client_id: str, wanted: int, quota: str = QUOTA) -> int:
        """How many consumers the session of a client may create."""
        return await self.quotas.reserve(name_hash(client_id), quota, WHO, wanted)


def test_who_uses_a_quota_is_named_in_the_log() -> None:
    assert holder("ann", "192.0.2.1") == WHO
    assert holder(None, "192.0.2.1") == "anonymous clients of 192.0.2.1"
    assert len(holder("x" * 10_000, "")) < NAME_MAX + 20


# -- sessions -----------------------------------------------------------------------------------------


async def test_sessions_of_all_gateways_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(monkeypatch, max_sessions=3)
    for name in ("one", "two"):
        await bench.stored(name)
    await bench.stored("others", quota=OTHER)
    assert [await bench.admits() for _ in range(2)] == [True, False]
    assert await bench.admits(OTHER)
    assert bench.counted == ["max_sessions"]
    assert f"limit max_sessions is reached by {WHO}" in caplog.text


async def test_without_a_limit_nobody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, max_sessions=None)
    assert all([await bench.admits() for _ in range(20)])
    assert bench.reads == 1


async def test_notes_are_read_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other gateways write notes too."""
    bench = Bench(monkeypatch, max_sessions=3)
    assert await bench.admits()
    for name in ("one", "two", "three"):
        await bench.stored(name)
    bench.now += READ_AGAIN_S
    assert await bench.admits(), "not read again yet"
    bench.now += 0.1
    assert not await bench.admits()


async def test_a_quota_that_is_used_up_is_read_again_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, max_sessions=1)
    ended = await bench.stored("one")
    assert not await bench.admits()
    await QuotaStore(bench.js).forget(QUOTA, ended.key)
    bench.now += READ_FULL_S
    assert not await bench.admits()
    bench.now += 0.1
    assert await bench.admits()


async def test_clients_that_come_at_the_same_time_share_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, max_sessions=2)
    found = await asyncio.gather(*(bench.admits() for _ in range(4)))
    assert (sorted(found), bench.reads) == ([False, False, True, True], 1)


@pytest.mark.sources  # it replaces a method of a native class
async def test_nobody_waits_while_there_is_much_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notes are read once meanwhile; sessions that begin during that time count, too."""
    most = ROOM_MIN + 10
    bench = Bench(monkeypatch, max_sessions=most)
    assert await bench.admits()
    for number in range(3):
        await bench.stored(f"elsewhere {number}")
    go_on = bench.hold(monkeypatch)
    bench.now += READ_AGAIN_S + 0.1
    async with asyncio.timeout(5):
        assert [await bench.admits() for _ in range(4)] == [True] * 4
        go_on.set()
        await aeventually(lambda: bench.quotas._uses[QUOTA].sessions == 3 + 5)
    assert bench.reads == 2


async def test_a_session_counts_before_its_note_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CONNECT may be answered while the notes are read."""
    bench = Bench(monkeypatch, max_sessions=2)
    assert await bench.admits()
    await bench.stored("elsewhere")
    bench.now += READ_AGAIN_S + 0.1
    assert not await bench.admits()


@pytest.mark.sources
async def test_what_is_noted_during_a_reading_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading may have missed it, as it has missed the notes of a session and of two consumers here."""
    bench = Bench(monkeypatch, max_sessions=ROOM_MIN * 2, max_durable_consumers=ROOM_MIN * 2)
    assert await bench.reserve("a", 2) == 2
    assert await bench.admits(client_id="b")
    go_on = bench.hold(monkeypatch)
    bench.now += READ_AGAIN_S + 0.1
    assert await bench.admits()
    await aeventually(lambda: bench.reads == 2)
    bench.quotas.store_note(record("a", 2))
    bench.quotas.store_note(record("b"))
    use = bench.quotas._uses[QUOTA]
    assert (use.sessions, use.consumers) == (2, 2)
    go_on.set()
    await aeventually(lambda: bench.quotas._uses[QUOTA] is not use)
    use = bench.quotas._uses[QUOTA]
    assert (use.sessions, use.consumers) == (2, 2)


@pytest.mark.sources
async def test_a_client_waits_for_the_notes_where_there_is_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does the first client of a quota; another quota's client does not wait for these notes."""
    bench = Bench(monkeypatch, max_sessions=ROOM_MIN)
    assert await bench.admits()
    assert await bench.admits(OTHER)
    go_on = bench.hold(monkeypatch)
    first = asyncio.create_task(bench.admits(quota_of("cat", "")))
    bench.now += READ_AGAIN_S + 0.1
    waiting = asyncio.create_task(bench.admits())
    await aeventually(lambda: bench.reads == 4)
    assert not first.done()
    assert not waiting.done()
    go_on.set()
    assert await first
    assert await waiting


@pytest.mark.sources
async def test_a_client_that_has_gone_does_not_stop_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the notes of a quota that take longer than clients wait would never be known."""
    bench = Bench(monkeypatch, max_sessions=3)
    go_on = bench.hold(monkeypatch)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await bench.admits()
    go_on.set()
    assert await bench.admits()
    assert bench.reads == 1


@pytest.mark.sources
async def test_notes_that_take_long_are_read_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, max_sessions=3)
    go_on = bench.hold(monkeypatch)
    waiting = asyncio.create_task(bench.admits())
    await aeventually(lambda: bench.reads == 1)
    bench.now += READ_AGAIN_S
    go_on.set()
    assert await waiting
    bench.now += READ_AGAIN_S * PAUSE_RATIO
    assert await bench.admits()
    assert bench.reads == 1
    bench.now += 0.1
    assert await bench.admits()
    assert bench.reads == 2


async def test_a_reading_that_fails_has_the_next_client_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is not used for ever while JetStream does not answer."""
    bench = Bench(monkeypatch, max_sessions=ROOM_MIN * 2)
    assert await bench.admits()
    bench.now += READ_AGAIN_S + 0.1

    def silent(subject: str) -> None:
        raise NoResponders("no leader")

    with monkeypatch.context() as patched:
        patched.setattr(bench.js, "before", silent)
        assert await bench.admits()
        await aeventually(lambda: QUOTA not in bench.quotas._uses)
        with pytest.raises(NoResponders):
            await bench.admits()
    assert await bench.admits()


async def test_jetstream_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is told; nothing is counted."""
    bench = Bench(monkeypatch, max_sessions=1)

    def silent(subject: str) -> None:
        raise NoResponders("no leader")

    monkeypatch.setattr(bench.js, "before", silent)
    with pytest.raises(NoResponders):
        await bench.admits()
    monkeypatch.undo()
    assert (await bench.admits(), bench.counted) == (True, [])


# -- notes that nobody has removed --------------------------------------------------------------------


async def test_a_note_without_its_session_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gateway has died, or the session counts for another user now."""
    bench = Bench(monkeypatch, max_sessions=4)
    bench.js.put(note_subject(QUOTA, name_hash("gone")), b"1")
    moved, poisoned, present = record("moved", quota=OTHER), record("poisoned"), await bench.stored("present")
    await bench.sessions.save(moved, expected=None)
    bench.js.put(bench.sessions.subject(poisoned.key), b"no JSON")
    begins = record("begins")  # its first record is about to be written
    bench.quotas.note_claim(begins)
    for one in (moved, poisoned, begins):
        bench.js.put(note_subject(QUOTA, one.key), b"0")
    assert await bench.admits()
    assert bench.noted() == [present.key, poisoned.key, begins.key]


async def test_not_all_notes_are_checked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, max_sessions=1)
    for number in range(STALE_MAX + 2):
        bench.js.put(note_subject(QUOTA, name_hash(f"gone {number}")), b"0")
    assert not await bench.admits()
    assert len(bench.noted()) == 2
    bench.now += READ_FULL_S + 0.1
    assert await bench.admits()
    assert bench.noted() == []


async def test_notes_are_left_alone_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, max_sessions=10)
    bench.js.put(note_subject(QUOTA, name_hash("gone")), b"0")
    assert await bench.admits()
    assert len(bench.noted()) == 1


# -- notes of sessions that are connected here --------------------------------------------------------


async def test_a_note_is_stored_when_the_number_of_consumers_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.quotas.note_claim(record("c", 1))
    bench.quotas.store_note(record("c", 1))
    assert bench.store.fake_put == []
    bench.quotas.store_note(record("c", 3))
    ((target, _, payload, _),) = bench.store.fake_put
    assert (target, payload) == (b"HPUB %b " % note_subject(QUOTA, name_hash("c")).encode(), b"3")
    assert bench.quotas.consumers == 3
    bench.quotas.forget_session(name_hash("c"))
    assert bench.quotas.consumers == 0


async def test_a_session_that_counts_for_nobody_has_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    for one in (record("c", 2, quota=""), SessionRecord("of nats-server's listener")):
        bench.quotas.note_claim(one)
        bench.quotas.store_note(one)
        await bench.quotas.forget(one)
        bench.quotas.forget_session(one.key)
    assert (bench.store.fake_put, bench.quotas.consumers, bench.js.asked) == ([], 0, [])


@pytest.mark.parametrize("ended", [False, True])
async def test_a_session_that_has_ended_gives_its_place_back(monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    """An ended session's consumers are draining, beside the one of its PUBRELs, which does not count."""
    bench = Bench(monkeypatch, max_sessions=2, max_durable_consumers=3)
    one, two = await bench.stored("one", 2), await bench.stored("two", 1)
    assert not await bench.admits()
    assert await bench.reserve("other", 1) == 0
    if ended:
        v5 = V5(kind="durable", quota=QUOTA, draining=[Draining(name, "a", 1, 5) for name in ("a", "b", "pubrels")])
        one = SessionRecord("one", clean=True, v5=v5)
    await bench.quotas.forget(one)
    assert bench.noted() == [two.key]
    assert await bench.admits()
    assert await bench.reserve("other", 3) == 2
    await bench.quotas.forget(one)
    assert await bench.reserve("third", 1) == 0, "there was no note any more"


# -- consumers ----------------------------------------------------------------------------------------


async def test_consumers_of_all_gateways_count(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, max_durable_consumers=5)
    await bench.stored("elsewhere", 3)
    assert await bench.reserve("here", 1) == 1
    assert await bench.reserve("also here", 4) == 1
    assert await bench.reserve("too late", 1) == 0
    assert bench.counted == ["max_durable_consumers"] * 2
    assert bench.quotas.consumers == 2


async def test_a_reservation_ends_when_the_record_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all reserved consumers may have come to be."""
    bench = Bench(monkeypatch, max_durable_consumers=5)
    assert await bench.reserve("c", 4) == 4
    assert await bench.reserve("other", 4) == 1
    bench.quotas.store_note(record("c", 2))
    assert bench.quotas.consumers == 3
    assert await bench.reserve("other", 4) == 3, "what it had reserved before is free again"
    bench.quotas.forget_session(name_hash("other"))
    assert bench.quotas.consumers == 2
    assert await bench.reserve("third", 4) == 3


async def test_reservations_count_when_the_notes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, max_durable_consumers=5)
    assert await bench.reserve("c", 4) == 4
    bench.now += READ_AGAIN_S + 0.1
    assert await bench.reserve("other", 4) == 1


async def test_consumers_of_one_gateway(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Of all users together; those elsewhere do not count."""
    bench = Bench(monkeypatch, max_durable_consumers_per_gateway=5)
    await bench.stored("elsewhere", 4)
    assert await bench.reserve("ann's", 3) == 3
    assert await bench.reserve("bob's", 3, OTHER) == 2
    assert bench.counted == ["max_durable_consumers_per_gateway"]
    assert "is reached by this gateway" in caplog.text


async def test_what_is_known_needs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, max_durable_consumers=5)
    key = name_hash("c")
    assert bench.quotas.reserve_known(key, QUOTA, WHO, 2) is None
    assert await bench.reserve("c", 2) == 2
    assert bench.quotas.reserve_known(key, QUOTA, WHO, 4) == 4
    assert bench.quotas.reserve_known(name_hash("other"), QUOTA, WHO, 4) == 1, "it was read a moment ago"
    bench.now += READ_FULL_S + 0.1
    assert bench.quotas.reserve_known(key, QUOTA, WHO, 6) is None
    assert bench.quotas.consumers == 1, "what the session had reserved before is free"


async def test_a_rate_delays_consumers_and_then_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, consumer_rate=10, rate_burst=2, rate_pause=3)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    assert await bench.reserve("at once", 20) == 20
    assert await bench.reserve("in a second", 10) == 10
    assert await bench.reserve("in three seconds", 20) == 20
    assert await bench.reserve("too much", 1) == 0
    assert await bench.reserve("of bob", 20, OTHER) == 20
    assert bench.counted == ["consumer_rate"]
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        for name in ("at once", "in a second", "in three seconds", "in a second"):
            await bench.quotas.pace(name_hash(name))
    assert slept == pytest.approx([0.0, 1.0, 3.0, -bench.now]), "a session waits once for what it has reserved"


async def test_without_a_rate_consumers_are_neither_delayed_nor_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, consumer_rate=None)
    assert await bench.reserve("a", 10_000) == 10_000
    await asyncio.wait_for(bench.quotas.pace(name_hash("a")), 5)
    assert bench.counted == []


async def test_a_rate_delays_new_sessions_and_then_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits leaves the place that it has among all claims."""
    bench = Bench(monkeypatch, session_rate=10, rate_burst=2, max_sessions=None)
    slept: list[float] = []
    left: list[int] = []

    async def sleep(seconds: float) -> None:
        if seconds:
            slept.append(seconds)

    async def begins(number: int, quota: str = QUOTA) -> None:
        await bench.quotas.admit(number, f"key {number}", quota, WHO, lambda: left.append(number))

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        for number in range(60):
            await begins(number)
        for number in range(60, 63):
            with pytest.raises(QuotaExceeded, match="session_rate"):
                await begins(number)
        await begins(100, OTHER)
    assert left == list(range(20, 60))
    assert slept == pytest.approx([one / 10 for one in range(1, 41)])
    assert max(slept) <= BEGINNING_S
    assert bench.counted == ["session_rate"] * 3


async def test_the_quotas_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was not used for the longest time is read again."""
    monkeypatch.setattr(module, "QUOTAS_MAX", 2)
    bench = Bench(monkeypatch)
    third = quota_of("cat", "")
    reads = []
    for quota in (QUOTA, OTHER, QUOTA, third, QUOTA, OTHER):
        before = bench.reads
        assert await bench.admits(quota)
        reads.append(bench.reads > before)
    assert reads == [True, True, False, True, False, True]
