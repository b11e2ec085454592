# SPDX-License-Identifier: Apache-2.0
"""Where a subscription begins in the stream: by the leader's last sequence, else by nats-server's clock."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.base import server_clock
from mqtt_nats.pubsub import beginnings as module
from mqtt_nats.pubsub.backlog import Backlog
from mqtt_nats.pubsub.beginnings import Beginning, Beginnings
from mqtt_nats.pubsub.subscribers import Filter
from mqtt_streams.api import NoResponders
from tests.harness.waiting import aeventually
from tests.pubsub.support import Bench, Subscriber
from tests.sessions.fakes import FakeServices, as_link, as_tasks


class Scene:
    """A table whose subscriptions have beginnings, and a leader that says its last sequence when a test wants it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.bench = Bench()
        self.services = FakeServices()
        self.nats = self.services.nats
        self.asked: list[asyncio.Future[int]] = []
        self.beginnings = Beginnings(self.nats, as_tasks(self.services.tasks), self.last)
        self.bench.table.call_on_joined(self.beginnings.begin)

    async def last(self) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.asked.append(future)
        return await future

    def subscribe(self, name: str, text: str = "a", qos: int = 1, *, durable: bool = False) -> Subscriber:
        member = Subscriber(self.bench, name, durable=durable)
        self.bench.subscribe(member, text, qos)
        return member

    def beginning(self, member: Subscriber) -> Beginning:
        (found,) = member.filters
        assert found.beginnings is not None
        return found.beginnings[member]

    async def question(self, count: int) -> asyncio.Future[int]:
        """The question with this number."""
        await aeventually(lambda: len(self.asked) >= count)
        return self.asked[count - 1]

    async def done(self) -> None:
        async with asyncio.timeout(5):
            await self.services.tasks.fake_settle()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(module, "SEQUENCE_READ_PAUSE_S", 0.0)
    monkeypatch.setattr(module, "SEQUENCE_READ_RETRY_S", 0.0)
    found = Scene()
    monkeypatch.setattr(server_clock, "now", lambda: found.now)
    return found


async def test_subscriptions_of_a_moment_share_one_question(scene: Scene) -> None:
    one, two = scene.subscribe("one"), scene.subscribe("two", "b")
    assert scene.beginning(one) is scene.beginning(two)
    first = await scene.question(1)
    later = scene.subscribe("later")
    first.set_result(5)
    (await scene.question(2)).set_result(7)
    await scene.done()
    assert [scene.beginning(each).last for each in (one, two, later)] == [5, 5, 7]
    assert len(scene.asked) == 2


async def test_the_sequence_decides_whatever_the_clocks_say(scene: Scene) -> None:
    member = scene.subscribe("one")
    (await scene.question(1)).set_result(5)
    await scene.done()
    beginning = scene.beginning(member)
    assert [beginning.covers(sequence, 2000.0) for sequence in (4, 5, 6)] == [False, False, True]
    assert beginning.covers(6, 0.0)


async def test_until_it_is_read_the_clock_decides(scene: Scene) -> None:
    member = scene.subscribe("one")
    beginning = scene.beginning(member)
    assert [beginning.covers(7, born) for born in (999.0, 1001.0)] == [False, True]
    (await scene.question(1)).set_result(0)
    await scene.done()


async def test_when_a_gap_begins_meanwhile_the_clock_decides_up_to_the_sequence(scene: Scene) -> None:
    """What was stored between SUBACK and the answer may have been missed."""
    member = scene.subscribe("one")
    question = await scene.question(1)
    await asyncio.wait_for(scene.beginnings.settle(member, member.filters), 1)
    scene.nats.lost(as_link(scene.services.fake_link))
    question.set_result(5)
    await scene.done()
    beginning = scene.beginning(member)
    assert [beginning.covers(5, born) for born in (999.0, 1001.0)] == [False, True]
    assert beginning.covers(6, 0.0)


async def test_when_a_gap_begins_before_suback_the_sequence_decides(scene: Scene) -> None:
    """The clock of a gateway is not exact: a message that was acknowledged just before SUBSCRIBE would come."""
    member = scene.subscribe("one")
    question = await scene.question(1)
    scene.nats.lost(as_link(scene.services.fake_link))
    settling = asyncio.create_task(scene.beginnings.settle(member, member.filters))
    await asyncio.sleep(0)
    question.set_result(5)
    await asyncio.wait_for(settling, 5)
    await scene.done()
    assert [scene.beginning(member).covers(sequence, 2000.0) for sequence in (5, 6)] == [False, True]


async def test_in_a_gap_the_sequence_decides(scene: Scene) -> None:
    """SUBACK waits for the answer."""
    scene.nats.lost(as_link(scene.services.fake_link))
    member = scene.subscribe("one")
    (await scene.question(1)).set_result(5)
    await scene.done()
    assert [scene.beginning(member).covers(sequence, 2000.0) for sequence in (5, 6)] == [False, True]


@pytest.mark.parametrize("end", ["read", "repaired", "late", "steady"])
async def test_suback_waits_while_a_gap_is_not_repaired(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Else a message that is stored after it would count as an older one; when nobody answers, the clock decides."""
    link = as_link(scene.services.fake_link)
    if end != "steady":
        scene.nats.lost(link)
    member = scene.subscribe("one")
    question = await scene.question(1)
    if end == "late":
        monkeypatch.setattr(module, "SEQUENCE_WAIT_MOST_S", 0.0)
    settling = asyncio.create_task(scene.beginnings.settle(member, member.filters))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert settling.done() == (end in ("late", "steady"))
    if end == "repaired":
        del scene.nats.gaps[link]
    if end != "read":
        await asyncio.wait_for(settling, 5)
    question.set_result(5)
    await asyncio.wait_for(settling, 5)
    await scene.done()
    assert [scene.beginning(member).covers(5, born) for born in (999.0, 1001.0)] == [False, end == "late"]


async def test_suback_waits_for_no_other_subscription(scene: Scene) -> None:
    """Neither at QoS 0, nor of a durable session, nor for those of other clients."""
    scene.nats.lost(as_link(scene.services.fake_link))
    others = [scene.subscribe("zero", qos=0), scene.subscribe("durable", durable=True)]
    scene.subscribe("one")
    for member in others:
        await asyncio.wait_for(scene.beginnings.settle(member, member.filters), 1)
    (await scene.question(1)).set_result(5)
    await scene.done()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_has_come_and_was_dropped_is_read(scene: Scene, when: str) -> None:
    """A queue was full, or its connection was lost before the queue was delivered."""
    member = scene.subscribe("one")
    (found,) = member.filters
    found.queue(Backlog(1000))
    question = await scene.question(1)
    if when == "before":
        found.queue(Backlog(1000))
    question.set_result(5)
    await scene.done()
    if when == "after":
        found.queue(Backlog(1000))
    assert [scene.beginning(member).covers(5, born) for born in (999.0, 1001.0)] == [False, True]


async def test_the_question_is_repeated(scene: Scene) -> None:
    member = scene.subscribe("one")
    (await scene.question(1)).set_exception(NoResponders("no leader"))
    (await scene.question(2)).set_result(5)
    await scene.done()
    assert scene.beginning(member).last == 5


async def test_nothing_is_asked_for_members_that_get_nothing_stored(scene: Scene) -> None:
    """Those at QoS 0, and durable ones; the clock tells what is too old for them."""
    zero = scene.subscribe("zero", qos=0)
    scene.subscribe("durable", durable=True)
    await asyncio.sleep(0)
    assert (scene.asked, scene.services.tasks.fake_spawned) == ([], [])
    scene.now += 10
    later = scene.subscribe("later", qos=0)
    assert [scene.beginning(one).at for one in (zero, later)] == [1000.0, 1010.0]


async def test_a_subscription_that_is_made_again_begins_anew_and_one_that_is_changed_does_not(scene: Scene) -> None:
    member = scene.subscribe("one", qos=0)
    scene.now += 10
    scene.bench.subscribe(member, "a", 0)
    assert scene.beginning(member).at == 1000.0
    scene.bench.table.unsubscribe(member, "a")
    scene.bench.subscribe(member, "a", 0)
    assert scene.beginning(member).at == 1010.0


async def test_a_durable_subscription_that_is_lowered_to_qos_0_begins_then(scene: Scene) -> None:
    """Until then a consumer has brought what is stored."""
    member = scene.subscribe("one", durable=True)
    scene.now += 10
    scene.bench.subscribe(member, "a", 0)
    assert scene.beginning(member).at == 1010.0


async def test_beginnings_are_forgotten(scene: Scene) -> None:
    """With their member, and when no gap reaches so far back."""
    one, two = scene.subscribe("one", qos=0), scene.subscribe("two", qos=0)
    (found,) = one.filters
    scene.bench.table.leave(one)
    assert list(found.beginnings or ()) == [two]
    scene.now += module.BEGINNINGS_KEPT_S - 1
    scene.beginnings.rotate()
    assert found.beginnings
    scene.now += 2
    scene.beginnings.rotate()
    assert _noted(scene, found) == (None, 0)


async def test_the_number_of_questions_that_wait_is_limited(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """While JetStream is away: of the oldest subscriptions only the time is known then."""
    monkeypatch.setattr(scene.beginnings, "_waiting", type(scene.beginnings._waiting)(maxlen=3))
    members = []
    for number in range(6):
        scene.now += 1
        members.append(scene.subscribe(f"{number}", f"a/{number}"))
    (await scene.question(1)).set_result(5)
    await scene.done()
    assert [scene.beginning(one).last for one in members] == [module.SEQUENCE_UNREAD] * 3 + [5] * 3


def _noted(scene: Scene, found: Filter) -> tuple[object, int]:
    return found.beginnings, len(scene.beginnings._noted)
