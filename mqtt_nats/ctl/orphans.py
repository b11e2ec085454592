# SPDX-License-Identifier: Apache-2.0
"""Orphans: consumers that no session record names.

A consumer is an orphan when two readings find no record of it, its deliver subject has no interest, and it is older
than `YOUNG`. So no consumer is removed that was just created and whose record may not be written yet.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
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


async def find(inbox: RequestInbox) -> list[tuple[str, str]]:
    """Return the orphaned consumers, as stream and name.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer, for instance where a consumer has no leader.
    """
    first = await _look(inbox)
    if not first:
        return []
    await asyncio.sleep(SECOND_READING_S)
    second = set(await _look(inbox))
    return [one for one in first if one in second]


async def _look(inbox: RequestInbox) -> list[tuple[str, str]]:
    """Return consumers that no record names."""
    there: dict[tuple[str, str], dict[str, Any]] = {}
    for stream in (MESSAGES, OUT):
        async for one in consumers(inbox, stream):
            there[stream, one["name"]] = one
    # Records are read after consumers, so that every consumer whose record is written by now is found in it.
    named: set[tuple[str, str]] = set()
    unreadable: set[str] = set()
    async for found in records(inbox):
        if found.record is None:
            unreadable.add(found.hash)
        else:
            named |= _named(found.hash, found.record)
    now = datetime.now(UTC)
    return [
        (stream, name)
        for (stream, name), one in there.items()
        if (stream, name) not in named
        and _is_session(stream, one)
        and not one.get("push_bound")
        and _hash(stream, name) not in unreadable
        and (now - datetime.fromisoformat(one["created"])).total_seconds() > YOUNG
    ]


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
