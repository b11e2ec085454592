# SPDX-License-Identifier: Apache-2.0
"""A member of a shared subscription whose session moves while it joins."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mqtt_nats.base import server_clock as natstime
from mqtt_nats.client.client import Client
from mqtt_nats.sessions import shared_member as membership
from mqtt_nats.sessions.shared_member import AssignOp, Membership
from mqtt_nats.sessions.shared_ownership import confirmed_at, room_of
from mqtt_streams.api import ApiError
from mqtt_streams.hashing import name_hash
from mqtt_streams.sessions import V5, PoisonedRecord, SessionRecord, SharedSubscription
from mqtt_streams.shared import TAKEN, Owner

TEXT = "$share/group/topic"
WANTED = SharedSubscription(1, False, None, 1)


class Inbox:
    """Where answers of JetStream arrive."""

    prefix = b"_INBOX.x."

    def __init__(self) -> None:
        self.count = 0

    def token(self) -> bytes:
        self.count += 1
        return b"%d" % self.count


class Groups:
    """Notes what is asked of the store of groups."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    async def join(self, *_: object) -> int:
        return 7

    async def ensure_consumer(self, *_: object) -> None:
        pass

    async def leave(self, _group: str, _client_hash: str, note: int) -> None:
        self.calls.append(("leave", note))


class Sessions:
    """Has one record, or none that can be read."""

    def __init__(self, record: SessionRecord | None, sequence: int = 3, poisoned: bool = False) -> None:
        self.record = record
        self.sequence = sequence
        self.poisoned = poisoned

    async def load(self, *_: object) -> tuple[SessionRecord, int] | None:
        if self.poisoned:
            raise PoisonedRecord("no JSON")
        return None if self.record is None else (self.record, self.sequence)


def record(nonce: str, shared: bool) -> SessionRecord:
    return SessionRecord("client", v5=V5(nonce=nonce, shared={TEXT: WANTED} if shared else {}))


CASES: dict[str, tuple[Sessions, list[tuple[object, ...]]]] = {
    "its own": (Sessions(record("mine", True), 2), [("begin",)]),
    "its own, written and not yet confirmed": (Sessions(record("mine", True)), [("begin",)]),
    "its own, being written": (Sessions(record("before", True), 2), [("begin",)]),
    "continued by another connection": (Sessions(record("other", True)), []),
    "begun anew by another connection": (Sessions(record("other", False)), [("leave", 7)]),
    "ended": (Sessions(None), [("leave", 7)]),
    "of nats-server's listener": (Sessions(SessionRecord("client")), [("leave", 7)]),
    "cannot be read": (Sessions(None, poisoned=True), [("leave", 7)]),
}


@pytest.mark.parametrize("case", CASES)
async def test_joining(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left behind would keep the group's consumer for ever."""
    sessions, expected = CASES[case]
    groups = Groups()
    settings = SimpleNamespace(max_topic_levels=128)
    broker: Any = SimpleNamespace(groups=groups, sessions=sessions, settings=settings, shared=None, inbox=Inbox())
    client: Any = SimpleNamespace(
        broker=broker, version=5, hash="hash", client_id="client", expiry=60, epoch=2, record=record("mine", True)
    )
    member = Membership(cast(Client, client), TEXT, WANTED)
    monkeypatch.setattr(Membership, "begin", lambda self: groups.calls.append(("begin",)))
    await member.enter()
    assert groups.calls == expected


@pytest.mark.parametrize("standing", [False, True])
async def test_what_comes_while_the_gateway_finds_out_what_it_has_missed(
    standing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been given to another member meanwhile: it goes back."""
    taken: list[int] = []
    out: list[bytes] = []
    broker: Any = SimpleNamespace(
        settings=SimpleNamespace(max_topic_levels=128),
        shared=None,
        nats=SimpleNamespace(standing=standing),
        link=SimpleNamespace(out=out, kick=lambda: None),
        stored_message=lambda *_: None,
        inbox=SimpleNamespace(api_prefix="$JS.API", prefix=b"_INBOX.x.", token=lambda: b"1"),
        clock=SimpleNamespace(now=1.0),
    )
    client: Any = SimpleNamespace(
        broker=broker, version=5, alive=True, durable_side=None, shares=None, checks_each=False
    )
    client.outlet = SimpleNamespace(clogged=False)
    client.regular_side = SimpleNamespace(room=1)
    member = Membership(cast(Client, client), TEXT, WANTED)
    member.inbox = b"1"
    monkeypatch.setattr(Membership, "take", lambda self, message, number, qos, reply, arrived=0: taken.append(number))
    reply = b"$JS.ACK.$MQTT_msgs.share_x.1.5.5.1700000000000000000.0"
    member._arrived(b"$MQTT.msgs.topic", reply, b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n", b"x")
    assert taken == ([] if standing else [5])
    assert (b"PUB %b 4\r\n-NAK\r\n" % reply in out) is standing


def test_an_address_is_never_that_of_another_member_before() -> None:
    """What a member asked for before it left would arrive at a client that may be allowed something else."""
    settings = SimpleNamespace(max_topic_levels=128)
    client: Any = SimpleNamespace(broker=SimpleNamespace(settings=settings, shared=None, inbox=Inbox()), version=5)
    addresses = [Membership(cast(Client, client), TEXT, WANTED).address for _ in range(100)]
    assert len(set(addresses)) == 100


class Doubts:
    """A regular session's member that is given QoS 2 messages which may be somebody's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out: list[bytes] = []
        self.jobs: list[Any] = []
        self.taken: list[int] = []
        self.owner: Callable[[int], object] = lambda number: None
        broker: Any = SimpleNamespace(
            settings=SimpleNamespace(max_topic_levels=128),
            groups=self,
            shared=None,
            link=SimpleNamespace(out=self.out, kick=lambda: None),
            stored_message=lambda number, stamp, *_: SimpleNamespace(stamp=stamp),
            inbox=SimpleNamespace(api_prefix="$JS.API", prefix=b"_INBOX.x.", token=lambda: b"1"),
            clock=SimpleNamespace(now=1.0),
            round=SimpleNamespace(start=lambda: None),
            nats=SimpleNamespace(standing=False, linked=natstime.elapsed()),
        )
        self.regular = SimpleNamespace(room=20)
        client: Any = SimpleNamespace(
            broker=broker, version=5, alive=True, durable_side=None, checks_each=False, do=self.jobs.append
        )
        client.outlet = SimpleNamespace(clogged=False)
        client.regular_side = self.regular
        self.client = client
        self.member = Membership(cast(Client, client), TEXT, SharedSubscription(2, False, None, 1))
        self.member.inbox = b"1"
        client.shares = {TEXT: self.member}
        monkeypatch.setattr(Membership, "take", self._take)

        async def owner(_group: str, _text: str, number: int, _stamp: int) -> object:
            return self.owner(number)

        broker.groups = SimpleNamespace(owner=owner)

    def _take(self, _message: object, number: int, _qos: int, _reply: bytes, _arrived: int = 0) -> None:
        self.taken.append(number)
        self.regular.room -= 1

    @staticmethod
    def reply(number: int, delivered: int) -> bytes:
        return b"$JS.ACK.$MQTT_msgs.share_x.%d.%d.%d.4000000000000000000.0" % (delivered, number, number)

    def arrive(self, number: int, *, delivered: int = 2) -> None:
        """One with delivery count 2 may be somebody's; the first delivery of a new one is not."""
        self.member.asked += 1
        reply = self.reply(number, delivered)
        self.member._arrived(b"$MQTT.msgs.topic", reply, b"NATS/1.0\r\nNmqtt-Pub:2\r\n\r\n", b"x")


async def test_what_may_be_somebodys_has_its_place_and_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is new does not overtake it, and a member asks for no more than its client has room for."""
    doubts = Doubts(monkeypatch)
    for number in (1, 2, 3):
        doubts.arrive(number)
    doubts.arrive(4, delivered=1)
    assert (room_of(doubts.client), doubts.taken, len(doubts.jobs)) == (16, [], 1)
    doubts.owner = {2: "somebody"}.get
    await doubts.jobs.pop()
    assert (doubts.taken, room_of(doubts.client)) == ([1, 3, 4], 17)
    assert b"PUB %b 0\r\n\r\n" % doubts.reply(2, 2) in doubts.out
    doubts.arrive(5, delivered=1)
    assert (doubts.taken[-1], doubts.jobs) == (5, [])


@pytest.mark.parametrize("owner", [None, "somebody"], ids=["nobody's", "somebody's"])
async def test_what_a_gateway_before_may_have_assigned(monkeypatch: pytest.MonkeyPatch, owner: str | None) -> None:
    """A durable session's member looks for it where a message was delivered before; else the store of its own tells."""
    doubts = Doubts(monkeypatch)
    doubts.client.durable_side = SimpleNamespace(machine=doubts.regular)
    doubts.owner = lambda number: owner
    doubts.client.broker.nats.linked = natstime.elapsed() + 3600
    doubts.arrive(1, delivered=1)
    assert (doubts.taken, doubts.jobs) == ([1], [])
    doubts.arrive(2)
    assert doubts.taken == [1]
    await doubts.jobs.pop()
    assert doubts.taken == ([1, 2] if owner is None else [1])
    assert (b"PUB %b 0\r\n\r\n" % doubts.reply(2, 2) in doubts.out) is (owner is not None)


async def test_what_was_looked_at_for_too_long_is_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """NATS was away meanwhile: the group gives it to another member, who has it twice else."""
    doubts = Doubts(monkeypatch)
    doubts.arrive(1)
    now = natstime.now()
    monkeypatch.setattr(natstime, "now", lambda: now + 16)
    doubts.arrive(2)
    doubts.out.clear()
    await doubts.jobs.pop()
    assert doubts.taken == [2]
    assert not any(doubts.reply(1, 2) in line for line in doubts.out)


async def test_what_waits_when_a_member_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    doubts = Doubts(monkeypatch)
    handlers: dict[bytes, object] = {}
    doubts.client.broker.link.handlers = handlers
    doubts.arrive(1)
    doubts.arrive(2)

    def ends(number: int) -> None:
        doubts.member.end(all_=True)

    doubts.owner = ends
    await doubts.jobs.pop()
    assert doubts.taken == []
    for number in (1, 2):
        assert b"PUB %b 4\r\n-NAK\r\n" % doubts.reply(number, 2) in doubts.out


@pytest.mark.parametrize("seconds", [1, 16], ids=["in time", "too late"])
async def test_a_message_becomes_a_members_that_has_left(monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Nobody has sent it: the next connection is told, or where that would find it void, the group."""
    out: list[bytes] = []
    told: list[tuple[str, int]] = []
    work: list[Any] = []
    deleted: list[int] = []
    broker: Any = SimpleNamespace(
        settings=SimpleNamespace(max_topic_levels=128),
        shared=None,
        link=SimpleNamespace(out=out, kick=lambda: None),
        inbox=Inbox(),
        store=SimpleNamespace(call=lambda target, body, operation: operation.stored(b"")),
        belated=SimpleNamespace(tell=lambda *what: told.append(what)),
        spawn=lambda coroutine, name: work.append(coroutine),
        clients={},
    )
    client: Any = SimpleNamespace(broker=broker, version=5, client_id="client", alive=False, durable_side=None)
    client.hash = name_hash("client")

    async def found(*_: object) -> object:
        return SimpleNamespace(time_ns=natstime.now() * 1e9)

    async def delete(_inbox: object, _stream: str, record: int) -> None:
        deleted.append(record)

    monkeypatch.setattr(membership, "get_sequence", found)
    monkeypatch.setattr(membership, "delete", delete)
    operation = AssignOp(Membership(cast(Client, client), TEXT, WANTED), cast(Any, None), 5, 7, b"reply")
    operation.arrived -= int(seconds * 1e9)
    operation.stored(b'{"stream":"$MQTT_shared","seq":11}')
    for one in work:
        await one
    if seconds < 15:
        assert (told, deleted, out) == ([("client", 11)], [], [])
    else:
        assert (told, deleted, out) == ([], [11], [b"PUB reply 4\r\n-NAK\r\n"])


@pytest.mark.parametrize(
    ("delivered", "seconds", "expected"),
    [(1, 5.0, 7.0), (2, 5.0, 0.0), (1, -1.0, 0.0)],
    ids=["once", "before", "before an election"],
)
def test_what_another_member_may_have_too(delivered: int, seconds: float, expected: float) -> None:
    """Its assignment stays for as long as the other member may claim the message."""
    elected = natstime.elapsed()
    broker: Any = SimpleNamespace(nats=SimpleNamespace(linked=elected), clock=SimpleNamespace(now=7.0))
    arrived = int((natstime.converted(elected) + seconds) * 1e9)
    assert confirmed_at(broker, Doubts.reply(5, delivered), arrived) == expected
    assert confirmed_at(broker, b"unknown", arrived) == 0.0


@pytest.mark.parametrize("same", [True, False], ids=["the same store", "another one"])
async def test_what_was_refused_because_it_was_stored_before_is_a_members_too(same: bool) -> None:
    """It was sent again since NATS was lost, and the member has left meanwhile.

    An earlier connection of the client may have had the message under the same identifier, whole.
    """
    told: list[tuple[str, int]] = []
    work: list[Any] = []

    async def owner(*_: object) -> Owner:
        return Owner(name_hash("client"), 7, 11, operation.arrived if same else operation.arrived - 1)

    out: list[bytes] = []
    broker: Any = SimpleNamespace(
        settings=SimpleNamespace(max_topic_levels=128),
        shared=None,
        link=SimpleNamespace(out=out, kick=lambda: None),
        inbox=Inbox(),
        groups=SimpleNamespace(owner=owner),
        store=SimpleNamespace(call=lambda target, body, operation: operation.stored(b"")),
        belated=SimpleNamespace(tell=lambda *what: told.append(what)),
        spawn=lambda coroutine, name: work.append(coroutine),
    )
    client: Any = SimpleNamespace(broker=broker, version=5, client_id="client", hash=name_hash("client"), alive=False)
    client.durable_side = None
    message: Any = SimpleNamespace(stamp=b"1")
    operation = AssignOp(Membership(cast(Client, client), TEXT, WANTED), message, 5, 7, b"reply")
    operation.failed(ApiError(400, TAKEN[0], "wrong last sequence"))
    for one in work:
        await one
    assert (told, out) == (([("client", 11)], []) if same else ([], [b"PUB reply 0\r\n\r\n"]))
