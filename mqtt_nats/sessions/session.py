# SPDX-License-Identifier: Apache-2.0
"""A client's session at this gateway: its record, its owner, and the state of its connection."""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from typing import TYPE_CHECKING

from mqtt_nats.protocol.transient_sender import TransientSender
from mqtt_nats.pubsub.data_path import Path
from mqtt_nats.pubsub.routing_table import Member
from mqtt_nats.transport.connection import Connection
from mqtt_streams.hashing import held_token
from mqtt_streams.headers import percent_encode

if TYPE_CHECKING:
    from mqtt_nats.sessions.shared_member import Membership
    from mqtt_streams.sessions import SessionRecord
    from mqtt_streams.wills import StoredWill


class State(Enum):
    """The state of a client's connection."""

    NEW = auto()
    OPENING = auto()
    RESUMING = auto()
    """CONNACK was sent, and the session's pending messages are being collected."""
    LIVE = auto()
    ENDED = auto()


class Session(Member):
    """The session of one connection, durable or not."""

    __slots__ = (
        "connection",
        "epoch",
        "expires",
        "expiry",
        "foreign",
        "greeted",
        "hash",
        "marked",
        "memory",
        "path",
        "record",
        "regular_side",
        "sender_header",
        "sent_disconnect",
        "shares",
        "state",
        "taken",
        "token",
        "unacknowledged",
        "user",
        "will",
    )

    def __init__(self, connection: Connection, path: Path) -> None:
        super().__init__(connection.outlet, False, False)
        self.connection, self.path, self.state = connection, path, State.NEW
        self.hash = ""
        """Key of the session: the hash of the client id, or the second key where another client has that hash."""
        self.token = ""
        """Token of the session in the subjects of held publishes."""
        self.record: SessionRecord | None = None
        self.epoch = 0
        """Stream sequence of the session record that this connection wrote last; 0 = the session is not claimed."""
        self.foreign = 0
        """Highest known stream sequence of a session record that another connection wrote; 0 = none."""
        self.taken = False
        """The session belongs to another connection: this one changes nothing that is stored."""
        self.expiry: int | None = 0
        """Session expiry interval in seconds; None = the session does not expire."""
        self.user: str | None = None
        """User that the authentication has proved; None = the client is anonymous."""
        self.expires: asyncio.TimerHandle | None = None
        """Timer that ends the connection when the credentials expire; None = they do not expire."""
        self.will: StoredWill | None = None
        self.greeted = False
        """CONNACK with success was sent: a reason for the end of the connection goes into DISCONNECT."""
        self.sent_disconnect = False
        """The client has sent DISCONNECT."""
        self.sender_header = b""
        """Header line with the client id for each publish; empty = publishes do not name the client."""
        self.marked = False
        """Every publish names this client, so that it is not delivered to the client itself (No Local, bridges)."""
        self.memory = path.client_memory()
        """Topic aliases, access decisions and routes that the gateway remembers because of the client."""
        self.unacknowledged = 0
        """Number of QoS 1 publishes of a 5.0 client that wait for PUBACK."""
        self.shares: dict[str, Membership] | None = None
        """Shared subscriptions by topic filter, ``$share/`` included; None = there are none."""
        self.regular_side: TransientSender | None = None
        """Sender of a session that ends with its connection; None = the session is durable, or not claimed yet."""

    @property
    def alive(self) -> bool:
        """True until the connection has ended."""
        return self.state is not State.ENDED

    @property
    def unserved(self) -> bool:
        """True while packets of the client wait and will still be handled."""
        raise NotImplementedError

    @property
    def left(self) -> bool:
        """True when the client itself has ended the connection."""
        raise NotImplementedError

    def taken_over(self) -> None:
        """End at once and change nothing that is stored: another connection has claimed the session."""
        raise NotImplementedError

    # -- who the client is ----------------------------------------------------------------------

    def name(self, client_id: str) -> None:
        """Set the client id."""
        self.client_id = client_id

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
        """Note the timer that ends the connection when the credentials expire."""
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

    def count_unacknowledged(self) -> None:
        """Count a QoS 1 publish that waits for PUBACK."""
        self.unacknowledged += 1

    # -- shared subscriptions -------------------------------------------------------------------

    def make_shares(self) -> dict[str, Membership]:
        """Return the shared subscriptions by topic filter, to which the caller adds."""
        if self.shares is None:
            self.shares = {}
        return self.shares
