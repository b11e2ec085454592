# SPDX-License-Identifier: Apache-2.0
"""Data path: the parts of a gateway that the message path uses, for compiled code without name lookups.

The parts live as long as the account is served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.backbone.link import ENOUGH
from mqtt_nats.base.bucket import MemoryBudget, Share
from mqtt_nats.messages.ids import MessageIds
from mqtt_nats.messages.message import Stored, stored
from mqtt_nats.pubsub.fanout import Fanout
from mqtt_nats.pubsub.routing_table import Route, Table
from mqtt_nats.transport.connection import Connection, Hold
from mqtt_nats.transport.write_buffer import FlushRound
from mqtt_streams.messages import PREFIX

if TYPE_CHECKING:
    from mqtt_nats.backbone.link import NatsConnection


# Limits of the cache: messages, and bytes of payload; beyond one of them it is emptied.
STORED_MOST: Final = 4096
STORED_BYTES: Final = 16 * 1024 * 1024

ALIAS_BYTES: Final = 200
"""Estimated bytes of a topic alias without its topic."""

DECISION_BYTES: Final = 300
"""Estimated bytes of a cached access decision without its topic."""


TOPIC_BYTES: Final = 64
"""Estimated bytes of the note that a client caused a topic's route, without the topic."""


class Recent:
    """Cache of messages of ``$MQTT_msgs``: one object for a message that many consumers of this gateway bring."""

    __slots__ = ("_bytes", "_table", "messages")

    def __init__(self, table: Table) -> None:
        self.messages: dict[int, Stored] = {}
        """Messages by stream sequence."""
        self._bytes = 0
        self._table = table

    def message(self, sequence: int, stamp: bytes, subject: bytes, headers: bytes, payload: bytes) -> Stored:
        """Return the message with this sequence; one without a subject, at QoS 0, where it is not for clients.

        ``stamp`` is the store time in nanoseconds: a stream that was created again counts from 1 again.
        """
        found = self.messages.get(sequence)
        if found is not None and found.stamp == stamp:
            return found
        bare = subject[len(PREFIX) :]
        route = self._table.by_subject.get(bare) or self._table.route_of_subject(bare)
        if route is None:
            return Stored("", b"", b"", 0, 0)
        found = stored(route.subject, route.key, payload, sequence, stamp, headers)
        self._bytes += len(payload)
        if len(self.messages) >= STORED_MOST or self._bytes > STORED_BYTES:
            self.messages.clear()
            self._bytes = len(payload)
        self.messages[sequence] = found
        return found


class ClientMemory:
    """Memory that one client causes: topic aliases, access decisions, and routes of its topics.

    All clients share the routes, which the table counts. The client's part notes the routes that the client caused,
    and limits them.
    """

    __slots__ = ("_budget", "_decisions", "_noted", "_routes", "_share", "_table", "_topics", "aliases")

    def __init__(self, budget: MemoryBudget) -> None:
        self.aliases: dict[int, bytes] | None = None
        """Topic keys by topic alias, as set by the client; None = no alias."""
        self._budget = budget
        self._share: Share | None = None
        self._decisions: dict[tuple[bytes, int, bool], bool] | None = None  # most clients have none
        self._table: Table | None = None
        self._topics: list[bytes] | None = None
        self._noted = self._routes = 0

    def route(self, table: Table, key: bytes) -> Route:
        """Return the route of a topic on which the client publishes.

        Raises:
            MqttError: as :meth:`Table.route`.
        """
        known = table.routes.get(key)
        route = table.route(key)
        if route is not known:
            if self._routes + route.size > self._budget.each:
                self._forget_routes()
            note = TOPIC_BYTES + len(key)  # counted apart from the route, which the table may drop earlier
            self._room().add(note)
            self._table = table
            self._noted += note
            self._routes += route.size
            if self._topics is None:
                self._topics = []
            self._topics.append(key)
        return route

    def decided(self, asked: tuple[bytes, int, bool]) -> bool | None:
        """Return whether the client may publish on a topic, at a QoS and retained or not; None: not decided yet."""
        return None if self._decisions is None else self._decisions.get(asked)

    def decide(self, asked: tuple[bytes, int, bool], allowed: bool) -> None:
        """Remember an access decision until the rules change, or there is no room."""
        self._room().add(DECISION_BYTES + len(asked[0]))
        if self._decisions is None:
            self._decisions = {}
        self._decisions[asked] = allowed

    def set_alias(self, alias: int, key: bytes) -> bool:
        """Remember the topic of an alias; False: there is no room."""
        if self.aliases is None:
            self.aliases = {}
        former = self.aliases.get(alias)
        size = len(key) - len(former) if former is not None else ALIAS_BYTES + len(key)
        if not self._room().count_kept(size):
            return False
        self.aliases[alias] = key
        return True

    def forget_decisions(self) -> None:
        """Forget the access decisions: the rules have changed."""
        if self._share is not None:
            self._share.forget()

    def free_all(self) -> None:
        """Free all memory of the client: its connection has ended."""
        self._forget_routes()
        if self._share is not None:
            self._share.return_all()

    def _room(self) -> Share:
        if self._share is None:
            self._share = Share(self._budget, self._clear)
        return self._share

    def _clear(self) -> None:
        self._decisions = None
        self._noted = 0
        self._forget_routes()

    def _forget_routes(self) -> None:
        if self._table is not None and self._topics is not None:
            self._table.forget(self._topics)
        self._topics = None
        noted, self._noted, self._routes = self._noted, 0, 0
        if noted:
            self._room().add(-noted)


class Path:
    """Message path of one gateway.

    Args:
        received: messages of clients, by QoS, and their payloads in bytes: counted here.
    """

    __slots__ = (
        "_held",
        "blocked",
        "fanout",
        "ids",
        "link",
        "memory",
        "out",
        "received",
        "received_bytes",
        "recent",
        "round",
        "store",
        "table",
        "with_ids",
    )

    def __init__(
        self,
        link: NatsConnection,
        store: AckedPublisher,
        table: Table,
        fanout: Fanout,
        round_: FlushRound,
        received: list[int],
        received_bytes: list[int],
        ids: MessageIds,
        memory: MemoryBudget,
    ) -> None:
        self.link, self.store, self.table, self.fanout, self.round = link, store, table, fanout, round_
        self.out: list[bytes | memoryview] = link.out
        """Frames for NATS that leave at the end of this turn: the link's own list, which the link never replaces."""
        self.received, self.received_bytes = received, received_bytes
        self.ids = ids
        self.memory = memory
        """Memory budget for all clients."""
        self.recent = Recent(table)
        """Recent messages that readers have brought."""
        self._held: list[Connection] = []
        """Connections that are not read from until NATS takes more."""
        self.blocked = False
        """Whether publishers are not read from, since NATS does not take as much as clients publish."""
        self.with_ids = False
        """Whether QoS 1 messages are stored under an id, by which their stream recognises a repetition."""

    def press(self, pressed: bool) -> None:
        """Update the back-pressure: NATS takes no more data (``pressed``), or takes data again."""
        self.blocked = pressed or not self.link.writable or self.store.pressed
        if not self.blocked:
            held, self._held = self._held, []
            for connection in held:
                connection.release(Hold.NATS)

    def hold(self, connection: Connection) -> None:
        """Stop reading from a publishing client until NATS takes more."""
        connection.hold(Hold.NATS)
        self._held.append(connection)

    def use_ids(self, with_ids: bool) -> None:
        """Store QoS 1 messages under an id, by which their stream recognises a repetition, or do not."""
        self.with_ids = with_ids

    def client_memory(self) -> ClientMemory:
        """Return the empty memory account of a new client."""
        return ClientMemory(self.memory)

    def leave(self) -> None:
        """Have the collected bytes for clients and for NATS leave at the end of the turn, or before."""
        self.round.start()
        link = self.link
        if not link.scheduled or len(self.out) >= ENOUGH:  # else a push is scheduled; many reads share one turn
            link.push()
