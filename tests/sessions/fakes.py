# SPDX-License-Identifier: Apache-2.0
"""A client and what it shares with others, as far as the modules of sessions use them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from math import inf
from typing import TYPE_CHECKING, Any, cast

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.backbone.connect import NatsLinks
from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.base.tasks import Tasks
from mqtt_nats.client.client import Client
from mqtt_nats.codec import MqttError
from mqtt_nats.config.settings import Settings
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.states import DeliveryEvent, StatefulDelivery
from mqtt_nats.messages.identity import Identity
from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.pubsub.data_path import Path, Recent
from mqtt_nats.pubsub.interest_propagation import Nodes
from mqtt_nats.pubsub.routing_table import Table
from mqtt_nats.sessions.message_stream import StreamHead, StreamIdentity
from mqtt_nats.sessions.quotas import Quotas
from mqtt_nats.sessions.services import Registry, Services
from mqtt_nats.sessions.session import Session
from mqtt_nats.sessions.takeover import RecordReads
from mqtt_nats.transport.connection import Connection
from mqtt_nats.transport.connection import Handler as ClientHandler
from mqtt_nats.transport.turns import Clock
from mqtt_nats.transport.write_buffer import FlushRound, WriteBuffer
from mqtt_streams.api import ApiError
from mqtt_streams.consumers import ConsumerInfo, ConsumerRef
from mqtt_streams.hashing import name_hash, registered_as
from mqtt_streams.sessions import V5, SessionRecord
from mqtt_streams.stores import Streams
from tests.harness.doubles import stands_for
from tests.harness.jetstream import MemoryJetStream
from tests.protocol.recorder import Recorder

if TYPE_CHECKING:
    from mqtt_nats.backbone.pending_stores import PendingStore
    from mqtt_nats.codec import Packet
    from mqtt_nats.messages.message import Message
    from mqtt_nats.pubsub.backlog import Gate
    from mqtt_nats.pubsub.routing_table import Choice, Filter
    from mqtt_nats.sessions.groups.ended_shares import EndedShares

Handler = Callable[[bytes, bytes, bytes, bytes], None]


@stands_for(NatsConnection)
class FakeLink:
    """Stands for `NatsConnection`: keeps frames and handlers."""

    max_payload = 1024 * 1024
    heard = inf

    def __init__(self) -> None:
        self.online = True
        self.server: dict[str, Any] = {}
        self.wire: object | None = object()
        self.out: list[bytes] = []
        self.handlers: dict[bytes, Handler] = {}
        self.fake_subjects: dict[bytes, bytes] = {}
        self.fake_renewed: list[tuple[bytes, bytes]] = []
        self.fake_unsubscribed: list[bytes] = []
        self.fake_wired: list[Callable[[bool], None]] = []

    def call_on_wire(self, changed: Callable[[bool], None]) -> None:
        self.fake_wired.append(changed)

    def kick(self) -> None:
        """Nothing is sent."""

    def subscribe_raw(self, subject: bytes, handler: Handler, queue: bytes = b"") -> bytes:
        sid = b"%d" % (len(self.fake_subjects) + 1)
        self.fake_subjects[sid] = subject
        self.handlers[sid] = handler
        return sid

    def unsubscribe_raw(self, sid: bytes) -> None:
        self.handlers.pop(sid, None)
        self.fake_unsubscribed.append(sid)

    def unsubscribe_later(self, sid: bytes) -> None:
        """Messages on their way still reach the handler."""

    def renew(self, sid: bytes, subject: bytes) -> None:
        self.fake_renewed.append((sid, subject))

    def fake_bring(self, subject: bytes, payload: bytes = b"", headers: bytes = b"", reply: bytes = b"") -> None:
        """Bring a message to everybody who has subscribed exactly this subject."""
        for sid, one in list(self.fake_subjects.items()):
            if one == subject and sid in self.handlers:
                self.handlers[sid](subject, reply, headers, payload)


@stands_for(AckedPublisher)
class FakeStore:
    """Stands for `AckedPublisher`: keeps what is to be stored."""

    max_payload = 1024 * 1024

    def __init__(self) -> None:
        self.fake_error: Exception | None = None
        self.fake_put: list[tuple[bytes, bytes, bytes, PendingStore]] = []
        self.fake_called: list[tuple[bytes, bytes, PendingStore]] = []
        self.fake_answers = False
        self.count = 0
        self.fake_oldest = 0

    def oldest_message(self) -> int:
        return self.fake_oldest

    def put(self, target: bytes, headers: bytes, payload: bytes, operation: PendingStore) -> None:
        if self.fake_error is not None:
            raise self.fake_error
        self.fake_put.append((target, headers, payload, operation))

    def call(self, subject: bytes, payload: bytes, operation: PendingStore) -> None:
        self.fake_called.append((subject, payload, operation))
        if self.fake_answers:
            operation.stored(b"")

    def excuse(self, seconds: float) -> None:
        """Nothing is late."""

    def online(self) -> None:
        """Nothing waits to be sent again."""


@stands_for(Quotas)
class FakeQuotas:
    """Stands for `Quotas`: notes written records."""

    def __init__(self) -> None:
        self.fake_written: list[SessionRecord] = []

    def store_note(self, record: SessionRecord) -> None:
        self.fake_written.append(record)

    def give_back(self, claim: object) -> None:
        """No claim has a place."""

    def settle(self, claim: object, record: SessionRecord) -> None:
        """No claim has a place."""


@stands_for(RequestInbox)
class FakeInbox(MemoryJetStream):
    """Stands for `RequestInbox`: JetStream in memory, and addresses for answers."""

    prefix = b"$MQTT.inbox.gateway."

    def __init__(self) -> None:
        super().__init__()
        self._tokens = 0

    def renew(self) -> None:
        """Answers go on coming."""

    def token(self) -> bytes:
        self._tokens += 1
        return b"%d" % self._tokens


@stands_for(WriteBuffer)
class FakeOutlet:
    """Stands for `WriteBuffer`: the socket takes everything."""

    clogged = False

    def __init__(self) -> None:
        self.round = FlushRound(lambda flush: None)


@stands_for(Connection)
class FakeClientConnection:
    """Stands for `Connection`: why it is not read from, and the packets that it is to handle after all."""

    def __init__(self) -> None:
        self.write_buffer = FakeOutlet()
        self.holds = 0
        self.keeps = self.hung_up = False
        self.fake_again: list[tuple[list[Packet], ClientHandler | None, MqttError | None]] = []

    def hold(self, why: int) -> None:
        self.holds |= why

    def release(self, why: int) -> None:
        self.holds &= ~why

    def handle_again(self, packets: list[Packet], way: ClientHandler | None, error: MqttError | None) -> None:
        self.fake_again.append((packets, way, error))

    def inner(self, otherwise: ClientHandler) -> ClientHandler:
        return otherwise


@stands_for(StreamIdentity)
class FakeIdentity:
    """Stands for `StreamIdentity`: a stream with an id, which was not replaced."""

    def __init__(self) -> None:
        self.id = "present"
        self.floor = 0
        self.consumers = 0
        self.replicas = 1
        self.crowded = False
        self.fake_gateways = 0.0
        self.fake_checks = 0
        self.fake_replaced: list[Callable[[], None]] = []

    async def check(self) -> None:
        self.fake_checks += 1

    def call_on_replaced(self, replaced: Callable[[], None]) -> None:
        self.fake_replaced.append(replaced)

    def count_consumers(self, number: int) -> None:
        self.consumers += number

    def share(self, gateways: float) -> None:
        self.fake_gateways = gateways


@stands_for(Nodes)
class FakeNodes:
    """Stands for `Nodes`: every server knows a subscription at once."""

    def __init__(self) -> None:
        self.fake_fences = 0
        self.fake_renewed = 0

    async def fence(self, *links: FakeLink) -> None:
        self.fake_fences += 1

    async def fence_filters(self, filters: Iterable[Filter]) -> None:
        self.fake_fences += 1

    def renew(self, link: FakeLink) -> None:
        self.fake_renewed += 1


@stands_for(DurableDelivery)
class FakeSide(StatefulDelivery):
    """Stands for `DurableDelivery`: the machine, with ports that write down what is asked of them."""

    def __init__(self, client: FakeClient) -> None:
        self.fake_ports = Recorder()
        super().__init__(DurableSender(10, self.fake_ports), 0)
        self.change(DeliveryEvent.OPENED)
        self.client = client
        self.fake_confirmed: list[tuple[bytes, int]] = []

    @property
    def session(self) -> Session:
        return as_client(self.client)

    def ack(self, reply: bytes, identifier: int = 0) -> None:
        self.fake_confirmed.append((reply, identifier))

    def pubrel_arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        self.pubrels_come += 1


@stands_for(FlushRound)
class FakeRound:
    """Stands for `FlushRound`."""

    def start(self) -> None:
        """Nothing is written."""


@stands_for(Clock)
class FakeClock:
    """Stands for `Clock`."""

    now = 0.0


@stands_for(Settings)
class FakeSettings:
    """Stands for `Settings`: limits of filters."""

    max_topic_levels = 128


@stands_for(Tasks)
class FakeTasks:
    """Stands for `Tasks`: what is spawned runs at once, and can be waited for."""

    def __init__(self) -> None:
        self.fake_spawned: list[asyncio.Task[Any]] = []

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.fake_spawned.append(task)
        return task

    spawn_safe = spawn

    async def fake_settle(self) -> None:
        """Wait for everything that was spawned."""
        while self.fake_spawned:
            await self.fake_spawned.pop()


@stands_for(Path)
class FakePath:
    """Stands for `Path`: the connection to NATS, and what goes there."""

    def __init__(self, link: FakeLink, store: FakeStore) -> None:
        self.link, self.store, self.out = link, store, link.out
        self.round: FakeRound | FlushRound = FakeRound()
        self.table = Table(True)
        self.recent = Recent(self.table)


@stands_for(Identity)
class FakeGatewayIdentity:
    """Stands for `Identity`."""

    def __init__(self) -> None:
        self.id = "gateway0"
        self._nuids = 0

    def new_nuid(self) -> str:
        self._nuids += 1
        return f"nuid{self._nuids}"


@stands_for(Services)
class FakeServices:
    """Stands for `Services`, with a JetStream in memory."""

    def __init__(self) -> None:
        self.identity = FakeGatewayIdentity()
        self.fake_inbox = FakeInbox()
        self.fake_link, self.fake_shared, self.fake_store = FakeLink(), FakeLink(), FakeStore()
        link, shared, store = (
            as_link(self.fake_link),
            as_link(self.fake_shared),
            cast("AckedPublisher", self.fake_store),
        )
        self.nats = NatsLinks(link, as_link(FakeLink()), shared, as_inbox(self.fake_inbox), store)
        self.streams = Streams(self.fake_inbox, "")
        self.tasks = FakeTasks()
        self.path = FakePath(self.fake_link, self.fake_store)
        self.registry: Registry[Any] = Registry()
        self.settings = FakeSettings()
        self.clock: FakeClock | Clock = FakeClock()
        self.nodes = FakeNodes()
        self.stream = FakeIdentity()
        self.head = StreamHead(as_inbox(self.fake_inbox))
        self.quotas = FakeQuotas()
        self.late_assignments: Any = None
        self.records = RecordReads(self.nats, self.streams.sessions, as_tasks(self.tasks))
        self.unrecorded: dict[Any, None] = {}
        self.fake_dropped: list[bytes] = []

    def drop_assignment(self, record: bytes, operation: PendingStore) -> None:
        self.fake_dropped.append(record)


@stands_for(Client)
class FakeClient:
    """Stands for `Client`: a connected durable session."""

    def __init__(self, services: FakeServices, client_id: str = "client", v5: V5 | None = None) -> None:
        self.services = services
        self.path = services.path
        self.client_id = client_id
        self.hash = name_hash(client_id)
        self.record: SessionRecord | None = SessionRecord(client_id, v5=v5 or V5())
        self.epoch = 0
        self.alive = True
        self.why: MqttError | None = None
        self.taken = False
        self.durable = True
        self.durable_side: Any = None
        self.regular_side: Any = None
        self.shares: dict[str, Any] | None = None
        self.ended_shares: EndedShares | None = None
        self.filters: dict[Filter, int] = {}
        self.gates: dict[Filter, Gate] | None = None
        self.expiry: int | None = 60
        self.write_buffer = FakeOutlet()
        self.bridge = False
        self.checks_each = False
        self.version = 5
        self.busy = False
        self.fake_ended: list[MqttError | str] = []
        self.fake_jobs: list[Coroutine[Any, Any, None]] = []
        services.registry.clients[registered_as(client_id, self.hash)] = as_client(self)

    @property
    def consumers(self) -> Any:
        return self.durable_side

    @property
    def ending(self) -> bool:
        return self.why is not None or not self.alive

    @property
    def here(self) -> bool:
        return self.alive and self.services.registry.clients.get(registered_as(self.client_id, self.hash)) is self

    def claim(self, epoch: int) -> None:
        self.epoch = epoch

    def make_shares(self) -> dict[str, Any]:
        self.shares = {} if self.shares is None else self.shares
        self.services.registry.sharing.add(self)
        return self.shares

    def keep_ended_shares(self, ended: EndedShares) -> EndedShares:
        self.ended_shares = ended
        return ended

    def close(self) -> None:
        self.fake_ended.append("close")

    def taken_over(self) -> None:
        self.taken, self.alive = True, False
        self.fake_ended.append("taken over")

    def end_connection(self, error: MqttError) -> None:
        self.fake_ended.append(error)
        self.alive = False

    def refused(self, error: ApiError) -> None:
        self.fake_ended.append(str(error))

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        self.fake_jobs.append(work)

    async def connected(self) -> None:
        """NATS is connected."""

    async def idle(self, waiting: Coroutine[Any, Any, object]) -> None:
        await waiting

    async def fake_work(self) -> None:
        """Run the jobs."""
        while self.fake_jobs:
            await self.fake_jobs.pop(0)


def consumer_state(
    consumer: ConsumerRef | None = None,
    *,
    deliver_subject: str = "",
    ack_wait: int = 0,
    num_ack_pending: int = 0,
    num_pending: int = 0,
) -> ConsumerInfo:
    """A consumer's state as JetStream reports it: configured as ``consumer``, unless something else is given."""
    config = {
        "deliver_subject": deliver_subject or (consumer.deliver_subject if consumer is not None else ""),
        "ack_wait": ack_wait or (consumer.ack_wait if consumer is not None else 0),
    }
    return ConsumerInfo(config, True, 0, 0, num_ack_pending, num_pending)


class PlainSession(Session):
    """A session without what the client above it decides."""

    consumers = None

    def begin_regular(self, record: SessionRecord) -> None:
        """Nothing is delivered."""

    def begin_durable(self, record: SessionRecord, former: int, *, continued: bool) -> None:
        """Nothing is delivered."""

    def deliver(self, choice: Choice, message: Message) -> None:
        """Nothing is delivered."""

    def end_connection(self, error: MqttError) -> None:
        """The connection stays."""

    def close(self) -> None:
        """The connection stays."""

    def refused(self, error: ApiError) -> None:
        """The connection stays."""

    def taken_over(self) -> None:
        """The connection stays."""

    def lost(self) -> None:
        """The connection stays."""

    def leave(self) -> None:
        """Nobody knows the client."""

    def proceed(self) -> None:
        """No packet waits."""

    def log_fields(self) -> dict[str, Any]:
        return {}


def as_client(fake: FakeClient) -> Client:
    """The fake, for a function that wants a `Client`."""
    return cast("Client", fake)


def as_services(fake: FakeServices) -> Services:
    """The fake, for a function that wants `Services`."""
    return cast("Services", fake)


def as_tasks(fake: FakeTasks) -> Tasks:
    """The fake, for what wants `Tasks`."""
    return cast("Tasks", fake)


def as_identity(fake: FakeGatewayIdentity) -> Identity:
    """The fake, for what wants an `Identity`."""
    return cast("Identity", fake)


def as_link(fake: FakeLink) -> NatsConnection:
    """The fake, for what wants a `NatsConnection`."""
    return cast("NatsConnection", fake)


def as_inbox(fake: FakeInbox) -> RequestInbox:
    """The fake, for what wants a `RequestInbox`."""
    return cast("RequestInbox", fake)


def as_side(fake: FakeSide) -> DurableDelivery:
    """The fake, for a function that wants a `DurableDelivery`."""
    return cast("DurableDelivery", fake)


def v5_of(client: FakeClient) -> V5:
    """The gateways' part of a client's record."""
    assert client.record is not None
    assert client.record.v5 is not None
    return client.record.v5
