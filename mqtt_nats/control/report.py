# SPDX-License-Identifier: Apache-2.0
"""Counters of a gateway, for the other workers of its supervisor (over NATS) and for its history."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import orjson

from mqtt_nats.control.snapshot import snapshot
from mqtt_nats.observability.jetstream_state import storage
from mqtt_nats.observability.process_usage import process_usage

if TYPE_CHECKING:
    from mqtt_nats.client.account import Account
    from mqtt_nats.config.worker_identity import WorkerIdentity

log = logging.getLogger("mqtt_nats.gateway")


def reported(
    account: Account, place: WorkerIdentity, subject: bytes, reply: bytes, headers: bytes, payload: bytes
) -> None:
    """Answer a request of another worker of the same group."""
    if not reply:
        return
    try:
        group = orjson.loads(payload)["group"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return
    if group == place.group:
        account.services.tasks.spawn(_report(account, place, reply), "counters")


async def report(account: Account, place: WorkerIdentity) -> dict[str, Any]:
    """Return the counters of the gateway and its tenants, its group and its worker number."""
    tenants = {name: await snapshot(other) for name, other in list(account.accounts.items()) if name}
    return {
        **await snapshot(account),
        "group": place.group,
        "worker": place.number,
        "tenants": tenants,
        "process": await asyncio.to_thread(process_usage),
    }


async def progress(account: Account) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the totals of the gateway since its start, and its present numbers, for a point of its history."""
    services = account.services
    counters = services.counters
    usage = await asyncio.to_thread(process_usage)
    totals = {
        "connects": counters.connects,
        "received": sum(counters.received),
        "sent": sum(counters.sent),
        "received_bytes": sum(counters.received_bytes),
        "sent_bytes": sum(counters.sent_bytes),
        "cpu": usage["cpu_seconds_total"],
        "dropped": counters.drops(services.path.round.dropped),
        "stored": (counters.stored.sum, counters.stored.count),
        "lag": (counters.lag.sum, counters.lag.count),
    }
    used = await storage(services.nats)
    present = {
        "clients": len(account.registry.clients),
        "memory": usage.get("resident_memory_bytes"),
        "storage": None if used is None else used.used,
    }
    return totals, present


async def _report(account: Account, place: WorkerIdentity, reply: bytes) -> None:
    found = await report(account, place)
    body = orjson.dumps(found)
    if len(body) > account.services.nats.link.max_payload:  # nats-server would end the connection
        log.warning("the counters of %d tenants do not fit into one NATS message", len(found["tenants"]))
        body = orjson.dumps({**found, "tenants": {}})
    account.services.nats.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
    account.services.nats.link.kick()
