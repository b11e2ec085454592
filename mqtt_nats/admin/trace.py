# SPDX-License-Identifier: Apache-2.0
"""``/api/v1/trace``: what ``mqtt-nats ctl trace`` prints, one JSON object to a line, until the time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing, suppress
from typing import Any, Final, Self

import anyio
import orjson
from pydantic import Field, model_validator
from starlette.responses import StreamingResponse
from starlette.types import Send

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.ctl.commands.trace import LASTS_MOST, Event, trace
from mqtt_nats.ctl.verb import Arguments, Length, Verb

LINES: Final = "application/x-ndjson"

KEEP_ALIVE_LINE_S: Final = 5.0
"""Seconds without an event after which an empty line is sent, so that nobody in between takes the answer for over."""


class Tracing(Arguments):
    """Arguments of a trace: a client or a topic, and the duration."""

    client: str = Field(default="", description="The packets of this client, on whichever gateway it is, or will be.")
    topic: str = Field(default="", description="What becomes of the messages on topics that match this filter.")
    lasts: Length = Field(
        default=60.0, gt=0, le=LASTS_MOST, description="Seconds, also as 90s or 15m; at most an hour."
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if bool(self.client) is bool(self.topic):
            raise ValueError("expected a client or a topic")
        return self


async def begin(inbox: RequestInbox, asked: Tracing) -> AsyncGenerator[bytes, None]:
    """Begin a trace.

    Returns:
        Its lines.

    Raises:
        Refused: no gateway is there, or the topic filter is none.
    """
    events = trace(inbox, asked.lasts, client=asked.client, topic=asked.topic)
    return _lines(await anext(events), events)


async def _lines(first: Event, events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield orjson.dumps(first) + b"\n"
        following: asyncio.Future[Event] | None = None
        try:
            while True:
                following = following or asyncio.ensure_future(anext(events))
                done, _ = await asyncio.wait((following,), timeout=KEEP_ALIVE_LINE_S)
                if not done:
                    yield b"\n"
                    continue
                try:
                    event = following.result()
                except StopAsyncIteration:
                    return
                following = None
                yield orjson.dumps(event) + b"\n"
        finally:
            if following is not None and not following.done():
                with anyio.CancelScope(shield=True), suppress(asyncio.CancelledError):
                    following.cancel()
                    await following


class Lines(StreamingResponse):
    """An answer whose source is closed when it is over, or whoever has asked is gone."""

    def __init__(self, content: AsyncIterable[Any]) -> None:
        super().__init__(content, media_type=LINES, headers={"cache-control": "no-store"})

    async def stream_response(self, send: Send) -> None:
        """Send the events of the trace to the client."""
        try:
            await super().stream_response(send)
        finally:
            with anyio.CancelScope(shield=True):
                source = self.body_iterator
                if isinstance(source, AsyncGenerator):
                    await source.aclose()


TRACE: Final = Verb(
    "trace",
    "GET",
    "/trace",
    Tracing,
    begin,
    "Follow the packets of a client, or the messages on a topic: JSON objects, one to a line, and empty lines between.",
    str,
    lines=True,
    confidential=True,
)
"""The verb of which the command line has a form of its own."""
