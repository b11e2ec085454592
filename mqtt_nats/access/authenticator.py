# SPDX-License-Identifier: Apache-2.0
"""What the gateway asks of whoever decides who may connect."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mqtt_nats.codec import ReasonCode

if TYPE_CHECKING:
    from mqtt_nats.connection.connection import Connection


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


@dataclass(frozen=True, slots=True)
class Challenge:
    """The client has to send more; ``data`` is for it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Success:
    """The client is ``user``; ``data`` is for it."""

    data: bytes
    user: str


@dataclass(frozen=True, slots=True)
class Denied:
    """The client does not get in. ``why`` is for the log, never for the client."""

    why: str


class Exchange(Protocol):
    """One run of an enhanced authentication method. It does no input or output of MQTT by itself."""

    async def step(self, data: bytes | None) -> Challenge | Success | Denied:
        """Take what the client has sent, None where it sent no data. An exception denies, and so does being slow."""


class Authenticator(Protocol):
    """Decides who may connect."""

    @property
    def methods(self) -> Collection[str]:
        """Names of the enhanced authentication methods that it serves."""

    async def authenticate(self, credentials: Credentials) -> ReasonCode:
        """Decide about a client that names no method: ``SUCCESS``, or the reason to refuse it. An exception denies."""

    async def begin(self, method: str, client_id: str, connection: Connection) -> Exchange:
        """Begin an exchange by one of :attr:`methods`, for a CONNECT or a re-authentication. An exception denies."""
