# SPDX-License-Identifier: Apache-2.0
"""Access checks of a client, and the end of subscriptions and wills that changed rules no longer permit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mqtt_nats.access.acl import EVERYTHING, Both, Identity, Rules
from mqtt_nats.access.authenticator import ADMINISTRATOR
from mqtt_nats.client.subscribe import may_subscribe, withdraw
from mqtt_nats.codec import NotAuthorized
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE
from mqtt_nats.lifecycle.will import drop_will, may_leave
from mqtt_nats.sessions.guard import AskingGuard, Guard
from mqtt_streams.hashing import registered_as
from mqtt_streams.subjects import subject_to_filter

if TYPE_CHECKING:
    from mqtt_nats.client.account import Account
    from mqtt_nats.client.client import Client

log = logging.getLogger("mqtt_nats.audit")


def identify(client: Client) -> None:
    """Set the permissions of an identified client by the present rules and hooks."""
    client.forget_decisions()
    rules, own = client.account.rules.present, client.granted.rules
    hooks = client.services.hooks
    asking = hooks.in_use and hooks.deciding(CLIENT_AUTHORIZE) is not None
    if client.granted is ADMINISTRATOR or (rules is None and own is None and not asking):
        client.guard_by(None)
        return
    identity = Identity(client.user, client.client_id, client.connection.host, client.granted.groups)
    found = [one.permissions(identity) for one in (rules, own) if one is not None] or [EVERYTHING]
    permissions = found[0] if len(found) == 1 else Both(found[0], found[1])
    client.guard_by((AskingGuard if asking else Guard)(client, identity, permissions))


def denied_subscriptions(client: Client) -> set[str]:
    """Return the filters of the session, shared ones included, that the client may not subscribe (any more)."""
    found = {one.text: qos for one, qos in client.filters.items()}
    found |= {text: one.choice.qos for text, one in (client.shares or {}).items()}
    record = client.record
    if client.durable and record is not None:
        for subject, qos in record.subs.items():
            try:
                found.setdefault(subject_to_filter(subject), qos)
            except ValueError:  # a subscription of nats-server's listener that `resubscribe` leaves out
                continue
        if record.v5 is not None:
            for text, share in record.v5.shared.items():
                found.setdefault(text, share.qos)
    return {text for text, qos in found.items() if not may_subscribe(client, text, qos)}


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
            client.end(NotAuthorized("the credentials are no longer valid"))


def _check(client: Client) -> None:
    guard = client.guarded
    if guard is None:
        return
    will = client.will
    if will is not None and not may_leave(client, will):
        drop_will(client)
    denied = denied_subscriptions(client)
    if not denied:
        return
    regular, durable = client.regular_side, client.durable_side
    if (regular is not None and regular.waiting) or (durable is not None and durable.stalled):
        # It is unknown which queued messages are permitted, and which messages of a stalled subscription another
        # subscription would have delivered.
        client.end(NotAuthorized("permissions have changed"))
    else:
        client.do(withdraw(client, denied))
