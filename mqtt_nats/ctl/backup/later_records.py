# SPDX-License-Identifier: Apache-2.0
"""Records that were stored while a snapshot of their stream was written.

A snapshot has no message after the last sequence of its beginning, and none that was removed before its turn came. A
record that another one has replaced meanwhile is in neither state, and the snapshot lacks its key. So the records
after the snapshot are read until there are no more, and stored after the snapshot is restored.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from mqtt_nats.base.errors import StartupError
from mqtt_streams import headers, stored
from mqtt_streams.api import ApiError, call, publish
from mqtt_streams.definitions import NEVER_AGAIN
from mqtt_streams.pages import PAGE_BYTES, PAGE_MESSAGES, Pages
from mqtt_streams.qos2 import STREAM as QOS2IN
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.stored import StoredMessage

if TYPE_CHECKING:
    from mqtt_nats.backbone.inbox import RequestInbox
    from mqtt_nats.ctl.backup.directory import SafeFile

READ_ROUNDS_MOST: Final = 200
"""Times that a stream is read to its end: each time with what has come meanwhile."""

STORES_UNDER_WAY_MOST: Final = 64
"""Records that are stored without an answer to the ones before."""

STORE_S: Final = 30.0
"""Seconds in which JetStream stores a record."""

_NS: Final = 1_000_000_000
_CHECKS: Final = (b"nats-expected-", b"nats-msg-id:", b"nats-rollup:")
"""Beginnings of headers by which JetStream would refuse a record that it has stored before, or remove others."""


async def save(inbox: RequestInbox, stream: str, subject: str, after: int, file: SafeFile) -> int:
    """Write the records behind sequence ``after``, one a line; return their number.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        OSError: the file cannot be written.
        StartupError: records come faster than they can be read.
    """
    count, at = 0, after
    for _ in range(READ_ROUNDS_MOST):
        state = (await call(inbox, f"STREAM.INFO.{stream}"))["state"]
        if int(state["last_seq"]) <= at:
            return count
        at = max(at, int(state["first_seq"]) - 1)
        reader = await Pages.open(inbox, stream, subject, at + 1)
        try:
            more, found = True, 0
            while more:
                page, more = await reader.page(PAGE_MESSAGES, PAGE_BYTES)
                for message in page:
                    file.write(_line(message))
                found += len(page)
                at = page[-1].seq if page else at
        finally:
            await reader.close()
        count += found
        if not found and await stored.get_next(inbox, stream, subject, at + 1) is None:
            return count
    raise StartupError(f"stream {stream}: records come faster than they can be read; use --pause")


def _line(message: StoredMessage) -> bytes:
    record = {
        "subject": b64encode(message.subject.encode(errors="surrogateescape")).decode(),
        "seq": message.seq,
        "time_ns": message.time_ns,
        "headers": b64encode(message.headers).decode(),
        "payload": b64encode(message.payload).decode(),
    }
    return orjson.dumps(record) + b"\n"


def read(path: Path) -> Iterator[StoredMessage]:
    """Yield the records of a file. Raises StartupError."""
    try:
        with path.open("rb") as file:
            for line in file:
                found = orjson.loads(line)
                block, payload = b64decode(found["headers"]), b64decode(found["payload"])
                subject = b64decode(found["subject"]).decode(errors="surrogateescape")
                yield StoredMessage(subject, int(found["seq"]), int(found["time_ns"]), block, payload)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from None


class _Stores:
    """Stores under way, in their order."""

    def __init__(self, inbox: RequestInbox) -> None:
        self._inbox = inbox
        self._under_way: deque[asyncio.Task[int]] = deque()
        self.last = 0
        """Sequence of the last record that is stored."""

    async def add(self, subject: str, payload: bytes, block: bytes) -> None:
        if len(self._under_way) == STORES_UNDER_WAY_MOST:
            self.last = await self._under_way.popleft()
        self._under_way.append(asyncio.create_task(publish(self._inbox, subject, payload, block)))

    async def finish(self) -> None:
        while self._under_way:
            self.last = await self._under_way.popleft()

    def cancel(self) -> None:
        for one in self._under_way:
            one.cancel()


async def load(inbox: RequestInbox, stream: str, records: Iterator[StoredMessage]) -> None:
    """Store records in a stream whose snapshot has just been restored.

    Where sequences identify records elsewhere, each gets the sequence that it had: empty records of its subject, which
    it replaces, fill the gap before it.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream refuses a record, or does not answer.
    """
    info = await call(inbox, f"STREAM.INFO.{stream}")
    # Without the header a former record, or one that filled the gap, stays below the record that replaces it.
    replaces = headers.REPLACES if info["config"].get("allow_rollup_hdrs") else b""
    filler = headers.REPLACING if replaces else b""
    now, at = stored.time_ns(info["ts"]), int(info["state"]["last_seq"])
    exact = stream in NEVER_AGAIN
    stores = _Stores(inbox)
    try:
        for record in records:
            if record.seq <= at:
                continue  # nats-server before 2.15 has more in a snapshot than at its beginning
            block = aged(stream, record.headers, (now - record.time_ns) // _NS)
            if block is None:
                await stores.finish()
                await stored.purge(inbox, stream, record.subject)
                continue
            while exact and at < record.seq - 1:
                await stores.add(record.subject, b"", filler)
                at += 1
            if replaces:
                block = headers.START + replaces + (block.removeprefix(headers.START) or headers.END)
            await stores.add(record.subject, record.payload, block)
            at = record.seq
        await stores.finish()
    finally:
        stores.cancel()
    if exact and stores.last not in (0, at):
        raise ApiError(500, 0, f"stream {stream} ends at sequence {stores.last} in place of {at}")


def aged(stream: str, block: bytes, seconds: int) -> bytes | None:
    """Return the headers of a record for another store, ``seconds`` after the first; None = the record has expired."""
    if headers.get(block, headers.MARKER_REASON) is not None:
        return None
    lines = []
    for line in block.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if not colon or line.lower().startswith(_CHECKS):
            continue
        text = value.strip().removesuffix(b"s")
        expires = name == headers.TTL.encode() or (name == headers.EXPIRY.encode() and stream in (RETAINED, QOS2IN))
        if expires and text.isdigit():
            left = int(text) - seconds
            if left <= 0 and stream != QOS2IN:
                return None
            value = b"%d" % max(left, 1) + (b"s" if name == headers.TTL.encode() else b"")
        lines.append(b"%b:%b\r\n" % (name, value))
    return headers.START + b"".join(lines) + headers.END if lines else b""
