# SPDX-License-Identifier: Apache-2.0
"""Reading of session records, consumers and deadlines from the streams, page by page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any, Final, NamedTuple

import orjson

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.ctl.gateway_requests import progress
from mqtt_streams import headers, stored
from mqtt_streams.api import ApiError, call
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.hashing import name_hash
from mqtt_streams.pages import pages_of
from mqtt_streams.sessions import PREFIX, STREAM, PoisonedRecord, SessionRecord, decode
from mqtt_streams.timers import EXPIRY, timer_subject
from mqtt_streams.timers import STREAM as TIMERS

RECORD_REQUESTS_MOST: Final = 32
"""Most requests at the same time."""

FIRST_PART_RECORDS: Final = 64
"""Records in the first part of `record_parts`."""

PART: Final = 1024
"""Most records in any other part."""

PART_NAMES: Final = 100_000
"""Characters of client ids at which a part ends: a question to gateways may name them all."""


class Found(NamedTuple):
    """A session record as found in the stream; ``written``: store time, Unix time in seconds."""

    client_id: str
    """Client id; the key in brackets if the record cannot be read."""
    hash: str
    """Key of the session."""
    seq: int
    """Sequence of the record."""
    written: float
    record: SessionRecord | None
    """None: the record cannot be read."""
    problem: str
    """Reason why the record cannot be read; else empty."""


class Entry(NamedTuple):
    """A session record of which only the client id was read."""

    client_id: str
    """Client id; the key in brackets if the record has none."""
    written: float
    """Store time, Unix time in seconds."""
    seq: int
    """Sequence of the record."""


async def pages(inbox: RequestInbox, stream: str, subject: str) -> AsyncGenerator[stored.StoredMessage, None]:
    """Yield the last message of each subject, oldest first. Raises ApiError, NoResponders, RequestTimeout."""
    done = 0
    async with aclosing(pages_of(inbox, stream, subject, newest=True)) as every:
        async for page in every:
            if done:
                progress(done)
            for message in page:
                yield message
            done += len(page)


async def named_records(inbox: RequestInbox) -> AsyncGenerator[tuple[str, stored.StoredMessage], None]:
    """Yield client id and message of each session record, oldest record first; the key in brackets if it has no id.

    Raises ApiError, NoResponders, RequestTimeout.
    """
    async with aclosing(pages(inbox, STREAM, PREFIX + ">")) as every:
        async for message in every:
            try:
                name = orjson.loads(message.payload)["id"]
            except (orjson.JSONDecodeError, KeyError, TypeError):
                name = None
            yield name if isinstance(name, str) else f"({message.subject.rpartition('.')[2]})", message


async def record_parts(
    inbox: RequestInbox, fits: Callable[[str], bool]
) -> AsyncGenerator[list[tuple[str, stored.StoredMessage]], None]:
    """Yield client id and message of the records whose client ids fit in parts, of which the first one is small.

    Raises ApiError, NoResponders, RequestTimeout.
    """
    part: list[tuple[str, stored.StoredMessage]] = []
    most, size = FIRST_PART_RECORDS, 0
    async with aclosing(named_records(inbox)) as every:
        async for one in every:
            if not fits(one[0]):
                continue
            part.append(one)
            size += len(one[0])
            if len(part) >= most or size >= PART_NAMES:
                yield part
                part, most, size = [], PART, 0
    yield part


async def records(inbox: RequestInbox, client_id: str | None = None) -> AsyncGenerator[Found, None]:
    """Yield all session records, or the records of one client. Raises ApiError, NoResponders, RequestTimeout."""
    if client_id is not None:  # with a JetStream domain the subject has one more token
        key, there = name_hash(client_id), False
        for subject in (f"{PREFIX}{key}", f"{PREFIX}*.{key}"):
            async with aclosing(_records(inbox, subject, client_id)) as every:
                async for one in every:
                    there = True
                    yield one
        if there:
            return
    # Second keys do not follow from the client id alone.
    async with aclosing(_records(inbox, PREFIX + ">", client_id)) as every:
        async for one in every:
            yield one


async def _records(inbox: RequestInbox, subject: str, client_id: str | None) -> AsyncGenerator[Found, None]:
    async with aclosing(pages(inbox, STREAM, subject)) as every:
        async for message in every:
            found = read_record(message, client_id)
            if client_id is None or found.client_id == client_id:
                yield found


def read_record(message: stored.StoredMessage, client_id: str | None = None) -> Found:
    """Return the record that a message is; ``client_id``: that of the session that the record was looked for."""
    key = message.subject.rpartition(".")[2]
    own = key == name_hash(client_id or "")
    problem, record, name = "", None, client_id if own and client_id else f"({key})"
    try:
        record = decode(message.payload, key=key)
        name = record.client_id
    except PoisonedRecord as error:
        problem = str(error)
    return Found(name, key, message.seq, message.time_ns / 1e9, record, problem)


async def entries(inbox: RequestInbox) -> AsyncGenerator[Entry, None]:
    """Yield an entry for each session record, oldest record first. Raises ApiError, NoResponders, RequestTimeout."""
    async with aclosing(named_records(inbox)) as every:
        async for name, message in every:
            yield Entry(name, message.time_ns / 1e9, message.seq)


async def records_of(inbox: RequestInbox, some: Sequence[Entry]) -> list[Found]:
    """Return the records of entries that have not been replaced or removed since, in the order of the entries."""
    found = []
    for start in range(0, len(some), RECORD_REQUESTS_MOST):
        looks = (stored.get_sequence(inbox, STREAM, one.seq) for one in some[start : start + RECORD_REQUESTS_MOST])
        found += [read_record(message) for message in await asyncio.gather(*looks) if message is not None]
    return found


async def count(inbox: RequestInbox) -> int:
    """Return the number of session records. Raises ApiError, NoResponders, RequestTimeout."""
    return stored.records_in((await call(inbox, f"STREAM.INFO.{STREAM}"))["state"])


async def deadlines(inbox: RequestInbox, client_hash: str = "*") -> dict[str, float]:
    """Return the deadlines of disconnected clients' sessions (Unix time in seconds), by session key."""
    found = {}
    async for message in pages(inbox, TIMERS, timer_subject(EXPIRY, client_hash)):
        text = headers.get(message.headers, headers.SCHEDULE) or ""
        try:
            at = datetime.fromisoformat(text.removeprefix("@at ")).timestamp()
        except ValueError:
            continue
        found[message.subject.rpartition(".")[2]] = at
    return found


async def consumers(inbox: RequestInbox, stream: str) -> AsyncIterator[dict[str, Any]]:
    """Yield the consumers of a stream that nats-server describes: not those without a leader; none without a stream."""
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
        offset += len(page) + len(unknown)
        if not (page or unknown) or offset >= answer.get("total", 0):
            return
