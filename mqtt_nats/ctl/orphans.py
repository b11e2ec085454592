# SPDX-License-Identifier: Apache-2.0
"""Orphans: consumers that no session record names, and broken sessions, whose consumers are all missing.

A session that has a position is not broken: gateways go on there.

A consumer is an orphan when two readings find no record of it, its deliver subject has no interest, and it is older
than `YOUNG`. So no consumer is removed that was just created and whose record may not be written yet.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.ctl.records import consumers, records
from mqtt_streams.consumers import consumer_info, delete_consumer
from mqtt_streams.messages import DELIVER_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import CONSUMER_PREFIX as PUBREL_CONSUMER
from mqtt_streams.pubrel import DELIVER_PREFIX as PUBREL_DELIVER
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.sessions import SessionRecord

YOUNG: Final = 60.0
"""Age in seconds below which a consumer without a record is no orphan: its record may be about to be written."""

SECOND_READING_S: Final = 1.0
"""Seconds between the two readings of consumers and records in `find`."""

_OWN: Final = re.compile(r"[A-Za-z0-9]{8}(?:[A-Za-z0-9]{8})?_[A-Za-z0-9]+")
"""Names of sessions' consumers of messages: the key of the session, and an id."""


async def find(inbox: RequestInbox, connected: Collection[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the orphaned consumers, as stream and name, and the clients of broken sessions.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer, for instance where a consumer has no leader.
    """
    first, broken = await _look(inbox, connected)
    if not first and not broken:
        return [], []
    await asyncio.sleep(SECOND_READING_S)
    second, still = await _look(inbox, connected)
    sure = []
    for client_id, names in broken.items():
        if still.get(client_id) == names:
            infos = [await consumer_info(inbox, MESSAGES, name) for name in names]
            if not any(infos):
                sure.append(client_id)
    return [one for one in first if one in set(second)], sure


async def _look(inbox: RequestInbox, connected: Collection[str]) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Return consumers that no record names; and the names of missing consumers by client of a broken session."""
    there: dict[tuple[str, str], dict[str, Any]] = {}
    leaderless: set[tuple[str, str]] = set()
    for stream in (MESSAGES, OUT):
        async for one in consumers(inbox, stream, leaderless):
            there[stream, one["name"]] = one
    # Records are read after consumers, so that every consumer whose record is written by now is found in it.
    named: set[tuple[str, str]] = set()
    broken: dict[str, list[str]] = {}
    unreadable: set[str] = set()
    async for found in records(inbox):
        record = found.record
        if record is None:
            unreadable.add(found.hash)
            continue
        named |= _named(found.hash, record)
        whole = record.v5 is not None and record.v5.consumerless
        wanted = {(MESSAGES, ref.durable_name) for ref in record.cons.values()}
        gone = wanted and not wanted & (there.keys() | leaderless)
        if gone and not whole and not record.clean and found.client_id not in connected:
            broken[found.client_id] = sorted(name for _, name in wanted)
    now = datetime.now(UTC)
    orphans = [
        (stream, name)
        for (stream, name), one in there.items()
        if (stream, name) not in named
        and _is_session(stream, one)
        and not one.get("push_bound")
        and _hash(stream, name) not in unreadable
        and (now - datetime.fromisoformat(one["created"])).total_seconds() > YOUNG
    ]
    return orphans, broken


def _named(client_hash: str, record: SessionRecord) -> set[tuple[str, str]]:
    """Return the consumers of one session, as stream and name."""
    found = {(MESSAGES, ref.durable_name) for ref in record.cons.values()}
    found.add((OUT, PUBREL_CONSUMER + client_hash))
    if record.pubrel is not None:
        found.add((OUT, record.pubrel.durable_name))
    if record.v5 is not None:
        found |= {(stream, one.name) for one in record.v5.draining for stream in (MESSAGES, OUT)}
    return found


def _is_session(stream: str, info: dict[str, Any]) -> bool:
    """Whether a consumer belongs to a session, according to its name and deliver subject."""
    name, deliver = str(info["name"]), str((info.get("config") or {}).get("deliver_subject", ""))
    if stream == OUT:
        return name.startswith(PUBREL_CONSUMER) and deliver.startswith(PUBREL_DELIVER)
    return _OWN.fullmatch(name) is not None and deliver.startswith(DELIVER_PREFIX)


def _hash(stream: str, name: str) -> str:
    return name.removeprefix(PUBREL_CONSUMER) if stream == OUT else name.partition("_")[0]


async def remove(inbox: RequestInbox, orphans: Sequence[tuple[str, str]]) -> AsyncIterator[str]:
    """Delete orphaned consumers whose deliver subjects have no interest at present; yield the deleted names."""
    for stream, name in orphans:
        info = await consumer_info(inbox, stream, name)
        if info is not None and not info.push_bound:
            await delete_consumer(inbox, stream, name)
            yield name
