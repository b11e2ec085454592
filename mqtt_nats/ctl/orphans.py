# SPDX-License-Identifier: Apache-2.0
"""What belongs to nobody: consumers that no session record names, and sessions whose consumers are all gone.

A consumer is one of these when no record has named it in two looks, nobody listens to it, and it is older than
anything that a gateway may be about to write. So nothing is removed that is just being made.
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
from mqtt_streams.sessions import V5_VERSION, SessionRecord

YOUNG: Final = 60.0
"""Seconds for which a consumer may be without a record: whoever makes it is about to write that."""

AGAIN: Final = 1.0
"""Seconds between the two looks."""

_OWN: Final = re.compile(r"[A-Za-z0-9]{8}(?:[A-Za-z0-9]{8})?_[A-Za-z0-9]+")
"""Consumers of messages that are a session's: the hash of its client id, and an id."""


async def find(inbox: RequestInbox, connected: Collection[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Consumers, as stream and name, and the clients whose sessions are broken.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not tell, as where a consumer has no leader.
    """
    first, broken = await _look(inbox, connected)
    if not first and not broken:
        return [], []
    await asyncio.sleep(AGAIN)
    second, still = await _look(inbox, connected)
    sure = []
    for client_id, names in broken.items():
        if still.get(client_id) == names:
            infos = [await consumer_info(inbox, MESSAGES, name) for name in names]
            if not any(infos):
                sure.append(client_id)
    return [one for one in first if one in set(second)], sure


async def _look(inbox: RequestInbox, connected: Collection[str]) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Consumers that no record names; and sessions without consumers, by client, with the names of those."""
    there: dict[tuple[str, str], dict[str, Any]] = {}
    leaderless: set[tuple[str, str]] = set()
    for stream in (MESSAGES, OUT):
        async for one in consumers(inbox, stream, leaderless):
            there[stream, one["name"]] = one
    # Records are read after consumers: whoever has made a consumer and written its record is found.
    named: set[tuple[str, str]] = set()
    broken: dict[str, list[str]] = {}
    unreadable: set[str] = set()
    async for found in records(inbox):
        record = found.record
        if record is None:
            unreadable.add(found.hash)
            continue
        named |= _named(found.hash, record)
        known = record.v5 is None or record.v5.version <= V5_VERSION
        wanted = {(MESSAGES, ref.durable_name) for ref in record.cons.values()}
        gone = wanted and not wanted & (there.keys() | leaderless)
        if gone and known and not record.clean and found.client_id not in connected:
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
    """The consumers of one session."""
    found = {(MESSAGES, ref.durable_name) for ref in record.cons.values()}
    found.add((OUT, PUBREL_CONSUMER + client_hash))
    if record.pubrel is not None:
        found.add((OUT, record.pubrel.durable_name))
    if record.v5 is not None:
        found |= {(stream, one.name) for one in record.v5.draining for stream in (MESSAGES, OUT)}
    return found


def _is_session(stream: str, info: dict[str, Any]) -> bool:
    """Whether a consumer was made for a session: by its name, and by where it delivers."""
    name, deliver = str(info["name"]), str((info.get("config") or {}).get("deliver_subject", ""))
    if stream == OUT:
        return name.startswith(PUBREL_CONSUMER) and deliver.startswith(PUBREL_DELIVER)
    return _OWN.fullmatch(name) is not None and deliver.startswith(DELIVER_PREFIX)


def _hash(stream: str, name: str) -> str:
    return name.removeprefix(PUBREL_CONSUMER) if stream == OUT else name.partition("_")[0]


async def remove(inbox: RequestInbox, orphans: Sequence[tuple[str, str]]) -> AsyncIterator[str]:
    """Remove consumers to which nobody listens, even now; yields those that are gone."""
    for stream, name in orphans:
        info = await consumer_info(inbox, stream, name)
        if info is not None and not info.push_bound:
            await delete_consumer(inbox, stream, name)
            yield name
