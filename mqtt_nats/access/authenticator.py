# SPDX-License-Identifier: Apache-2.0
"""What the gateway asks of whoever decides who may connect."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mqtt_nats.codec import ReasonCode

if TYPE_CHECKING:
    from mqtt_nats.access.acl import OwnRules
    from mqtt_nats.transport.connection import Connection


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client presents in its CONNECT packet."""

    client_id: str
    username: str | None
    password: bytes | None
    connection: Connection
    """Where the client comes from."""

    def __repr__(self) -> str:
        """Without the password."""
        return f"Credentials(client_id={self.client_id!r}, username={self.username!r}, peer={self.connection.peer!r})"


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Allow:
    """The client gets in.

    Attributes:
        user: whom it has proved to be; None: it is anonymous.
        groups: of the user, beside those that the ACL file puts it into.
        rules: what it may do at most; None: the ACL file alone says.
        expires: Unix time at which its connection has to end; None: it does not.
        valid: false as soon as what it has presented would not let it in any more. Asked when files were read again.
        tenant: that it belongs to; None: that of the listener.
    """

    user: str | None
    groups: frozenset[str] = frozenset()
    rules: OwnRules | None = None
    expires: float | None = None
    valid: Callable[[], bool] = field(default=_always, compare=False)
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Ignore:
    """It is for another authenticator to decide."""


@dataclass(frozen=True, slots=True)
class Denied:
    """The client does not get in. ``why`` is for the log, never for the client."""

    why: str
    reason: ReasonCode = ReasonCode.NOT_AUTHORIZED


ANONYMOUS = Allow(None)
ADMINISTRATOR = Allow("administrator")
"""Who came in by the admin listener: no rule holds."""
IGNORE = Ignore()


@dataclass(frozen=True, slots=True)
class Challenge:
    """The client has to send more; ``data`` is for it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Success:
    """The client is ``user``; ``data`` is for it. ``valid`` is that of :class:`Allow`."""

    data: bytes
    user: str
    valid: Callable[[], bool] = field(default=_always, compare=False)


class Exchange(Protocol):
    """One run of an enhanced authentication method. It does no input or output of MQTT by itself."""

    async def step(self, data: bytes | None) -> Challenge | Success | Denied:
        """Take what the client has sent, None where it sent no data. An exception denies, and so does being slow."""


class Authenticator(Protocol):
    """A link of the chain: knows some clients."""

    @property
    def name(self) -> str:
        """As the settings call it."""

    async def check(self, credentials: Credentials) -> Allow | Ignore | Denied:
        """Decide about a client, or leave that to the next one. An exception denies."""


class Door(Protocol):
    """Decides who may connect by one listener."""

    @property
    def immediate(self) -> bool:
        """:meth:`authenticate` waits for nothing, and needs no limit of time."""

    @property
    def methods(self) -> Collection[str]:
        """Names of the enhanced authentication methods that are served."""

    async def authenticate(self, credentials: Credentials) -> Allow | Denied:
        """Decide about a client that names no method. An exception denies."""

    async def begin(self, method: str, client_id: str, connection: Connection) -> Exchange:
        """Begin an exchange by one of :attr:`methods`, for a CONNECT or a re-authentication. An exception denies."""
