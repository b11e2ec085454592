# SPDX-License-Identifier: Apache-2.0
"""Durable sessions that the shared reader serves: when a session may become one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.delivery.receiver import Receiver
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.position import SessionPosition
from mqtt_nats.sessions import message_stream
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.sessions.message_stream import StreamHead
from mqtt_nats.sessions.record import claimed
from mqtt_nats.sessions.services import Registry
from mqtt_nats.shared_reader import new_subscriptions
from mqtt_nats.shared_reader import sessions as live_sessions
from mqtt_nats.shared_reader.catch_up import CatchUpReader
from mqtt_nats.shared_reader.consumer_choice import ConsumerChoice
from mqtt_nats.shared_reader.promotion import Promotion, PromotionLimit, ReaderSession, consumers_behind
from mqtt_nats.shared_reader.sessions import SharedReaderSessions
from mqtt_nats.transport.turns import TimingWheel
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.stored import StoredMessage
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeClient, FakeInbox, FakeServices, as_client, as_inbox
from tests.shared_reader.fakes import FakeReader, FakeReaderServices, member_of

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings


class Head(StreamHead):
    """The head of a stream with one replica, unless a test says otherwise."""

    def __init__(self) -> None:
        super().__init__(as_inbox(FakeInbox()))
        self.replicated = False


@pytest.mark.parametrize(("following", "passed"), [(7, False), (10, False), (11, True), (None, True)])
async def test_a_consumer_on_a_server_that_lags(
    monkeypatch: pytest.MonkeyPatch, following: int | None, passed: bool
) -> None:
    """That it has nothing left is what the leader of the stream says, and not its own server, which has not all yet."""
    head = Head()
    asked: list[tuple[str, int]] = []

    async def get_next(_: object, stream: str, subject: str, start: int) -> StoredMessage | None:
        asked.append((subject, start))
        return None if following is None else StoredMessage(subject, following, 0, b"", b"")

    monkeypatch.setattr(message_stream, "get_next", get_next)
    source = SubscriptionState(1, 3, 100)
    source.last = 6
    consumer = subscription_consumer("hash", "a", name_nuid="n", deliver_nuid="d", max_ack_pending=100, start_seq=3)
    binding = ConsumerBinding("a", consumer, source)
    joining = Promotion([binding], 10)
    assert await consumers_behind(head, joining, [binding]) == ([] if passed else [binding])
    assert asked == [("$MQTT.msgs.a", 7)]
    source.last = 10
    assert not await consumers_behind(head, joining, [binding])
    assert len(asked) == 1


async def test_a_leader_that_does_not_count_all_of_it_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says that nothing is left is asked again when it has decided something."""
    head = Head()
    found = [None, StoredMessage("$MQTT.msgs.a", 7, 0, b"", b"")]
    decided: list[int] = []

    async def get_next(*_: object) -> StoredMessage | None:
        return found.pop(0)

    async def state() -> dict[str, Any]:
        decided.append(len(found))
        return {}

    head.replicated = True
    monkeypatch.setattr(head, "state", state)
    monkeypatch.setattr(message_stream, "get_next", get_next)
    consumer = subscription_consumer("hash", "a", name_nuid="n", deliver_nuid="d", max_ack_pending=100, start_seq=3)
    binding = ConsumerBinding("a", consumer, SubscriptionState(1, 3, 100))
    assert await consumers_behind(head, Promotion([binding], 10), [binding]) == [binding]
    assert (decided, found) == ([1], [])


@stands_for(PositionWriter)
class FakeKeeper:
    """Stands for `PositionWriter`: a position that is not written."""

    def __init__(self) -> None:
        self.ledger = SessionPosition()


@stands_for(CatchUpReader)
class FakeCatchUpReader:
    """Stands for `CatchUpReader`: nothing was missed."""

    def begin(self) -> None:
        """Read nothing."""


@stands_for(SharedReaderSessions)
class Room:
    """Stands for `SharedReaderSessions`: whether sessions may go on without consumers."""

    def __init__(
        self, *, allowed: bool = True, refused: float = 0.0, services: FakeReaderServices | None = None
    ) -> None:
        self.allowed = allowed
        self.services = services or FakeReaderServices()
        self.choice = ConsumerChoice(cast("Settings", self.services.settings))
        self.reader = FakeReader()
        self.reader.refused = refused
        self.members: dict[object, ReaderSession] = {}
        self.registry: Registry[Any] = Registry()
        self.renewals: TimingWheel[Any] = TimingWheel()

    def _settle_consumers(self, client: object, side: object, *, in_records: bool) -> None:
        """A job, which `FakeClient.do` notes."""

    def catch_up(self, member: ReaderSession, position: int, *, missed: bool) -> FakeCatchUpReader:
        return FakeCatchUpReader()

    def admit(self) -> bool:
        return SharedReaderSessions.admit(cast("SharedReaderSessions", self))

    def wants_records(self, client: Receiver) -> bool:
        return SharedReaderSessions.wants_records(cast("SharedReaderSessions", self), client)

    def _member(self, client: object) -> ReaderSession:
        return self.members[client]


@stands_for(SharedReaderSessions)
class JoiningRoom(Room):
    """Stands for `SharedReaderSessions`, in which each session may become live; notes those that begin to."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = PromotionLimit(lambda _: None)
        self.fake_joined: list[ReaderSession] = []

    def _may_join(self, client: object, side: object) -> bool:
        return True

    def _join(self, member: ReaderSession) -> None:
        self.fake_joined.append(member)


@pytest.mark.sources
@pytest.mark.parametrize(
    ("allowed", "refused", "admitted"), [(True, 0.0, True), (False, 0.0, False), (True, 1.0, False)]
)
def test_which_sessions_go_on_without_consumers(allowed: bool, refused: float, admitted: bool) -> None:
    """While the shared reader may be used, and JetStream takes it."""
    room = cast("SharedReaderSessions", Room(allowed=allowed, refused=refused))
    assert SharedReaderSessions.admit(room) is admitted


@pytest.mark.sources
@pytest.mark.parametrize(("allowed", "refused"), [(True, 0.0), (False, 0.0), (True, 1.0)])
@pytest.mark.parametrize(("consumers", "wanted"), [(999, False), (1000, True)])
def test_which_sessions_are_to_have_no_consumers(allowed: bool, refused: float, consumers: int, wanted: bool) -> None:
    """By the number of consumers, while all who serve sessions know such ones, and JetStream takes the reader."""
    services = FakeReaderServices(session_positions="auto")
    services.stream.count_consumers(consumers)
    room = cast("SharedReaderSessions", Room(allowed=allowed, refused=refused, services=services))
    client = as_client(FakeClient(services))
    assert SharedReaderSessions.wants_records(room, client) is (allowed and not refused and wanted)


@pytest.mark.sources
def test_a_session_that_left_while_it_subscribed_becomes_live_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its catch-up reader had not begun, and has left messages to keep back."""
    monkeypatch.setattr(live_sessions, "settled", lambda _: True)
    member = member_of(FakeServices(), "c", "a")
    member.begin_joining(Promotion([], 10))
    room = JoiningRoom()
    room.members[member.client] = member
    monkeypatch.setattr(member.client, "do", lambda _: None)
    SharedReaderSessions.begin(cast("SharedReaderSessions", room), member.client, member.side, 1.0)
    assert (room.fake_joined, member.joining) == ([member], None)


@pytest.mark.sources
@pytest.mark.parametrize("lost", [False, True])
def test_new_messages_wait_when_nats_was_lost_during_a_resume(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """A session without consumers may have moved meanwhile: the check after the reconnect lets its messages go."""
    monkeypatch.setattr(new_subscriptions, "limit_in_flight", lambda _: None)
    room = Room()
    member = member_of(FakeServices(), "c", "a")
    monkeypatch.setattr(member.side, "position_writer", FakeKeeper())
    room.members[member.client] = member
    # A former reader was ended, as its client did not read, while it waited for the shared reader's filters.
    member.begin_joining(Promotion([], 5))
    (binding,) = member.side.bindings.values()
    binding.go_on(10)
    if lost:
        room.registry.unchecked.add(member.client)
    SharedReaderSessions.go_on(cast("SharedReaderSessions", room), member.client, member.side)
    assert member.side.live
    assert member.joining is None, "the former reader would end the handover of the new one"
    assert bool(binding.source.held) is lost


@pytest.mark.sources
@pytest.mark.parametrize(("qos", "present", "attached"), [(2, False, 1), (2, True, 0), (1, False, 0)])
async def test_with_its_consumers_a_session_keeps_that_of_its_pubrels(
    monkeypatch: pytest.MonkeyPatch, qos: int, present: bool, attached: int
) -> None:
    found: list[object] = []

    async def attach(side: object) -> None:
        found.append(side)

    async def done(*_: object) -> None:
        """JetStream has all of it."""

    monkeypatch.setattr(live_sessions, "attach_pubrels", attach)
    for name in ("check_dormant", "write_changed_record"):
        monkeypatch.setattr(live_sessions, name, done)
    member = member_of(FakeServices(), "c", "a")
    record, _ = claimed(member.client.record)
    record.subs = {"a": qos}
    if present:
        member.side.listen_for_pubrels(b"pubrels")
    room = cast("SharedReaderSessions", Room())
    await SharedReaderSessions._keep_consumers(room, member.client, member.side)
    assert found == [member.side] * attached
