# SPDX-License-Identifier: Apache-2.0
"""The checker of histories: a good one has no violation, and each kind of violation is found in one that is not."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checker import Promises, Verdict, check
from tests.chaos.history import Event, History, read

MS = 1_000_000


class Story:
    """Events one millisecond apart."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now = 0

    def note(self, who: str, what: str, **fields: Any) -> None:
        self.now += MS
        self.events.append(Event(self.now, who, what, fields))

    def connect(self, who: str, conn: int = 1, *, clean: bool = False, present: bool = False) -> None:
        self.note(who, "connect", port=1, clean=clean, conn=conn)
        self.note(who, "connected", port=1, present=present, conn=conn)

    def publish(self, n: int, qos: int = 1, *, acked: bool = True, conn: int = 1, dup: bool = False) -> None:
        self.note("p", "publish", topic="t/a", qos=qos, n=n, id=n, dup=dup, conn=conn)
        if acked:
            self.note("p", "acked", topic="t/a", n=n, conn=conn)

    def receive(
        self,
        n: int,
        qos: int = 1,
        *,
        dup: bool = False,
        id: int = 0,
        retain: bool = False,
        delivered: bool = True,
        conn: int = 2,
    ) -> None:
        self.note("s", "received", of="p", n=n, topic="t/a", qos=qos, dup=dup, id=id or n, retain=retain, conn=conn)
        if delivered:
            self.note("s", "delivered", of="p", n=n, topic="t/a")

    def check(self, promises: Promises | None = None) -> Verdict:
        return check(self.events, promises or Promises())


@pytest.fixture
def story() -> Story:
    """A publisher, and a subscriber of ``t/#`` at QoS 2 whose session outlives its connections."""
    story = Story()
    story.connect("p")
    story.connect("s", 2)
    story.note("s", "subscribe", filter="t/#", qos=2)
    story.note("s", "subscribed", filter="t/#", qos=2)
    return story


def again(story: Story, open: Iterable[int] = (), *, present: bool = True) -> None:
    """The subscriber's connection is lost, and a new one accepted."""
    story.note("s", "lost", reason="closed", conn=2, open=list(open))
    story.connect("s", 3, present=present)


def test_what_is_kept(story: Story) -> None:
    story.publish(1)
    story.receive(1)
    story.publish(2, 2)
    story.receive(2, 2, delivered=True)
    again(story, [2])
    story.receive(2, 2, dup=True, delivered=False)
    story.note("s", "released", id=2)
    story.publish(3, acked=False)
    verdict = story.check()
    assert verdict.violations == []
    assert verdict.figures["sent"] == 3
    assert verdict.figures["acked"] == 2
    assert verdict.figures["delivered"] == 2
    assert verdict.figures["resent"] == 1
    assert verdict.figures["reconnects"] == 1
    assert verdict.figures["longest_resume_ms"] == 1
    assert verdict.figures["longest_pause_ms"] == 1


def test_lost(story: Story) -> None:
    story.publish(1)
    story.publish(2)
    story.receive(2)
    verdict = story.check()
    assert verdict.kinds == {"lost"}
    assert verdict.missing == [("s", "p", 1)]
    assert verdict.figures["lost"] == 1


def test_not_lost_before_the_subscription_nor_after_its_end(story: Story) -> None:
    story.events.insert(2, Event(MS // 2, "p", "publish", {"topic": "t/a", "qos": 1, "n": 1, "id": 1, "conn": 1}))
    story.note("p", "acked", topic="t/a", n=1, conn=1)
    story.note("s", "unsubscribe", filter="t/#")
    story.publish(2)
    assert story.check().violations == []


def test_not_lost_for_a_session_that_ends_with_its_connection(story: Story) -> None:
    story.events[2] = Event(3 * MS, "s", "connect", {"clean": True, "conn": 2})
    story.publish(1)
    assert story.check().violations == []


@pytest.mark.parametrize("qos", [0, 1])
def test_duplicates_that_are_allowed(story: Story, qos: int) -> None:
    story.publish(1, qos, acked=False)
    story.publish(1, qos, dup=True)
    story.receive(1, qos)
    story.receive(1, qos)
    verdict = story.check()
    assert verdict.violations == []
    assert verdict.figures["repeated"] == 1
    assert verdict.figures["duplicated"] == 0


def test_duplicated(story: Story) -> None:
    story.publish(1, 2)
    story.receive(1, 2)
    story.note("s", "released", id=1)
    story.receive(1, 2, dup=True)
    verdict = story.check()
    assert verdict.kinds == {"duplicated"}
    assert verdict.figures["duplicated"] == 1


def test_not_duplicated_through_a_subscription_of_qos_1(story: Story) -> None:
    story.events[-1].fields["qos"] = 1
    story.publish(1, 2)
    story.receive(1, 1)
    story.receive(1, 1, dup=True)
    assert story.check().violations == []


def test_again_without_dup(story: Story) -> None:
    story.publish(1)
    story.receive(1)
    story.receive(1)
    assert story.check().kinds == {"DUP missing"}


def test_once_as_the_retained_message_and_once_as_a_new_one(story: Story) -> None:
    """The message was published while the filter was subscribed."""
    story.publish(1)
    story.receive(1, retain=True)
    story.receive(1)
    assert story.check().violations == []
    story.receive(1)
    assert story.check().kinds == {"DUP missing"}


def test_without_dup_as_often_as_it_was_published(story: Story) -> None:
    """A publisher whose PUBACK was lost publishes again: what is stored twice comes twice, and each may be repeated."""
    story.publish(1, acked=False)
    story.receive(1)
    story.receive(1, dup=True)
    story.publish(1, dup=True)
    story.receive(1, id=2)
    assert story.check().violations == []
    story.receive(1, id=3)
    assert story.check().kinds == {"DUP missing"}


def test_again_after_dup_without_it(story: Story) -> None:
    story.publish(1)
    story.receive(1, dup=True)
    story.receive(1)
    assert story.check().kinds == {"DUP missing"}


def test_resent_without_dup(story: Story) -> None:
    story.publish(1, 2)
    story.receive(1, 2)
    again(story, [1])
    story.receive(1, 2, delivered=False)
    assert story.check().kinds == {"DUP missing"}


def test_out_of_order(story: Story) -> None:
    for n in (1, 2, 3):
        story.publish(n)
    for n in (1, 3, 2):
        story.receive(n)
    verdict = story.check()
    assert verdict.kinds == {"out of order"}
    assert verdict.figures["reordered"] == 1
    assert story.check(Promises(order=False)).violations == []
    assert story.check(Promises(leaders_change=True)).kinds == {"out of order"}


def test_order_of_what_is_on_its_way_when_leaders_change(story: Story) -> None:
    """Two was not acknowledged when three was sent."""
    story.publish(1)
    story.publish(2, acked=False)
    story.publish(3)
    for n in (1, 3, 2):
        story.receive(n)
    assert story.check().kinds == {"out of order"}
    assert story.check(Promises(leaders_change=True)).violations == []


def test_order_of_what_is_sent_again(story: Story) -> None:
    for n in (1, 2, 3):
        story.publish(n)
    for n in (1, 2):
        story.receive(n)
    again(story, [1, 2])
    for n in (1, 2):
        story.receive(n, dup=True)
    story.receive(3)
    assert story.check().violations == []


def test_packet_id_in_use(story: Story) -> None:
    story.publish(1, 2)
    story.receive(1, 2, id=7)
    story.publish(2, 2)
    story.receive(2, 2, id=7, delivered=False)
    assert story.check().kinds == {"packet id in use", "lost"}


def test_not_sent_again(story: Story) -> None:
    story.publish(1)
    story.receive(1)
    again(story, [1])
    story.note("s", "disconnect", conn=3)
    assert story.check().kinds == {"not sent again"}


def test_sent_again_late(story: Story) -> None:
    story.publish(1)
    story.receive(1)
    again(story, [1])
    story.now += 2000 * MS
    story.receive(1, dup=True)
    assert story.check(Promises(resent=1.0)).kinds == {"sent again late"}
    assert story.check(Promises(resent=3.0)).violations == []


def test_session_gone(story: Story) -> None:
    again(story, present=False)
    assert story.check().kinds == {"session gone"}
    assert story.check(Promises(sessions=False)).violations == []


def test_invented(story: Story) -> None:
    story.receive(9)
    assert story.check().kinds == {"invented"}


def test_acknowledged_twice(story: Story) -> None:
    story.publish(1)
    story.note("p", "acked", topic="t/a", n=1, conn=1)
    story.receive(1)
    assert story.check().kinds == {"acknowledged twice"}


def test_two_owners(story: Story) -> None:
    story.connect("p", 5, present=True)
    story.now += 3000 * MS
    story.publish(1, conn=1)
    story.receive(1)
    assert story.check().kinds == {"two owners"}
    assert story.check(Promises(handover=4.0)).violations == []


def test_an_owner_after_another(story: Story) -> None:
    story.note("p", "lost", reason="closed", conn=1, open=[])
    story.connect("p", 5, present=True)
    story.now += 3000 * MS
    story.publish(1, conn=5)
    story.receive(1)
    assert story.check().violations == []


@pytest.mark.parametrize(
    ("end", "times", "delay", "kinds"),
    [
        ("disconnect", 0, 0, set()),
        ("disconnect", 1, 0, {"will fired after DISCONNECT"}),
        ("abandoned", 1, 0, set()),
        ("abandoned", 0, 0, {"will never fired"}),
        ("abandoned", 2, 0, {"will fired twice"}),
        ("lost", 1, 0, set()),
        ("lost", 0, 0, {"will never fired"}),
        ("lost", 2, 0, {"will fired twice"}),
        ("lost", 0, 9, set()),
        ("lost", 1, 9, set()),
        ("taken-over", 1, 0, set()),
        ("taken-over", 0, 0, {"will never fired"}),
        ("taken-over", 0, 9, set()),
    ],
)
def test_wills(story: Story, end: str, times: int, delay: int, kinds: set[str]) -> None:
    story.note("p", "will", topic="t/w", qos=2, n=-1, delay=delay)
    story.note("p", end, conn=1, reason="", open=[])
    for _ in range(times):
        story.note("s", "delivered", of="p", n=-1, topic="t/w")
    assert story.check().kinds == kinds


def test_many_of_a_kind_are_counted(story: Story) -> None:
    for n in range(1, 11):
        story.publish(n)
    lines = story.check().lines()
    assert len(lines) == 6
    assert lines[-1] == "lost: 5 more"


def test_a_pause_counts_while_there_is_no_connection(story: Story) -> None:
    story.publish(1, acked=False)
    story.note("p", "lost", reason="closed", conn=1, open=[])
    story.now += 500 * MS
    story.connect("p", 4, present=True)
    story.publish(1, dup=True, conn=4)
    story.receive(1)
    assert story.check().figures["longest_pause_ms"] == 505


def test_a_history_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    one, two = (History(tmp_path / f"{name}.jsonl") for name in ("one", "two"))
    one.note("connect", port=1, clean=True)
    two.note("publish", n=1, topic="é")
    one.note("disconnect")
    events = read([two.path, one.path])
    assert [(event.who, event.what) for event in events] == [
        ("one", "connect"),
        ("two", "publish"),
        ("one", "disconnect"),
    ]
    assert events[1].topic == "é"
    assert events[1].of is None
    assert events[0].t < events[1].t < events[2].t


def test_a_history_that_is_gone_was_written(tmp_path: Path) -> None:
    History(tmp_path / "x.jsonl", "somebody").note("connect", conn=1)
    (event,) = read([tmp_path / "x.jsonl"])
    assert (event.who, event.conn) == ("somebody", 1)


SHARE = "$share/g/t/#"


def join(story: Story, who: str, qos: int, conn: int) -> None:
    """A member of a group that subscribes what everybody publishes."""
    story.connect(who, conn)
    story.note(who, "subscribe", filter=SHARE, qos=qos)
    story.note(who, "subscribed", filter=SHARE, qos=qos)


def give(story: Story, who: str, n: int, qos: int, *, id: int, dup: bool = False, delivered: bool = True) -> None:
    """A member gets a message."""
    story.note(who, "received", of="p", n=n, topic="t/a", qos=qos, dup=dup, id=id, retain=False, conn=3)
    if delivered:
        story.note(who, "delivered", of="p", n=n, topic="t/a")


@pytest.fixture
def group(story: Story) -> Story:
    """Two members at QoS 2 beside the subscriber, who has unsubscribed."""
    story.note("s", "unsubscribe", filter="t/#")
    join(story, "a", 2, 3)
    join(story, "b", 2, 4)
    return story


def test_a_group_gets_each_message_once(group: Story) -> None:
    group.publish(1, 2)
    group.publish(2, 2)
    give(group, "a", 1, 2, id=1)
    give(group, "b", 2, 2, id=1)
    verdict = group.check(Promises(shared=True))
    assert not verdict.violations
    assert verdict.figures["shared"] == 2


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_message_that_comes_twice_to_a_group(group: Story, who: str) -> None:
    """To another member, or to the same one under another identifier."""
    group.publish(1, 2)
    give(group, "a", 1, 2, id=1)
    give(group, who, 1, 2, id=2)
    verdict = group.check()
    assert verdict.kinds == {"duplicated"}
    assert verdict.figures["duplicated"] == 1


def test_a_message_that_a_group_gets_again_at_qos_1(story: Story) -> None:
    """Another member may have it, behind newer ones and without DUP: nobody has acknowledged it."""
    story.note("s", "unsubscribe", filter="t/#")
    join(story, "a", 1, 3)
    join(story, "b", 1, 4)
    for n in (1, 2):
        story.publish(n)
    give(story, "a", 2, 1, id=1)
    give(story, "a", 1, 1, id=2)
    story.note("a", "lost", reason="closed", conn=3, open=[2])
    give(story, "b", 1, 1, id=1)
    story.connect("a", 5, present=True)
    story.note("a", "disconnect", conn=5)
    assert not story.check(Promises(shared=True)).violations


def test_each_group_gets_each_message(group: Story) -> None:
    """What one group has had, another one has not."""
    other = SHARE.replace("/g/", "/other/")
    group.connect("c", 5)
    group.note("c", "subscribe", filter=other, qos=2)
    group.note("c", "subscribed", filter=other, qos=2)
    group.publish(1, 2)
    give(group, "a", 1, 2, id=1)
    verdict = group.check(Promises(shared=True))
    assert [one[0] for one in verdict.missing] == [other]
    give(group, "c", 1, 2, id=1)
    verdict = group.check(Promises(shared=True))
    assert not verdict.violations
    assert verdict.figures["shared"] == 2


def test_what_no_member_has_got(group: Story) -> None:
    group.publish(1, 2)
    assert group.check(Promises(shared=True)).kinds == {"lost"}
    assert not group.check().violations, "it may be on its way to another member"


def test_what_a_member_has_half_way_comes_to_it_again(group: Story) -> None:
    group.publish(1, 2)
    give(group, "a", 1, 2, id=1)
    group.note("a", "lost", reason="closed", conn=3, open=[1])
    group.connect("a", 5, present=True)
    group.note("a", "disconnect", conn=5)
    assert group.check().kinds == {"not sent again"}
