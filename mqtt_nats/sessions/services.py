# SPDX-License-Identifier: Apache-2.0
"""Services that all sessions of one account share, complete when they are made."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from mqtt_nats.transport.turns import TimingWheel

if TYPE_CHECKING:
    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.backbone.pending_stores import PendingStore
    from mqtt_nats.base.tasks import Tasks
    from mqtt_nats.config.settings import Settings
    from mqtt_nats.hooks.registry import Hooks
    from mqtt_nats.messages.identity import Identity
    from mqtt_nats.observability.counters import Counters
    from mqtt_nats.pubsub.data_path import Path
    from mqtt_nats.pubsub.interest_propagation import Nodes
    from mqtt_nats.sessions.groups.subscribe import LateAssignments
    from mqtt_nats.sessions.message_stream import StreamHead, StreamIdentity
    from mqtt_nats.sessions.quotas import Quotas
    from mqtt_nats.sessions.session import Session
    from mqtt_nats.sessions.takeover import RecordReads
    from mqtt_nats.transport.connection import Clock
    from mqtt_streams.stores import Streams

S = TypeVar("S", bound="Session")


class Registry(Generic[S]):
    """The connections of a gateway in one account, and the sessions that they have."""

    __slots__ = ("attached", "checks", "client_removed", "clients", "closing", "connections", "sharing", "unchecked")

    def __init__(self) -> None:
        self.clients: dict[str, S] = {}
        """Connected clients by client id; by the name of `registered_as` if the session has its second key."""
        self.unchecked: set[S] = set()
        """Clients whose session may have moved while NATS was away."""
        self.connections: set[S] = set()
        """Clients with an open socket, also before CONNECT."""
        self.checks: TimingWheel[S] = TimingWheel()
        """Of these, clients by the time at which their keep alive or connect timeout may have passed."""
        self.sharing: set[S] = set()
        """Clients that have had shared subscriptions."""
        self.client_removed = asyncio.Event()
        """Set when a client was removed: its connection has ended, or belongs to another account."""
        self.attached: dict[str, S] = {}
        """Clients by the names of their dormant consumers, and of their consumers of PUBREL records."""
        self.closing = False
        """Whether the gateway ends, and lets no more clients in."""

    def enter(self, client: S) -> None:
        """Add a client with an open socket."""
        self.connections.add(client)
        self.checks.put(client, 0.0)

    def leave(self, client: S) -> None:
        """Remove a client whose connection has ended, or belongs to another account."""
        self.connections.discard(client)
        self.checks.discard(client)
        self.sharing.discard(client)
        self.client_removed.set()

    def begin_closing(self) -> None:
        """Let no more clients in: the gateway ends."""
        self.closing = True

    def find(self, client_id: str) -> S | None:
        """Return a connected client by its id, under either key; None if there is none."""
        found = self.clients.get(client_id)
        return found or next((one for one in self.clients.values() if one.client_id == client_id), None)


@dataclass(frozen=True, slots=True)
class Services:
    """Services of one account that every session uses."""

    settings: Settings
    nats: NatsLinks
    streams: Streams
    identity: Identity
    tasks: Tasks
    path: Path
    registry: Registry[Session]
    hooks: Hooks
    counters: Counters
    clock: Clock
    nodes: Nodes
    head: StreamHead
    """Head of the stream of messages."""
    stream: StreamIdentity
    """Identity of the stream of messages."""
    quotas: Quotas
    late_assignments: LateAssignments
    records: RecordReads
    """Reads of the records of connected sessions."""
    unrecorded: dict[Session, None] = field(default_factory=dict)
    """Clean sessions without a record, oldest first: see :mod:`mqtt_nats.sessions.unrecorded`."""

    def drop_assignment(self, record: bytes, operation: PendingStore) -> None:
        """Remove the assignment of a QoS 2 message of a group: the message is complete, or has no receiver."""
        self.nats.store.call(self.streams.delete_assignment, b'{"seq":%b,"no_erase":true}' % record, operation)
