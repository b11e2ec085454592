# SPDX-License-Identifier: Apache-2.0
"""Broker: the parts that all clients of a gateway in one account share."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.access.acl import Rules
from mqtt_nats.backbone.connect import NatsLinks
from mqtt_nats.backbone.doubtful_stores import DoubtfulStores, find_stored
from mqtt_nats.backbone.pending_stores import PendingStore
from mqtt_nats.base.bucket import MemoryBudget
from mqtt_nats.base.tasks import Tasks
from mqtt_nats.client.message_hooks import changed, fit
from mqtt_nats.config.nats_connect import server_version
from mqtt_nats.config.worker_identity import own_place
from mqtt_nats.control.server import Control
from mqtt_nats.delivery.position_handover import PositionHandover
from mqtt_nats.delivery.reconcile import Reconciling
from mqtt_nats.gateway.desired_state import Fleet
from mqtt_nats.hooks.registry import Hooks
from mqtt_nats.ingress.interceptors import Takers
from mqtt_nats.ingress.request_reply import Replying
from mqtt_nats.ingress.retained_tombstones import Tombstones
from mqtt_nats.lifecycle.cluster_bans import Banning
from mqtt_nats.lifecycle.lease import Lease
from mqtt_nats.lifecycle.quotas import Quotas
from mqtt_nats.lifecycle.readiness import Readiness
from mqtt_nats.messages.cache import Recent
from mqtt_nats.messages.copies import Copies
from mqtt_nats.messages.ids import MessageIds
from mqtt_nats.observability.counters import Counters
from mqtt_nats.observability.nats_service import Service
from mqtt_nats.observability.presence import Presence
from mqtt_nats.observability.sys_topics import System
from mqtt_nats.plugins.manager import Plugins
from mqtt_nats.pubsub.data_path import Path
from mqtt_nats.pubsub.fanout import Fanout
from mqtt_nats.pubsub.interest_propagation import Nodes
from mqtt_nats.pubsub.routing_table import Table
from mqtt_nats.pubsub.subject_mapping import parse_mappings
from mqtt_nats.sessions.shared_assignment import LateAssignments
from mqtt_nats.sessions.stream_head import StreamHead
from mqtt_nats.sessions.stream_identity import StreamIdentity
from mqtt_nats.sessions.takeover import Claims
from mqtt_nats.shared_reader.sessions import SharedReaderSessions
from mqtt_nats.transport.connection import Clock, Hold
from mqtt_nats.transport.write_buffer import FlushRound
from mqtt_streams.hashing import nuid
from mqtt_streams.quotas import QuotaStore
from mqtt_streams.stores import Streams

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.config.settings import Settings
    from mqtt_nats.control.server import Powers
    from mqtt_nats.delivery.position_writer import PositionWriter
    from mqtt_nats.lifecycle.will import Done
    from mqtt_streams.wills import StoredWill

RESETS: Final = (2, 14)
"""First nats-server version that can set the position of a consumer."""


class Account(NamedTuple):
    """An account among those of the gateway."""

    tenant: str
    """Name of the tenant; empty = the gateway's own account."""
    domain: str
    """JetStream domain; empty = none."""
    brokers: Mapping[str, Broker]
    """All brokers of the gateway, that of this account included, by tenant."""
    rules: Rules | None
    """Access rules; None = every client may publish and subscribe on every topic."""


class Broker:
    """Broker of one account; made once, when NATS is connected and the streams exist.

    Args:
        nats: the account's connections to NATS.
        streams: the stores of the account's streams.
        identity: the gateway's id, 8 characters, unique in the NATS account.
        group: the gateway's task group.
        account: which of the gateway's accounts it is.
        positions: whether the shared reader may be used.
        reload: reads files again; returns the problems, one line each.
        powers: actions that may be requested in this account.
    """

    def __init__(
        self,
        settings: Settings,
        nats: NatsLinks,
        streams: Streams,
        identity: str,
        group: asyncio.TaskGroup,
        account: Account,
        *,
        positions: bool,
        reload: Callable[[], list[str]],
        powers: Powers,
    ) -> None:
        self.settings, self.nats, self.identity = settings, nats, identity
        self.tenant, self.tenants, self.domain = account.tenant, account.brokers, account.domain
        self.rules = account.rules
        """Access rules for publishing and subscribing; None = every client may do both on every topic."""
        self.tasks = Tasks(group)
        self.spawn, self.spawn_safe = self.tasks.spawn, self.tasks.spawn_safe
        self._nuid_prefix = nuid(secrets.token_bytes(32))[:12]
        self._nuids = secrets.randbelow(1_000_000_000)
        self._take_links(nats)
        self._take_streams(streams)
        self._know_nobody()
        self._begin_messages(nats)
        self._begin_sessions()
        self._begin_operation(positions=positions, reload=reload, powers=powers)

    def _take_links(self, nats: NatsLinks) -> None:
        """Keep the connections as direct attributes: they are used for each message."""
        self.link, self.wild, self.shared = nats.link, nats.wild, nats.shared
        self.inbox, self.store = nats.inbox, nats.store
        self.reconnect, self.online = nats.reconnect, nats.online

    def _take_streams(self, streams: Streams) -> None:
        """Keep the stores as direct attributes."""
        self.sessions, self.retained, self.held = streams.sessions, streams.retained, streams.held
        self.pubrels, self.timers, self.wills = streams.pubrels, streams.timers, streams.wills
        self.groups, self.positions = streams.groups, streams.positions
        self.delete_session, self.delete_retained = streams.delete_session, streams.delete_retained
        self.delete_will, self.delete_shared = streams.delete_will, streams.delete_shared
        self.delete_held, self.purge_held = streams.delete_held, streams.purge_held

    def _know_nobody(self) -> None:
        """Begin without clients."""
        self.clients: dict[str, Client] = {}
        """Connected clients by client id; by the name of `registered_as` if the session has its second key."""
        self.unchecked: set[Client] = set()
        """Clients whose session may have moved while NATS was away."""
        self.connections: set[Client] = set()
        """Clients with an open socket, also before CONNECT."""
        self.left = asyncio.Event()
        """Set when a client has left."""
        self.attached: dict[str, Client] = {}
        """Clients by the name of the consumer of ``$MQTT_msgs`` that delivers to their connection."""
        self.keepers: set[PositionWriter] = set()
        """Writers of sessions' positions."""
        self.last_wills: dict[Client, Done] = {}
        """Wills that are being published, by client, of sessions that end with their connection."""
        self.late_wills: dict[Client, tuple[StoredWill, float]] = {}
        """Delayed wills with their due Unix time in seconds, by client, of clients whose last job has not ended."""
        self.welcomes: dict[tuple[int, ...], bytes] = {}
        """CONNACK packets of most 5.0 connections, by Session Present and limits."""
        self._blocked_clients: list[Client] = []
        self.closing = False

    def _begin_messages(self, nats: NatsLinks) -> None:
        """Make what a message passes through."""
        settings, link, store = self.settings, self.link, self.store
        loop = asyncio.get_running_loop()
        self.clock = Clock(loop.time())
        self.round = FlushRound(loop.call_soon, link.write_out)
        unheard = DoubtfulStores(nats, self.tasks, self.round)
        store.consult(absent=unheard.absent, silent=unheard.silent, find=partial(find_stored, self.inbox))
        self.hooks = Hooks(self.spawn, partial(changed, self))
        self.fit = fit
        """Function that puts hooks between a client and its connection after the client has moved to this account."""
        self.takers = Takers()
        """Interceptors: functions that take messages of topics in place of subscribers."""
        memory = MemoryBudget(settings.max_cache_bytes, settings.max_client_cache_bytes)
        longest, mappings = (settings.max_topic_levels, settings.max_topic_length), parse_mappings(settings.mappings)
        self.table = Table(settings.local_dispatch, *longest, mappings, memory)
        self.fanout = Fanout(self.table, link, self.round)
        recent = Recent(self.table)
        self.stored = recent.messages
        """Recent messages that consumers have delivered, by stream sequence."""
        self.stored_message = recent.message
        self.counters = Counters(self.fanout.sent, self.fanout.sent_bytes)
        store.call_on_timed(self.counters.stored.observe)
        self.ids = MessageIds(secrets.randbits(48))
        counted = self.counters.received, self.counters.received_bytes
        self.path = Path(link, store, self.table, self.fanout, self.round, *counted, self.ids, memory)
        self.replying = Replying(self)
        self.fanout.tell_response_topics(self.replying.response_topic)
        self.copies = Copies(link, self.inbox, store, self.online, self.spawn, self.counters.drop)
        self.fanout.begin_looking(self.copies.suspect, self.copies.doubt)
        self.retaining: set[PendingStore] = set()
        """Stores of retained messages that are not acknowledged."""
        self.withholding: set[Client] | None = None
        """Clients whose ownership must be checked before withheld stores go on; None = no stores are withheld."""
        self._retained = asyncio.Event()
        limited = settings.max_retained is not None
        self.tombstones = Tombstones(nats, self.delete_retained, at_once=limited)
        self.not_retained = 0
        """Number of messages that were not retained because of a limit."""

    def _begin_sessions(self) -> None:
        """Make what sessions need of this account."""
        self.nodes = Nodes(self.nats)
        limited = self.counters.limit
        self.quotas = Quotas(self.settings, QuotaStore(self.inbox), self.sessions, self.store, limited)
        self.latest = StreamHead(self.inbox)
        self.claims = Claims(self.nats, self.sessions, self.domain, self.identity)
        self.leaving = PositionHandover(self)
        self.belated = LateAssignments(self)
        self.generation = StreamIdentity(self)
        self.reconciling = Reconciling(self)
        self.resets = server_version(self.link) >= RESETS
        """Whether nats-server can set the position of a consumer."""
        self.crowded_until = 0.0
        """Loop time in seconds until which every deliver subject is assumed to have its own listener."""
        self.passed_over = 0
        """Number of messages that were not sent to a session because too many waited."""

    def _begin_operation(self, *, positions: bool, reload: Callable[[], list[str]], powers: Powers) -> None:
        """Make what observes and steers the gateway in this account."""
        self.place = own_place()
        self.presence, self.system, self.service = Presence(self), System(self), Service(self)
        self.banning = Banning(self)
        self.plugins = Plugins(self, self.settings.plugins)
        self.fleet = Fleet(self, self.plugins, reload)
        self.lease = Lease(self)
        self.readiness = Readiness(self.nats, self.lease)
        self.control = Control(self, self.lease, powers)
        self.live = SharedReaderSessions(self) if positions else None
        """Sessions of the shared reader; None = the shared reader is not used."""

    def rename(self, identity: str) -> None:
        """Go on under another id: another gateway has dealt with the clients of the former one."""
        self.identity = identity

    def use_rules(self, rules: Rules | None) -> None:
        """Set the access rules; None = every client may publish and subscribe on every topic."""
        self.rules = rules

    def begin_closing(self) -> None:
        """Let no more clients in: the gateway ends."""
        self.closing = True

    def crowd(self, until: float) -> None:
        """Assume that every deliver subject has its own listener, until a loop time in seconds."""
        self.crowded_until = until

    def count_passed_over(self) -> None:
        """Count a message that is not sent to a session because too many wait."""
        self.passed_over += 1

    def count_not_retained(self) -> None:
        """Count a message that is not retained because of a limit."""
        self.not_retained += 1

    def begin_withholding(self) -> set[Client]:
        """Withhold stores of retained messages; return the clients whose ownership must be checked, none yet."""
        doubted: set[Client] = set()  # not set[Client](): the class is imported for its type only
        self.withholding = doubted
        return doubted

    def end_withholding(self) -> None:
        """Let stores of retained messages go on."""
        self.withholding = None

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
        self.path.block(blocked or not self.link.writable or self.store.pressed)
        if not self.path.blocked:
            clients, self._blocked_clients = self._blocked_clients, []
            for client in clients:
                client.connection.release(Hold.NATS)

    def client(self, client_id: str) -> Client | None:
        """Return a connected client by its id, under either key; None if there is none."""
        found = self.clients.get(client_id)
        return found or next((one for one in self.clients.values() if one.client_id == client_id), None)

    def is_own(self, headers: bytes) -> bool:
        """Return whether this gateway made the message, by its id header."""
        start = headers.find(b"\r\nNmqtt-Id:")
        return start >= 0 and headers[start + 27 : start + 39] == self.ids.own

    def new_nuid(self) -> str:
        """Return a unique token of 22 characters, as used in consumer names and deliver subjects."""
        self._nuids += 1
        return f"{self._nuid_prefix}{self._nuids:010d}"
