# SPDX-License-Identifier: Apache-2.0
"""Connections to NATS made from the settings."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from nats.errors import AuthorizationError, NoServersError
from nats.errors import Error as NatsError

from mqtt_nats.backbone.connect import open_link
from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.backbone.link import CONNECT_TIMEOUT, NatsConnection
from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.nats_keys import creds_login, nkey_file
from mqtt_nats.config.settings import Settings
from mqtt_streams.api import api_prefix
from mqtt_streams.gateway_subjects import INBOX

if TYPE_CHECKING:
    from mqtt_nats.authenticators.nats_users import NatsAccess


async def connect_link(
    settings: Settings,
    *,
    name: str,
    no_echo: bool,
    on_online: Callable[[], Awaitable[None]],
    on_offline: Callable[[], Awaitable[None]],
) -> NatsConnection:
    """Connect a :class:`NatsConnection`; arguments as for :func:`open_link`.

    Raises:
        StartupError: one line with the error.
    """
    urls = settings.nats_display
    refused = f"nats-server at {urls} refuses the credentials: check the nats_* settings (of an embedded one: --data)"
    try:
        return await open_link(
            nats_options(settings), name=name, no_echo=no_echo, on_online=on_online, on_offline=on_offline
        )
    except AuthorizationError:
        raise StartupError(refused) from None
    except (OSError, NatsError, TimeoutError, ValueError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        if "authorization violation" in text.lower():
            raise StartupError(refused) from None
        if isinstance(error, TimeoutError) or "info message" in text.lower():
            reason = f"what answers there did not greet as a nats-server does, within {CONNECT_TIMEOUT:g} s"
            raise StartupError(
                f"cannot connect to nats-server at {urls}: {reason}; if one is there, it stands still or is "
                "overloaded; otherwise set --nats to where one is"
            ) from None
        reason = "no server answers" if isinstance(error, NoServersError) else text
        raise StartupError(f"cannot connect to nats-server at {urls}: {reason}; start it or set --nats") from None


async def open_inbox(settings: Settings, link: NatsConnection) -> RequestInbox:
    """Subscribe the inbox for requests over a connection, to the JetStream of the settings.

    Raises:
        StartupError: the NATS user may not subscribe it, or nats-server does not answer.
    """
    refused: list[bytes] = []

    def denied(publish: bool, subject: bytes) -> None:
        if not publish and subject.startswith(INBOX.encode()):
            refused.append(subject)

    link.report(denied)
    inbox = RequestInbox(link, api_prefix(settings.jetstream_domain))
    try:
        await link.fence()
    except TimeoutError:
        raise StartupError(f"nats-server at {settings.nats_display} does not answer") from None
    if refused:
        raise StartupError(
            f"the NATS user may not subscribe to {INBOX}>, where answers arrive: permit it to this user "
            "(not to MQTT devices) in the configuration of nats-server; see docs/upgrading.md"
        )
    return inbox


def nats_options(settings: Settings) -> dict[str, Any]:
    """Return the settings as options of nats-py's ``connect``.

    Raises:
        StartupError: a file cannot be used.
    """
    options: dict[str, Any] = {"servers": list(settings.nats)}
    if settings.nats_user is not None:
        options["user"] = settings.nats_user
    if settings.nats_password is not None:
        options["password"] = settings.nats_password.get_secret_value()
    if settings.nats_token is not None:
        options["token"] = settings.nats_token.get_secret_value()
    if settings.nats_nkey is not None:
        options["nkeys_seed"] = nkey_file(settings.nats_nkey)
    if settings.nats_creds is not None:
        options |= creds_login(settings.nats_creds)
    context = _tls(settings)
    if context is not None:
        options["tls"] = context
        if settings.nats_tls_hostname is not None:
            options["tls_hostname"] = settings.nats_tls_hostname
    return options


def nats_access(settings: Settings) -> NatsAccess:
    """Return the access to nats-server for :mod:`mqtt_nats.authenticators.nats_users`."""
    from mqtt_nats.authenticators.nats_users import NatsAccess, own_login

    nkey = settings.nats_nkey is not None or settings.nats_creds is not None
    password = None if settings.nats_password is None else settings.nats_password.get_secret_value()
    token = None if settings.nats_token is None else settings.nats_token.get_secret_value()
    login = None if nkey else own_login(settings.nats[0], settings.nats_user, password, token)
    return NatsAccess(settings.nats, _tls(settings), settings.nats_tls_hostname, login)


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if not settings.requires_tls(settings.nats):
        return None
    try:
        context = ssl.create_default_context(cafile=None if settings.nats_tls_ca is None else str(settings.nats_tls_ca))
        if settings.nats_tls_cert is not None:
            context.load_cert_chain(str(settings.nats_tls_cert), str(settings.nats_tls_key))
    except (OSError, ssl.SSLError) as error:
        raise StartupError(f"the TLS files for NATS cannot be used: {error}") from None
    return context


MINIMUM_SERVER: Final = (2, 12)


def check_version(link: NatsConnection, urls: str) -> None:
    """Check that the connected nats-server is new enough.

    Raises:
        StartupError: nats-server is too old.
    """
    if server_version(link) < MINIMUM_SERVER:
        raise StartupError(
            f"nats-server at {urls} is version {link.server.get('version', '0')}; mqtt-nats needs "
            f"{MINIMUM_SERVER[0]}.{MINIMUM_SERVER[1]} or newer: upgrade it"
        )


def server_version(link: NatsConnection) -> tuple[int, int]:
    """Return major and minor version of the connected nats-server; (0, 0) when it announces none."""
    parts = str(link.server.get("version", "0")).split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return 0, 0
