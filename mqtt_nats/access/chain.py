# SPDX-License-Identifier: Apache-2.0
"""The chain of authenticators: the first that does not ignore a client decides, and the end denies.

Nothing but success lets a client in: who fails, for whatever reason, denies.
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
    """Who may connect by one listener.

    Args:
        authenticators: are asked in this order about who names no method.
        users: finds those who may authenticate by SCRAM-SHA-256, as they are now; None: nobody.
        anonymous: clients that present no user name and no password get in. Without authenticators there is nobody
            to look at these, so then all get in.
    """

    def __init__(
        self, authenticators: Sequence[Authenticator], users: Callable[[], Users] | None, anonymous: bool
    ) -> None:
        self._authenticators = tuple(authenticators)
        self._users = users
        self._anonymous = anonymous

    @property
    def immediate(self) -> bool:
        """Nobody is asked about a client that names no method."""
        return not self._authenticators

    @property
    def methods(self) -> Collection[str]:
        """SCRAM-SHA-256 where there is a file of users."""
        if self._users is None:
            return ()
        from mqtt_nats.access.scram import METHOD  # not needed where nobody has SCRAM

        return (METHOD,)

    async def authenticate(self, credentials: Credentials) -> Allow | Denied:
        """Ask one authenticator after the other."""
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
            return Denied("nobody knows the user", ReasonCode.BAD_USER_NAME_OR_PASSWORD)
        return ANONYMOUS if self._anonymous else Denied("anonymous clients are not allowed")

    async def begin(self, method: str, client_id: str, connection: Connection) -> Exchange:
        """Begin an exchange."""
        from mqtt_nats.access.scram import ScramExchange

        assert self._users is not None
        return ScramExchange(self._users, secrets.token_urlsafe(24))
