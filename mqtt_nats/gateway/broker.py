# SPDX-License-Identifier: Apache-2.0
"""Broker: the parts that all clients of a gateway in one account share."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.access.acl import Rules
from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.backbone.doubtful_stores import DoubtfulStores, find_stored
from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.backbone.pending import PendingStore
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.base.bucket import MemoryBudget
from mqtt_nats.base.tasks import rooted
from mqtt_nats.config.worker_identity import own_place
from mqtt_nats.delivery.position_handover import PositionHandover
from mqtt_nats.hooks.registry import Hooks
from mqtt_nats.ingress.interceptors import Takers
from mqtt_nats.ingress.request_reply import Replying
from mqtt_nats.ingress.retained_tombstones import Tombstones
from mqtt_nats.lifecycle.cluster_bans import Banning
from mqtt_nats.lifecycle.quotas import Quotas
from mqtt_nats.lifecycle.readiness import Readiness
from mqtt_nats.messages.cache import Recent
from mqtt_nats.messages.copies import Copies
from mqtt_nats.messages.ids import MessageIds
from mqtt_nats.observability.counters import Counters
from mqtt_nats.observability.nats_service import Service
from mqtt_nats.observability.presence import Presence
from mqtt_nats.observability.sys_topics import System
from mqtt_nats.pubsub.data_path import Path
from mqtt_nats.pubsub.fanout import Fanout
from mqtt_nats.pubsub.interest_propagation import Nodes
from mqtt_nats.pubsub.routing_table import Table
from mqtt_nats.pubsub.subject_mapping import parse_mappings
from mqtt_nats.sessions.shared_assignment import LateAssignments
from mqtt_nats.sessions.stream_head import StreamHead
from mqtt_nats.sessions.stream_identity import StreamIdentity
from mqtt_nats.sessions.takeover import Claims
from mqtt_nats.transport.connection import Clock, Hold
from mqtt_nats.transport.write_buffer import FlushRound
from mqtt_streams.hashing import nuid
from mqtt_streams.positions import PositionStore
from mqtt_streams.pubrel import PubrelStore
from mqtt_streams.qos2 import Qos2Store
from mqtt_streams.quotas import QuotaStore
from mqtt_streams.retained import RetainedStore
from mqtt_streams.sessions import SessionStore
from mqtt_streams.shared import SharedStore
from mqtt_streams.timers import TimerStore
from mqtt_streams.wills import WillStore

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.config.settings import Settings
    from mqtt_nats.control.server import Control
    from mqtt_nats.delivery.position_writer import PositionWriter
    from mqtt_nats.delivery.reconcile import Reconciling
    from mqtt_nats.gateway.desired_state import Fleet
    from mqtt_nats.lifecycle.lease import Lease
    from mqtt_nats.lifecycle.will import Done
    from mqtt_nats.plugins.manager import Plugins
    from mqtt_nats.shared_reader.sessions import SharedReaderSessions
    from mqtt_streams.wills import StoredWill

log = logging.getLogger("mqtt_nats.broker")

# Maximum seconds between two signs of life of a connection to NATS: nats-py pings every ten seconds.
SILENCE: Final = 12.0


class Broker:
    """Broker of one account; made once, when NATS is connected and the streams exist.

    Args:
        identity: the gateway's id, 8 characters, unique in the NATS account.
        link: the connection for publishes, requests and ordinary subscriptions.
        wild: the connection for filters that start with a wildcard.
        shared: the connection for queue groups, which also get what this gateway publishes.
        spawn: runs a coroutine in the gateway's task group.
    """

    def __init__(
        self,
        settings: Settings,
        identity: str,
        domain: str,
        link: NatsConnection,
        wild: NatsConnection,
        shared: NatsConnection,
        inbox: RequestInbox,
        store: AckedPublisher,
        spawn: asyncio.TaskGroup,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.settings = settings
        self.tenant = ""
        """Name of the tenant; empty = the gateway's own account."""
        self.tenants: Mapping[str, Broker] = {}
        """All brokers of the gateway, this one included, by tenant."""
        self.fit: Callable[[Client], None] = lambda client: None
        """Function that puts hooks between a client and its connection after the client has moved to this account."""
        self.identity = identity
        self.domain = domain
        self.link = link
        self.wild = wild
        self.shared = shared
        self.inbox = inbox
        self.store = store
        unheard = DoubtfulStores(self)
        store.on_absent, store.on_silent = unheard.absent, unheard.silent
        store.find = partial(find_stored, inbox)
        self.rules: Rules | None = None
        """Access rules for publishing and subscribing; None = every client may do both on every topic."""
        self.hooks = Hooks(self.spawn)
        self.takers = Takers()
        """Interceptors: functions that take messages of topics in place of subscribers."""
        self.clock = Clock(loop.time())
        self.linked = natstime.elapsed()
        """Time of the last reconnect, or new leader of a group's consumer, by :func:`natstime.elapsed` in seconds."""
        self.relinked = -inf
        """Loop time in seconds of the last reconnect, or new leader of a group's consumer; -inf = none yet."""
        self.standing = False
        """Whether the gateway stood still, and does not know yet which sessions have moved."""
        self.round = FlushRound(loop.call_soon)
        self.round.ahead = link.write_out
        memory = MemoryBudget(settings.max_cache_bytes, settings.max_client_cache_bytes)
        longest, mappings = (settings.max_topic_levels, settings.max_topic_length), parse_mappings(settings.mappings)
        self.table = Table(settings.local_dispatch, *longest, mappings, memory)
        self.fanout = Fanout(self.table, link, self.round)
        recent = Recent(self.table)
        self.stored = recent.messages
        """Recent messages that consumers have delivered, by stream sequence."""
        self.stored_message = recent.message
        self.place = own_place()
        self.counters = Counters(self.fanout.sent, self.fanout.sent_bytes)
        store.on_timed = self.counters.stored.observe
        self.ids = MessageIds(secrets.randbits(48))
        counted = self.counters.received, self.counters.received_bytes
        self.path = Path(link, store, self.table, self.fanout, self.round, *counted, self.ids, memory)
        self.replying = Replying(self)
        self.nodes = Nodes(self)
        self.readiness = Readiness(self)
        self.system, self.presence, self.service = System(self), Presence(self), Service(self)
        self.fanout.response_topic = self.replying.response_topic
        self.sessions = SessionStore(inbox, domain)
        self.retained = RetainedStore(inbox)
        self.held = Qos2Store(inbox)
        self.pubrels = PubrelStore(inbox)
        self.timers = TimerStore(inbox)
        self.wills, self.groups = WillStore(inbox), SharedStore(inbox)
        self.positions = PositionStore(inbox)
        self.quotas = Quotas(settings, QuotaStore(inbox), self.sessions, store, self.counters.limit)
        self.latest = StreamHead(self)
        self.keepers: set[PositionWriter] = set()
        """Writers of sessions' positions."""
        self.claims = Claims(self)
        self.leaving = PositionHandover(self)
        self.belated = LateAssignments(self)
        self.live: SharedReaderSessions | None = None
        """Sessions of the shared reader; None = the shared reader is not used."""
        self.resets = False
        """Whether nats-server can set the position of a consumer."""
        self.generation = StreamIdentity(self)
        self.welcomes: dict[tuple[int, ...], bytes] = {}
        """CONNACK packets of most 5.0 connections, by Session Present and limits."""
        self.banning = Banning(self)
        self.passed_over = 0
        """Number of messages that were not sent to a session because too many waited."""
        self.not_retained = 0
        """Number of messages that were not retained because of a limit."""
        self.clients: dict[str, Client] = {}
        """Connected clients by client id; by the name of `registered_as` if the session has its second key."""
        self.unchecked: set[Client] = set()
        """Clients whose session may have moved while NATS was away."""
        self.connections: set[Client] = set()
        """Clients with an open socket, also before CONNECT."""
        self.left = asyncio.Event()
        """Set when a client has left."""
        self.retaining: set[PendingStore] = set()
        """Stores of retained messages that are not acknowledged."""
        self.withholding: set[Client] | None = None
        """Clients whose ownership must be checked before withheld stores go on; None = no stores are withheld."""
        self._retained = asyncio.Event()
        self.tombstones = Tombstones(self)
        self.closing = False
        self.ended = False
        """Whether no task is started any more."""
        self.attached: dict[str, Client] = {}
        """Clients by the name of the consumer of ``$MQTT_msgs`` that delivers to their connection."""
        self.advisories = b""
        """Subscription id of the advisories of deleted consumers."""
        self.reconciling: Reconciling | None = None
        """Reconciliation of deliveries and acknowledgements that may have been lost."""
        self.control: Control | None = None
        """Service that answers the requests of `mqtt-nats ctl`."""
        self.fleet: Fleet | None = None
        """Desired state of all gateways: loads plugins, reads files again."""
        self.plugins: Plugins | None = None
        """Plugins of this account."""
        self.lease: Lease | None = None
        """Lease that this gateway renews."""
        self.crowded_until = 0.0
        """Loop time in seconds until which every deliver subject is assumed to have its own listener."""
        self.online = asyncio.Event()
        """Set while NATS is connected."""
        self.online.set()
        self.copies = Copies(link, inbox, store, self.online, self.spawn, self.counters.drop)
        self.fanout.begin_looking(self.copies.suspect)
        self.gaps: dict[NatsConnection, float] = {}
        """Unix time of nats-server in seconds since which a connection may have missed messages, by connection."""
        self.repairing = 0
        """Number of gaps that are being repaired."""
        self._blocked_clients: list[Client] = []
        api = inbox.api_prefix
        self.delete_session = f"{api}.STREAM.MSG.DELETE.$MQTT_sess".encode()
        self.delete_retained = f"{api}.STREAM.MSG.DELETE.$MQTT_rmsgs".encode()
        self.delete_will = f"{api}.STREAM.MSG.DELETE.$MQTT_wills".encode()
        self.delete_shared = f"{api}.STREAM.MSG.DELETE.$MQTT_shared".encode()
        self.delete_held = f"{api}.STREAM.MSG.DELETE.$MQTT_qos2in".encode()
        self.purge_held = f"{api}.STREAM.PURGE.$MQTT_qos2in".encode()
        self.last_wills: dict[Client, Done] = {}
        """Wills that are being published, by client, of sessions that end with their connection."""
        self.late_wills: dict[Client, tuple[StoredWill, float]] = {}
        """Delayed wills with their due Unix time in seconds, by client, of clients whose last job has not ended."""
        self.farewells: set[asyncio.Task[None]] = set()
        """Last jobs of clients that have left; the gateway waits for them before it ends."""
        self._tasks = spawn
        self._spawned: set[asyncio.Task[None]] = set()
        self._nuid_prefix = nuid(secrets.token_bytes(32))[:12]
        self._nuids = secrets.randbelow(1_000_000_000)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` in the gateway's task group, its exceptions logged; start nothing after the end."""
        if self.ended:
            work.close()
            return asyncio.get_running_loop().create_task(_nothing(), name=name)
        task = self._tasks.create_task(_guard(work), name=name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    def cancel(self) -> None:
        """Cancel the tasks that :meth:`spawn` has started, and start no more."""
        self.ended = True
        for task in self._spawned:
            task.cancel()

    def spawn_safe(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` like :meth:`spawn`, for work that lets no exception out."""
        return self._tasks.create_task(rooted(work), name=name)

    def retained_now(self, operation: PendingStore) -> None:
        """Note that the store of a retained message has ended."""
        self.retaining.discard(operation)
        self._retained.set()

    async def retained_so_far(self) -> None:
        """Wait until all retained messages stored by this gateway before this call can be read."""
        pending = set(self.retaining)
        while pending := pending & self.retaining:
            self._retained.clear()
            await self._retained.wait()

    def drop_assignment(self, record: bytes, operation: PendingStore) -> None:
        """Remove the assignment of a QoS 2 message of a group: the message is complete, or has no receiver."""
        self.store.call(self.delete_shared, b'{"seq":%b,"no_erase":true}' % record, operation)

    def block(self, client: Client) -> None:
        """Stop reading from a publishing client until NATS takes more."""
        client.connection.hold(Hold.NATS)
        self._blocked_clients.append(client)

    def pressure(self, blocked: bool) -> None:
        """Update the back-pressure: NATS takes no more data, or takes data again."""
        self.path.blocked = blocked or not self.link.writable or self.store.pressed
        if not self.path.blocked:
            clients, self._blocked_clients = self._blocked_clients, []
            for client in clients:
                client.connection.release(Hold.NATS)

    def lost(self, link: NatsConnection) -> None:
        """Note a gap: messages that the server sent after it was last heard are lost with the connection."""
        self.gaps.setdefault(link, natstime.converted(link.heard))

    def client(self, client_id: str) -> Client | None:
        """Return a connected client by its id, under either key; None if there is none."""
        found = self.clients.get(client_id)
        return found or next((one for one in self.clients.values() if one.client_id == client_id), None)

    @property
    def steady(self) -> bool:
        """Whether no gap has to be repaired, and no connection to NATS has fallen silent."""
        silent = natstime.elapsed() - min(self.link.heard, self.wild.heard) > SILENCE
        return not (self.gaps or self.repairing or silent)

    def is_own(self, headers: bytes) -> bool:
        """Return whether this gateway made the message, by its id header."""
        start = headers.find(b"\r\nNmqtt-Id:")
        return start >= 0 and headers[start + 27 : start + 39] == self.ids.own

    def new_nuid(self) -> str:
        """Return a unique token of 22 characters, as used in consumer names and deliver subjects."""
        self._nuids += 1
        return f"{self._nuid_prefix}{self._nuids:010d}"


async def _nothing() -> None:
    """Do nothing, in place of work that is not started any more."""


async def _guard(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except asyncio.CancelledError:
        raise
    except Exception:
        log.exception("a task of the gateway failed")
