# SPDX-License-Identifier: Apache-2.0
"""Clients that belong to another NATS account than their listener.

Until a client has been authenticated it is in the hands of the account of its listener, of which nothing but the hooks
of CONNECT and bans of addresses concern it. See docs/internals/rules.md#tenants.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mqtt_nats.base.logs import log_failure
from mqtt_nats.codec import NotAuthorized
from mqtt_nats.transport.connection import Hold

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.gateway.broker import Broker

log = logging.getLogger("mqtt_nats.broker")


async def settle(client: Client, client_id: str) -> Broker:
    """Hand a client that has just been authenticated to the account that it belongs to, once that can be used.

    Raises:
        NotAuthorized: its listener is for another tenant, or there is no such tenant.
    """
    former, tenant = client.broker, client.granted.tenant
    if tenant is None or tenant == former.tenant:
        return former
    broker = former.tenants.get(tenant)
    if former.tenant or not tenant or broker is None:
        here = f"this listener is for tenant {former.tenant!r}" if former.tenant else "there is no such tenant"
        text = "client %r from %s is of tenant %r: %s"
        log_failure(log, logging.ERROR, "tenant", text, client_id, client.connection.peer, tenant, here)
        raise NotAuthorized("access denied")
    former.connections.discard(client)
    former.left.set()
    client.broker, client.path = broker, broker.path
    broker.connections.add(client)
    client.connection.move(broker.round, broker.clock)
    if broker.standing:  # who lets go of those that wait knows only its own clients
        client.connection.hold(Hold.STANDSTILL)
    else:
        client.connection.release(Hold.STANDSTILL)
    broker.fit(client)
    await client.connected()
    return broker
