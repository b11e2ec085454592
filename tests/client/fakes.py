# SPDX-License-Identifier: Apache-2.0
"""Fakes of what a connected client uses: its connection, its account, and a client that writes down what it handles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from mqtt_nats.client.account import Account
from mqtt_nats.client.client import Client
from mqtt_nats.client.grant import grant
from mqtt_nats.codec import MqttError, Packet
from mqtt_nats.config.settings import Settings
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.receiver import Receiver, SharedFeed
from mqtt_nats.hooks.registry import Hooks
from mqtt_nats.ingress.publish import Ingress
from mqtt_nats.ingress.qos2 import Inbound
from mqtt_nats.lifecycle.will import Wills
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.qos2_receiver import State as Held
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.sessions.message_stream import Mark
from mqtt_nats.sessions.quotas import Quotas
from mqtt_nats.sessions.record import save_record
from mqtt_nats.sessions.services import Services
from mqtt_nats.sessions.session import State
from mqtt_nats.sessions.takeover import Claims
from mqtt_nats.transport.connection import Connection
from mqtt_nats.transport.listener_settings import ConnectionSettings
from mqtt_streams.hashing import held_token
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import V5, SessionRecord
from mqtt_streams.wills import StoredWill
from tests.delivery.fakes import (
    FakeConnection,
    FakeConnectionSettings,
    FakeDeliveryServices,
    FakeDeliverySettings,
    FakeReceiver,
)
from tests.harness.doubles import stands_for
from tests.ingress.fakes import FakeIngress, FakePublishingServices
from tests.sessions.fakes import FakeClientConnection, FakeQuotas, FakeSide, FakeTasks, as_client

if TYPE_CHECKING:
    from mqtt_nats.access.authenticator import Door
    from mqtt_nats.client.subscription_change import Wish


@stands_for(Claims)
class FakeClaims:
    """Stands for `Claims`: whose packets are handled."""

    def __init__(self) -> None:
        self.fake_served: list[str] = []

    def served(self, client_hash: str) -> None:
        self.fake_served.append(client_hash)


@stands_for(Account)
class FakeClientAccount:
    """Stands for `Account`."""

    def __init__(self) -> None:
        self.services = FakePublishingServices()
        self.ingress = FakeIngress(self.services)
        self.delivery = object()
        self.claims = FakeClaims()


def as_account(fake: FakeClientAccount) -> Account:
    """The fake, for what wants an `Account`."""
    return cast("Account", fake)


@stands_for(Settings)
class FakeGrantSettings(FakeDeliverySettings):
    """Stands for `Settings`: limits of filters of all clients together."""

    max_topic_levels = 8

    def __init__(self) -> None:
        super().__init__()
        self.max_subscriptions_per_gateway: int | None = None


@stands_for(Settings)
class FakeGrantLimits(FakeConnectionSettings):
    """Stands for `Settings` of the client's listener."""

    max_subscriptions = 100


@stands_for(Connection)
class FakeGrantConnection(FakeConnection):
    """Stands for `Connection`."""

    host = "192.0.2.1"

    def __init__(self) -> None:
        self.settings: FakeGrantLimits = FakeGrantLimits()


@stands_for(Quotas)
class FakeGrantQuotas(FakeQuotas):
    """Stands for `Quotas`: how many consumers may be created, and whether that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_most = 100
        self.fake_known = True
        self.fake_reserved: list[tuple[str, str, int]] = []
        self.fake_paced: list[str] = []

    async def reserve(self, key: str, quota: str, who: str, wanted: int) -> int:
        self.fake_reserved.append((quota, who, wanted))
        return min(wanted, self.fake_most)

    def reserve_known(self, key: str, quota: str, who: str, wanted: int) -> int | None:
        return min(wanted, self.fake_most) if self.fake_known else None

    async def pace(self, key: str) -> None:
        self.fake_paced.append(key)


@stands_for(Services)
class FakeGrantServices(FakeDeliveryServices):
    """Stands for `Services`."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: FakeGrantSettings = FakeGrantSettings()
        self.quotas: FakeGrantQuotas = FakeGrantQuotas()


@stands_for(Mark)
class FakeMark:
    """Stands for `Mark`: a place in the stream."""

    def __init__(self, sequence: int) -> None:
        self._sequence = sequence

    async def position(self, inbox: object) -> int:
        return self._sequence


class FakeFeed(SharedFeed):
    """A shared reader that takes sessions; with consumers, or without."""

    def __init__(self, *, in_records: bool = False) -> None:
        self._in_records = in_records
        self.fake_places: list[int] = []
        self.fake_reached = 0

    def reached(self, side: DurableDelivery) -> int:
        return self.fake_reached

    def without_consumers(self, client: object) -> bool:
        return self._in_records

    async def subscribe(
        self, client: Receiver, place: int, put: Callable[[], list[ConsumerBinding]]
    ) -> list[ConsumerBinding]:
        self.fake_places.append(place)
        added = put()
        for one in added:
            one.source.drop_reason(SubscriptionState.RETURNING)
        await save_record(client, client.epoch)
        return added


@stands_for(Client)
class FakeSubscriber(FakeReceiver):
    """Stands for `Client`, which subscribes."""

    def __init__(self, *, durable: bool = True, version: int = 5, quota: str = "q") -> None:
        services = FakeGrantServices()
        super().__init__(services, v5=V5(quota=quota, expiry=100))
        self.services: FakeGrantServices = services
        self.version = version
        self.durable = durable
        self.user: str | None = None
        self.delivery.feed = self.fake_feed = FakeFeed()
        self.connection: FakeGrantConnection = FakeGrantConnection()
        self.fake_refused: list[tuple[Mapping[str, int], str]] = []
        if durable:
            self.durable_side = side = DurableDelivery(as_client(self))
            side.begin()

    @property
    def fake_side(self) -> DurableDelivery:
        return cast("DurableDelivery", self.durable_side)

    @property
    def fake_record(self) -> SessionRecord:
        assert self.record is not None
        return self.record

    @property
    def fake_created(self) -> dict[str, Any]:
        """Configurations of the consumers in JetStream, by their filters."""
        found = self.services.fake_inbox.consumers[MESSAGES].values()
        return {one["config"]["filter_subject"]: one["config"] for one in found}

    def refuse_filters(self, limits: Mapping[str, int], why: str = "") -> None:
        self.fake_refused.append((limits, why))

    async def connected(self) -> None:
        """NATS is connected."""

    async def fake_grant(self, wanted: dict[str, Wish], place: int = 7, **more: Any) -> None:
        """Subscribe, as the packet came when the stream had some messages."""
        await grant(cast("Client", self), wanted, more.pop("replays", {}), cast("Mark", FakeMark(place)), **more)

    async def fake_stored(self) -> SessionRecord:
        found = await self.services.streams.sessions.load(self.hash, self.client_id)
        assert found is not None
        return found[0]


@stands_for(ConnectionSettings)
class FakeListenerSettings:
    """Stands for `ConnectionSettings`."""

    max_inflight = 10

    def __init__(self) -> None:
        self.durable_sessions = True
        self.max_session_expiry_interval: int | None = None


@stands_for(Connection)
class FakeLeftConnection(FakeConnection):
    """Stands for `Connection`."""

    def __init__(self) -> None:
        self.settings: Any = FakeListenerSettings()


@stands_for(Quotas)
class FakeLeftQuotas(FakeQuotas):
    """Stands for `Quotas`: whose session has no connection here any more."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_left: list[str] = []

    def forget_session(self, client_hash: str) -> None:
        self.fake_left.append(client_hash)


class FakeLastTasks(FakeTasks):
    """Tasks that the end of the gateway waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_last: list[object] = []

    def await_at_end(self, task: object) -> object:
        self.fake_last.append(task)
        return task


@stands_for(Services)
class FakeLeftServices(FakeDeliveryServices):
    """Stands for `Services`, with hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks = Hooks(lambda work, name: None)
        self.quotas: FakeLeftQuotas = FakeLeftQuotas()
        self.tasks: FakeLastTasks = FakeLastTasks()


@stands_for(Claims)
class FakeLeftClaims:
    """Stands for `Claims`: which connections have ended."""

    def __init__(self) -> None:
        self.fake_left: list[object] = []
        self.fake_others = False
        """Whether other connections have the session or claim it."""

    def leave(self, client: object) -> bool:
        self.fake_left.append(client)
        return self.fake_others


@stands_for(Account)
class FakeLeftAccount:
    """Stands for `Account`."""

    def __init__(self, services: FakeLeftServices) -> None:
        self.claims = FakeLeftClaims()
        ingress = FakeIngress(cast("FakePublishingServices", services))
        self.wills = Wills(cast("Ingress", ingress), cast("Claims", self.claims))
        self.presence = object()


@stands_for(DurableDelivery)
class FakeLeftSide(FakeSide):
    """Stands for `DurableDelivery`: what is done with it at the end, in order."""

    def __init__(self, client: FakeLeaver) -> None:
        super().__init__(client)
        self.position_writer = None
        self.fake_owes = False
        """Whether records of answered PUBRELs have yet to be acknowledged."""
        self.fake_done: list[object] = []

    def detach(self) -> None:
        self.fake_done.append("detach")

    def close(self) -> bool:
        self.fake_done.append(self.state)
        return not self.fake_owes


@stands_for(Client)
class FakeLeaver(FakeReceiver):
    """Stands for `Client`, which owns its session with epoch 9."""

    def __init__(self, *, durable: bool = True, v5: V5 | None = None) -> None:
        services = FakeLeftServices()
        super().__init__(services, v5=v5)
        self.services: FakeLeftServices = services
        self.account = FakeLeftAccount(services)
        self.connection: FakeLeftConnection = FakeLeftConnection()
        self.durable = durable
        self.epoch = 9
        self.token = held_token(self.client_id, self.hash)
        self.busy = self.greeted = self.sent_disconnect = False
        self.will: StoredWill | None = None
        self.qos2: Inbound | None = None
        self.receipts: list[object] = [object()]

    def hear_disconnect(self) -> None:
        self.sent_disconnect = True

    def expire_after(self, expiry: int | None) -> None:
        self.expiry = expiry

    def take_will(self) -> StoredWill | None:
        will, self.will = self.will, None
        return will

    def release_memory(self) -> None:
        self.fake_ended.append("memory")

    def end_delivery(self) -> None:
        self.durable_side = None

    def forget_filters(self) -> None:
        self.filters = {}

    @property
    def fake_called(self) -> list[tuple[bytes, bytes]]:
        """Requests to JetStream that the path has sent: their subjects and bodies."""
        return [(subject, body) for subject, body, _ in self.services.fake_store.fake_called]

    async def fake_save(self) -> None:
        """The record is stored, as the claim has left it."""
        assert self.record is not None
        self.epoch = await self.services.streams.sessions.save(self.record, expected=None)

    async def fake_work(self) -> None:
        """Run the jobs."""
        for job in self.fake_jobs:
            await job


class Runner(Client):
    """A client whose packets are only written down; it is LIVE unless a test says otherwise."""

    def __init__(self, state: State = State.LIVE) -> None:
        self.fake_account = FakeClientAccount()
        self.fake_connection = FakeClientConnection()
        account, connection = as_account(self.fake_account), cast("Connection", self.fake_connection)
        super().__init__(account, connection, cast("Door", object()))
        self.name("client")
        self.state = state
        self.fake_log: list[object] = []
        """What has happened, in order."""

    @property
    def fake_tasks(self) -> FakeTasks:
        return self.fake_account.services.tasks

    @property
    def fake_again(self) -> list[Packet]:
        """The packets that the connection is to handle now."""
        return [packet for packets, *_ in self.fake_connection.fake_again for packet in packets]

    def fake_hold(self, identifier: int, state: Held) -> None:
        """Have a publish at QoS 2 in a state."""
        self.inbound.machine.states[identifier] = state

    def packets(self, packets: list[Packet]) -> None:
        self.fake_log += packets

    def handle(self, packet: Packet) -> None:
        self.fake_log.append(packet)

    def fall_silent(self) -> None:
        self.fake_log.append("silent")

    def leave(self) -> None:
        self.fake_log.append("left")

    def end_connection(self, error: MqttError) -> None:
        self.fake_log.append(error)
        self.state = State.ENDED
