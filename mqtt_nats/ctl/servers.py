# SPDX-License-Identifier: Apache-2.0
"""The nats-servers of a cluster, as far as they are visible without the system account."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.ctl.nats_connection import ask_all
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call

PING: Final = b"$SYS.REQ.SERVER.PING.CONNZ"
"""Request that every nats-server answers for any account, with the connections of that account."""

ADVISORY: Final = b"$JS.EVENT.ADVISORY.API"
"""Subject of advisories that name the nats-server that answered a JetStream API request."""


async def servers(inbox: RequestInbox, seconds: float) -> list[dict[str, Any]]:
    """Return the nats-servers that answer within ``seconds``, sorted by name; ``leader``: leader of the meta group.

    A NATS user without the permission for `PING` gets only the nats-server of its connection.
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
    """Return the name of the meta group's leader, which answers `$JS.API.INFO`; empty when it is not known."""
    link = inbox.link
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def heard(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        advisory = orjson.loads(payload)
        if not told.done() and advisory.get("subject") == f"{inbox.api_prefix}.INFO":
            told.set_result(str(advisory.get("server", "")))

    sid = link.subscribe_raw(ADVISORY, heard)
    try:
        # The nats-server that sends the advisory must have received the subscription before.
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
