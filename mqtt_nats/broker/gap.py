# SPDX-License-Identifier: Apache-2.0
"""What regular sessions missed while their gateway had no connection to NATS.

Their messages come from core NATS, which keeps nothing. Those at QoS 1 and 2 are also stored, so they are
read from the stream, from shortly before the gap on, and delivered unless they had come already.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import orjson

from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.headers import STREAM_SEQUENCE, STREAM_SUBJECT, get_last, status
from mqtt_streams.messages import PREFIX
from mqtt_streams.messages import STREAM as MESSAGES

if TYPE_CHECKING:
    from mqtt_nats.backbone.link import Link
    from mqtt_nats.broker.context import Broker
    from mqtt_nats.pubsub.table import Filter

log = logging.getLogger("mqtt_nats.broker")

# The gap is taken to have begun this much before the server was last heard (seconds): a message may have waited in
# the server, and clocks differ. Less than the identifiers of what has come are remembered.
BEFORE: Final = 8.0
PAGE: Final = 256

# JetStream may need a while after core NATS is back (seconds).
PATIENCE: Final = 30.0
RETRY: Final = 0.25


async def repair(broker: Broker, link: Link) -> None:
    """Deliver what was stored since ``link`` was lost and has not come through it."""
    since = broker.gaps.pop(link, None)
    if since is None:
        return
    broker.repairing += 1
    try:
        await broker.online.wait()
        missed = [found for found in broker.table.filters.values() if found.link is link]
        patience = asyncio.get_running_loop().time() + PATIENCE
        while missed:
            found = missed[-1]
            try:
                if any(qos and not member.durable for member, qos in found.members.items()):
                    await _repair(broker, found, since)
            except (ApiError, NoResponders, RequestTimeout) as error:
                if not link.online or not broker.link.online:  # the next connection starts over
                    broker.gaps[link] = min(since, broker.gaps.get(link, since))
                    return
                if asyncio.get_running_loop().time() < patience:
                    await asyncio.sleep(RETRY)
                    continue
                log.error("messages of %r may have been missed: %s", found.text, error)
            missed.pop()
    finally:
        broker.repairing -= 1


async def _repair(broker: Broker, found: Filter, since: float) -> None:
    subject = f"{broker.inbox.api_prefix}.DIRECT.GET.{MESSAGES}"
    start = datetime.fromtimestamp(since - BEFORE, UTC).isoformat().replace("+00:00", "Z")
    delivered = 0
    for bare in found.subjects:
        body: dict[str, object] = {"next_by_subj": PREFIX + bare.decode(), "batch": PAGE, "start_time": start}
        while True:
            last = 0
            answers = broker.inbox.stream(subject, orjson.dumps(body))
            try:
                async for reply in answers:
                    stored = get_last(reply.headers, STREAM_SUBJECT)
                    if stored is None or status(reply.headers) in (204, 404, 408, 413):
                        break
                    last = int(get_last(reply.headers, STREAM_SEQUENCE) or 0)
                    delivered += _deliver(broker, found, stored.removeprefix(PREFIX), reply.headers, reply.payload)
            finally:
                await answers.aclose()
            if not last:
                break
            body = {"next_by_subj": PREFIX + bare.decode(), "batch": PAGE, "seq": last + 1}
    if delivered:
        log.info("%d messages of %r were delivered after the connection to NATS had been lost", delivered, found.text)


def _deliver(broker: Broker, found: Filter, subject: str, headers: bytes, payload: bytes) -> int:
    route = broker.table.route_of_subject(subject.encode())
    group = route.groups.get(found) if route is not None else None
    if route is None or group is None or not group.high:
        return 0
    if found.local and broker.is_own(headers):
        return 0  # delivered without a way through NATS
    before = broker.fanout.delivered
    broker.fanout.from_nats(found, group, route, headers, payload)
    return broker.fanout.delivered - before
