# SPDX-License-Identifier: Apache-2.0
"""The nats-servers of a cluster, as far as they can be seen without the system account."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.ctl.nats_connection import ask_all
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call

PING: Final = b"$SYS.REQ.SERVER.PING.CONNZ"
"""Every server answers any account, with the connections of that account."""

ADVISORY: Final = b"$JS.EVENT.ADVISORY.API"
"""Who has answered a request to JetStream."""


async def servers(inbox: RequestInbox, seconds: float) -> list[dict[str, Any]]:
    """Every server that answers in this time, by name; ``leader``: it leads JetStream's meta group.

    A NATS user who may not ask sees the server that it is connected to.
    """
    answers, leader = await asyncio.gather(ask_all(inbox, PING, seconds, b'{"limit":1}'), _meta_leader(inbox, seconds))
    info = inbox.link.server
    own = str(info.get("server_id", ""))
    found = {
        own: {
            "name": info.get("server_name", ""),
            "version": info.get("version", ""),
            "cluster": info.get("cluster", ""),
            "jetstream": bool(info.get("jetstream")),
        }
    }
    connections: dict[str, int] = {}
    for answer in answers:
        one = answer.get("server") or {}
        found[one.get("id", "")] = {
            "name": one.get("name", ""),
            "version": one.get("ver", ""),
            "cluster": one.get("cluster", ""),
            "jetstream": bool(one.get("jetstream")),
        }
        connections[one.get("id", "")] = int((answer.get("data") or {}).get("total", 0))
    rows = [
        {**one, "connections": connections.get(name), "leader": one["name"] == leader, "connected": name == own}
        for name, one in found.items()
    ]
    return sorted(rows, key=lambda one: str(one["name"]))


async def _meta_leader(inbox: RequestInbox, seconds: float) -> str:
    """The name of the server that leads the meta group: it answers for the account; empty when nobody can tell."""
    link = inbox.link
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def heard(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        advisory = orjson.loads(payload)
        if not told.done() and advisory.get("subject") == f"{inbox.api_prefix}.INFO":
            told.set_result(str(advisory.get("server", "")))

    sid = link.subscribe_raw(ADVISORY, heard)
    try:
        # The advisory comes from a server that has to know of the subscription first.
        for _ in range(3):
            await asyncio.wait_for(link.fence(), seconds)
            await asyncio.wait_for(call(inbox, "INFO"), seconds)
            await asyncio.wait([told], timeout=seconds / 3)
            if told.done():
                return told.result()
    except (ApiError, NoResponders, RequestTimeout, TimeoutError):
        pass
    finally:
        link.unsubscribe_raw(sid)
    return ""
