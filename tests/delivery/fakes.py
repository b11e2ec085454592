# SPDX-License-Identifier: Apache-2.0
"""Fakes of a gateway for durable delivery to one client, and a side without a client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from mqtt_nats.client.client import Client
from mqtt_nats.codec import MqttError
from mqtt_nats.config.settings import Settings
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.position_handover import PositionHandover
from mqtt_nats.delivery.position_writer import PositionWriter, PositionWriters
from mqtt_nats.delivery.receiver import DeliveryServices, SharedFeed
from mqtt_nats.delivery.states import FROM_READER, DeliveryEvent, DeliveryState, StatefulDelivery
from mqtt_nats.messages.terms import TERMS, Terms
from mqtt_nats.observability.counters import Counters
from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.protocol.ports import NOWHERE
from mqtt_nats.protocol.position import SessionPosition
from mqtt_nats.pubsub.data_path import Path
from mqtt_nats.pubsub.fanout import Fanout
from mqtt_nats.sessions.services import Services
from mqtt_nats.transport.connection import Connection
from mqtt_nats.transport.write_buffer import FlushRound, WriteBuffer
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeClient, FakeLink, FakePath, FakeServices, FakeSettings, FakeSide, FakeStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mqtt_nats.messages.publish_encoder import Aliases
    from mqtt_nats.pubsub.backlog import Gate
    from mqtt_nats.pubsub.routing_table import Filter
    from mqtt_streams.positions import Position
    from mqtt_streams.sessions import V5


@stands_for(PositionHandover)
class FakeHandover:
    """Stands for `PositionHandover`: which sessions are being handed over; none is waited for."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(1)
        self.fake_added: list[str] = []

    def add(self, client_hash: str, task: asyncio.Task[None]) -> None:
        self.fake_added.append(client_hash)

    async def over(self, client_hash: str) -> None:
        """Nothing is under way."""

    async def elsewhere(self, name: str, gateway: str) -> bool:
        return False


@stands_for(DeliveryServices)
class FakeDelivery:
    """Stands for `DeliveryServices`, with a feed that brings nothing."""

    def __init__(self, services: FakeDeliveryServices) -> None:
        self.services, self.registry = services, services.registry
        self.writers = PositionWriters()
        self.waiting: set[DurableDelivery] = set()
        self.feed = SharedFeed()
        self.handover = FakeHandover()
        self.resets = True


@stands_for(Settings)
class FakeDeliverySettings(FakeSettings):
    """Stands for `Settings`: the limits of what waits for clients that do not read."""

    def __init__(self) -> None:
        self.stall_time = 1e9
        self.max_unread_bytes = 1 << 40
        self.max_backlog: int | None = None


@stands_for(Services)
class FakeDeliveryServices(FakeServices):
    """Stands for `Services`, connected to NATS."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: FakeDeliverySettings = FakeDeliverySettings()
        self.counters = Counters([0] * 3, [0] * 3)
        self.path = FakeDeliveryPath(self.fake_link, self.fake_store, self.counters)


@stands_for(FlushRound)
class FakeFlushRound:
    """Stands for `FlushRound`: which buffers are to be written."""

    def __init__(self) -> None:
        self.fake_added = 0

    def add(self, write_buffer: object) -> None:
        self.fake_added += 1

    def holding(self, size: int) -> None:
        """Count no bytes that wait."""


@stands_for(WriteBuffer)
class FakeBuffer:
    """Stands for `WriteBuffer`: what is to be sent."""

    def __init__(self) -> None:
        self.clogged = False
        self.dirty = False
        self.chunks: list[bytes] = []
        self.round = FakeFlushRound()
        self.fake_held = 0

    def write(self, data: bytes) -> None:
        self.chunks.append(data)

    def hold(self, size: int) -> None:
        self.fake_held += size

    def schedule(self) -> None:
        self.dirty = True
        self.round.add(self)


@stands_for(Settings)
class FakeConnectionSettings:
    """Stands for `Settings` of the client's listener."""

    max_inflight = 10


@stands_for(Connection)
class FakeConnection:
    """Stands for `Connection`."""

    settings = FakeConnectionSettings()

    def release(self, reason: int) -> None:
        """Read on."""


@stands_for(Fanout)
class FakeFanout:
    """Stands for `Fanout`: what is counted."""

    def __init__(self, counters: Counters) -> None:
        self.sent, self.sent_bytes = counters.sent, counters.sent_bytes


@stands_for(Path)
class FakeDeliveryPath(FakePath):
    """Stands for `Path`."""

    def __init__(self, link: FakeLink, store: FakeStore, counters: Counters) -> None:
        super().__init__(link, store)
        self.fanout = FakeFanout(counters)


@stands_for(Client)
class FakeReceiver(FakeClient):
    """Stands for `Client`, which stored messages are sent to."""

    def __init__(self, services: FakeDeliveryServices, client_id: str = "client", v5: V5 | None = None) -> None:
        super().__init__(services, client_id, v5)
        self.terms: Terms = TERMS
        self.version = 4
        self.write_buffer = FakeBuffer()  # type: ignore[assignment]
        self.connection = FakeConnection()
        self.delivery = FakeDelivery(services)
        self.guarded = None
        self.checks_each = False
        self.options = 0


@stands_for(Client)
class FakeSlowReceiver:
    """Stands for `Client`, which does not read what its write buffer keeps."""

    def __init__(self, write_buffer: WriteBuffer, aliases: Aliases | None = None) -> None:
        self.services = FakeDeliveryServices()
        self.delivery = FakeDelivery(self.services)
        self.path = self.services.path
        self.client_id = "client"
        self.alive = True
        self.write_buffer = write_buffer
        self.outgoing = aliases
        self.regular_side: None = None
        self.durable_side: DurableDelivery | None = None
        self.gates: dict[Filter, Gate] | None = None
        self.fake_ended: list[str] = []

    def end_connection(self, error: MqttError) -> None:
        self.fake_ended.append(str(error))


@stands_for(DurableSender)
class FakeMachine:
    """Stands for `DurableSender`: what a stored position lets it do."""

    def __init__(self) -> None:
        self.fake_freed: list[int] = []
        self.fake_confirmed: list[int] = []
        self.fake_past = 0

    def free_packet_id(self, identifier: int) -> None:
        self.fake_freed.append(identifier)

    def confirmed(self, identifier: int) -> None:
        self.fake_confirmed.append(identifier)

    def past_all(self, sequence: int) -> bool:
        return sequence <= self.fake_past


@stands_for(DurableDelivery)
class FakeWriterSide(FakeSide):
    """Stands for `DurableDelivery`, with a position that is written."""

    def __init__(self, client: FakeClient) -> None:
        super().__init__(client)
        self.fake_machine = FakeMachine()
        self.machine = cast("DurableSender", self.fake_machine)
        self.position_writer: PositionWriter | None = None
        self.fake_released: list[tuple[int, bytes]] = []

    def pubrel_stored(self, identifier: int, mark: bytes = b"") -> None:
        self.fake_released.append((identifier, mark))


@stands_for(PositionWriter)
class FakePositionWriter:
    """Stands for `PositionWriter`: its writes are stored, or refused."""

    def __init__(self, ledger: SessionPosition | None = None, *, stores: bool = True) -> None:
        self.ledger = SessionPosition() if ledger is None else ledger
        self.live = {"a"}
        self.present: set[str] = set()
        self.perhaps = 0
        self.fake_stores = stores
        self.fake_left = False
        self.fake_written: list[set[str]] = []

    async def flush(self) -> bool:
        self.fake_written.append(set(self.present))
        return self.fake_stores

    def end_if_moved(self) -> None:
        self.fake_left = True

    def restore(self, position: Position) -> None:
        """Begin as the position says."""

    def go_on(self) -> None:
        """Remove what the end of a connection has noted."""

    def expect_consumers(self, names: Iterable[str]) -> None:
        self.present.update(names)

    def miss_consumers(self, names: Iterable[str]) -> None:
        self.present.difference_update(names)


def as_delivery(fake: FakeDelivery) -> DeliveryServices:
    """The fake, for a function that wants a `DeliveryServices`."""
    return cast("DeliveryServices", fake)


def as_receiver(fake: FakeReceiver | FakeSlowReceiver) -> Client:
    """The fake, for a function that wants a `Receiver`."""
    return cast("Client", fake)


class Side(StatefulDelivery):
    """In place of a `DurableDelivery`, with the attributes that a test gives."""

    client: Any
    position_writer: Any
    stall: Any

    def __init__(
        self, machine: DurableSender | None = None, state: DeliveryState = DeliveryState.LIVE, **given: Any
    ) -> None:
        super().__init__(DurableSender(10, NOWHERE) if machine is None else machine, 0)
        self.state, self.live = state, state in FROM_READER
        self.client = self.position_writer = self.stall = None
        for name, value in given.items():
            setattr(self, name, value)

    @property
    def session(self) -> Any:
        return self.client

    def pubrel_arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        raise AssertionError("no PUBREL record is delivered")

    def ack(self, reply: bytes, identifier: int = 0) -> None:
        raise AssertionError("no message is acknowledged")

    def begin_stall(self, stall: Any) -> None:
        self.change(DeliveryEvent.STOPS_READING)
        self.stall = stall

    def end_stall(self) -> None:
        self.change(DeliveryEvent.READS_AGAIN)
        self.stall = None

    def store_position_with(self, position_writer: Any) -> None:
        self.position_writer = position_writer
