# SPDX-License-Identifier: Apache-2.0
"""``ctl counters``: what the gateways have counted since they were started."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import orjson

from mqtt_nats.backbone.inbox import NO_RESPONDERS, Inbox
from mqtt_nats.broker.reporting import COUNTERS
from mqtt_nats.ctl.tables import ago, table
from mqtt_nats.ctl.verb import Arguments, Verb

PATIENCE: Final = 0.5
"""Seconds in which gateways answer."""


async def gather(inbox: Inbox, seconds: float = PATIENCE, group: str = "", count: int = 0) -> list[dict[str, Any]]:
    """What gateways have counted, ordered by worker and id.

    Args:
        seconds: how long is waited for answers.
        group: only those that one supervisor has started.
        count: with so many answers nobody else is waited for; 0: nobody knows how many there are.
    """
    link = inbox.link
    answers: list[dict[str, Any]] = []
    enough = asyncio.Event()

    def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if payload and not headers.startswith(NO_RESPONDERS):
            answers.append(orjson.loads(payload))
        if len(answers) == count or not payload:
            enough.set()

    body = orjson.dumps({"group": group}) if group else b""
    reply = inbox.prefix + b"all." + inbox.token()
    sid = link.subscribe_raw(reply, arrived)
    link.out.append(b"PUB %b %b %d\r\n%b\r\n" % (COUNTERS, reply, len(body), body))
    link.kick()
    try:
        async with asyncio.timeout(seconds):
            await enough.wait()
    except TimeoutError:
        pass
    finally:
        link.unsubscribe_raw(sid)
    return sorted(answers, key=lambda one: (one["worker"], one["id"]))


class Counting(Arguments):
    """Nothing has to be said."""


async def _counters(inbox: Inbox, arguments: Counting) -> dict[str, Any]:
    return {"gateways": await gather(inbox)}


def _shown(found: dict[str, Any]) -> str:
    now = time.time()
    rows = []
    for one in found["gateways"]:
        received, sent = sum(one["received"]), sum(one["sent"])
        numbers = (one["clients"], received, sent, sum(one["dropped"].values()), one["inflight"], one["queued"])
        rows.append([one["id"], ago(one["since"], now), *(f"{number:,}" for number in numbers)])
    heads = ["gateway", "started", "clients", "received", "sent", "dropped", "in flight", "queued"]
    return "\n".join(table(heads, rows))


VERBS: Final = (
    Verb(
        "counters",
        "GET",
        "/counters",
        Counting,
        _counters,
        "What each gateway has counted since its start: connections, messages by QoS, drops by reason.",
        _shown,
    ),
)
