# SPDX-License-Identifier: Apache-2.0
"""Changed rules: new permissions of connected clients, and the end of subscriptions and wills that they deny."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from mqtt_nats.client.authentication import identify
from mqtt_nats.client.subscribe import withdraw
from mqtt_nats.codec import NotAuthorized
from mqtt_nats.lifecycle.will import drop_will, may_publish
from mqtt_nats.sessions.guard import denied_subscriptions
from mqtt_nats.transport.client_trust import certificate_of
from mqtt_streams.hashing import registered_as

if TYPE_CHECKING:
    from collections.abc import Callable

    from mqtt_nats.access.acl import Rules
    from mqtt_nats.access.authenticator import Door
    from mqtt_nats.client.account import Account
    from mqtt_nats.client.client import Client

CERTIFICATES_PER_TURN: Final = 100
"""Number of certificates that are looked at before other tasks have a turn."""


def change_rules(account: Account, rules: Rules) -> None:
    """Replace the access rules, for connected clients too.

    A subscription that is no longer permitted ends together with its waiting messages. A will is removed likewise.
    """
    account.rules.use(rules)
    look_again(account)


def look_again(account: Account) -> None:
    """Check all connected clients against the present rules and hooks.

    A client that is identified but still connecting has no subscriptions to end: only its permissions are set anew.
    """
    for client in list(account.registry.connections):
        if client.alive and client.client_id:
            identify(client)
            if account.registry.clients.get(registered_as(client.client_id, client.hash)) is client:
                _check(client)


def revoke(account: Account) -> None:
    """Disconnect the clients whose credentials are no longer valid."""
    for client in list(account.registry.connections):
        if client.alive and not client.granted.valid():
            client.end_connection(NotAuthorized("the credentials are no longer valid"))


async def distrust(account: Account, door: Door, accepts: Callable[[bytes], bool]) -> None:
    """Disconnect the clients of a listener whose certificates are not accepted any more.

    Args:
        door: of the listener.
        accepts: tells whether a certificate (DER) is accepted.
    """
    for number, client in enumerate(list(account.registry.connections)):
        if client.alive and client.access is door:
            certificate = certificate_of(client.connection.transport)
            if certificate is not None and not accepts(certificate):
                client.end_connection(NotAuthorized("the certificate is no longer trusted"))
        if number % CERTIFICATES_PER_TURN == CERTIFICATES_PER_TURN - 1:
            await asyncio.sleep(0)


def _check(client: Client) -> None:
    guard = client.guarded
    if guard is None:
        return
    will = client.will
    if will is not None and not may_publish(client, will):
        drop_will(client)
    denied = denied_subscriptions(client)
    if not denied:
        return
    regular, durable = client.regular_side, client.durable_side
    if (regular is not None and regular.waiting) or (durable is not None and durable.stalled):
        # It is unknown which queued messages are permitted, and which messages of a stalled subscription another
        # subscription would have delivered.
        client.end_connection(NotAuthorized("permissions have changed"))
    else:
        client.do(withdraw(client, denied))
