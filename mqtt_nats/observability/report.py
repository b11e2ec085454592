# SPDX-License-Identifier: Apache-2.0
"""Counters of a gateway, for the other workers of its supervisor (over NATS) and for its history."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import orjson

from mqtt_nats.observability.counters import snapshot
from mqtt_nats.observability.jetstream_state import storage
from mqtt_nats.observability.process_usage import process_usage

if TYPE_CHECKING:
    from mqtt_nats.gateway.broker import Broker

log = logging.getLogger("mqtt_nats.gateway")


def reported(broker: Broker, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
    """Answer a request of another worker of the same group."""
    if not reply:
        return
    try:
        group = orjson.loads(payload)["group"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return
    if group == broker.place.group:
        broker.spawn(_report(broker, reply), "counters")


async def report(broker: Broker) -> dict[str, Any]:
    """Return the counters of the gateway and its tenants, its group and its worker number."""
    tenants = {name: await snapshot(other) for name, other in broker.tenants.items() if name}
    return {
        **await snapshot(broker),
        "group": broker.place.group,
        "worker": broker.place.number,
        "tenants": tenants,
        "process": await asyncio.to_thread(process_usage),
    }


async def progress(broker: Broker) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the totals of the gateway since its start, and its present numbers, for a point of its history."""
    counters = broker.counters
    usage = await asyncio.to_thread(process_usage)
    totals = {
        "connects": counters.connects,
        "received": sum(counters.received),
        "sent": sum(counters.sent),
        "received_bytes": sum(counters.received_bytes),
        "sent_bytes": sum(counters.sent_bytes),
        "cpu": usage["cpu_seconds_total"],
        "dropped": counters.drops(broker),
        "stored": (counters.stored.sum, counters.stored.count),
        "lag": (counters.lag.sum, counters.lag.count),
    }
    used = await storage(broker)
    present = {
        "clients": len(broker.clients),
        "memory": usage.get("resident_memory_bytes"),
        "storage": None if used is None else used.used,
    }
    return totals, present


async def _report(broker: Broker, reply: bytes) -> None:
    found = await report(broker)
    body = orjson.dumps(found)
    if len(body) > broker.link.max_payload:  # nats-server would end the connection
        log.warning("the counters of %d tenants do not fit into one NATS message", len(found["tenants"]))
        body = orjson.dumps({**found, "tenants": {}})
    broker.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
    broker.link.kick()
