# SPDX-License-Identifier: Apache-2.0
"""Reading many stored messages through a temporary consumer.

Direct gets cost nats-server several times as much: it searches for each message, and for each page it counts the
remaining messages. So only the first page of a subject, mostly the only one, is read by direct get.
"""

from collections.abc import AsyncGenerator
from typing import Any, Final, Self

import orjson

from mqtt_streams import headers
from mqtt_streams.api import ApiError, JetStream, NoResponders, RequestTimeout, call
from mqtt_streams.consumers import delete_consumer, reader_request
from mqtt_streams.stored import StoredMessage, direct_page, get_last, several

PAGE_FIRST: Final = 256
PAGE_MESSAGES: Final = 2048
PAGE_BYTES: Final = 2 * 1024 * 1024
"""Bounds of the first page and of the others, so that memory does not grow with the number of messages."""

IDLE: Final = 60.0
"""Seconds without a request after which nats-server removes the consumer."""

_NOTHING: Final = (404, 408)
"""Status codes for "no message left"; 408: nats-server before 2.15 has sent fewer messages than the batch."""
_TOO_LARGE: Final = b"MaxBytes"


class Pages:
    """Reader of a subject of a stream (wildcards allowed), in sequence order; call :meth:`close` at the end."""

    def __init__(self, js: JetStream, stream: str, name: str, pending: int) -> None:
        self._js = js
        self._stream = stream
        self._name = name
        self.pending = pending
        """Number of messages that there were to read when the reader was opened."""
        self._next = 1
        """Consumer sequence of the next message; a gap shows that a message is missing."""

    @classmethod
    async def open(cls, js: JetStream, stream: str, subject: str, start_seq: int) -> Self:
        """Create the consumer, which begins at a stream sequence; nats-server names it.

        Raises ApiError, NoResponders, RequestTimeout.
        """
        request = reader_request(stream, "", (subject,), start_seq, IDLE)
        answer = await call(js, f"CONSUMER.CREATE.{stream}", request)
        return cls(js, stream, str(answer["name"]), int(answer.get("num_pending", 0)))

    async def page(self, messages: int, size: int) -> tuple[list[StoredMessage], bool]:
        """Return up to `messages` messages, about `size` bytes or one message, and whether there are more.

        Raises ApiError, NoResponders, RequestTimeout; then the consumer's place is not known: close the reader.
        """
        page, more = await self._pull({"batch": messages, "no_wait": True, "max_bytes": size})
        if more and not page:
            page, more = await self._pull({"batch": 1, "no_wait": True})
        return page, more

    async def _pull(self, body: dict[str, Any]) -> tuple[list[StoredMessage], bool]:
        page: list[StoredMessage] = []
        most = body["batch"]
        subject = f"{self._js.api_prefix}.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
        answers = self._js.stream(subject, orjson.dumps(body))
        try:
            async for reply in answers:
                tokens = reply.reply.split(".")
                if len(tokens) < 9 or tokens[1] != "ACK":
                    code = headers.status(reply.headers)
                    if code in _NOTHING:
                        return page, False
                    if code == 409 and _TOO_LARGE in reply.headers:
                        break
                    line = reply.headers[9:].partition(b"\r")[0].decode(errors="replace")
                    raise ApiError(code or 500, 0, f"page of {self._stream}: {line or 'unexpected answer'}")
                at = 5 if len(tokens) == 9 else 7
                if int(tokens[at + 1]) != self._next:
                    raise ApiError(500, 0, f"page of {self._stream}: a message is missing")
                self._next += 1
                page.append(
                    StoredMessage(reply.subject, int(tokens[at]), int(tokens[at + 2]), reply.headers, reply.payload)
                )
                if tokens[at + 3] == "0":
                    return page, False
                if len(page) == most:
                    break
        finally:
            await answers.aclose()
        return page, True

    async def close(self) -> None:
        """Remove the consumer if nats-server can be reached; nats-server removes it after `IDLE` seconds otherwise."""
        try:
            await delete_consumer(self._js, self._stream, self._name)
        except (ApiError, NoResponders, RequestTimeout):
            return


class SubjectReader:
    """Reader of a subject of a stream (wildcards allowed), in sequence order; call :meth:`close` at the end.

    The first page is read by direct get, the others by a consumer. Where nats-server refuses the consumer, all pages
    are read by direct get. A page that the consumer does not bring is read by direct get, and the next page through
    another consumer.
    """

    def __init__(
        self,
        js: JetStream,
        stream: str,
        subject: str,
        start: dict[str, Any],
        several: dict[str, int] | None = None,
    ) -> None:
        """Make a reader that begins at `start`: `{"seq": n}` or `{"start_time": <RFC 3339>}`.

        `several`: of a stream of records, as returned by `stored.several`: only the last record of each subject is
        read, and no answers (`stored.is_answer`). A record that is written meanwhile may come out of order.
        """
        self._js = js
        self._stream = stream
        self._subject = subject
        self._start = start
        self._records = several is not None
        self._several = several or {}
        """By subject, number of records that are still to come."""
        self._former: dict[str, StoredMessage] = {}
        """By subject, the last of its records so far; others are still to come, which may be answers."""
        self._pages: Pages | None = None
        self._direct = True
        """Whether the next page is read by direct get."""
        self._refused = False
        self.more = True
        """Whether more messages may follow."""

    async def page(self, messages: int = PAGE_MESSAGES, size: int = PAGE_BYTES) -> list[StoredMessage]:
        """Return the next page: up to `messages` messages of about `size` bytes, or one larger message.

        The first page has up to `PAGE_FIRST` messages.

        Raises ApiError, NoResponders, RequestTimeout.
        """
        page, self.more = await self._read(messages, size)
        if page:
            self._start = {"seq": page[-1].seq + 1}
        return await self._last_ones(page) if self._records else page

    async def _last_ones(self, page: list[StoredMessage]) -> list[StoredMessage]:
        """Return the records of a page that no other one has replaced."""
        found = []
        for one in page:
            left = self._several.pop(one.subject, 1) - 1
            former = self._former.pop(one.subject, None)
            last = former if one.is_answer else one
            if left:
                self._several[one.subject] = left
            if last is not None and left:
                self._former[one.subject] = last
            elif last is not None:
                found.append(last)
        if not self.more:  # what is left has been replaced or removed since, or its first records are before the start
            for subject in self._several:
                last = await get_last(self._js, self._stream, subject)
                found += [] if last is None else [last]
        return found

    async def _read(self, messages: int, size: int) -> tuple[list[StoredMessage], bool]:
        if not self._direct:
            try:
                if self._pages is None:
                    self._refused = True  # stays if the consumer cannot be created
                    self._pages = await Pages.open(self._js, self._stream, self._subject, self._start["seq"])
                    self._refused = False
                return await self._pages.page(messages, size)
            except (ApiError, NoResponders, RequestTimeout):
                await self.close()
        most = messages if self._refused else min(messages, PAGE_FIRST)
        found = await direct_page(self._js, self._stream, self._subject, self._start, messages=most, size=size)
        self._direct = self._refused
        return found

    async def close(self) -> None:
        """Remove the consumer, if there is one."""
        pages, self._pages = self._pages, None
        if pages is not None:
            await pages.close()


async def pages_of(
    js: JetStream,
    stream: str,
    subject: str,
    start: dict[str, Any] | None = None,
    *,
    newest: bool = False,
    messages: int = PAGE_MESSAGES,
    size: int = PAGE_BYTES,
) -> AsyncGenerator[list[StoredMessage], None]:
    """Yield all messages of a subject (wildcards allowed) in the order of the stream, in pages; no page is empty.

    A caller that does not read to the end closes the generator. Raises ApiError, NoResponders, RequestTimeout.

    Args:
        start: `{"seq": n}` or `{"start_time": <RFC 3339>}`; None = the beginning of the stream.
        newest: only the last message of each subject: of a stream of records, which replace each other.
        messages: most messages of a page.
        size: bytes of a page, about.
    """
    former = await several(js, stream, subject) if newest else None
    reader = SubjectReader(js, stream, subject, start or {"seq": 1}, former)
    try:
        while reader.more:
            if page := await reader.page(messages, size):
                yield page
    finally:
        await reader.close()
