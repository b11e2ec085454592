# SPDX-License-Identifier: Apache-2.0
"""A command reads a list and stops early, by choice or by an error: nothing of the reading is left."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NoReturn, cast

import orjson
import pytest

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.ctl import parser
from mqtt_nats.ctl.backlog import Waiting
from mqtt_nats.ctl.commands import retained, sessions, trace
from mqtt_nats.ctl.gateway_requests import Answers
from mqtt_nats.ctl.records import records
from mqtt_nats.ctl.verb import Parts, PartsText
from mqtt_streams.api import RequestTimeout
from mqtt_streams.retained import PREFIX as RETAINED
from mqtt_streams.retained import set_block
from mqtt_streams.sessions import PREFIX, V5, SessionRecord
from tests.harness.doubles import stands_for
from tests.harness.generators import all_closed
from tests.sessions.fakes import FakeInbox, FakeLink

pytestmark = pytest.mark.sources

Part = dict[str, Any]


@stands_for(NatsConnection)
class FakeCommandLink(FakeLink):
    """Stands for `NatsConnection` of a command."""

    async def fence(self, timeout: float = 5.0) -> None:
        """The server knows all subscriptions."""


@stands_for(RequestInbox)
class FakeCommandInbox(FakeInbox):
    """Stands for `RequestInbox` of a command, with two session records."""

    def __init__(self) -> None:
        super().__init__()
        self.link = FakeCommandLink()
        for name in ("one", "two"):
            record = SessionRecord(name, v5=V5())
            self.put(f"{PREFIX}{record.key}", record.encode())


def inbox_of(fake: FakeInbox) -> RequestInbox:
    return cast(RequestInbox, fake)


async def unanswered(*_: object) -> NoReturn:
    raise RequestTimeout("no leader")


@pytest.mark.parametrize("client_id", [None, "one"])
async def test_the_first_record(client_id: str | None) -> None:
    with all_closed():
        async with aclosing(records(inbox_of(FakeCommandInbox()), client_id)) as every:
            assert (await anext(every)).client_id == "one"


async def test_the_first_part_of_the_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    async def part(*_: object) -> Part:
        return {"sessions": []}

    monkeypatch.setattr(sessions, "_part", part)
    with all_closed():
        async with aclosing(sessions.parts(inbox_of(FakeCommandInbox()), sessions.Listing())) as every:
            assert "sessions" in await anext(every)


async def test_sessions_whose_queues_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connected(*_: object, loads: bool) -> tuple[dict[str, Any], list[str]]:
        return {}, []

    async def look(inbox: RequestInbox) -> None:
        """Nothing waits."""

    monkeypatch.setattr(Waiting, "read_queues", look)
    monkeypatch.setattr(sessions, "_connected", connected)
    monkeypatch.setattr(sessions, "_briefs", unanswered)
    monkeypatch.setattr(sessions, "LOOKS", 1)
    with all_closed(), pytest.raises(RequestTimeout):
        await sessions.listed(inbox_of(FakeCommandInbox()), sessions.Listing(sort="queued"))


class FakeText:
    """Text of a list of numbers."""

    def part(self, found: Part) -> list[str]:
        return [str(one) for one in found["numbers"]]

    def footer(self, found: Part) -> list[str]:
        return []


@pytest.mark.parametrize("printed", [parser.print_text_parts, parser.print_json_parts])
async def test_a_reader_who_has_gone(monkeypatch: pytest.MonkeyPatch, printed: Any) -> None:
    """As `head`, which ends when it has its lines."""

    def say(text: str, newline: bool = True) -> None:
        raise BrokenPipeError

    closed = False

    async def numbers() -> AsyncGenerator[Part, None]:
        nonlocal closed
        try:
            for number in range(10):
                yield {"numbers": [number]}
        finally:
            closed = True

    monkeypatch.setattr(parser, "say", say)
    parts = Parts("numbers", lambda inbox, asked: numbers(), lambda: cast(PartsText, FakeText()))
    with pytest.raises(BrokenPipeError):
        await printed(parts, numbers())
    assert closed


async def test_a_terminal_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress of a list of retained messages is shown there."""
    inbox = FakeCommandInbox()
    inbox.put(f"{RETAINED}a.one", b"x", set_block("a/one", 1, "origin00"))

    def progress(done: int) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(retained, "progress", progress)
    with all_closed(), pytest.raises(BrokenPipeError):
        await retained.listed(inbox_of(inbox), retained.Listing(filter="a/+"))


async def test_a_trace_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(inbox: FakeCommandInbox, what: str, question: Part) -> Answers:
        page = {"id": "gateway0", "lost": 0, "events": [{"time": 1.0, "event": "connected", "client": "c"}]}
        inbox.link.fake_bring(question["to"].encode(), orjson.dumps(page))
        return Answers(heard={"gateway0"})

    monkeypatch.setattr(trace, "ask", ask)
    monkeypatch.setattr(trace, "ORDERED", 0.0)
    with all_closed():
        async with aclosing(trace.trace(inbox_of(FakeCommandInbox()), 10.0)) as events:
            assert (await anext(events))["event"] == "tracing"
            assert (await anext(events))["event"] == "connected"
