# SPDX-License-Identifier: Apache-2.0
"""Interfaces between the gateway and authenticators: credentials, verdicts, exchanges."""

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
    """Credentials of a client in its CONNECT packet."""

    client_id: str
    username: str | None
    password: bytes | None
    connection: Connection
    """The client's connection, with its address and certificate."""

    def __repr__(self) -> str:
        """Return a text without the password."""
        return f"Credentials(client_id={self.client_id!r}, username={self.username!r}, peer={self.connection.peer!r})"


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Allow:
    """Verdict: the client is admitted.

    Attributes:
        user: authenticated user; None: anonymous client.
        groups: groups of the user beside its groups in the ACL file.
        rules: rules that restrict the client beside the ACL file; None: only the ACL file applies.
        expires: Unix time in seconds at which the connection has to end; None: never.
        valid: returns whether the credentials would still be accepted. Called when files were reloaded.
        tenant: tenant of the client; None: the tenant of the listener.
    """

    user: str | None
    groups: frozenset[str] = frozenset()
    rules: OwnRules | None = None
    expires: float | None = None
    valid: Callable[[], bool] = field(default=_always, compare=False)
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Ignore:
    """Verdict: this authenticator does not know the client; the next authenticator decides."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Verdict: the client is denied. ``why`` is for the log, never for the client."""

    why: str
    reason: ReasonCode = ReasonCode.NOT_AUTHORIZED


ANONYMOUS = Allow(None)
ADMINISTRATOR = Allow("administrator")
"""Verdict for the admin listener, to which no access rule applies."""
IGNORE = Ignore()


@dataclass(frozen=True, slots=True)
class Challenge:
    """Step of an exchange: ``data`` is sent to the client, which has to answer."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Success:
    """End of an exchange: the client is ``user``; ``data`` is sent to it. ``valid`` as in :class:`Allow`."""

    data: bytes
    user: str
    valid: Callable[[], bool] = field(default=_always, compare=False)


class Exchange(Protocol):
    """Exchange of an enhanced authentication method. It sends and receives no MQTT packets itself."""

    async def step(self, data: bytes | None) -> Challenge | Success | Denied:
        """Process the client's authentication data (None: no data). An exception or a time-out denies the client."""


class Authenticator(Protocol):
    """Authenticator of a chain, which knows some of the clients."""

    @property
    def name(self) -> str:
        """Name of the authenticator in the settings."""

    async def check(self, credentials: Credentials) -> Allow | Ignore | Denied:
        """Decide about a client, or leave the decision to the next authenticator. An exception denies the client."""


class Door(Protocol):
    """Authentication of the clients of one listener."""

    @property
    def immediate(self) -> bool:
        """Whether :meth:`authenticate` returns without waiting, so that it needs no time-out."""

    @property
    def methods(self) -> Collection[str]:
        """Names of the supported enhanced authentication methods."""

    async def authenticate(self, credentials: Credentials) -> Allow | Denied:
        """Decide about a client without an authentication method. An exception denies the client."""

    async def begin(self, method: str, client_id: str, connection: Connection) -> Exchange:
        """Begin an exchange of a method of :attr:`methods`, for CONNECT or re-authentication. An exception denies."""
