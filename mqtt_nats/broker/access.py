# SPDX-License-Identifier: Apache-2.0
"""Who may connect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mqtt_nats.codec import ReasonCode
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


class Authenticator(Protocol):
    """Decides about a CONNECT. An exception denies."""

    async def authenticate(self, credentials: Credentials) -> ReasonCode:
        """``SUCCESS``, or the reason to refuse the client."""


class AllowAll:
    """Accepts every client."""

    async def authenticate(self, credentials: Credentials) -> ReasonCode:
        """Accept."""
        return ReasonCode.SUCCESS
