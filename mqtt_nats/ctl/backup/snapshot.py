# SPDX-License-Identifier: Apache-2.0
"""Snapshot of a stream with its consumers, from nats-server into a file and back.

nats-server sends a snapshot in chunks (`$JS.API.STREAM.SNAPSHOT`) and waits for acknowledgements of chunks. It takes
chunks in the same way (`$JS.API.STREAM.RESTORE`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from mqtt_nats.base.errors import StartupError
from mqtt_nats.ctl.backup.directory import pieces
from mqtt_streams import headers as header
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call, decode
from mqtt_streams.error_codes import (
    STREAM_CREATE_FAILED,
    STREAM_EXISTS_NO_RESTORE,
    STREAM_INVALID_CONFIG,
    STREAM_NAME_EXISTS,
    STREAM_NOT_FOUND,
    STREAM_RESTORE_FAILED,
)

if TYPE_CHECKING:
    from mqtt_nats.backbone.inbox import RequestInbox
    from mqtt_nats.ctl.backup.directory import SafeFile

CHUNK: Final = 128 * 1024
"""Bytes of a chunk, where `max_payload` allows it."""

UNACKNOWLEDGED_BYTES: Final = 8 * CHUNK
"""Bytes that may be on their way without an acknowledgement."""

CHUNKS_AT_ONCE: Final = UNACKNOWLEDGED_BYTES // CHUNK

TRANSFER_SILENCE_MOST_S: Final = 30.0
"""Seconds without an answer or a chunk after which a transfer has failed."""

STREAM_MADE_MOST_S: Final = 600.0
"""Seconds in which nats-server makes the stream of the chunks."""

FILES_REMOVED_MOST_S: Final = 30.0
"""Seconds in which nats-server has removed the files of a stream that was deleted."""

REPLACE_RETRY_S: Final = 0.2
"""Seconds between two attempts to replace a stream that a gateway has made, or that is still being removed."""

SUBSCRIPTION_KNOWN_S: Final = 4.0
"""Seconds in which all servers know of the subscription for chunks; nats-server waits 5 seconds for the first one."""

_THERE: Final = (
    STREAM_CREATE_FAILED,
    STREAM_INVALID_CONFIG,
    STREAM_NAME_EXISTS,
    STREAM_RESTORE_FAILED,
    STREAM_EXISTS_NO_RESTORE,
)
"""Errors of a stream that exists, or whose files do."""

_ENDED: Final = (None, 204)
"""Status of the last message of a snapshot that is complete; nats-server before 2.15 sends none."""


class Incomplete(Exception):
    """A snapshot did not arrive as a whole; it may be asked for again."""


class _Arrivals:
    """Chunks of a snapshot that arrive, each written and then acknowledged."""

    def __init__(self, inbox: RequestInbox, file: SafeFile) -> None:
        self._link, self._file = inbox.link, file
        self._count = 0
        self.heard = asyncio.Event()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Take a chunk, or the end of the snapshot."""
        self.heard.set()
        if self.done.done():
            return
        try:
            self._take(reply, headers, payload)
        except (Incomplete, OSError) as error:
            self.done.set_exception(error)

    def _take(self, reply: bytes, headers: bytes, payload: bytes) -> None:
        if not payload:
            if header.status(headers) not in _ENDED:
                raise Incomplete(headers[9:].partition(b"\r")[0].decode(errors="replace"))
            self.done.set_result(None)
            return
        self._file.write(payload)
        self._count += 1
        if not reply:  # the last chunk needs no acknowledgement
            return
        size, number = reply.split(b".")[-2:]
        if int(size) != len(payload) or int(number) != self._count:
            raise Incomplete(f"chunk {self._count} is missing")
        self._link.out.append(b"PUB %b 0\r\n\r\n" % reply)
        self._link.kick()


async def save(inbox: RequestInbox, stream: str, file: SafeFile) -> dict[str, Any]:
    """Write a snapshot of a stream into a file; return nats-server's answer with `config` and `state`.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream refuses, or does not answer.
        Incomplete: the snapshot has broken off.
        OSError: the file cannot be written.
    """
    link = inbox.link
    arrivals = _Arrivals(inbox, file)
    subject = b"%bsnapshot.%b" % (inbox.prefix, inbox.token())
    sid = link.subscribe_raw(subject, arrivals.arrived)
    body = {
        "deliver_subject": subject.decode(),
        "no_consumers": False,
        "jsck": True,
        "chunk_size": min(CHUNK, link.max_payload),
        "window_size": UNACKNOWLEDGED_BYTES,
    }
    try:
        asked = inbox.request(
            f"{inbox.api_prefix}.STREAM.SNAPSHOT.{stream}", orjson.dumps(body), timeout=STREAM_MADE_MOST_S
        )
        answer = decode((await asked).payload)
        while not arrivals.done.done():
            arrivals.heard.clear()
            try:
                async with asyncio.timeout(TRANSFER_SILENCE_MOST_S):
                    await arrivals.heard.wait()
            except TimeoutError:
                raise Incomplete(f"no chunk for {TRANSFER_SILENCE_MOST_S:g} s") from None
        await arrivals.done
        return answer
    finally:
        link.unsubscribe_raw(sid)
        arrivals.done.cancel()


async def load(inbox: RequestInbox, config: dict[str, Any], state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Put a snapshot in the place of a stream, which is removed first; return the stream's information.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream refuses, or does not answer.
        StartupError: the file cannot be read.
    """
    until = asyncio.get_running_loop().time() + FILES_REMOVED_MOST_S
    while True:
        await remove(inbox, config["name"])
        try:
            return await _load(inbox, config, state, path)
        except ApiError as error:
            # A gateway that did not know of the pause yet has made the stream, or its files are still being removed.
            if error.err_code not in _THERE or asyncio.get_running_loop().time() > until:
                raise
        await asyncio.sleep(REPLACE_RETRY_S)


async def remove(inbox: RequestInbox, stream: str) -> None:
    """Remove a stream if there is one. Raises ApiError, NoResponders, RequestTimeout."""
    try:
        await call(inbox, f"STREAM.DELETE.{stream}")
    except ApiError as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise


async def _load(inbox: RequestInbox, config: dict[str, Any], state: dict[str, Any], path: Path) -> dict[str, Any]:
    body = orjson.dumps({"config": config, "state": state})
    subject = f"{inbox.api_prefix}.STREAM.RESTORE.{config['name']}"
    target = str(
        decode((await inbox.request(subject, body, timeout=TRANSFER_SILENCE_MOST_S)).payload)["deliver_subject"]
    )
    sent: deque[asyncio.Task[None]] = deque()
    try:
        chunks = pieces(path, min(CHUNK, inbox.link.max_payload))
        for piece in itertools.islice(chunks, 1):
            await _send_first(inbox, target, piece)
        for piece in chunks:
            if len(sent) == CHUNKS_AT_ONCE:
                await sent.popleft()
            sent.append(asyncio.create_task(_send(inbox, target, piece)))
        while sent:
            await sent.popleft()
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror or error}") from None
    finally:
        for one in sent:
            one.cancel()
    return decode((await inbox.request(target, timeout=STREAM_MADE_MOST_S)).payload)


async def _send_first(inbox: RequestInbox, target: str, piece: bytes) -> None:
    """Send the first chunk: in a cluster, another server may announce its subscription later than its answer."""
    until = asyncio.get_running_loop().time() + SUBSCRIPTION_KNOWN_S
    while True:
        try:
            await _send(inbox, target, piece)
            return
        except NoResponders:
            if asyncio.get_running_loop().time() > until:
                raise
        await asyncio.sleep(REPLACE_RETRY_S)


async def _send(inbox: RequestInbox, target: str, piece: bytes) -> None:
    try:
        answer = await inbox.request(target, piece, timeout=TRANSFER_SILENCE_MOST_S)
    except RequestTimeout:
        raise RequestTimeout(f"nats-server takes no more of the snapshot for {TRANSFER_SILENCE_MOST_S:g} s") from None
    if answer.payload:
        decode(answer.payload)
