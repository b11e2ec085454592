# SPDX-License-Identifier: Apache-2.0
"""What is done when streams and consumers of nats-server have new leaders."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mqtt_nats.backbone import retry as patience
from mqtt_nats.delivery import elections
from mqtt_nats.delivery.elections import Elections
from mqtt_nats.delivery.receiver import SharedFeed
from mqtt_nats.protocol.ack_tokens import OWED, RECORD
from mqtt_streams.consumers import ConsumerInfo
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import CONSUMER_PREFIX
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.shared import CONSUMER_PREFIX as SHARED_PREFIX
from mqtt_streams.shared import STREAM as SHARED
from tests.delivery.fakes import FakeDeliveryServices, FakeReceiver, Side
from tests.harness.doubles import Timers
from tests.protocol.recorder import session
from tests.sessions.fakes import as_services, consumer_state


class Feed(SharedFeed):
    """Notes the consumers that have new leaders."""

    def __init__(self) -> None:
        self.fake_elected: list[str] = []

    def elected(self, consumer: str) -> None:
        self.fake_elected.append(consumer)


class Bench:
    """A session with a consumer of PUBREL records, and what new leaders cause."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.services: Any = FakeDeliveryServices()
        self.machine, _ = session()
        self.client: Any = FakeReceiver(self.services)
        self.name = CONSUMER_PREFIX + self.client.hash
        self.services.registry.attached[self.name] = self.client
        self.client.durable_side = Side(self.machine, client=self.client)
        self.feed = Feed()
        self.notes: list[tuple[str, ...]] = []
        self.pending: int | None = 0
        """Records that JetStream has pending for the session's consumer; None: there is no consumer."""
        monkeypatch.setattr(self.services.fake_inbox, "elected", self._note("inbox"), raising=False)
        monkeypatch.setattr(self.services.fake_store, "elected", self._note("store"), raising=False)
        monkeypatch.setattr(self.services.nats, "relink", self._note("relink"))
        monkeypatch.setattr(elections, "ask_groups_again", lambda _, groups: self._note("groups")(*sorted(groups)))
        monkeypatch.setattr(elections, "attach_pubrels", self._attach)
        monkeypatch.setattr(elections, "consumer_info", self._info)
        Elections(as_services(self.services), self.services.registry, self.feed)

    def _note(self, what: str) -> Any:
        return lambda *told: self.notes.append((what, *told))

    async def _attach(self, side: object) -> None:
        assert side is self.client.durable_side
        self.notes.append(("attach",))

    async def _info(self, inbox: object, stream: str, name: str) -> ConsumerInfo | None:
        assert (stream, name) == (OUT, self.name)
        return None if self.pending is None else consumer_state(num_ack_pending=self.pending)

    def elect(self, kind: str, *tokens: str) -> None:
        """Bring an advisory."""
        subject = ".".join((f"$JS.EVENT.ADVISORY.{kind}.LEADER_ELECTED", *tokens)).encode()
        pattern = next(one for one in elections.ELECTED if kind.encode() in one)
        link = self.services.fake_link
        (sid,) = [sid for sid, one in link.fake_subjects.items() if one == pattern]
        link.handlers[sid](subject, b"", b"", b"")


async def test_a_stream_has_a_new_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the former leader had not answered is sent again."""
    bench = Bench(monkeypatch)
    bench.elect("STREAM", MESSAGES)
    assert bench.notes == [("inbox", MESSAGES, ""), ("store", MESSAGES)]
    assert bench.feed.fake_elected == [""]


async def test_a_reader_has_a_new_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.elect("CONSUMER", MESSAGES, "reader")
    assert bench.notes == [("inbox", MESSAGES, "reader")]
    assert bench.feed.fake_elected == ["reader"]


def test_groups_have_new_leaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that are elected at about the same time are asked at once, and each time anew."""
    timers = Timers(monkeypatch)
    bench = Bench(monkeypatch)
    for name in ("one", "two", "one"):
        bench.elect("CONSUMER", SHARED, SHARED_PREFIX + name)
    assert [note for note in bench.notes if note[0] != "inbox"] == [("relink",)] * 3
    bench.notes.clear()
    timers.pass_to(elections.AT_SAME_TIME)
    assert bench.notes == [("groups", "one", "two")]
    bench.elect("CONSUMER", SHARED, f"{SHARED_PREFIX}two")
    timers.pass_to(2 * elections.AT_SAME_TIME)
    assert bench.notes[-1] == ("groups", "two")
    assert timers.due == []


@pytest.mark.parametrize(
    ("pending", "come", "attached"), [(2, 1, True), (1, 1, False), (0, 0, False), (None, 0, False)]
)
async def test_pubrel_records_that_were_lost_come_again(
    monkeypatch: pytest.MonkeyPatch, pending: int | None, come: int, attached: bool
) -> None:
    """JetStream has more of them pending than have come to this gateway."""
    monkeypatch.setattr(elections, "SETTLE_BEFORE_CHECK_S", 0)
    bench = Bench(monkeypatch)
    bench.pending = pending
    bench.machine.owe(5, 5)
    for number in range(come):
        bench.machine.pubrel_delivered(5, 5, RECORD + b"%d" % number)
    bench.elect("CONSUMER", OUT, bench.name)
    await asyncio.sleep(0.001)
    assert len(bench.client.fake_jobs) == 1
    await bench.client.fake_work()
    assert (("attach",) in bench.notes) is attached


async def test_a_pubrel_of_the_position_hides_no_record_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """JetStream knows nothing of it."""
    monkeypatch.setattr(elections, "SETTLE_BEFORE_CHECK_S", 0)
    bench = Bench(monkeypatch)
    bench.pending = 1
    for identifier in (5, 6):
        bench.machine.owe(identifier, identifier)
        bench.machine.keep_identifier(identifier, OWED + b"%d" % identifier)
    bench.elect("CONSUMER", OUT, bench.name)
    await asyncio.sleep(0.001)
    await bench.client.fake_work()
    assert bench.notes[-1] == ("attach",)


@pytest.mark.parametrize("why", ["not attached", "left", "regular"])
async def test_nobody_waits_for_the_records(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(elections, "SETTLE_BEFORE_CHECK_S", 0)
    bench = Bench(monkeypatch)
    if why == "not attached":
        bench.services.registry.attached.clear()
    elif why == "left":
        bench.client.alive = False
    else:
        bench.client.durable_side = None
    bench.elect("CONSUMER", OUT, bench.name)
    await asyncio.sleep(0.001)
    assert bench.client.fake_jobs == []


async def test_who_is_not_answered_holds_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its consumer has no leader any more; as many are looked at as may be at the same time."""
    monkeypatch.setattr(patience, "UNANSWERED_PLACE_MOST_S", 0.05)
    monkeypatch.setattr(elections, "SESSIONS_CHECKED_AT_ONCE", 1)
    monkeypatch.setattr(elections, "SETTLE_BEFORE_CHECK_S", 0)
    bench = Bench(monkeypatch)
    answered: asyncio.Future[ConsumerInfo] = asyncio.get_running_loop().create_future()
    asked = 0

    async def info(*_: object) -> ConsumerInfo:
        nonlocal asked
        asked += 1
        return await answered if asked == 1 else consumer_state(num_ack_pending=1)

    monkeypatch.setattr(elections, "consumer_info", info)
    for _ in range(2):
        bench.elect("CONSUMER", OUT, bench.name)
    await asyncio.sleep(0.001)
    stuck, other = [asyncio.create_task(job) for job in bench.client.fake_jobs]
    async with asyncio.timeout(5):
        await other
    assert bench.notes[-1] == ("attach",)
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)
