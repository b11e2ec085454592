# SPDX-License-Identifier: Apache-2.0
"""Counters of the workers of one gateway, requested from each worker over NATS."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from mqtt_nats.backbone.inbox import NO_RESPONDERS, RequestInbox
from mqtt_streams.gateway_subjects import COUNTERS


async def gather(inbox: RequestInbox, seconds: float, group: str, count: int) -> list[dict[str, Any]]:
    """Counters of the workers that answer, by worker.

    Args:
        seconds: how long is waited for answers.
        group: of those that one supervisor has started.
        count: how many there are.
    """
    link = inbox.link
    answers: list[dict[str, Any]] = []
    enough = asyncio.Event()

    def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if payload and not headers.startswith(NO_RESPONDERS):
            answers.append(orjson.loads(payload))
        if len(answers) == count or not payload:
            enough.set()

    body = orjson.dumps({"group": group})
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
    return sorted(answers, key=lambda one: int(one["worker"]))
