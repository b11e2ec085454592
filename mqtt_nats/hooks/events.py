# SPDX-License-Identifier: Apache-2.0
"""Events passed to callbacks, and the values that callbacks decide about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from mqtt_nats.codec import Properties, ReasonCode, Subscription

REFUSALS: Final = frozenset(
    (
        ReasonCode.SUCCESS,
        ReasonCode.UNSPECIFIED_ERROR,
        ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
        ReasonCode.NOT_AUTHORIZED,
        ReasonCode.TOPIC_NAME_INVALID,
        ReasonCode.QUOTA_EXCEEDED,
        ReasonCode.PAYLOAD_FORMAT_INVALID,
    )
)
"""Reason codes with which a dropped publish may be acknowledged (sections 3.4.2.1 and 3.5.2.1)."""

_SUBSCRIPTION_REFUSALS: Final = frozenset(
    (
        ReasonCode.UNSPECIFIED_ERROR,
        ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
        ReasonCode.NOT_AUTHORIZED,
        ReasonCode.TOPIC_FILTER_INVALID,
        ReasonCode.QUOTA_EXCEEDED,
    )
)


DropReason = Literal["denied", "expired", "hook", "not permitted", "slow client", "too large"]
"""Reason for which a client does not get a message, or a publish of the client is dropped."""


class HookedConnection(Protocol):
    """A client's connection, as far as hooks see it."""

    @property
    def host(self) -> str:
        """IP address of the client; empty = none."""


class HookedClient(Protocol):
    """A connected client, as far as hooks see it: a session."""

    client_id: str
    version: int
    durable: bool
    epoch: int

    @property
    def user(self) -> str | None:
        """Authenticated user; None = anonymous."""

    @property
    def connection(self) -> HookedConnection:
        """The connection of the client."""

    def log_fields(self) -> dict[str, Any]:
        """Return the ids for a log record about the client."""


def client_of(view: ClientView) -> HookedClient:
    """Return the client behind a view, for the gateway's own callbacks."""
    return view._client


class ClientView:
    """View of a connected client for callbacks. Views of the same connection are equal."""

    __slots__ = ("_client",)

    def __init__(self, client: HookedClient) -> None:
        self._client = client

    def __repr__(self) -> str:
        """Return client id and address."""
        return f"ClientView({self.client_id!r}, {self.address!r})"

    def __str__(self) -> str:
        """Return the client's name for logs."""
        return str(self._client)

    def log_fields(self) -> dict[str, Any]:
        """Return the ids for a log record about the client."""
        return self._client.log_fields()

    def __eq__(self, other: object) -> bool:
        """Whether both views are of the same connection."""
        return isinstance(other, ClientView) and self._client is other._client

    def __hash__(self) -> int:
        """Return a hash of the connection."""
        return hash(self._client)

    @property
    def client_id(self) -> str:
        """The client identifier."""
        return self._client.client_id

    @property
    def user(self) -> str | None:
        """Authenticated user; None: an anonymous client, whatever user name it presents."""
        return self._client.user

    @property
    def address(self) -> str:
        """IP address of the client; empty without one, also after the connection has ended."""
        return self._client.connection.host

    @property
    def version(self) -> int:
        """Protocol version: 4 (MQTT 3.1.1) or 5."""
        return self._client.version

    @property
    def durable(self) -> bool:
        """Whether the client's session is stored in JetStream."""
        return self._client.durable

    @property
    def epoch(self) -> int:
        """Epoch of the session: grows with every connection, so a lower epoch is older."""
        return self._client.epoch


@dataclass(frozen=True, slots=True)
class Connecting:
    """A CONNECT packet before authentication, without its password."""

    client_id: str
    """Client id from the client, or assigned by the gateway."""
    username: str | None
    """User name from the client, not authenticated."""
    address: str
    version: int
    clean_start: bool
    keepalive: int
    """Keep alive in seconds."""
    has_will: bool
    properties: Properties


@dataclass(frozen=True, slots=True)
class Connected:
    """A client is connected: its CONNACK has been written."""

    client: ClientView
    session_present: bool


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection of a connected client has ended."""

    client: ClientView
    reason: ReasonCode
    text: str


@dataclass(frozen=True, slots=True)
class Session:
    """Event of a session; ``epoch`` is the session's epoch at that time."""

    client_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Subscribing:
    """A SUBSCRIBE packet."""

    client: ClientView
    properties: Properties


@dataclass(frozen=True, slots=True)
class Refused:
    """Refusal in place of a subscription."""

    reason: ReasonCode = ReasonCode.NOT_AUTHORIZED

    def __post_init__(self) -> None:
        if self.reason not in _SUBSCRIPTION_REFUSALS:
            raise ValueError(f"a subscription cannot be refused with {self.reason!r}")


Wanted = tuple[Subscription | Refused, ...]
"""The subscriptions of a SUBSCRIBE packet, in order."""


@dataclass(frozen=True, slots=True)
class Unsubscribing:
    """An UNSUBSCRIBE packet."""

    client: ClientView


@dataclass(frozen=True, slots=True)
class Subscribed:
    """A session has a new or changed subscription; ``qos``: as granted."""

    client: ClientView
    topic_filter: str
    qos: int


@dataclass(frozen=True, slots=True)
class Unsubscribed:
    """A subscription of a session has ended."""

    client: ClientView
    topic_filter: str


@dataclass(frozen=True, slots=True)
class Authorizing:
    """A client wants to publish on a topic or to subscribe a filter."""

    client: ClientView
    access: Literal["publish", "subscribe"]
    topic: str
    """Topic or filter; the filter of a shared subscription without ``$share/<group>/``."""
    qos: int
    retain: bool


@dataclass(frozen=True, slots=True)
class Publishing:
    """Origin of a message: its publisher."""

    client: ClientView
    will: bool = False
    """Whether the message is the will of a client that is connecting."""


@dataclass(frozen=True, slots=True)
class Published:
    """A message from its publisher. `dataclasses.replace` makes a changed message."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: Properties
    message_id: str = ""
    """128-bit id of the message, 32 hex digits; empty at QoS 0 and for a will. A changed id is ignored."""
    packet_id: int = 0
    """Packet identifier of the publisher; 0 at QoS 0 and for a will. A changed identifier is ignored."""

    def __post_init__(self) -> None:
        if self.qos not in (0, 1, 2):
            raise ValueError(f"QoS is {self.qos}")


@dataclass(frozen=True, slots=True)
class Drop:
    """Value in place of a message that is not delivered to any subscriber.

    With ``SUCCESS`` the publisher gets a normal acknowledgement. Any other reason code is in the acknowledgement of a
    5.0 client at QoS 1 and 2; other publishers cannot get it.
    """

    reason: ReasonCode = ReasonCode.SUCCESS
    text: str = "the message is not accepted"

    def __post_init__(self) -> None:
        if self.reason not in REFUSALS:
            raise ValueError(f"a publish cannot be answered with {self.reason!r}")


@dataclass(frozen=True, slots=True)
class Answered:
    """A PUBACK, PUBREC or PUBCOMP has been written to the publisher's socket."""

    client: ClientView
    kind: Literal[4, 5, 7]
    """Type of the packet: 4 = PUBACK, 5 = PUBREC, 7 = PUBCOMP."""
    packet_id: int
    reason: int
    """Reason code; 0 to a 3.1.1 client."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A PUBLISH packet has been written to the client's socket."""

    client: ClientView
    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool
    packet_id: int
    """Packet identifier; 0 at QoS 0."""
    message_id: str = ""
    """Id of a stored message for a durable session; empty where it is not known."""
    properties: bytes = field(default=b"", repr=False)
    """Properties as they are encoded in the packet, without their length; empty to a 3.1.1 client."""


@dataclass(frozen=True, slots=True)
class Acked:
    """A client has acknowledged a message (PUBACK; PUBCOMP, or PUBREC with a reason of 0x80 or more)."""

    client: ClientView
    packet_id: int
    failed: bool
    message: Delivered | None
    """The acknowledged message; None when it was sent before a callback was added."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A message was not delivered to the subscriber ``client``, or to no subscriber if ``client`` is the publisher."""

    client: ClientView
    topic: str
    qos: int
    reason: DropReason
    message_id: str = ""
    """Id of the message; empty where it is not known."""
