# SPDX-License-Identifier: Apache-2.0
"""``ctl sessions``: list and show stored sessions, end sessions, remove orphaned consumers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final, Literal, NamedTuple

from pydantic import Field

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.logs import plain
from mqtt_nats.control.filter_selection import pattern_test
from mqtt_nats.control.list_page import ListPage
from mqtt_nats.control.selection import CONNECTED, RECONNECTED
from mqtt_nats.ctl.backlog import Load, Waiting, Waits
from mqtt_nats.ctl.gateway_requests import ask, ask_one, known, progress
from mqtt_nats.ctl.orphans import find, remove
from mqtt_nats.ctl.records import (
    PART,
    Entry,
    Found,
    count,
    deadlines,
    entries,
    read_record,
    record_parts,
    records,
    records_of,
)
from mqtt_nats.ctl.records import RECORD_REQUESTS_MOST as LOOKS
from mqtt_nats.ctl.tables import Table, ago, cell, rest, sheet, span, table
from mqtt_nats.ctl.verb import Arguments, Paged, Parts, Pattern, Refused, Verb, collected
from mqtt_streams.sessions import second_sid
from mqtt_streams.subjects import subject_to_filter

SESSIONS_PER_REQUEST: Final = 32
"""Number of sessions in one request to a gateway to end them."""

RETURNED: Final = frozenset((CONNECTED, RECONNECTED))
"""Reasons why a session is not ended: its client is connected, or has connected since."""


class Listing(Paged):
    """Selection of sessions, and of a part of their list."""

    match: Pattern = Field(
        default="",
        description="Client ids like this: * stands for any characters, ? for one.",
        json_schema_extra={"metavar": "PATTERN"},
    )
    state: Literal["all", "connected", "disconnected"] = Field(
        default="all", description="Only those whose clients are connected, or are not."
    )
    quick: bool = Field(default=False, description="Without the lengths of queues, which are asked of every consumer.")
    sort: Literal["client", "written", "queued"] = Field(
        default="written",
        description="Order of the list. `written` (when their records were) comes while they are read; `client` needs "
        "all records first, `queued` all consumers, too.",
    )


class Who(Arguments):
    """Client of a session."""

    client_id: str


class Cleaned(Arguments):
    """Selection of sessions to end, and of orphans to remove."""

    clients: tuple[str, ...] = Field(
        default=(), description="Client ids.", json_schema_extra={"metavar": "[CLIENT_ID]..."}
    )
    match: Pattern = Field(
        default="",
        description="Of all clients like this that are not connected.",
        json_schema_extra={"metavar": "PATTERN"},
    )
    orphans: bool = Field(
        default=False,
        description="Consumers without a session.",
    )
    dry_run: bool = Field(default=False, description="Only show what it would be.")


class Client(NamedTuple):
    """A connected client: its gateway, and the messages in that gateway's memory."""

    gateway: str
    load: Load | None
    """None: not requested."""


Connected = tuple[dict[str, Client], list[str]]
"""Connected clients with their gateways, and the gateways that have not answered."""


async def _connected(
    inbox: RequestInbox, *, surely: bool = False, loads: bool = False, clients: Sequence[str] = ()
) -> Connected:
    """Return the connected clients with their gateways, and the gateways that have not answered.

    Without a running gateway no client is connected.

    Args:
        surely: gateways with a lapsed lease have to answer too, as they may run nevertheless.
        loads: request the numbers of messages in the gateways' memory.
        clients: only these; otherwise all.

    Raises:
        Refused: no gateway answers, and with ``surely`` a gateway may run.
    """
    there = await known(inbox) if surely else None
    try:
        answers = await ask(inbox, "connected", {"loads": loads, "clients": clients})
    except Refused as refused:
        if refused.status != 503 or (surely and (there is None or there.live or there.lapsed)):
            raise
        return {}, []
    lapsed = there.lapsed - answers.heard if there is not None else set()
    there_now = {one["value"]: Client(one["gateway"], Load.told(one)) for one in answers.items}
    return there_now, sorted({*answers.silent, *lapsed})


async def listed(inbox: RequestInbox, asked: Listing) -> dict[str, Any]:
    """Return sessions in an order, their total number, and the gateways that have not answered."""
    return await collected(parts(inbox, asked))


async def parts(inbox: RequestInbox, asked: Listing) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the list in parts. In the order of the records only one part is in memory, in others the list of keys."""
    if asked.sort == "queued":
        yield await _listed_by_queue(inbox, asked)
        return
    if asked.sort == "written" and not asked.reverse:
        async with aclosing(_as_written(inbox, asked)) as every:
            async for each in every:
                yield each
        return
    page, silent = await _chosen(inbox, asked)
    chosen = page.entries()
    yield {"sessions": [], "silent": silent, "total": page.total}
    for start in range(0, len(chosen), PART):
        yield await _part(inbox, asked, await records_of(inbox, chosen[start : start + PART]))


async def _as_written(inbox: RequestInbox, asked: Listing) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the list in the order of the stream; only what is shown is looked up."""
    fits, total = pattern_test(asked.match), 0
    most = asked.offset + asked.limit if asked.limit else sys.maxsize
    async with aclosing(record_parts(inbox, fits)) as every:
        async for some in every:
            there: Connected | None = None
            if asked.state != "all":
                there = await _connected(inbox, loads=not asked.quick, clients=[name for name, _ in some])
                some = [one for one in some if (one[0] in there[0]) is (asked.state == "connected")]
            shown = some[max(asked.offset - total, 0) : max(most - total, 0)]
            total += len(some)
            part = await _part(inbox, asked, [read_record(message) for _, message in shown], there)
            if total >= most and not asked.match and asked.state == "all":  # the others need not be read
                yield part | {"total": await count(inbox)}
                return
            yield part | {"total": total}


async def _part(
    inbox: RequestInbox, asked: Listing, some: list[Found], there: Connected | None = None
) -> dict[str, Any]:
    """Return what the list says about some sessions; ``there``: connected clients, if they are known already."""
    waiting = None if asked.quick or not some else await Waiting.read_queues(inbox, some)
    names = [one.client_id for one in some]
    if there is None:
        there = await _connected(inbox, loads=not asked.quick, clients=names) if names else ({}, [])
    connected, silent = there
    due: dict[str, float] = {}
    for start in range(0, len(some), LOOKS):
        for each in await asyncio.gather(*(deadlines(inbox, one.hash) for one in some[start:][:LOOKS])):
            due |= each
    return {"sessions": await _briefs(some, connected, due, waiting), "silent": silent}


async def _chosen(inbox: RequestInbox, asked: Listing) -> tuple[ListPage[Entry], list[str]]:
    """Return the part of the list of all records that match, and the gateways that have not answered."""
    by_client = asked.sort == "client"
    page = ListPage[Entry](
        asked.offset,
        asked.limit,
        lambda one: (one.client_id, one.seq) if by_client else (one.seq, one.client_id),
        reverse=asked.reverse,
    )
    connected, silent = await _connected(inbox) if asked.state != "all" else ({}, [])
    fits = pattern_test(asked.match)
    async for one in entries(inbox):
        state = "connected" if one.client_id in connected else "disconnected"
        if fits(one.client_id) and asked.state in ("all", state):
            page.add(one)
    return page, silent


async def _listed_by_queue(inbox: RequestInbox, asked: Listing) -> dict[str, Any]:
    """Return sessions by the number of messages that wait, for which all records and consumers are read."""
    waiting = await Waiting.read_queues(inbox)
    connected, silent = await _connected(inbox, loads=True)
    due = await deadlines(inbox)
    page = ListPage[dict[str, Any]](
        asked.offset, asked.limit, lambda one: (one["queued"] or 0, one["client"]), reverse=asked.reverse
    )
    some: list[Found] = []
    fits = pattern_test(asked.match)
    async with aclosing(records(inbox)) as every:
        async for one in every:
            state = "connected" if one.client_id in connected else "disconnected"
            if fits(one.client_id) and asked.state in ("all", state):
                some.append(one)
            if len(some) == LOOKS:
                for each in await _briefs(some, connected, due, waiting):
                    page.add(each)
                some.clear()
    for each in await _briefs(some, connected, due, waiting):
        page.add(each)
    return {"sessions": page.entries(), "silent": silent, "total": page.total}


async def _briefs(
    some: Sequence[Found], connected: dict[str, Client], due: dict[str, float], waiting: Waiting | None
) -> list[dict[str, Any]]:
    found = []
    for start in range(0, len(some), LOOKS):
        few = some[start : start + LOOKS]
        each = await asyncio.gather(*(_waits(one, connected, waiting) for one in few))
        found += [_brief(one, connected, due, waits) for one, waits in zip(few, each, strict=True)]
    return found


async def _waits(one: Found, connected: dict[str, Client], waiting: Waiting | None) -> Waits | None:
    """Return the waiting messages of a session; None: not known, or not requested."""
    client = connected.get(one.client_id)
    if waiting is None or one.record is None or (client is not None and client.load is None):
        return None
    return await waiting.of(one, client.load if client is not None else None)


def _brief(one: Found, connected: dict[str, Client], due: dict[str, float], waits: Waits | None) -> dict[str, Any]:
    record = one.record
    v5 = record.v5 if record is not None else None
    return {
        "client": one.client_id,
        "user": v5.user if v5 is not None else None,
        "connected": one.client_id in connected,
        "gateway": connected[one.client_id].gateway if one.client_id in connected else "",
        "owner": v5.owner if v5 is not None else "",
        "durable": record is not None and not record.clean,
        "position": "records" if v5 is not None and v5.consumerless else "consumers",
        "expiry": v5.expiry if v5 is not None else None,
        "ends": None if one.client_id in connected else due.get(one.hash),
        "subscriptions": 0 if record is None else len(record.subs) + (len(v5.shared) if v5 is not None else 0),
        "queued": None if waits is None else waits.queued,
        "inflight": None if waits is None else waits.inflight,
        "written": one.written,
        "problem": one.problem,
    }


class ListText:
    """Text of the list for a terminal."""

    def __init__(self) -> None:
        heading = ["client", "user", "connected to", "ends", "subs", "queued", "in flight", "record written", ""]
        self._table = Table(heading, "record written, user, in flight, subs")
        self._now = time.time()
        self._shown = 0

    def part(self, found: dict[str, Any]) -> list[str]:
        """Return the lines of some sessions."""
        self._shown += len(found["sessions"])
        return self._table.lines([_row(one, self._now) for one in found["sessions"]])

    def footer(self, found: dict[str, Any]) -> list[str]:
        """Return the lines below the table."""
        silent = [f"gateway {one} has not answered: its clients are listed as not connected" for one in found["silent"]]
        return [*self._table.footer(), *silent, *rest(self._shown, found["total"])]


def _row(one: dict[str, Any], now: float) -> list[str]:
    return [
        cell(one["client"]),
        _user(one),
        one["gateway"] if one["connected"] else "not connected",
        _ends(one, now),
        f"{one['subscriptions']:,}",
        "" if one["queued"] is None else f"{one['queued']:,}",
        "" if one["inflight"] is None else f"{one['inflight']:,}",
        ago(one["written"], now),
        plain(one["problem"]),
    ]


def _user(one: dict[str, Any]) -> str:
    """Return the user of a session as text; empty for one that nats-server's listener has begun."""
    return "" if one["user"] is None else cell(one["user"]) if one["user"] else "(anonymous)"


def _ends(one: dict[str, Any], now: float) -> str:
    """Return the end of a session as text."""
    if one["ends"] is not None:
        return f"in {span(max(one['ends'] - now, 0.0))}"
    if not one["durable"]:
        return "with the connection"
    return "never" if one["expiry"] is None else f"{span(one['expiry'])} after the connection"


async def show(inbox: RequestInbox, asked: Who) -> dict[str, Any]:
    """Return one session with its subscriptions and the waiting messages of each.

    Raises:
        Refused: there is no such session.
    """
    found: Found | None = None
    async for one in records(inbox, asked.client_id):
        found = one
    if found is None:
        raise Refused(f"there is no session of {plain(asked.client_id)}: `mqtt-nats ctl sessions list` shows all", 404)
    waiting = await Waiting.read_queues(inbox, [found])
    connected, silent = await _connected(inbox, loads=True, clients=[found.client_id])
    record = found.record
    waits = await _waits(found, connected, waiting)
    about = _brief(found, connected, await deadlines(inbox, found.hash), waits)
    subscriptions = []
    for subject, qos in (record.subs if record is not None else {}).items():
        pair = (subject, second_sid(subject.removesuffix(".>")) if subject.endswith(".>") else "")
        consumers = [record.cons[key] for key in pair if record is not None and key in record.cons]
        spoken_for = [one for one in consumers if waiting.speaks_for(found, one)]
        there = about["connected"] and bool(spoken_for)
        expected = [one for one in consumers if about["position"] == "consumers" or one not in spoken_for]
        # A gateway does not report by subscription the messages that it has taken for its client.
        own = await waiting.of_subscription(found, consumers) if consumers and not there else None
        subscriptions.append(
            {
                "filter": _filter(subject),
                "qos": qos,
                "queued": None if own is None else own.queued,
                "inflight": None if own is None else own.inflight,
                "in_gateway": there,
                "consumers": len(consumers),
                "missing": sum(one.durable_name not in waiting.states for one in expected),
            }
        )
    if record is not None and record.v5 is not None:
        subscriptions += [
            {"filter": text, "qos": one.qos, "queued": None, "inflight": None, "in_gateway": False}
            | {"consumers": 0, "missing": 0}
            for text, one in record.v5.shared.items()
        ]
    return {**about, "subscribed": subscriptions, "silent": silent}


def _filter(subject: str) -> str:
    try:
        return subject_to_filter(subject)
    except ValueError:
        return subject


def shown_one(one: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    now = time.time()
    where = f"to gateway {one['gateway']}" if one["connected"] else "no"
    queued = "not known" if one["queued"] is None else f"{one['queued']:,}, {one['inflight']:,} in flight"
    lines = sheet(
        ("client", plain(one["client"])),
        ("user", _user(one) or "not known"),
        ("connected", where),
        ("record", f"written {ago(one['written'], now)} by gateway {one['owner'] or 'unknown'}"),
        ("ends", _ends(one, now)),
        ("queued", queued),
        ("position", f"in {one['position']}"),
    )
    if one["problem"]:
        lines.append(f"problem  {plain(one['problem'])}")
    rows = [
        [
            cell(each["filter"]),
            str(each["qos"]),
            "" if each["queued"] is None else f"{each['queued']:,}",
            "" if each["inflight"] is None else f"{each['inflight']:,}",
            _remark(each),
        ]
        for each in one["subscribed"]
    ]
    lines += ["", *table(["subscription", "QoS", "queued", "in flight", ""], rows, none="no subscriptions")]
    return "\n".join([*lines, *(f"gateway {each} has not answered" for each in one["silent"])])


def _remark(each: dict[str, Any]) -> str:
    if each["missing"]:
        return f"{each['missing']} of {each['consumers']} consumers are gone"
    return "its gateway has them, counted above" if each["in_gateway"] else ""


async def clean(inbox: RequestInbox, asked: Cleaned) -> dict[str, Any]:
    """End sessions of clients that are not connected, with their waiting messages; remove orphaned consumers.

    Raises:
        Refused: no session is selected, or a gateway does not say which clients are connected.
    """
    if not (asked.clients or asked.match or asked.orphans):
        raise Refused("no session is selected: give client ids, --match or --orphans")
    # Records are read before the connected clients are: a client that connects later writes a newer record.
    written: dict[str, int] = {}
    for client_id in asked.clients:
        async for one in records(inbox, client_id):
            written[one.client_id] = one.seq
    if asked.match:
        async for one in records(inbox):
            written[one.client_id] = one.seq
    connected, silent = await _connected(inbox, surely=True)
    if silent:
        raise Refused(f"gateway {', '.join(silent)} has not answered: its connected clients are not known", 504)
    wanted = dict.fromkeys(asked.clients)
    consumers: list[tuple[str, str]] = []
    if asked.match:
        fits = pattern_test(asked.match)
        wanted |= {one: None for one in written if fits(one) and one not in connected}
    if asked.orphans:
        consumers = await find(inbox)
    # The gateway that ends the sessions knows its own clients only, so clients connected elsewhere are excluded here.
    kept = [{"client": one, "why": CONNECTED} for one in wanted if one in connected]
    names = [name for name in wanted if name not in connected]
    result: dict[str, Any] = {"dry_run": asked.dry_run, "sessions": [], "kept": kept}
    if asked.dry_run:
        return {**result, "sessions": names, "consumers": [name for _, name in consumers]}
    total = len(names) + len(consumers)
    for start in range(0, len(names), SESSIONS_PER_REQUEST):
        some = names[start : start + SESSIONS_PER_REQUEST]
        at = {name: written.get(name, 0) for name in some}
        for done in await ask_one(inbox, "sessions.end", {"clients": some, "written": at}):
            if done["why"]:
                result["kept"].append({"client": done["client"], "why": done["why"]})
            else:
                result["sessions"].append(done["client"])
        progress(start + len(some), total)
    removed = []
    async for name in remove(inbox, consumers):
        removed.append(name)
        progress(len(names) + len(removed), total)
    return {**result, "consumers": removed}


def shown_cleaned(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    would = "would be " if found["dry_run"] else ""
    lines = [f"{len(found['sessions']):,} sessions {would}ended, {len(found['consumers']):,} consumers {would}removed"]
    if found["dry_run"]:
        lines += [f"  session of {plain(one)}" for one in found["sessions"]]
        lines += [f"  consumer {plain(one)}" for one in found["consumers"]]
    return "\n".join([*lines, *(f"{plain(one['client'])}: {plain(one['why'])}" for one in found["kept"])])


def left(asked: Cleaned, found: dict[str, Any]) -> str:
    """Return the sessions that were to be ended and are kept; a pattern does not mean sessions of connected clients."""
    kept = [one for one in found["kept"] if one["client"] in asked.clients or one["why"] not in RETURNED]
    return "; ".join(f"the session of {plain(one['client'])} is kept: {plain(one['why'])}" for one in kept)


VERBS: Final = (
    Verb(
        "sessions.list",
        "GET",
        "/sessions",
        Listing,
        listed,
        "Show sessions, of clients that are connected or not: how much waits, and when they end.",
        Parts("sessions", parts, ListText),
    ),
    Verb(
        "sessions.show",
        "GET",
        "/sessions/{client_id}",
        Who,
        show,
        "Show one session: its subscriptions and what waits for each.",
        shown_one,
    ),
    Verb(
        "sessions.clean",
        "POST",
        "/sessions/clean",
        Cleaned,
        clean,
        "End sessions of clients that are not connected, with all that waits for them.",
        shown_cleaned,
        ("clients",),
        lacking=left,
    ),
)
