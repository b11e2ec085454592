# SPDX-License-Identifier: Apache-2.0
"""Snapshot: the counters and the present state of a gateway in one account."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.base.logs import FAILURES, left_out
from mqtt_nats.config.build_info import build_and_reason

if TYPE_CHECKING:
    from mqtt_nats.client.account import Account
    from mqtt_nats.client.client import Client
    from mqtt_nats.client.kept_messages import KeptMessages

CLIENTS_PER_TURN: Final = 1000
"""Number of clients after which `snapshot` gives way to other tasks."""


async def snapshot(account: Account) -> dict[str, Any]:
    """Return all counters and the present state of a gateway as JSON values; gives way to other tasks meanwhile."""
    services = account.services
    counters = services.counters
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found: dict[str, Any] = {
        "id": services.identity.id,
        "name": account.lease.info.get("name", ""),
        "time": time.time(),
        "since": counters.since,
        "received": list(counters.received),
        "received_bytes": list(counters.received_bytes),
        "sent": list(counters.sent),
        "sent_bytes": list(counters.sent_bytes),
        "connections": len(account.registry.connections),
        "clients": len(account.registry.clients),
        "connects": counters.connects,
        "refused": dict(counters.refused),
        "limited": dict(counters.limited),
        "filters_refused": dict(counters.filters_refused),
        "disconnects": dict(counters.disconnects),
        "dropped": counters.drops(services.path.round.dropped),
        "failures": dict(FAILURES),
        "log_records_left_out": left_out(),
        "filters": len(services.path.table.filters),
        "copies_stored": account.copies.stored,
        "pending_stores": len(services.nats.store.pending),
        "pending_store_bytes": services.nats.store.bytes,
        "resent_stores": services.nats.store.resent,
        "refused_stores": dict(services.nats.store.refusals.counts),
        "unread_bytes": services.path.round.held,
        "nats": [
            {"link": name, "online": link.online, "writable": link.writable}
            for name, link in (
                ("main", services.nats.link),
                ("wildcards", services.nats.wild),
                ("shared", services.nats.shared),
            )
        ],
        "reconnects": counters.reconnects,
        "stored": counters.stored.state(),
        "lag": counters.lag.state(),
        "cpu": usage.ru_utime + usage.ru_stime,
        "memory": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "tasks": len(asyncio.all_tasks()),
        "draining": account.registry.closing,
        "obstacle": account.readiness.reason,
        "refused_tenants": dict(account.refused),
    }
    return found | {"build": build_and_reason()} | await _of_clients(list(account.registry.connections), account.kept)


async def _of_clients(clients: list[Client], kept: KeptMessages) -> dict[str, Any]:
    durable = regular = inflight = queued = receipts = subscriptions = stalled = clogged = 0
    oldest = 0.0
    for start in range(0, len(clients), CLIENTS_PER_TURN):
        for client in clients[start : start + CLIENTS_PER_TURN]:
            subscriptions += len(client.filters) + len(client.shares or ())
            receipts += len(client.receipts)
            clogged += client.write_buffer.clogged
            oldest = max(oldest, kept.age(client) or 0.0)
            side = client.durable_side
            if side is not None:
                durable += 1
                inflight += len(side.machine.inflight)
                queued += len(side.machine.queued)
                stalled += side.stalled
            elif client.regular_side is not None:
                regular += 1
                inflight += len(client.regular_side.inflight)
                queued += client.regular_side.waiting
        if start + CLIENTS_PER_TURN < len(clients):
            await asyncio.sleep(0)
    return {
        "durable": durable,
        "regular": regular,
        "inflight": inflight,
        "queued": queued,
        "unacknowledged": receipts,
        "subscriptions": subscriptions,
        "slow": clogged,
        "stalled": stalled,
        "oldest_unacknowledged": oldest,
    }
