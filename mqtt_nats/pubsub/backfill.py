# SPDX-License-Identifier: Apache-2.0
"""Backfill of messages that regular sessions missed while their gateway had no connection to NATS.

Regular sessions get their messages from core NATS, which keeps nothing. QoS 1 and 2 messages are also stored, so the
gateway reads them from the stream, from shortly before the gap on, and delivers the messages that had not come
already (docs/internals/pubsub.md#two-copies).
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import orjson

from mqtt_nats.pubsub.backlog import Backlog
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.headers import STREAM_SEQUENCE, STREAM_SUBJECT, STREAM_TIME, get_last, status
from mqtt_streams.messages import PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.stored import time_ns

if TYPE_CHECKING:
    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.backbone.link import NatsConnection
    from mqtt_nats.pubsub.data_path import Path
    from mqtt_nats.pubsub.routing_table import Filter, Group

log = logging.getLogger("mqtt_nats.broker")

# Seconds by which the gap is taken to have begun before the server was last heard: a message may have waited in the
# server, and clocks differ. The ids of delivered messages are remembered for longer.
BEFORE: Final = 8.0
PAGE: Final = 256

# Seconds for which JetStream is asked again after core NATS is back.
PATIENCE: Final = 30.0
RETRY: Final = 0.25

# Maximum bytes of new messages per filter that wait while older ones are read; beyond it they are read as well.
BACKLOG_BYTES: Final = 4 * 1024 * 1024


def expect_gap(nats: NatsLinks, path: Path, link: NatsConnection) -> None:
    """Queue new messages of the subscriptions of ``link`` until missed messages are read; called before renewal."""
    if link not in nats.gaps:
        return
    for found in path.table.filters.values():
        if found.link is link and any(qos and not member.durable for member, qos in found.members.items()):
            found.queue(Backlog(BACKLOG_BYTES))


async def repair(nats: NatsLinks, path: Path, link: NatsConnection) -> None:
    """Deliver the messages that were stored since ``link`` was lost and have not come through ``link``."""
    since = nats.gaps.pop(link, None)
    if since is None:
        return
    nats.begin_repair()
    try:
        await nats.online.wait()
        missed = [found for found in path.table.filters.values() if found.link is link and found.backlog is not None]
        patience = asyncio.get_running_loop().time() + PATIENCE
        while missed:
            found = missed[-1]
            try:
                await _repair(nats, path, found, since)
            except (ApiError, NoResponders, RequestTimeout) as error:
                if not link.online:  # the next connection starts over
                    nats.gaps[link] = min(since, nats.gaps.get(link, since))
                    return
                if not nats.link.online:
                    await nats.online.wait()
                    patience = asyncio.get_running_loop().time() + PATIENCE
                    continue
                if asyncio.get_running_loop().time() < patience:
                    await asyncio.sleep(RETRY)
                    continue
                log.error("messages of %r may have been missed: %s", found.text, error)
            _let_go(path, found)
            missed.pop()
    finally:
        nats.end_repair()


def _let_go(path: Path, found: Filter) -> None:
    """Deliver the queued messages; later messages are delivered as they come."""
    backlog = found.take_backlog()
    if backlog is None:
        return
    for route, headers, payload, reply in backlog.waiting:
        current = path.table.route_of_subject(route.subject.encode())
        group = None if current is None else current.groups.get(found)
        if current is not None and group is not None:
            path.fanout.from_nats(found, group, current, headers, payload, reply=reply)


async def _repair(nats: NatsLinks, path: Path, found: Filter, since: float) -> None:
    start = datetime.fromtimestamp(since - BEFORE, UTC).isoformat().replace("+00:00", "Z")
    position: dict[bytes, dict[str, object]] = {bare: {"start_time": start} for bare in found.subjects}
    before = sum(path.fanout.sent)
    while True:
        for bare in found.subjects:
            while (last := await _page(nats, path, found, bare, position[bare])) > 0:
                position[bare] = {"seq": last + 1}
        if found.backlog is None or not found.backlog.full:
            break
        # Messages that had no room in the backlog are stored by now, or in a moment.
        found.backlog.reset()
        await asyncio.sleep(RETRY)
    if sum(path.fanout.sent) > before:
        log.info("messages of %r that were published while NATS was not connected are delivered", found.text)


async def _page(nats: NatsLinks, path: Path, found: Filter, bare: bytes, position: dict[str, object]) -> int:
    """Deliver one page from ``position`` on; return the stream sequence of its last message, 0 at the end."""
    last = 0
    body = {"next_by_subj": PREFIX + bare.decode(), "batch": PAGE, **position}
    answers = nats.inbox.stream(f"{nats.inbox.api_prefix}.DIRECT.GET.{MESSAGES}", orjson.dumps(body))
    try:
        async for reply in answers:
            stored = get_last(reply.headers, STREAM_SUBJECT, "surrogateescape")
            if stored is None or status(reply.headers) in (204, 404, 408, 413):
                break
            last = int(get_last(reply.headers, STREAM_SEQUENCE) or 0)
            born = time_ns(get_last(reply.headers, STREAM_TIME) or "") / 1e9
            _deliver(path, found, stored.removeprefix(PREFIX), reply.headers, reply.payload, born)
    finally:
        await answers.aclose()
    return last


def _deliver(path: Path, found: Filter, subject: str, headers: bytes, payload: bytes, born: float) -> None:
    route = path.table.route_of_subject(subject.encode(errors="surrogateescape"))
    group = route.groups.get(found) if route is not None else None
    if route is None or group is None or not _counts(group):
        return
    if found.local and path.ids.is_own(headers):
        return  # the local members had it directly
    path.fanout.from_nats(found, group, route, headers, payload, born)


def _counts(group: Group) -> bool:
    """Return whether a member of the group gets QoS 1 or 2 messages from core NATS."""
    return bool(group.high) or any(choice.qos and not member.durable for member, choice in group.guarded)
