# SPDX-License-Identifier: Apache-2.0
"""``ctl sessions list`` of many sessions: the first lines come before the rest is read, and no part is long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.cli import command
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl import records
from mqtt_nats.ctl.commands.sessions import Listing, parts
from mqtt_nats.ctl.nats_connection import connected
from mqtt_nats.ctl.tables import Table
from mqtt_streams.definitions import ensure_streams
from mqtt_streams.hashing import name_hash
from mqtt_streams.sessions import PREFIX, V5, SessionRecord
from mqtt_streams.stored import StoredMessage
from tests.harness.nats import NatsServer

SESSIONS = 2500
WRITTEN = [f"c-{(number * 7) % SESSIONS:05}" for number in range(SESSIONS)]
"""Client ids in the order in which their records are written."""


def on_nats(url: str, work: Callable[[RequestInbox], Awaitable[Any]]) -> Any:
    """Run something with a connection of its own."""

    async def run() -> Any:
        async with connected(Settings(nats=(url,))) as inbox:
            return await work(inbox)

    return asyncio.run(run())


async def fill(inbox: RequestInbox) -> None:
    """Store the records of sessions that no gateway serves at present."""
    await ensure_streams(inbox)
    for start in range(0, SESSIONS, 100):
        some = WRITTEN[start : start + 100]
        made = (SessionRecord(one, clean=False, v5=V5(kind="durable", expiry=1000, user="")) for one in some)
        await asyncio.gather(*(inbox.request(PREFIX + name_hash(one.client_id), one.encode()) for one in made))


@pytest.fixture(scope="module")
def url(nats_server: NatsServer) -> str:
    on_nats(nats_server.url, fill)
    return nats_server.url


async def clients_of_parts(inbox: RequestInbox, asked: Listing) -> tuple[list[list[str]], int]:
    """Return the client ids of each part, and the total of the last one."""
    found, total = [], 0
    async for part in parts(inbox, asked):
        found.append([one["client"] for one in part["sessions"]])
        total = part.get("total", total)
    return found, total


def listed(url: str, **asked: Any) -> tuple[list[list[str]], int]:
    return on_nats(url, lambda inbox: clients_of_parts(inbox, Listing(quick=True, **asked)))  # type: ignore[no-any-return]


def test_the_first_part_comes_before_the_rest_is_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    async def first(inbox: RequestInbox) -> list[str]:
        nonlocal read
        every = records.pages

        async def counted(inbox: RequestInbox, stream: str, subject: str) -> Any:
            nonlocal read
            async with aclosing(every(inbox, stream, subject)) as messages:
                async for message in messages:
                    read += isinstance(message, StoredMessage)
                    yield message

        monkeypatch.setattr(records, "pages", counted)
        async with aclosing(parts(inbox, Listing())) as some:
            return [one["client"] for one in (await anext(some))["sessions"]]

    assert on_nats(url, first) == WRITTEN[: records.FIRST_PART_RECORDS]
    assert read == records.FIRST_PART_RECORDS


@pytest.mark.long
def test_no_part_is_long(url: str) -> None:
    """Neither in the order of the records, where only one is in memory, nor by client, where all keys are."""
    for sort, wanted in (("written", WRITTEN), ("client", sorted(WRITTEN))):
        found, total = listed(url, sort=sort)
        assert [name for part in found for name in part] == wanted
        assert total == SESSIONS
        assert max(map(len, found)) <= records.PART


def test_a_part_ends_before_a_question_about_it_is_too_large(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PART_NAMES", 100)
    found, _ = listed(url, limit=50)
    assert [len(part) for part in found if part] == [15, 15, 15, 5]  # each client id has 7 characters


def test_a_page_in_the_order_of_the_records(url: str) -> None:
    def page(**asked: Any) -> tuple[list[str], int]:
        found, total = listed(url, **asked)
        return [name for part in found for name in part], total

    few = [one for one in WRITTEN if one.startswith("c-000")]
    assert page(offset=1200, limit=3) == (WRITTEN[1200:1203], SESSIONS)
    assert page(offset=SESSIONS - 2, limit=3) == (WRITTEN[-2:], SESSIONS)
    assert page(match="c-000*") == (few, 100)
    assert page(match="c-000*", offset=90, limit=20, state="disconnected") == (few[90:], 100)
    assert page(state="connected") == ([], 0)


@pytest.mark.parametrize("sort", ["written", "client"])
def test_what_is_printed_part_by_part(url: str, sort: str) -> None:
    """One JSON object, as if it were made at once; one heading above the lines, of all widths."""
    run = ["ctl", "--nats", url, "sessions", "list", "--quick", "--sort", sort]
    wanted = WRITTEN if sort == "written" else sorted(WRITTEN)
    done = CliRunner().invoke(command, [*run, "--json"])
    found = orjson.loads(done.output)
    assert list(found) == ["sessions", "silent", "total"]
    assert ([one["client"] for one in found["sessions"]], found["silent"], found["total"]) == (wanted, [], SESSIONS)
    assert done.output == orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() + "\n"
    done = CliRunner().invoke(command, [*run, "--limit", "70"])
    heading, *lines, last = done.output.splitlines()
    assert heading.split()[:2] == ["client", "user"]
    assert [line.split()[0] for line in lines] == wanted[:70]
    assert last == "70 of 2,500 are shown"
    nobody = CliRunner().invoke(command, [*run, "--match", "nobody*"])
    assert nobody.output == "none\n"
    nobody = CliRunner().invoke(command, [*run, "--match", "nobody*", "--json"])
    assert nobody.output == '{\n  "sessions": [],\n  "silent": [],\n  "total": 0\n}\n'


def test_the_columns_of_a_later_part_are_not_narrower() -> None:
    table = Table(["client", "subs"])
    assert table.lines([["lamp-1", "12"]]) == ["client  subs", "lamp-1  12"]
    assert table.lines([["x", "3"]]) == ["x       3"]
    assert table.lines([["y" * 10, "4"]]) == ["y" * 10 + "  4"]
    assert table.lines([["x", "5"]]) == ["x           5"]
    assert table.footer() == []
