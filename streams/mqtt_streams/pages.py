# SPDX-License-Identifier: Apache-2.0
"""Reading many stored messages through a temporary consumer.

Direct gets cost nats-server several times as much: it searches for each message, and for each page it counts the
remaining messages.
"""

from typing import Any, Final, Self

import orjson

from mqtt_streams import headers
from mqtt_streams.api import ApiError, JetStream, NoResponders, RequestTimeout, call
from mqtt_streams.consumers import delete_consumer, reader_request
from mqtt_streams.stored import StoredMessage

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
