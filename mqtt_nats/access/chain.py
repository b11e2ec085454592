# SPDX-License-Identifier: Apache-2.0
"""Chain of authenticators: the first that does not ignore a client decides; if all ignore the client, it is denied.

Only a successful authenticator admits a client: an authenticator that fails for any reason denies.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from mqtt_nats.access.authenticator import (
    ANONYMOUS,
    IGNORE,
    Allow,
    Authenticator,
    Credentials,
    Denied,
    Exchange,
)
from mqtt_nats.base.errors import describe
from mqtt_nats.base.logs import log_failure
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.transport.connection import Connection

if TYPE_CHECKING:
    from mqtt_nats.access.scram import Users

log = logging.getLogger("mqtt_nats.access")


class Chain:
    """Authentication of the clients of one listener.

    Args:
        authenticators: asked in this order about a client without an authentication method.
        users: returns the present users for SCRAM-SHA-256; None: no SCRAM.
        anonymous: admit clients without user name and password; without authenticators, which would check user names
            and passwords, all clients are admitted.
    """

    def __init__(
        self, authenticators: Sequence[Authenticator], users: Callable[[], Users] | None, anonymous: bool
    ) -> None:
        self._authenticators = tuple(authenticators)
        self._users = users
        self._anonymous = anonymous

    @property
    def immediate(self) -> bool:
        """Whether no authenticator is asked about a client without an authentication method."""
        return not self._authenticators

    @property
    def methods(self) -> Collection[str]:
        """SCRAM-SHA-256 if the listener has SCRAM users, else no method."""
        if self._users is None:
            return ()
        from mqtt_nats.access.scram import METHOD  # imported only where SCRAM is used

        return (METHOD,)

    async def authenticate(self, credentials: Credentials) -> Allow | Denied:
        """Ask the authenticators in order until one decides."""
        for one in self._authenticators:
            try:
                verdict = await one.check(credentials)
            except MqttError as error:
                return Denied(str(error), error.reason)
            except Exception as error:
                text = "authenticator %r failed, so access is denied: %s"
                log_failure(log, logging.ERROR, "authenticator", text, one.name, describe(error))
                return Denied(f"authenticator {one.name!r} failed")
            if isinstance(verdict, Allow | Denied):
                return verdict
            if verdict is not IGNORE:
                text = "authenticator %r gave no verdict, so access is denied"
                log_failure(log, logging.ERROR, "authenticator", text, one.name)
                return Denied(f"authenticator {one.name!r} gave no verdict")
        presented = credentials.username is not None or credentials.password is not None
        if presented and self._authenticators:
            return Denied("no authenticator knows the user", ReasonCode.BAD_USER_NAME_OR_PASSWORD)
        return ANONYMOUS if self._anonymous else Denied("anonymous clients are not allowed")

    async def begin(self, method: str, client_id: str, connection: Connection) -> Exchange:
        """Begin a SCRAM exchange."""
        from mqtt_nats.access.scram import ScramExchange

        assert self._users is not None
        return ScramExchange(self._users, secrets.token_urlsafe(24))
