# SPDX-License-Identifier: Apache-2.0
"""Broker: one account of a gateway as composed of its services, and what steers and observes them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from mqtt_nats.access.acl import Rules
from mqtt_nats.backbone.batch import SharedRequest
from mqtt_nats.backbone.connect import NatsLinks
from mqtt_nats.backbone.doubtful_stores import DoubtfulStores, find_stored
from mqtt_nats.backbone.store_barrier import StoreBarrier
from mqtt_nats.base.bucket import MemoryBudget
from mqtt_nats.base.tasks import Tasks
from mqtt_nats.client.account import Account, ClientRules
from mqtt_nats.client.message_hooks import changed, fit
from mqtt_nats.config.nats_connect import server_version
from mqtt_nats.config.worker_identity import own_place
from mqtt_nats.control.server import Control
from mqtt_nats.control.snapshot import snapshot
from mqtt_nats.delivery.elections import Elections
from mqtt_nats.delivery.position_handover import PositionHandover
from mqtt_nats.delivery.position_writer import PositionWriters
from mqtt_nats.delivery.receiver import DeliveryServices
from mqtt_nats.gateway.desired_state import Fleet
from mqtt_nats.hooks.registry import Hooks
from mqtt_nats.ingress.interceptors import Takers
from mqtt_nats.ingress.publish import Ingress
from mqtt_nats.ingress.request_reply import Replying
from mqtt_nats.ingress.retained.store import RetainedStores
from mqtt_nats.lifecycle.cluster_bans import Banning
from mqtt_nats.lifecycle.lease import Lease
from mqtt_nats.lifecycle.readiness import Readiness
from mqtt_nats.lifecycle.will import Wills
from mqtt_nats.messages.copies import Copies
from mqtt_nats.messages.identity import Identity
from mqtt_nats.messages.ids import MessageIds
from mqtt_nats.messages.live_copies import LiveCopies
from mqtt_nats.observability.counters import Counters
from mqtt_nats.observability.nats_service import Service, Statistics
from mqtt_nats.observability.presence import Presence
from mqtt_nats.observability.sys_topics import System
from mqtt_nats.plugins.manager import Plugins
from mqtt_nats.pubsub.backfill import Gaps
from mqtt_nats.pubsub.beginnings import Beginnings
from mqtt_nats.pubsub.data_path import Path
from mqtt_nats.pubsub.fanout import Fanout
from mqtt_nats.pubsub.interest_propagation import Nodes
from mqtt_nats.pubsub.lost_servers import LostServers
from mqtt_nats.pubsub.routing_table import Table
from mqtt_nats.pubsub.subject_mapping import parse_mappings
from mqtt_nats.sessions.groups.subscribe import LateAssignments
from mqtt_nats.sessions.message_stream import StreamHead, StreamIdentity, mark
from mqtt_nats.sessions.quotas import Quotas
from mqtt_nats.sessions.services import Registry, Services
from mqtt_nats.sessions.takeover import Claims, RecordReads
from mqtt_nats.shared_reader.sessions import SharedReaderSessions
from mqtt_nats.transport.connection import Clock
from mqtt_nats.transport.write_buffer import FlushRound
from mqtt_streams.quotas import QuotaStore
from mqtt_streams.stores import Streams

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.config.settings import Settings
    from mqtt_nats.control.server import Powers
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.gateway.fleet_pause import FleetPause
    from mqtt_nats.ingress.publish import Publisher
    from mqtt_nats.sessions.session import Session

RESETS: Final = (2, 14)
"""First nats-server version that can set the position of a consumer."""


class Place(NamedTuple):
    """An account among those of the gateway."""

    identity: Identity
    """The gateway in this account."""
    accounts: Mapping[str, Account]
    """All accounts of the gateway by tenant, this one included once it is served."""
    refused: Mapping[str, str]
    """Why the other tenants are not served; empty in the account of a tenant."""
    rules: Rules | None
    """Access rules; None = every client may publish and subscribe on every topic."""


class Broker:
    """Broker of one account; made once, when NATS is connected and the streams exist.

    Args:
        nats: the account's connections to NATS.
        streams: the stores of the account's streams.
        group: the gateway's task group.
        place: which of the gateway's accounts it is.
        reload: reads files again; returns the problems, one line each.
        pause: the account's pause of all gateways.
        powers: actions that may be requested in this account.
    """

    def __init__(
        self,
        settings: Settings,
        nats: NatsLinks,
        streams: Streams,
        group: asyncio.TaskGroup,
        place: Place,
        *,
        reload: Callable[[], list[str]],
        pause: FleetPause,
        powers: Powers,
    ) -> None:
        registry: Registry[Client] = Registry()
        services = _services(settings, nats, streams, Tasks(group), place.identity, registry)
        system = System(nats, services.path, services.identity, settings.sys_interval, self.snapshot)
        retained = RetainedStores(services, limited=settings.max_retained is not None)
        publishers = cast("Registry[Publisher]", registry)
        ingress = Ingress(services, publishers, Replying(services), Takers(), retained, system)
        services.path.fanout.tell_response_topics(ingress.replying.response_topic)
        receivers = cast("Registry[Receiver]", registry)
        resets = server_version(nats.link) >= RESETS
        self.live = SharedReaderSessions(services, receivers)
        """Sessions of the shared reader."""
        Elections(services, receivers, self.live)
        handover = PositionHandover(services)
        delivery = DeliveryServices(services, receivers, handover, PositionWriters(), self.live, resets)
        self.account = _account(place, registry, ingress, delivery)
        """The services of the account for its clients."""
        services.hooks.call_on_change(partial(changed, self.account))
        self.plugins = Plugins(self.account, settings.plugins)
        self.fleet = Fleet(services, self.plugins, reload, pause)
        self.control = Control(self.account, self.plugins, own_place(), powers)
        about = self.account.lease.info
        self.service = Service(nats, services.identity, services.tasks, about, self._statistics, self.snapshot)

    async def snapshot(self) -> dict[str, Any]:
        """Return all counters and the present state as JSON values."""
        return await snapshot(self.account)

    def _statistics(self) -> Statistics:
        services = self.account.services
        counters, registry = services.counters, services.registry
        dropped = sum(counters.drops(services.path.round.dropped).values())
        numbers = len(registry.connections), len(registry.clients), sum(counters.received), sum(counters.sent), dropped
        return Statistics(counters.since, *numbers)


def _services(
    settings: Settings, nats: NatsLinks, streams: Streams, tasks: Tasks, identity: Identity, clients: Registry[Client]
) -> Services:
    """Make the services that every session uses."""
    registry = cast("Registry[Session]", clients)  # all sessions are clients
    loop = asyncio.get_running_loop()
    link, store = nats.link, nats.store
    round_ = FlushRound(loop.call_soon, link.write_out)
    unheard = DoubtfulStores(nats, tasks, round_)
    store.consult(absent=unheard.absent, silent=unheard.silent, find=partial(find_stored, nats.inbox))
    memory = MemoryBudget(settings.max_cache_bytes, settings.max_client_cache_bytes)
    longest, mappings = (settings.max_topic_levels, settings.max_topic_length), parse_mappings(settings.mappings)
    table = Table(settings.local_dispatch, *longest, mappings, memory)
    fanout = Fanout(table, link, round_)
    counters = Counters(fanout.sent, fanout.sent_bytes)
    store.call_on_timed(counters.stored.observe)
    streams.retained.read_info_by(SharedRequest(streams.retained.info).answer)
    counted = counters.received, counters.received_bytes
    path = Path(link, store, table, fanout, round_, *counted, MessageIds(secrets.randbits(48)), memory)
    return Services(
        settings=settings,
        nats=nats,
        streams=streams,
        identity=identity,
        tasks=tasks,
        path=path,
        registry=registry,
        hooks=Hooks(tasks.spawn),
        counters=counters,
        clock=Clock(loop.time()),
        nodes=Nodes(nats),
        head=StreamHead(nats.inbox),
        stream=StreamIdentity(nats, identity, tasks, registry),
        quotas=Quotas(settings, QuotaStore(nats.inbox), streams.sessions, store, counters.limit),
        late_assignments=LateAssignments(nats, registry),
        records=RecordReads(nats, streams.sessions, tasks),
    )


def _account(place: Place, registry: Registry[Client], ingress: Ingress, delivery: DeliveryServices) -> Account:
    """Make the services of an account for its clients."""
    services = ingress.services
    settings, nats, identity = services.settings, services.nats, services.identity
    copies = Copies(nats.link, nats.inbox, nats.store, nats.online, services.tasks.spawn, services.counters.drop)
    services.path.fanout.begin_looking(copies.suspect, copies.doubt)
    # Before the live copies, which leave behind its subscriptions, and behind the name of the lost server.
    store_barrier = StoreBarrier(nats, services.tasks)
    gaps = Gaps(nats, services.path, services.nodes, services.head, store_barrier)
    lost_servers = LostServers(nats, gaps, services.tasks)
    beginnings = Beginnings(nats, services.tasks, lambda: mark(nats).position(nats.inbox))
    services.path.table.call_on_joined(beginnings.begin)
    claims = Claims(nats, services.streams.sessions, identity.domain, identity.id)
    wills = Wills(ingress, claims)
    presence = Presence(services.path, identity, wanted=settings.presence)
    lease = Lease(wills, presence, claims, delivery.handover)
    return Account(
        services=services,
        ingress=ingress,
        delivery=delivery,
        registry=registry,
        claims=claims,
        wills=wills,
        presence=presence,
        lease=lease,
        readiness=Readiness(nats, lease),
        banning=Banning(services),
        copies=copies,
        live_copies=LiveCopies(nats.link, nats.store, services.counters.drop),
        gaps=gaps,
        lost_servers=lost_servers,
        beginnings=beginnings,
        rules=ClientRules(place.rules),
        accounts=place.accounts,
        refused=place.refused,
        fit=fit,
        welcomes={},
    )
