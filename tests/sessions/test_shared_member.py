# SPDX-License-Identifier: Apache-2.0
"""A member of a shared subscription whose session moves while it joins."""

from collections.abc import Callable
from typing import cast

import pytest

from mqtt_nats.backbone import retry
from mqtt_nats.backbone.pending_stores import STALE
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.messages.message import Stored
from mqtt_nats.protocol.transient_sender import TransientSender
from mqtt_nats.sessions.groups import member as membership
from mqtt_nats.sessions.groups.member import AssignOp, Membership
from mqtt_nats.sessions.groups.ownership import confirmed_at, room_of
from mqtt_nats.sessions.groups.subscribe import LateAssignments
from mqtt_streams.api import ApiError, RequestTimeout
from mqtt_streams.hashing import name_hash
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import (
    V5,
    ForeignRecord,
    NewerRecord,
    PoisonedRecord,
    SessionRecord,
    SessionStore,
    SharedSubscription,
)
from mqtt_streams.shared import CONSUMER_PREFIX, TAKEN, Owner, SharedStore, members_subject
from mqtt_streams.stored import StoredMessage
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeClient, FakeServices, as_client, as_services

TEXT = "$share/group/topic"
WANTED = SharedSubscription(1, False, None, 1)
STORED = Stored("topic", b"\0\5topic", b"", 2, 5, stamp=b"1")


class Sessions:
    """Has one record, or none that can be read."""

    def __init__(self, record: SessionRecord | None, sequence: int = 3, failure: Exception | None = None) -> None:
        self.record = record
        self.sequence = sequence
        self.failure = failure

    async def load(self, *_: object) -> tuple[SessionRecord, int] | None:
        if self.failure is not None:
            raise self.failure
        return None if self.record is None else (self.record, self.sequence)


def record(nonce: str, shared: bool) -> SessionRecord:
    return SessionRecord("client", v5=V5(nonce=nonce, shared={TEXT: WANTED} if shared else {}))


CASES: dict[str, tuple[Sessions, bool, bool]] = {
    "its own": (Sessions(record("mine", True), 2), True, True),
    "its own, written and not yet confirmed": (Sessions(record("mine", True)), True, True),
    "its own, being written": (Sessions(record("before", True), 2), True, True),
    "continued by another connection": (Sessions(record("other", True)), False, True),
    "begun anew by another connection": (Sessions(record("other", False)), False, False),
    "ended": (Sessions(None), False, False),
    "of nats-server's listener": (Sessions(SessionRecord("client")), False, False),
    "cannot be read": (Sessions(None, failure=PoisonedRecord("no JSON")), False, False),
    "of a newer gateway": (Sessions(None, failure=NewerRecord("version 99")), False, True),
    "of another client with the same hash": (Sessions(None, failure=ForeignRecord("not its own")), False, True),
}
"""The session record; whether the member takes part, and whether its registration stays."""


@pytest.mark.sources
@pytest.mark.parametrize("case", CASES)
async def test_joining(case: str) -> None:
    """A registration that is left behind would keep the group's consumer for ever."""
    sessions, begun, stays = CASES[case]
    client = FakeClient(FakeServices())
    client.services.streams.sessions = cast(SessionStore, sessions)
    client.record, client.epoch = record("mine", True), 2
    member = Membership(as_client(client), TEXT, WANTED)
    await member.enter()
    assert bool(member.inbox) is begun
    inbox = client.services.fake_inbox
    assert inbox.subjects("$MQTT_shared") == ([members_subject(member.group, client.hash)] if stays else [])
    assert list(inbox.consumers[MESSAGES]) == ([CONSUMER_PREFIX + member.group] if stays else [])


@pytest.mark.parametrize("standing", [False, True])
async def test_what_comes_while_the_gateway_finds_out_what_it_has_missed(
    standing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been given to another member meanwhile: it goes back."""
    taken: list[int] = []
    client = FakeClient(FakeServices())
    client.services.nats.standing = standing
    client.regular_side = FakeRoom(1)
    member = Membership(as_client(client), TEXT, WANTED)
    member.inbox = b"1"
    monkeypatch.setattr(Membership, "send_or_assign", lambda self, message, number, *args: taken.append(number))
    reply = b"$JS.ACK.$MQTT_msgs.share_x.1.5.5.1700000000000000000.0"
    member._arrived(b"$MQTT.msgs.topic", reply, b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n", b"x")
    assert taken == ([] if standing else [5])
    assert (b"PUB %b 4\r\n-NAK\r\n" % reply in client.services.fake_link.out) is standing


def test_an_address_is_never_that_of_another_member_before() -> None:
    """What a member asked for before it left would arrive at a client that may be allowed something else."""
    client = FakeClient(FakeServices())
    addresses = [Membership(as_client(client), TEXT, WANTED).address for _ in range(100)]
    assert len(set(addresses)) == 100


@stands_for(TransientSender)
class FakeRoom:
    """Stands for `TransientSender`, or for the machine of a durable session: how many messages it takes."""

    def __init__(self, room: int) -> None:
        self.room = room


@stands_for(DurableDelivery)
class FakeMachineSide:
    """Stands for `DurableDelivery`: its machine."""

    def __init__(self, machine: FakeRoom) -> None:
        self.machine = machine


@stands_for(LateAssignments)
class FakeLate:
    """Stands for `LateAssignments`: what other gateways are told."""

    def __init__(self) -> None:
        self.fake_told: list[tuple[str, int]] = []

    def tell(self, name: str, record: int) -> None:
        self.fake_told.append((name, record))


class Left:
    """A client that has left while a message was being assigned to it; every acknowledgement is confirmed at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Callable[[int], object] = lambda number: None) -> None:
        self.client = FakeClient(FakeServices())
        self.client.alive = False
        services = self.client.services
        self.late = services.late_assignments = FakeLate()
        self.owners = FakeOwners(owner)
        services.streams.groups = cast(SharedStore, self.owners)
        monkeypatch.setattr(services.fake_store, "call", lambda target, body, operation: operation.stored(b""))
        self.out = services.fake_link.out
        self.member = Membership(as_client(self.client), TEXT, WANTED)


@stands_for(SharedStore)
class FakeOwners:
    """Stands for `SharedStore`: whose a message is."""

    def __init__(self, owner: Callable[[int], object]) -> None:
        self._owner = owner
        self.fake_under_way = 0
        """Number of questions before none is on its way."""
        self.fake_void: list[int] = []

    async def decide(self, _client: str, _group: str, _number: int) -> None:
        if self.fake_under_way:
            self.fake_under_way -= 1
            raise RequestTimeout("an assignment is on its way")

    async def remove_void(self, _client: str, _group: str, number: int) -> None:
        self.fake_void.append(number)

    async def owner(self, _group: str, number: int, _stamp: int) -> object:
        return self._owner(number)


class Doubts:
    """A regular session's member that is given QoS 2 messages which may be somebody's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = FakeClient(FakeServices())
        self.out = self.client.services.fake_link.out
        self.jobs = self.client.fake_jobs
        self.taken: list[int] = []
        self.owner: Callable[[int], object] = lambda number: None
        self.regular = self.client.regular_side = FakeRoom(20)
        self.member = Membership(as_client(self.client), TEXT, SharedSubscription(2, False, None, 1))
        self.member.inbox = b"1"
        self.client.shares = {TEXT: self.member}
        monkeypatch.setattr(Membership, "send_or_assign", self._take)
        owners = FakeOwners(lambda number: self.owner(number))
        self.client.services.streams.groups = cast(SharedStore, owners)

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
    assert (room_of(as_client(doubts.client)), doubts.taken, len(doubts.jobs)) == (16, [], 1)
    doubts.owner = {2: "somebody"}.get
    await doubts.jobs.pop()
    assert (doubts.taken, room_of(as_client(doubts.client))) == ([1, 3, 4], 17)
    assert b"PUB %b 0\r\n\r\n" % doubts.reply(2, 2) in doubts.out
    doubts.arrive(5, delivered=1)
    assert (doubts.taken[-1], doubts.jobs) == (5, [])


@pytest.mark.parametrize("owner", [None, "somebody"], ids=["nobody's", "somebody's"])
async def test_what_a_durable_session_may_have(monkeypatch: pytest.MonkeyPatch, owner: str | None) -> None:
    """A durable session's member looks for it where a message was delivered before; else the store of its own tells."""
    doubts = Doubts(monkeypatch)
    doubts.client.durable_side = FakeMachineSide(doubts.regular)
    doubts.owner = lambda number: owner
    doubts.client.services.nats.linked = natstime.elapsed() + 3600
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
    doubts.arrive(1)
    doubts.arrive(2)

    def ends(number: int) -> None:
        doubts.member.leave_group(all_=True)

    doubts.owner = ends
    await doubts.jobs.pop()
    assert doubts.taken == []
    for number in (1, 2):
        assert b"PUB %b 4\r\n-NAK\r\n" % doubts.reply(number, 2) in doubts.out


@pytest.mark.parametrize("seconds", [1, 16], ids=["in time", "too late"])
async def test_a_message_becomes_a_members_that_has_left(monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Nobody has sent it: the next connection is told, or where that would find it void, the group."""
    deleted: list[int] = []
    left = Left(monkeypatch)

    async def found(*_: object) -> object:
        return StoredMessage("$MQTT.shared", 11, int(natstime.now() * 1e9), b"", b"")

    async def delete(_inbox: object, _stream: str, record: int) -> None:
        deleted.append(record)

    monkeypatch.setattr(membership, "get_sequence", found)
    monkeypatch.setattr(membership, "delete", delete)
    operation = AssignOp(left.member, STORED, 5, 7, b"reply")
    operation.arrived -= int(seconds * 1e9)
    operation.stored(b'{"stream":"$MQTT_shared","seq":11}')
    await left.client.services.tasks.fake_settle()
    if seconds < 15:
        assert (left.late.fake_told, deleted, left.out) == ([("client", 11)], [], [])
    else:
        assert (left.late.fake_told, deleted, left.out) == ([], [11], [b"PUB reply 4\r\n-NAK\r\n"])


@pytest.mark.parametrize(
    ("delivered", "seconds", "expected"),
    [(1, 5.0, 7.0), (2, 5.0, 0.0), (1, -1.0, 0.0)],
    ids=["once", "before", "before an election"],
)
def test_what_another_member_may_have_too(delivered: int, seconds: float, expected: float) -> None:
    """Its assignment stays for as long as the other member may claim the message."""
    elected = natstime.elapsed()
    fake = FakeServices()
    fake.nats.linked, fake.clock.now = elected, 7.0
    services = as_services(fake)
    arrived = int((natstime.converted(elected) + seconds) * 1e9)
    assert confirmed_at(services, Doubts.reply(5, delivered), arrived) == expected
    assert confirmed_at(services, b"unknown", arrived) == 0.0


@pytest.mark.parametrize("same", [True, False], ids=["the same store", "another one"])
async def test_what_was_refused_because_it_was_stored_before_is_a_members_too(
    monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """It was sent again since NATS was lost, and the member has left meanwhile.

    An earlier connection of the client may have had the message under the same identifier, whole.
    """

    def owner(number: int) -> Owner:
        return Owner(name_hash("client"), 7, 11, operation.arrived if same else operation.arrived - 1)

    left = Left(monkeypatch, owner)
    operation = AssignOp(left.member, STORED, 5, 7, b"reply")
    operation.failed(ApiError(400, TAKEN[0], "wrong last sequence"))
    await left.client.services.tasks.fake_settle()
    assert (left.late.fake_told, left.out) == (([("client", 11)], []) if same else ([], [b"PUB reply 0\r\n\r\n"]))


REFUSED = ApiError(400, TAKEN[1], "wrong last sequence")
"""JetStream's answer while another store is on its way."""


@pytest.mark.parametrize("alive", [True, False], ids=["connected", "gone"])
@pytest.mark.parametrize("error", [REFUSED, STALE], ids=["refused", "late"])
async def test_an_assignment_whose_earlier_attempt_may_be_stored_yet(
    monkeypatch: pytest.MonkeyPatch, error: ApiError, alive: bool
) -> None:
    """The group does not get the message back before that is known: another member would find it assigned."""
    monkeypatch.setattr(retry, "RETRY_PAUSE_S", 0.0)

    def owner(number: int) -> Owner | None:
        stored = not left.owners.fake_under_way
        return Owner(name_hash("client"), 7, 11, operation.arrived) if stored else None

    left = Left(monkeypatch, owner)
    left.client.alive = alive
    operation = AssignOp(left.member, STORED, 5, 7, b"reply")
    operation.arrived -= 16 * 10**9 if error is STALE else 0
    left.owners.fake_under_way = 3
    operation.failed(error)
    await left.client.services.tasks.fake_settle()
    assert (left.late.fake_told, left.out, left.owners.fake_under_way) == ([("client", 11)], [], 0)
    assert not left.client.services.fake_store.fake_put


@pytest.mark.parametrize("alive", [True, False], ids=["connected", "gone"])
@pytest.mark.parametrize("error", [REFUSED, STALE], ids=["refused", "late"])
async def test_an_assignment_whose_earlier_attempt_was_lost(
    monkeypatch: pytest.MonkeyPatch, error: ApiError, alive: bool
) -> None:
    """It is made again while it is in time and the client is there; else the group gets the message back."""
    monkeypatch.setattr(retry, "RETRY_PAUSE_S", 0.0)
    left = Left(monkeypatch)
    left.client.alive = alive
    left.owners.fake_under_way = 1
    operation = AssignOp(left.member, STORED, 5, 7, b"reply")
    operation.arrived -= 16 * 10**9 if error is STALE else 0
    operation.failed(error)
    await left.client.services.tasks.fake_settle()
    puts = [one[3] for one in left.client.services.fake_store.fake_put]
    if alive and error is REFUSED:
        assert (puts, left.out, left.owners.fake_void) == ([operation], [], [])
    else:
        assert (puts, left.out, left.owners.fake_void) == ([], [b"PUB reply 4\r\n-NAK\r\n"], [5])
