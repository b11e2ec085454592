# SPDX-License-Identifier: Apache-2.0
"""``ctl cluster``: show gateways (from leases and answers), nats-servers and streams; remove a dead gateway."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.ctl.gateway_requests import present
from mqtt_nats.ctl.servers import servers
from mqtt_nats.ctl.tables import ago, quantity, table
from mqtt_nats.ctl.verb import Arguments, Refused, Verb
from mqtt_streams import stored
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call, has_leader
from mqtt_streams.definitions import EVERY
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.gateway_subjects import LOOK
from mqtt_streams.gateways import PREFIX, STREAM, Entry, GatewayStore

PING_TIMEOUT: Final = 0.5
"""Seconds to wait for the answers of nats-servers."""


async def status(inbox: RequestInbox) -> dict[str, Any]:
    """Return gateways, nats-servers and streams in the form of ``--json``, as far as JetStream answers at present.

    Raises:
        ApiError, NoResponders, RequestTimeout: neither JetStream nor a gateway answers.
    """
    answered, found = await asyncio.gather(present(inbox), servers(inbox, PING_TIMEOUT))
    answers = {one["id"]: one for one in answered}
    entries: dict[str, Entry] = {}
    try:
        entries = {one.identity: one for one in await GatewayStore(inbox).entries()}
    except (ApiError, NoResponders, RequestTimeout):
        if not answers:
            raise
    gateways = [
        _gateway(identity, entries.get(identity), answers.get(identity)) for identity in sorted({*entries, *answers})
    ]
    info = inbox.link.server
    nats = {
        "connected": info.get("server_name", ""),
        "version": info.get("version", ""),
        "cluster": info.get("cluster", ""),
        "urls": inbox.link.known.known if inbox.link.known is not None else [],
        "servers": found,
    }
    streams = await asyncio.gather(*(_stream(inbox, name) for name in EVERY))
    return {"gateways": gateways, "nats": nats, "streams": [one for one in streams if one is not None]}


def _gateway(identity: str, entry: Entry | None, answer: dict[str, Any] | None) -> dict[str, Any]:
    """Return one gateway; ``state``: running, draining, not ready, silent (with a lease), dead, or being dealt with."""
    if answer is not None:
        obstacle = answer.get("obstacle")
        state = "draining" if answer["draining"] else f"not ready: {obstacle}" if obstacle else "running"
    elif entry is not None and entry.reaper:
        state = f"dead, {entry.reaper} deals with its clients"
    else:
        state = "silent" if entry is not None and not entry.lapsed else "dead"
    known = (entry.info if entry is not None else {}) | (answer or {})
    return {
        "id": identity,
        "name": known.get("name", ""),
        "state": state,
        "listen": known.get("listen", []),
        "version": known.get("version", ""),
        "build": known.get("build", ""),
        "started": known.get("started"),
        "alive": time.time() if answer is not None else entry.alive if entry is not None else None,
        "connections": known.get("connections"),
        "nats": known.get("server"),
        "memory": known.get("memory"),
        "tasks": known.get("tasks"),
        "passed_over": known.get("passed_over"),
        "not_retained": known.get("not_retained"),
    }


async def _stream(inbox: RequestInbox, name: str) -> dict[str, Any] | None:
    try:
        info = await call(inbox, f"STREAM.INFO.{name}")
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return None
        return {"name": name, "obstacle": " ".join(str(error).split())}
    except (NoResponders, RequestTimeout):
        return {"name": name, "obstacle": "does not answer"}
    cluster = info.get("cluster") or {}
    return {
        "name": name,
        "obstacle": "" if has_leader(info) else "no leader",
        "replicas": info["config"].get("num_replicas", 1),
        "leader": cluster.get("leader", ""),
        "followers": [
            {"name": one["name"], "current": bool(one.get("current")), "lag": int(one.get("lag", 0))}
            for one in cluster.get("replicas") or []
        ],
        "messages": info["state"]["messages"],
        "bytes": info["state"]["bytes"],
        "consumers": info["state"]["consumer_count"],
    }


def _server_row(one: dict[str, Any], streams: list[dict[str, Any]]) -> list[str]:
    """Return the row of a nats-server, with its leaderships: JetStream's meta group, and streams."""
    led = sum(stream.get("leader") == one["name"] for stream in streams)
    leads = ", ".join([*(["meta"] if one["leader"] else []), *([f"{led} streams"] if led else [])])
    connections = "" if one["connections"] is None else f"{one['connections']:,}"
    return [one["name"], one["version"], one["cluster"], "yes" if one["jetstream"] else "no", connections, leads]


def shown(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    now = time.time()
    rows = []
    for one in found["gateways"]:
        times = [ago(one["started"], now), ago(one["alive"], now)]
        connections = "" if one["connections"] is None else f"{one['connections']:,}"
        about = [", ".join(one["listen"]), one["version"], *times, connections, one["nats"] or ""]
        rows.append([one["id"], one["name"], one["state"], *about])
    heading = ["gateway", "name", "state", "listens on", "version", "started", "alive", "connections", "nats-server"]
    lines = table(heading, rows, "started, version, nats-server, alive, listens on", "no gateways")
    nats = found["nats"]
    urls = ", ".join(nats["urls"])
    lines += ["", f"connected to nats-server {nats['connected']} {nats['version']}; known: {urls}", ""]
    lines += table(
        ["nats-server", "version", "cluster", "JetStream", "connections", "leads"],
        [_server_row(one, found["streams"]) for one in nats["servers"]],
        "cluster, version",
        "no nats-server answers",
    )
    lines.append("")
    rows = []
    for one in found["streams"]:
        if one["obstacle"]:
            rows.append([one["name"], "", one["obstacle"], "", "", "", ""])
            continue
        followers = [f"{peer['name']}{'' if peer['current'] else ' (behind)'}" for peer in one["followers"]]
        numbers = [f"{one['messages']:,}", quantity(one["bytes"]), f"{one['consumers']:,}"]
        rows.append([one["name"], f"{one['replicas']}", one["leader"], ", ".join(followers), *numbers])
    lines += table(
        ["stream", "replicas", "leader", "followers", "messages", "size", "consumers"],
        rows,
        "consumers, followers",
        "no streams",
    )
    return "\n".join(lines)


async def remove(inbox: RequestInbox, identity: str) -> str:
    """End a dead gateway's lease, so that another gateway deals with its clients at once; return a text about it.

    Raises:
        Refused: there is no such gateway, or it is not dead.
    """
    store = GatewayStore(inbox)
    found = {one.identity: one for one in await store.entries()}.get(identity)
    if found is None:
        raise Refused(f"there is no gateway {identity}: `mqtt-nats ctl cluster status` lists them", 404)
    answers = [one["id"] for one in await present(inbox)]
    if identity in answers:
        raise Refused(f"gateway {identity} runs, and is not removed: stop it by SIGTERM", 409)
    if found.reaper:
        return f"gateway {found.reaper} is dealing with the clients of {identity} already"
    await stored.purge(inbox, STREAM, f"{PREFIX}lease.{identity}")
    if not answers:
        return f"the lease of {identity} has ended; no gateway runs that could deal with its clients: the next one will"
    inbox.link.out.append(b"PUB %b 0\r\n\r\n" % LOOK)
    inbox.link.kick()
    await inbox.link.fence()
    return f"the lease of {identity} has ended: its wills are published and its sessions dealt with now"


class Gateway(Arguments):
    """Selection of one gateway."""

    gateway: str


async def _status(inbox: RequestInbox, _: Arguments) -> dict[str, Any]:
    return await status(inbox)


async def _remove(inbox: RequestInbox, arguments: Gateway) -> dict[str, Any]:
    return {"gateway": arguments.gateway, "done": await remove(inbox, arguments.gateway)}


VERBS: Final = (
    Verb(
        "cluster.status",
        "GET",
        "/cluster",
        Arguments,
        _status,
        "Show the gateways, from their leases and answers, and the streams with their nats-servers.",
        shown,
    ),
    Verb(
        "cluster.remove",
        "DELETE",
        "/cluster/gateways/{gateway}",
        Gateway,
        _remove,
        "Have others deal with the clients of a dead GATEWAY now, and not only when its lease has lapsed.",
        lambda found: str(found["done"]),
    ),
)
