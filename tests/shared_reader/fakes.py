# SPDX-License-Identifier: Apache-2.0
"""What the modules of the shared reader use of a gateway and of each other."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

from mqtt_nats.config.settings import Settings
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.states import DeliveryEvent
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.sessions.services import Services
from mqtt_nats.shared_reader.catch_up import CatchUpReader
from mqtt_nats.shared_reader.catch_up_places import CatchUpPlaces
from mqtt_nats.shared_reader.index import ServedFilters
from mqtt_nats.shared_reader.reader import SharedReader
from mqtt_nats.shared_reader.reader_session import ReaderHandover, ReaderSession
from mqtt_nats.shared_reader.sessions import SharedReaderSessions
from mqtt_nats.transport.turns import TimingWheel
from mqtt_streams.messages import PREFIX, subscription_consumer
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeClient, FakeServices, FakeSettings, FakeSide, as_client, as_side

if TYPE_CHECKING:
    from mqtt_nats.delivery.position_writer import PositionWriter
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.messages.message import Stored


@stands_for(Settings)
class FakeReaderSettings(FakeSettings):
    """Stands for `Settings`: which sessions have consumers."""

    def __init__(self, session_positions: str = "consumers") -> None:
        self.session_positions = session_positions
        self.session_consumers: int | None = None
        self.max_backlog: int | None = None


@stands_for(Services)
class FakeReaderServices(FakeServices):
    """Stands for `Services`, connected to NATS."""

    def __init__(self, session_positions: str = "consumers") -> None:
        super().__init__()
        self.settings = FakeReaderSettings(session_positions)


@stands_for(SharedReader)
class FakeReader:
    """Stands for `SharedReader`, which is at a position."""

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.wanted: Counter[str] = Counter()
        self.fake_asked = 0

    async def ready(self) -> int:
        self.fake_asked += 1
        return self.position


@stands_for(DurableDelivery)
class FakeReaderSide(FakeSide):
    """Stands for `DurableDelivery`, with a position."""

    def __init__(self, client: FakeClient) -> None:
        super().__init__(client)
        self.position_writer: PositionWriter | None = None
        self.fake_shared: list[tuple[bytes, int]] = []

    def send_shared(self, message: Stored, qos: int) -> None:
        self.fake_shared.append((message.payload, qos))


@stands_for(SharedReaderSessions)
class FakeSessions:
    """Stands for `SharedReaderSessions`: notes what is given to whom."""

    def __init__(self, services: FakeReaderServices, position: int = 0) -> None:
        self.services, self.registry = services, services.registry
        self.reader = FakeReader(position)
        self.interest = ServedFilters(self.reader.wanted)
        self.listener = False
        self.queue_most = 4096
        self.catching: dict[DurableDelivery, CatchUpReader] = {}
        self.places = CatchUpPlaces(cast("Services", services), self.catching.values())
        self.slow: set[CatchUpReader] = set()
        self.members: dict[Receiver, ReaderSession] = {}
        self.renewals: TimingWheel[Receiver] = TimingWheel()
        self.fake_refuses = False
        self.fake_given: list[int] = []
        self.fake_through: list[int] = []
        self.fake_failed: list[int] = []
        self.fake_behind: list[FakeClient] = []
        self.fake_fails: set[FakeClient] = set()
        self.fake_ended = 0
        self.fake_caught_up: list[tuple[ReaderHandover, int]] = []

    def give(self, member: ReaderSession, sequence: int, message: Stored, mark: bytes) -> None:
        if self.fake_refuses:
            raise ValueError("on purpose")
        self.fake_given.append(sequence)

    def put_through(
        self,
        member: ReaderSession,
        sequence: int,
        message: Stored,
        mark: bytes,
        sources: set[SubscriptionState] | None = None,
    ) -> None:
        self.fake_through.append(sequence)

    def failed(self, member: ReaderSession, sequence: int, qos: int, error: Exception) -> None:
        self.fake_failed.append(sequence)

    def fall_behind(self, member: ReaderSession) -> None:
        client = cast("FakeClient", member.client)
        self._fail(client)
        self.fake_behind.append(client)

    def _fail(self, client: FakeClient) -> None:
        if client in self.fake_fails:
            raise ValueError("on purpose")

    def reached(self, side: FakeSide) -> int:
        return self.reader.position

    def catch_up(self, member: ReaderSession, position: int, *, missed: bool = True) -> CatchUpReader:
        member.side.change(DeliveryEvent.FAR_BEHIND)
        reader = CatchUpReader(as_sessions(self), member, position, missed=missed)
        self.catching[member.side] = reader
        return reader

    def end_catching(self, side: DurableDelivery) -> None:
        self.fake_ended += 1
        if self.catching.pop(side, None) is not None:
            side.change(DeliveryEvent.CATCH_UP_ENDED)

    def remove(self, client: FakeClient) -> None:
        for member in self.members.values():
            self.interest.remove(member)

    def caught_up(self, member: ReaderSession, handover: ReaderHandover, position: int) -> None:
        member.end_handover()
        self.fake_caught_up.append((handover, position))


def as_sessions(fake: FakeSessions) -> SharedReaderSessions:
    """The fake, for what wants `SharedReaderSessions`."""
    return cast("SharedReaderSessions", fake)


def live_binding(subject: str, *, end: int | None = None, whole: bool = False) -> ConsumerBinding:
    """A subscription of a session without consumers, whose messages the shared reader brings."""
    consumer = subscription_consumer("hash", subject, name_nuid="n", deliver_nuid="d", max_ack_pending=10, start_seq=1)
    assert consumer.filter_subject == PREFIX + subject
    source = SubscriptionState(1, 1, end=end, whole=whole)
    binding = ConsumerBinding(subject, consumer, source)
    binding.begin_after(0, removed=True)
    source.drop_reason(SubscriptionState.RETURNING)
    return binding


def member_of(services: FakeServices, client_id: str, *subjects: str) -> ReaderSession:
    """A session with live subscriptions of these subjects."""
    client = FakeClient(services, client_id)
    side = client.durable_side = FakeReaderSide(client)
    side.bindings = {subject: live_binding(subject) for subject in subjects}
    side.machine.sources += [one.source for one in side.bindings.values()]
    side.machine.start()
    return ReaderSession(as_client(client), as_side(side))
