# SPDX-License-Identifier: Apache-2.0
"""What every client of a gateway shares."""

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

# A connection is heard at least this often: nats-py pings every ten seconds.
SILENCE: Final = 12.0


class Broker:
    """The parts that a gateway is made of; made once, when NATS is connected and the streams exist.

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
        """Whose account it is; empty: the gateway's own."""
        self.tenants: Mapping[str, Broker] = {}
        """All of the gateway, this one among them, by their tenant."""
        self.fit: Callable[[Client], None] = lambda client: None
        """Puts what hooks want between a client that has come from another account and its connection."""
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
        """Who may publish and subscribe what; None: everybody everything."""
        self.hooks = Hooks(self.spawn)
        self.takers = Takers()
        """Who takes messages of which topics in place of their subscribers."""
        self.clock = Clock(loop.time())
        self.linked = natstime.elapsed()
        """Unix time since when the server that delivers has been the same one, as far as is known."""
        self.relinked = -inf
        """Time of the loop when that has changed."""
        self.standing = False
        """The gateway stood still, and has not found out yet what has moved."""
        self.round = FlushRound(loop.call_soon)
        self.round.ahead = link.write_out
        memory = MemoryBudget(settings.max_cache_bytes, settings.max_client_cache_bytes)
        longest, mappings = (settings.max_topic_levels, settings.max_topic_length), parse_mappings(settings.mappings)
        self.table = Table(settings.local_dispatch, *longest, mappings, memory)
        self.fanout = Fanout(self.table, link, self.round)
        recent = Recent(self.table)
        self.stored = recent.messages
        """Messages that consumers have brought lately, by stream sequence."""
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
        """What writes positions of sessions."""
        self.claims = Claims(self)
        self.leaving = PositionHandover(self)
        self.belated = LateAssignments(self)
        self.live: SharedReaderSessions | None = None
        """The sessions that the shared reader serves; None: it is not used."""
        self.resets = False
        """Whether nats-server can set the position of a consumer."""
        self.generation = StreamIdentity(self)
        self.welcomes: dict[tuple[int, ...], bytes] = {}
        """CONNACK of most 5.0 connections, by Session Present and limits."""
        self.banning = Banning(self)
        self.passed_over = 0
        """Messages that were not sent to a session for which too many waited."""
        self.not_retained = 0
        """Messages that were to be retained, and are not, because of a limit."""
        self.clients: dict[str, Client] = {}
        """Connected clients by client id; those whose session has its second key as `registered_as` has it."""
        self.unchecked: set[Client] = set()
        """Those whose session may have moved while NATS was away."""
        self.connections: set[Client] = set()
        """Everything with an open socket, also before CONNECT."""
        self.left = asyncio.Event()
        """Set when a client has left."""
        self.retaining: set[PendingStore] = set()
        """Stores of retained messages that are not acknowledged."""
        self.withholding: set[Client] | None = None
        """They wait until it is known whether the sessions of these are here still; None: they do not wait."""
        self._retained = asyncio.Event()
        self.tombstones = Tombstones(self)
        self.closing = False
        self.ended = False
        """Nothing is begun any more."""
        self.attached: dict[str, Client] = {}
        """Whose connection a consumer of ``$MQTT_msgs`` delivers to, by its name."""
        self.advisories = b""
        """The subscription that tells which consumers are deleted."""
        self.reconciling: Reconciling | None = None
        """Looks after deliveries and acknowledgements that may have been lost."""
        self.control: Control | None = None
        """Answers the questions of `mqtt-nats ctl`."""
        self.fleet: Fleet | None = None
        """Does what all gateways are asked to do: loading plugins, reading files again."""
        self.plugins: Plugins | None = None
        """The plugins of this account."""
        self.lease: Lease | None = None
        """The lease of this gateway, which it renews."""
        self.crowded_until = 0.0
        """Loop time until which every deliver subject is taken to have a listener of its own."""
        self.online = asyncio.Event()
        """Set while NATS is connected."""
        self.online.set()
        self.copies = Copies(link, inbox, store, self.online, self.spawn, self.counters.drop)
        self.fanout.begin_looking(self.copies.suspect)
        self.gaps: dict[NatsConnection, float] = {}
        """Since when (Unix time of nats-server) messages of a connection may have been missed."""
        self.repairing = 0
        """Gaps that are being repaired."""
        self._blocked_clients: list[Client] = []
        api = inbox.api_prefix
        self.delete_session = f"{api}.STREAM.MSG.DELETE.$MQTT_sess".encode()
        self.delete_retained = f"{api}.STREAM.MSG.DELETE.$MQTT_rmsgs".encode()
        self.delete_will = f"{api}.STREAM.MSG.DELETE.$MQTT_wills".encode()
        self.delete_shared = f"{api}.STREAM.MSG.DELETE.$MQTT_shared".encode()
        self.delete_held = f"{api}.STREAM.MSG.DELETE.$MQTT_qos2in".encode()
        self.purge_held = f"{api}.STREAM.PURGE.$MQTT_qos2in".encode()
        self.last_wills: dict[Client, Done] = {}
        """Wills that are being published, of clients whose sessions end with their connections."""
        self.late_wills: dict[Client, tuple[StoredWill, float]] = {}
        """Wills that have a delay, and when it is over (Unix time), of clients that have a job to end first."""
        self.farewells: set[asyncio.Task[None]] = set()
        """What clients that have left still have to put in order; the gateway does not end before."""
        self._tasks = spawn
        self._spawned: set[asyncio.Task[None]] = set()
        self._nuid_prefix = nuid(secrets.token_bytes(32))[:12]
        self._nuids = secrets.randbelow(1_000_000_000)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` in the gateway's task group; its exceptions end only itself. Nothing is begun after the end."""
        if self.ended:
            work.close()
            return asyncio.get_running_loop().create_task(_nothing(), name=name)
        task = self._tasks.create_task(_guard(work), name=name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    def cancel(self) -> None:
        """End what :meth:`spawn` has started and is still running, and start nothing more."""
        self.ended = True
        for task in self._spawned:
            task.cancel()

    def spawn_safe(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """As :meth:`spawn`, for work that lets no exception out."""
        return self._tasks.create_task(rooted(work), name=name)

    def retained_now(self, operation: PendingStore) -> None:
        """The store of a retained message has ended."""
        self.retaining.discard(operation)
        self._retained.set()

    async def retained_so_far(self) -> None:
        """Wait until what this gateway's clients have had retained before this call can be read."""
        pending = set(self.retaining)
        while pending := pending & self.retaining:
            self._retained.clear()
            await self._retained.wait()

    def drop_assignment(self, record: bytes, operation: PendingStore) -> None:
        """A QoS 2 message of a shared subscription is complete, or goes to nobody: its assignment is not needed."""
        self.store.call(self.delete_shared, b'{"seq":%b,"no_erase":true}' % record, operation)

    def block(self, client: Client) -> None:
        """Read nothing more from a client that publishes until NATS takes more."""
        client.connection.hold(Hold.NATS)
        self._blocked_clients.append(client)

    def pressure(self, blocked: bool) -> None:
        """NATS takes no more, or takes more again."""
        self.path.blocked = blocked or not self.link.writable or self.store.pressed
        if not self.path.blocked:
            clients, self._blocked_clients = self._blocked_clients, []
            for client in clients:
                client.connection.release(Hold.NATS)

    def lost(self, link: NatsConnection) -> None:
        """A connection is lost, and with it whatever the server sent after it was last heard."""
        self.gaps.setdefault(link, natstime.converted(link.heard))

    def client(self, client_id: str) -> Client | None:
        """A connected client by its id, wherever its session is kept."""
        found = self.clients.get(client_id)
        return found or next((one for one in self.clients.values() if one.client_id == client_id), None)

    @property
    def steady(self) -> bool:
        """True when nothing has to be repaired, and no connection has fallen silent."""
        silent = natstime.elapsed() - min(self.link.heard, self.wild.heard) > SILENCE
        return not (self.gaps or self.repairing or silent)

    def is_own(self, headers: bytes) -> bool:
        """Whether this gateway made the message."""
        start = headers.find(b"\r\nNmqtt-Id:")
        return start >= 0 and headers[start + 27 : start + 39] == self.ids.own

    def new_nuid(self) -> str:
        """A unique token of 22 characters, as consumer names and deliver subjects have."""
        self._nuids += 1
        return f"{self._nuid_prefix}{self._nuids:010d}"


async def _nothing() -> None:
    """In place of what is not begun any more."""


async def _guard(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except asyncio.CancelledError:
        raise
    except Exception:
        log.exception("a task of the gateway failed")
