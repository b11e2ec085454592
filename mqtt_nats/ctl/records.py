# SPDX-License-Identifier: Apache-2.0
"""What the streams say of sessions: records, consumers, deadlines. Read page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_streams import headers, stored
from mqtt_streams.api import ApiError, call
from mqtt_streams.hashing import name_hash
from mqtt_streams.sessions import PREFIX, STREAM, PoisonedRecord, SessionRecord, decode
from mqtt_streams.timers import EXPIRY, timer_subject
from mqtt_streams.timers import STREAM as TIMERS

PAGE: Final = 256
PAGE_BYTES: Final = 512 * 1024

STREAM_NOT_FOUND: Final = 10059


class Found(NamedTuple):
    """A session record; ``written`` is a Unix time."""

    client_id: str
    """Where the record cannot be read, its hash in brackets."""
    hash: str
    seq: int
    written: float
    record: SessionRecord | None
    problem: str
    """Why it cannot be read."""


def fits(pattern: str, client_id: str) -> bool:
    """Whether a client id is like a pattern; every one is like none."""
    return not pattern or fnmatchcase(client_id, pattern)


async def pages(inbox: RequestInbox, stream: str, subject: str) -> AsyncIterator[stored.StoredMessage]:
    """All messages of a subject (wildcards allowed), oldest first. Raises ApiError, NoResponders, RequestTimeout."""
    start, more = 1, True
    while more:
        page, more = await stored.direct_page(inbox, stream, subject, {"seq": start}, messages=PAGE, size=PAGE_BYTES)
        for message in page:
            start = message.seq + 1
            yield message


async def records(inbox: RequestInbox, client_id: str | None = None) -> AsyncIterator[Found]:
    """All session records, or those of one client. Raises ApiError, NoResponders, RequestTimeout."""
    if client_id is not None:  # with a JetStream domain there is a token more
        key, there = name_hash(client_id), False
        for subject in (f"{PREFIX}{key}", f"{PREFIX}*.{key}"):
            async for one in _records(inbox, subject, client_id):
                there = True
                yield one
        if there:
            return
    async for one in _records(inbox, PREFIX + ">", client_id):  # at its second key, which nobody knows by the id alone
        yield one


async def _records(inbox: RequestInbox, subject: str, client_id: str | None) -> AsyncIterator[Found]:
    async for message in pages(inbox, STREAM, subject):
        key = message.subject.rpartition(".")[2]
        own = key == name_hash(client_id or "")
        problem, record, name = "", None, client_id if own and client_id else f"({key})"
        try:
            record = decode(message.payload, key=key)
            name = record.client_id
        except PoisonedRecord as error:
            problem = str(error)
        if client_id is None or name == client_id:
            yield Found(name, key, message.seq, message.time_ns / 1e9, record, problem)


async def deadlines(inbox: RequestInbox, client_hash: str = "*") -> dict[str, float]:
    """When sessions end whose clients are not connected (Unix time), by the hash of the client id."""
    found = {}
    async for message in pages(inbox, TIMERS, timer_subject(EXPIRY, client_hash)):
        text = headers.get(message.headers, headers.SCHEDULE) or ""
        try:
            at = datetime.fromisoformat(text.removeprefix("@at ")).timestamp()
        except ValueError:
            continue
        found[message.subject.rpartition(".")[2]] = at
    return found


async def consumers(
    inbox: RequestInbox, stream: str, missing: set[tuple[str, str]] | None = None
) -> AsyncIterator[dict[str, Any]]:
    """All consumers of a stream, as nats-server describes them; none where there is no such stream.

    Args:
        missing: gets those, as stream and name, that are there and cannot be described: they have no leader.
    """
    offset = 0
    while True:
        try:
            answer = await call(inbox, f"CONSUMER.LIST.{stream}", {"offset": offset})
        except ApiError as error:
            if error.err_code == STREAM_NOT_FOUND:
                return
            raise
        page = answer.get("consumers") or []
        for one in page:
            yield one
        unknown = {*(answer.get("missing") or ()), *(answer.get("offline") or ())}
        if missing is not None:
            missing |= {(stream, name) for name in unknown}
        offset += len(page) + len(unknown)
        if not (page or unknown) or offset >= answer.get("total", 0):
            return
