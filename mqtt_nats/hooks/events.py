# SPDX-License-Identifier: Apache-2.0
"""What callbacks are told, and the values that they decide about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from mqtt_nats.codec import Properties, ReasonCode, Subscription

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client

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
"""What a publish that is dropped may be answered with (sections 3.4.2.1 and 3.5.2.1)."""

_SUBSCRIPTION_REFUSALS: Final = frozenset(
    (
        ReasonCode.UNSPECIFIED_ERROR,
        ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
        ReasonCode.NOT_AUTHORIZED,
        ReasonCode.TOPIC_FILTER_INVALID,
        ReasonCode.QUOTA_EXCEEDED,
    )
)


class ClientView:
    """A connected client, as callbacks see it. It is the same as long as the connection."""

    __slots__ = ("_client",)

    def __init__(self, client: Client) -> None:
        self._client = client

    def __repr__(self) -> str:
        """Its name and address."""
        return f"ClientView({self.client_id!r}, {self.address!r})"

    def __str__(self) -> str:
        """Its name, for logs."""
        return str(self._client)

    def log_fields(self) -> dict[str, Any]:
        """The ids of a log record about it."""
        return self._client.log_fields()

    def __eq__(self, other: object) -> bool:
        """Whether it is the same connection."""
        return isinstance(other, ClientView) and self._client is other._client

    def __hash__(self) -> int:
        """That of the connection."""
        return hash(self._client)

    @property
    def client_id(self) -> str:
        """The client identifier."""
        return self._client.client_id

    @property
    def user(self) -> str | None:
        """Whom the authentication has proved it to be; None: it is anonymous, whatever it calls itself."""
        return self._client.user

    @property
    def address(self) -> str:
        """Its IP address; empty where it has none, any more."""
        return self._client.connection.host

    @property
    def version(self) -> int:
        """Protocol version: 4 (MQTT 3.1.1) or 5."""
        return self._client.version

    @property
    def durable(self) -> bool:
        """Whether its session is kept in JetStream."""
        return self._client.durable

    @property
    def epoch(self) -> int:
        """Of its session: grows with every connection, so what has a lower one is older."""
        return self._client.epoch


@dataclass(frozen=True, slots=True)
class Connecting:
    """A CONNECT packet, before anybody has looked at its password (which is not in here)."""

    client_id: str
    """As the client gave it, or as it was assigned."""
    username: str | None
    """What the client calls itself; nobody has checked it."""
    address: str
    version: int
    clean_start: bool
    keepalive: int
    """Seconds."""
    has_will: bool
    properties: Properties


@dataclass(frozen=True, slots=True)
class Connected:
    """CONNACK has been written."""

    client: ClientView
    session_present: bool


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection of a client that was connected has ended."""

    client: ClientView
    reason: ReasonCode
    text: str


@dataclass(frozen=True, slots=True)
class Session:
    """Something has happened to a session; ``epoch`` is the one that it has, or had, then."""

    client_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Subscribing:
    """A SUBSCRIBE packet."""

    client: ClientView
    properties: Properties


@dataclass(frozen=True, slots=True)
class Refused:
    """In place of a subscription: the client does not get it."""

    reason: ReasonCode = ReasonCode.NOT_AUTHORIZED

    def __post_init__(self) -> None:
        if self.reason not in _SUBSCRIPTION_REFUSALS:
            raise ValueError(f"a subscription cannot be refused with {self.reason!r}")


Wanted = tuple[Subscription | Refused, ...]
"""The subscriptions of a SUBSCRIBE packet, in their order."""


@dataclass(frozen=True, slots=True)
class Unsubscribing:
    """An UNSUBSCRIBE packet."""

    client: ClientView


@dataclass(frozen=True, slots=True)
class Subscribed:
    """A session has a subscription; ``qos`` as granted."""

    client: ClientView
    topic_filter: str
    qos: int


@dataclass(frozen=True, slots=True)
class Unsubscribed:
    """A session has had a subscription."""

    client: ClientView
    topic_filter: str


@dataclass(frozen=True, slots=True)
class Authorizing:
    """Somebody wants to publish on a topic, or subscribe a filter."""

    client: ClientView
    access: Literal["publish", "subscribe"]
    topic: str
    """Topic or filter; that of a shared subscription without ``$share/<group>/``."""
    qos: int
    retain: bool


@dataclass(frozen=True, slots=True)
class Publishing:
    """Where a message comes from."""

    client: ClientView
    will: bool = False
    """It is the will of a client that is connecting."""


@dataclass(frozen=True, slots=True)
class Published:
    """A message on its way from its publisher. `dataclasses.replace` makes another one."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: Properties
    message_id: str = ""
    """The 128-bit id that it will have, 32 hex digits; empty at QoS 0, and of a will. Changing it changes nothing."""

    def __post_init__(self) -> None:
        if self.qos not in (0, 1, 2):
            raise ValueError(f"QoS is {self.qos}")


@dataclass(frozen=True, slots=True)
class Drop:
    """In place of a message: nobody gets it.

    With ``SUCCESS`` its publisher is none the wiser; any other reason is in the acknowledgement of a 5.0 client at
    QoS 1 and 2, and cannot be said to others.
    """

    reason: ReasonCode = ReasonCode.SUCCESS
    text: str = "the message is not accepted"

    def __post_init__(self) -> None:
        if self.reason not in REFUSALS:
            raise ValueError(f"a publish cannot be answered with {self.reason!r}")


@dataclass(frozen=True, slots=True)
class Delivered:
    """A PUBLISH packet has been handed to the client's socket."""

    client: ClientView
    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool
    packet_id: int
    """0 at QoS 0."""
    message_id: str = ""
    """The id of a stored message that a durable session gets; empty where it is not known."""


@dataclass(frozen=True, slots=True)
class Acked:
    """A client has acknowledged a message (PUBACK; PUBCOMP, or PUBREC with a reason of 0x80 or more)."""

    client: ClientView
    packet_id: int
    failed: bool
    message: Delivered | None
    """None when it was sent before anybody listened."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A message did not reach somebody: a subscriber, or all, where its publisher is the ``client``."""

    client: ClientView
    topic: str
    qos: int
    reason: Literal["denied", "expired", "hook", "not permitted", "slow client", "too large"]
    message_id: str = ""
    """Where it is known."""
