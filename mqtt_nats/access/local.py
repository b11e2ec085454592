# SPDX-License-Identifier: Apache-2.0
"""The authenticator that the settings describe: users of a file, anonymous clients."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import TYPE_CHECKING

from mqtt_nats.access.authenticator import Credentials, Exchange
from mqtt_nats.access.scram import METHOD, ScramExchange, Users
from mqtt_nats.access.verifiers import load
from mqtt_nats.codec import ReasonCode

if TYPE_CHECKING:
    from mqtt_nats.config import Settings
    from mqtt_nats.connection.connection import Connection


class LocalAccess:
    """Users that this gateway knows by SCRAM-SHA-256, and, where they are allowed, clients without a method.

    Raises:
        StartupError: the file of users cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._users = None if settings.scram_file is None else Users(load(settings.scram_file))
        self._anonymous = ReasonCode.SUCCESS if settings.allow_anonymous else ReasonCode.NOT_AUTHORIZED

    @property
    def methods(self) -> Collection[str]:
        """SCRAM-SHA-256 where there is a file of users."""
        return () if self._users is None else (METHOD,)

    async def authenticate(self, credentials: Credentials) -> ReasonCode:
        """Nobody is known by a user name or password in CONNECT: who does without a method is anonymous."""
        return self._anonymous

    async def begin(self, method: str, client_id: str, connection: Connection) -> Exchange:
        """Begin an exchange."""
        assert self._users is not None
        return ScramExchange(self._users, secrets.token_urlsafe(24))
