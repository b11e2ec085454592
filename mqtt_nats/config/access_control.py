# SPDX-License-Identifier: Apache-2.0
"""Authenticators of the listeners and access rules, made from the settings and reloaded on SIGHUP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mqtt_nats.access.acl import Rules
from mqtt_nats.access.authenticator import Authenticator, Door
from mqtt_nats.access.certificates import CertificateUsers
from mqtt_nats.access.chain import Chain
from mqtt_nats.access.settings import (
    SCRAM,
    AnySettings,
    HttpSettings,
    NatsSettings,
    PasswordSettings,
    TokenSettings,
)
from mqtt_nats.authenticators.tenancy import bound

if TYPE_CHECKING:
    from mqtt_nats.access.scram import Users
    from mqtt_nats.authenticators.nats_users import NatsAccess
    from mqtt_nats.config.settings import Settings
    from mqtt_nats.transport.listener_settings import ListenerSettings

log = logging.getLogger("mqtt_nats.access")


class Part(Authenticator, Protocol):
    """An authenticator with files or connections."""

    def reload(self) -> Callable[[], None]:
        """Read the files again; the returned function puts them in force. Raises StartupError."""

    async def keep_current(self) -> None:
        """Run background work while the gateway runs."""

    async def close(self) -> None:
        """Close connections and threads."""


class AccessControl:
    """The gateway's authenticators and access rules.

    Raises:
        StartupError: a file cannot be used.
    """

    def __init__(self, settings: Settings, nats_access: Callable[[Settings], NatsAccess]) -> None:
        self._settings = settings
        self._nats_access = nats_access
        self._on_rules: Callable[[Rules], None] = _nobody
        self._on_revoked: Callable[[], None] = _nobody
        self.rules = _rules(settings)
        self._users = _users(settings)
        self._parts = {one.called: self._make(one) for one in settings.all_authenticators}

    def _make(self, one: AnySettings) -> Part:
        # Modules of authenticators that are not configured are not imported.
        match one:
            case PasswordSettings():
                from mqtt_nats.authenticators.passwords import PasswordFile

                return PasswordFile(one)
            case TokenSettings():
                from mqtt_nats.authenticators.tokens import Tokens

                return Tokens(one, self._changed)
            case HttpSettings():
                from mqtt_nats.authenticators.callback import Callback

                return Callback(one)
            case NatsSettings():
                from mqtt_nats.authenticators.nats_users import NatsUsers

                return NatsUsers(one, self._nats_access(self._settings.of(one.tenant or "")))

    def door(self, listener: ListenerSettings) -> Door:
        """Return the authentication of a listener's clients."""
        settings = self._settings
        if listener.use_identity is not None:
            return Chain([CertificateUsers(listener.use_identity)], None, False)
        chain = settings.chain_of(listener)
        if settings.exposes_passwords(listener):
            log.warning("listener %s: passwords are sent without encryption: use TLS", listener.listen)
        users = self._current_users if SCRAM in chain else None
        asked = [one for name in chain if name != SCRAM for one in settings.all_authenticators if one.called == name]
        return Chain([bound(self._parts[one.called], one.tenant) for one in asked], users, settings.is_open(listener))

    def _current_users(self) -> Users:
        assert self._users is not None
        return self._users

    def reload(self) -> None:
        """Reload all files; connections and subscriptions that are not allowed any more are ended.

        Raises:
            StartupError: a file cannot be used; then nothing has changed.
        """
        settings = self._settings
        commits = [part.reload() for part in self._parts.values()]
        users, rules = _users(settings), _rules(settings)
        for commit in commits:
            commit()
        self._users, self.rules = users, rules
        self._changed()
        if rules is not None:
            self._on_rules(rules)

    def tell(self, on_rules: Callable[[Rules], None], on_revoked: Callable[[], None]) -> None:
        """Set the callbacks: ``on_rules`` for new rules, ``on_revoked`` when admitted clients may not be valid now."""
        self._on_rules, self._on_revoked = on_rules, on_revoked

    def _changed(self) -> None:
        self._on_revoked()

    async def keep_current(self) -> None:
        """Run the background work of the authenticators while the gateway runs."""
        await asyncio.gather(*(part.keep_current() for part in self._parts.values()))

    async def close(self) -> None:
        """Close the authenticators."""
        for part in self._parts.values():
            await part.close()


def _nobody(*changes: object) -> None:
    """Ignore changes until `tell` has set the callbacks."""


def _rules(settings: Settings) -> Rules | None:
    if settings.acl_file is None:
        return None
    from mqtt_nats.access.acl_file import load

    return load(settings.acl_file)


def _users(settings: Settings) -> Users | None:
    if settings.scram_file is None:
        return None
    from mqtt_nats.access.scram import Users
    from mqtt_nats.access.verifiers import load

    return Users(load(settings.scram_file))
