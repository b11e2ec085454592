# SPDX-License-Identifier: Apache-2.0
"""A client's session at this gateway: its record, its owner, and the state of its connection."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from mqtt_nats.access.authenticator import ANONYMOUS
from mqtt_nats.codec import MqttError
from mqtt_nats.hooks.events import ClientView, Dropped, DropReason
from mqtt_nats.hooks.points import MESSAGE_DROPPED
from mqtt_nats.messages.message import Message
from mqtt_nats.messages.terms import TERMS, Terms
from mqtt_nats.protocol.transient_sender import TransientSender
from mqtt_nats.pubsub.data_path import ClientMemory, Path
from mqtt_nats.pubsub.routing_table import PLAIN, Choice, Filter, Member, Options
from mqtt_nats.sessions.consumer_binding import SessionConsumers
from mqtt_nats.sessions.jobs import Jobs
from mqtt_nats.transport.connection import Connection
from mqtt_nats.transport.packet_order import PacketOrder
from mqtt_streams.api import ApiError
from mqtt_streams.hashing import held_token, name_hash, registered_as
from mqtt_streams.headers import percent_encode
from mqtt_streams.subjects import filter_to_subjects

if TYPE_CHECKING:
    from mqtt_nats.access.authenticator import Allow
    from mqtt_nats.messages.publish_encoder import Aliases
    from mqtt_nats.sessions.groups.ended_shares import EndedShares
    from mqtt_nats.sessions.groups.member import Membership
    from mqtt_nats.sessions.guard import Guard
    from mqtt_nats.sessions.services import Services
    from mqtt_streams.sessions import SessionRecord
    from mqtt_streams.wills import StoredWill


class State(Enum):
    """The state of a client's connection."""

    NEW = auto()
    OPENING = auto()
    RESUMING = auto()
    """CONNACK was sent, and the session's messages in flight are being fetched."""
    LIVE = auto()
    ENDED = auto()


class Session(Member):
    """The session of one connection, durable or not; abstract: `Client` handles the packets."""

    __slots__ = (
        "_jobs",
        "_memory",
        "_order",
        "connection",
        "ended_shares",
        "epoch",
        "expires",
        "expiry",
        "foreign",
        "granted",
        "greeted",
        "guarded",
        "hash",
        "marked",
        "outgoing",
        "path",
        "record",
        "regular_side",
        "sender_header",
        "sent_disconnect",
        "services",
        "shares",
        "state",
        "taken",
        "terms",
        "token",
        "user",
        "why",
        "will",
    )

    def __init__(self, connection: Connection, services: Services) -> None:
        super().__init__(connection.write_buffer, False, False)
        self.connection, self.services, self.state = connection, services, State.NEW
        self.path: Path = services.path
        """The message path of the account, for compiled code."""
        self.hash = ""
        """Key of the session: the hash of the client id, or the second key where another client has that hash."""
        self.token = ""
        """Token of the session in the subjects of held publishes."""
        self.record: SessionRecord | None = None
        self.epoch = 0
        """Stream sequence of the session record that this connection wrote last; 0 = the session is not claimed."""
        self.foreign = 0
        """Highest known stream sequence of a session record that another connection wrote; 0 = none."""
        self.expiry: int | None = 0
        """Session expiry interval in seconds; None = the session does not expire."""
        self.granted: Allow = ANONYMOUS
        """Decision of the authentication; `ANONYMOUS` until then."""
        self.user: str | None = None
        """User that the authentication has proved; None = the client is anonymous."""
        self.expires: asyncio.TimerHandle | None = None
        """Timer that ends the connection when the credentials expire; None = they do not expire."""
        self.will: StoredWill | None = None
        self.sender_header = b""
        """Header line with the client id for each publish; empty = publishes do not name the client."""
        # Flags stand together: compiled code packs them.
        self.taken = False
        """The session belongs to another connection: this one changes nothing that is stored."""
        self.greeted = False
        """CONNACK with success was sent: a reason for the end of the connection goes into DISCONNECT."""
        self.sent_disconnect = False
        self.marked = False
        """Every publish names this client, so that it is not delivered to the client itself (No Local, bridges)."""
        self._memory: ClientMemory | None = None
        self._jobs: Jobs | None = None
        self._order: PacketOrder | None = None
        self.terms: Terms = TERMS
        """Limits and options that the client has set in CONNECT."""
        self.guarded: Guard | None = None
        """Permissions of the client; None = no rules and no hooks apply to the client."""
        self.outgoing: Aliases | None = None
        """Topic aliases of PUBLISH packets to the client; None = the client allows none."""
        self.why: MqttError | None = None
        """Error for which the gateway has ended the connection; None = it has not."""
        self.shares: dict[str, Membership] | None = None
        """Shared subscriptions by topic filter, ``$share/`` included; None = there are none."""
        self.ended_shares: EndedShares | None = None
        """Ended shared subscriptions with messages that are not acknowledged; None = there were none."""
        self.regular_side: TransientSender | None = None
        """Sender of a session that ends with its connection; None = the session is durable, or not claimed yet."""

    @property
    def alive(self) -> bool:
        """True until the connection has ended."""
        return self.state is not State.ENDED

    @property
    def ending(self) -> bool:
        """True from the decision of the gateway to end the connection, or from its end on: a socket may close late."""
        return self.why is not None or not self.alive

    @property
    def memory(self) -> ClientMemory:
        """Topic aliases, access decisions and routes that the gateway remembers because of the client.

        Made with the first one, since many clients only receive.
        """
        if self._memory is None:
            self._memory = self.path.client_memory()
        return self._memory

    def forget_decisions(self) -> None:
        """Forget the access decisions: the rules have changed."""
        if self._memory is not None:
            self._memory.forget_decisions()

    def release_memory(self) -> None:
        """Forget what the gateway remembers because of the client: its connection has ended."""
        if self._memory is not None:
            self._memory.free_all()

    @property
    def here(self) -> bool:
        """True while the connection is alive and has the session."""
        clients = self.services.registry.clients
        return self.alive and clients.get(registered_as(self.client_id, self.hash)) is self

    # -- implemented by Client and the classes between -------------------------------------------

    @property
    @abstractmethod
    def consumers(self) -> SessionConsumers | None:
        """The sender of a durable session; None = the session is regular, or not claimed yet."""

    @abstractmethod
    def begin_regular(self, record: SessionRecord) -> None:
        """Take the record that claims a session which ends with its connection."""

    @abstractmethod
    def begin_durable(self, record: SessionRecord, former: int, *, continued: bool) -> None:
        """Take the record that claims a durable session, and put new deliver subjects into it.

        Args:
            former: sequence of the session record that the previous connection had replaced.
            continued: an earlier session goes on.
        """

    @abstractmethod
    def deliver(self, choice: Choice, message: Message) -> None:
        """Deliver a message that core NATS or local dispatch has brought."""

    @abstractmethod
    def end_connection(self, error: MqttError) -> None:
        """Close the connection because of an error; a will is published."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @abstractmethod
    def refused(self, error: ApiError) -> None:
        """End the connection without an acknowledgement: JetStream refuses a message."""

    @abstractmethod
    def taken_over(self) -> None:
        """End at once and change nothing that is stored: another connection has claimed the session."""

    @abstractmethod
    def lost(self) -> None:
        """End the client, whose socket is closed."""

    @abstractmethod
    def leave(self) -> None:
        """Forget the client's state in this gateway and leave its session; the last step."""

    @abstractmethod
    def proceed(self) -> None:
        """Handle the waiting packets, unless a packet before them has not taken effect yet."""

    @abstractmethod
    def log_fields(self) -> dict[str, Any]:
        """Return the ids for a log record about the client."""

    # -- jobs -----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while the client has jobs."""
        return self._jobs is not None

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Queue a job, which runs after the client's earlier jobs."""
        if self.state is State.ENDED:
            work.close()
        elif self._jobs is None:
            self._jobs = Jobs(self, work)
        else:
            self._jobs.add(work)

    def finish_jobs(self) -> None:
        """Go on after the last job."""
        self._jobs = None
        if self.alive:
            self.proceed()
        else:
            self.leave()

    async def connected(self) -> None:
        """Wait, in a job, until NATS is connected; the end of the client cancels the wait."""
        if not self.services.nats.online.is_set():
            await self.idle(self.services.nats.online.wait())

    async def idle(self, waiting: Coroutine[Any, Any, object]) -> None:
        """Wait for NATS or JetStream; in a job of the client, the end of the client cancels the wait."""
        await (waiting if self._jobs is None else self._jobs.wait(waiting))

    # -- packets that wait ----------------------------------------------------------------------

    @property
    def order(self) -> PacketOrder:
        """Queue of waiting packets; made with the first one, since most clients have none."""
        if self._order is None:
            self._order = PacketOrder(self.connection)
        return self._order

    @property
    def waits(self) -> bool:
        """True while packets of the client wait for a packet before them."""
        return self._order is not None

    @property
    def gone(self) -> bool:
        """True when the socket is closed and packets before its end have yet to be handled."""
        return self._order is not None and self._order.gone

    @property
    def unserved(self) -> bool:
        """True while packets of the client wait and will still be handled."""
        waits = self.waits or self.connection.keeps or (self.sent_disconnect and self.busy)
        return waits and self.alive and not self.taken

    @property
    def ended_by_client(self) -> bool:
        """True when the client itself has ended the connection."""
        return self.sent_disconnect or self.connection.hung_up

    # -- messages to the client -----------------------------------------------------------------

    def withheld(self, key: bytes, qos: int, message_id: str) -> bool:
        """Whether the rules withhold a message of a subscription of this QoS; a withheld message is counted."""
        return self.guarded is not None and self.guarded.withholds(key, qos, message_id)

    def drop(self, topic: str, qos: int, reason: DropReason, message_id: str = "") -> None:
        """Count and announce a message that the client does not get, or whose publish is dropped."""
        services = self.services
        if reason != "slow client":  # these are counted in `FlushRound.dropped`
            services.counters.drop(reason)
        chain = services.hooks.noticing(MESSAGE_DROPPED)
        if chain is not None:
            chain.emit(Dropped(ClientView(self), topic, qos, reason, message_id))

    def join(self, topic_filter: str, qos: int, options: Options = PLAIN) -> Filter:
        """Add a subscription of the client to the routing table of this gateway."""
        nats, path = self.services.nats, self.path
        link = nats.wild if topic_filter[0] in "#+" else nats.link
        if options.no_local:
            self.mark()
        return path.table.subscribe(
            self, topic_filter, qos, filter_to_subjects(topic_filter), link, path.fanout.arrival, options
        )

    # -- who the client is ----------------------------------------------------------------------

    def name(self, client_id: str) -> None:
        """Set the client id, whose hash is the key of the session unless the claim finds another one."""
        self.client_id = client_id
        self.keep_at(name_hash(client_id))

    def keep_at(self, key: str) -> None:
        """Set the key of the session; see :attr:`hash`."""
        self.hash, self.token = key, held_token(self.client_id, key)

    def mark(self) -> None:
        """Name this client in each of its publishes, so that it does not get its own messages."""
        self.marked = True
        self.name_in_publishes()

    def name_in_publishes(self) -> None:
        """Have each publish name this client, and deliver to the client itself all the same."""
        self.sender_header = b"Nmqtt-Client:%b\r\n" % percent_encode(self.client_id).encode()

    def end_by(self, timer: asyncio.TimerHandle) -> None:
        """Note the timer that ends the connection when the credentials expire, in place of an earlier one."""
        if self.expires is not None:
            self.expires.cancel()
        self.expires = timer

    # -- the record and its owner ---------------------------------------------------------------

    def claim(self, epoch: int) -> None:
        """Note the stream sequence of the session record that this connection has written."""
        self.epoch = epoch

    def hear_claim(self, sequence: int) -> None:
        """Note the stream sequence of a session record that another connection has written."""
        self.foreign = max(self.foreign, sequence)

    def give_up(self) -> None:
        """Change nothing more that is stored: the session belongs to another connection, or is given up."""
        self.taken = True

    def expire_after(self, expiry: int | None) -> None:
        """Set the session expiry interval in seconds; None = the session does not expire."""
        self.expiry = expiry

    # -- the connection -------------------------------------------------------------------------

    def greet(self) -> None:
        """Note that CONNACK with success was sent."""
        self.greeted = True

    def hear_disconnect(self) -> None:
        """Note that the client has sent DISCONNECT."""
        self.sent_disconnect = True

    def keep_will(self, will: StoredWill) -> None:
        """Note the will that is stored."""
        self.will = will

    def take_will(self) -> StoredWill | None:
        """Return the stored will, which the caller publishes or deletes; None = there is none."""
        will, self.will = self.will, None
        return will

    # -- shared subscriptions -------------------------------------------------------------------

    def make_shares(self) -> dict[str, Membership]:
        """Return the shared subscriptions by topic filter, to which the caller adds."""
        if self.shares is None:
            self.shares = {}
            self.services.registry.sharing.add(self)
        return self.shares

    def keep_ended_shares(self, ended: EndedShares) -> EndedShares:
        """Set, and return, the ended shared subscriptions with messages that are not acknowledged."""
        self.ended_shares = ended
        return ended
