# SPDX-License-Identifier: Apache-2.0
"""Names and values of `$SYS` topics: mosquitto's topics for the cluster, EMQX's for each gateway.

They are computed from reports: counters of a gateway (:mod:`mqtt_nats.observability.counters`) and further values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from mqtt_nats.observability.load_averages import MINUTES

Report = Mapping[str, Any]
"""One gateway's counters, and ``interval``, ``version``, ``loads``, ``most`` (clients) and ``streams``."""

ROOT: Final = "$SYS"

DESCRIPTION: Final = "mqtt-nats"

LOADS: Final = (
    "connections",
    "sockets",
    "messages/received",
    "messages/sent",
    "bytes/received",
    "bytes/sent",
    "publish/received",
    "publish/sent",
    "publish/dropped",
)
"""Counters of which load averages are published."""


def totals(report: Report) -> dict[str, int]:
    """Return the values of the counters of `LOADS` in a report."""
    received, sent = sum(report["received"]), sum(report["sent"])
    return {
        "connections": report["connects"],
        "sockets": report["connects"] + sum(report["refused"].values()),
        "messages/received": received,
        "messages/sent": sent,
        "bytes/received": sum(report["received_bytes"]),
        "bytes/sent": sum(report["sent_bytes"]),
        "publish/received": received,
        "publish/sent": sent,
        "publish/dropped": sum(report["dropped"].values()),
    }


def of_cluster(reports: Sequence[Report], most: int) -> dict[str, str]:
    """Return mosquitto's topics: sums over all gateways.

    Args:
        reports: reports of all gateways, at least one; values of streams come from the latest report that has them.
        most: largest number of clients that were connected at the same time.
    """
    sums = {name: sum(totals(one)[name] for one in reports) for name in LOADS}
    clients = sum(one["clients"] for one in reports)
    latest = max(reports, key=lambda one: float(one["time"]))
    found: dict[str, object] = {
        "version": f"{DESCRIPTION} version {latest['version']}",
        "uptime": f"{int(latest['time'] - min(one['since'] for one in reports))} seconds",
        "clients/connected": clients,
        "clients/active": clients,
        "clients/maximum": most,
        "subscriptions/count": sum(one["subscriptions"] for one in reports),
        "messages/received": sums["messages/received"],
        "messages/sent": sums["messages/sent"],
        "messages/inflight": sum(one["inflight"] for one in reports),
        "bytes/received": sums["bytes/received"],
        "bytes/sent": sums["bytes/sent"],
        "publish/messages/received": sums["publish/received"],
        "publish/messages/sent": sums["publish/sent"],
        "publish/messages/dropped": sums["publish/dropped"],
        "publish/bytes/received": sums["bytes/received"],
        "publish/bytes/sent": sums["bytes/sent"],
        "heap/maximum": sum(one["memory"] for one in reports),
    }
    knowing = [one for one in reports if one["streams"]]
    if knowing:
        streams = max(knowing, key=lambda one: float(one["time"]))["streams"]
        away = max(streams["sessions"] - clients, 0)
        found |= {
            "clients/total": clients + away,
            "clients/disconnected": away,
            "clients/inactive": away,
            "messages/stored": streams["messages"],
            "store/messages/count": streams["messages"],
            "store/messages/bytes": streams["bytes"],
            "retained messages/count": streams["retained"],
        }
    for name in LOADS:
        for place, minutes in enumerate(MINUTES):
            load = sum(one["loads"][name][place] for one in reports)
            found[f"load/{name}/{minutes}min"] = f"{load:.2f}"
    return {
        f"{ROOT}/brokers": ",".join(sorted(one["id"] for one in reports)),
        **{f"{ROOT}/broker/{name}": str(value) for name, value in found.items()},
    }


def of_gateway(report: Report) -> dict[str, str]:
    """Return EMQX's topics of one node for a gateway."""
    received, sent, dropped = report["received"], report["sent"], report["dropped"]
    at = datetime.fromtimestamp(report["time"], UTC)
    found: dict[str, object] = {
        "version": report["version"],
        "name": report.get("name", ""),
        "uptime": int((report["time"] - report["since"]) * 1000),
        "datetime": at.isoformat(timespec="seconds"),
        "sysdescr": DESCRIPTION,
        "stats/connections/count": report["clients"],
        "stats/connections/max": report["most"],
        "stats/live_connections/count": report["clients"],
        "stats/live_connections/max": report["most"],
        "stats/channels/count": report["connections"],
        "stats/sessions/count": report["durable"] + report["regular"],
        "stats/topics/count": report["filters"],
        "stats/subscriptions/count": report["subscriptions"],
        "metrics/client/connected": report["connects"],
        "metrics/client/disconnected": sum(report["disconnects"].values()),
        "metrics/client/refused": sum(report["refused"].values()),
        "metrics/bytes/received": sum(report["received_bytes"]),
        "metrics/bytes/sent": sum(report["sent_bytes"]),
        "metrics/packets/publish/received": sum(received),
        "metrics/packets/publish/sent": sum(sent),
        "metrics/messages/received": sum(received),
        "metrics/messages/sent": sum(sent),
        "metrics/messages/dropped": sum(dropped.values()),
        "metrics/authorization/deny": dropped.get("denied", 0),
        "metrics/delivery/dropped": sum(dropped.values()) - dropped.get("denied", 0) - dropped.get("hook", 0),
        "metrics/delivery/dropped/expired": dropped.get("expired", 0),
        "metrics/delivery/dropped/too_large": dropped.get("too large", 0),
        "metrics/delivery/dropped/queue_full": dropped.get("slow client", 0) + dropped.get("backlog", 0),
    }
    if report["streams"]:
        found["stats/retained/count"] = report["streams"]["retained"]
    for qos in range(3):
        found[f"metrics/messages/qos{qos}/received"] = received[qos]
        found[f"metrics/messages/qos{qos}/sent"] = sent[qos]
    return {f"{ROOT}/brokers/{report['id']}/{name}": str(value) for name, value in found.items()}
