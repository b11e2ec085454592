# SPDX-License-Identifier: Apache-2.0
"""``ctl sessions``: what JetStream keeps of clients, connected or not; ending it; what belongs to nobody."""

from __future__ import annotations

import time
from typing import Any, Final, Literal

from pydantic import Field

from mqtt_nats.backbone.inbox import Inbox
from mqtt_nats.ctl.asking import ask, ask_one, known, progress
from mqtt_nats.ctl.orphans import find, remove
from mqtt_nats.ctl.records import Found, deadlines, fits, queues, records
from mqtt_nats.ctl.tables import ago, cut, plain, rest, sheet, span, table
from mqtt_nats.ctl.verb import Arguments, Refused, Verb
from mqtt_streams.sessions import second_sid
from mqtt_streams.subjects import subject_to_filter

AT_ONCE: Final = 32
"""Sessions that a gateway is asked to end at a time."""


class Listing(Arguments):
    """Which sessions."""

    match: str = Field(
        default="",
        description="Client ids like this: * stands for any characters, ? for one.",
        json_schema_extra={"metavar": "PATTERN"},
    )
    state: Literal["all", "connected", "disconnected"] = Field(
        default="all", description="Only those whose clients are connected, or are not."
    )
    quick: bool = Field(default=False, description="Without the lengths of queues, which are asked of every consumer.")
    limit: int = Field(default=0, ge=0, description="So many at most; 0 for all.", json_schema_extra={"metavar": "N"})


class Who(Arguments):
    """Whose session."""

    client_id: str


class Cleaned(Arguments):
    """Which sessions are to be ended."""

    clients: tuple[str, ...] = Field(
        default=(), description="Client ids.", json_schema_extra={"metavar": "[CLIENT_ID]..."}
    )
    match: str = Field(
        default="",
        description="Of all clients like this that are not connected.",
        json_schema_extra={"metavar": "PATTERN"},
    )
    orphans: bool = Field(
        default=False,
        description="Consumers without a session, and sessions of absent clients whose consumers are all gone.",
    )
    dry_run: bool = Field(default=False, description="Only show what it would be.")


async def _connected(inbox: Inbox, *, surely: bool = False) -> tuple[dict[str, str], list[str]]:
    """The gateway of every client that is connected, and the gateways that have not answered.

    Nobody is connected where no gateway runs.

    Args:
        surely: gateways whose leases have lapsed count too; they may run all the same.

    Raises:
        Refused: nobody answers, and ``surely`` somebody may run.
    """
    there = await known(inbox) if surely else None
    try:
        answers = await ask(inbox, "connected")
    except Refused as refused:
        if refused.status != 503 or (surely and (there is None or there.live or there.lapsed)):
            raise
        return {}, []
    lapsed = there.lapsed - answers.heard if there is not None else set()
    return {one["value"]: one["gateway"] for one in answers.items}, sorted({*answers.silent, *lapsed})


async def listed(inbox: Inbox, asked: Listing) -> dict[str, Any]:
    """The sessions, those first for which most messages wait; and the gateways that have not answered."""
    connected, silent = await _connected(inbox)
    waiting = {} if asked.quick else await queues(inbox)
    due = await deadlines(inbox)
    found = []
    async for one in records(inbox):
        state = "connected" if one.client_id in connected else "disconnected"
        if not fits(asked.match, one.client_id) or asked.state not in ("all", state):
            continue
        found.append(_brief(one, connected, due, None if asked.quick else waiting))
    found.sort(key=lambda one: (-(one["queued"] or 0), one["client"]))
    return cut({"sessions": found, "silent": silent}, "sessions", asked.limit)


def _brief(
    one: Found, connected: dict[str, str], due: dict[str, float], waiting: dict[str, tuple[int, int]] | None
) -> dict[str, Any]:
    record = one.record
    v5 = record.v5 if record is not None else None
    queued: int | None = None
    inflight: int | None = None
    if waiting is not None and record is not None:
        states = [waiting[ref.durable_name] for ref in record.cons.values() if ref.durable_name in waiting]
        queued, inflight = sum(state[0] for state in states), sum(state[1] for state in states)
    return {
        "client": one.client_id,
        "connected": one.client_id in connected,
        "gateway": connected.get(one.client_id, ""),
        "owner": v5.owner if v5 is not None else "",
        "durable": record is not None and not record.clean,
        "expiry": v5.expiry if v5 is not None else None,
        "ends": None if one.client_id in connected else due.get(one.hash),
        "subscriptions": 0 if record is None else len(record.subs) + (len(v5.shared) if v5 is not None else 0),
        "queued": queued,
        "inflight": inflight,
        "written": one.written,
        "problem": one.problem,
    }


def shown(found: dict[str, Any]) -> str:
    """The same for people."""
    now = time.time()
    rows = [
        [
            plain(one["client"]),
            one["gateway"] if one["connected"] else "not connected",
            _ends(one, now),
            f"{one['subscriptions']:,}",
            "" if one["queued"] is None else f"{one['queued']:,}",
            "" if one["inflight"] is None else f"{one['inflight']:,}",
            ago(one["written"], now),
            plain(one["problem"]),
        ]
        for one in found["sessions"]
    ]
    heading = ["client", "connected to", "ends", "subs", "queued", "in flight", "record written", ""]
    silent = [f"gateway {one} has not answered: its clients look as if not connected" for one in found["silent"]]
    return "\n".join([*table(heading, rows), *silent, *rest(found, "sessions")])


def _ends(one: dict[str, Any], now: float) -> str:
    """When a session ends."""
    if one["ends"] is not None:
        return f"in {span(max(one['ends'] - now, 0.0))}"
    if not one["durable"]:
        return "with the connection"
    return "never" if one["expiry"] is None else f"{span(one['expiry'])} after the connection"


async def show(inbox: Inbox, asked: Who) -> dict[str, Any]:
    """One session, with its subscriptions and what waits for each.

    Raises:
        Refused: there is none.
    """
    found: Found | None = None
    async for one in records(inbox, asked.client_id):
        found = one
    if found is None:
        raise Refused(f"there is no session of {plain(asked.client_id)}: `mqtt-nats ctl sessions list` shows all", 404)
    connected, silent = await _connected(inbox)
    record = found.record
    names = [] if record is None else [ref.durable_name for ref in record.cons.values()]
    waiting = await queues(inbox, names)
    about = _brief(found, connected, await deadlines(inbox, found.hash), waiting)
    subscriptions = []
    for subject, qos in (record.subs if record is not None else {}).items():
        pair = (subject, second_sid(subject.removesuffix(".>")) if subject.endswith(".>") else "")
        keys = [key for key in pair if record is not None and key in record.cons]
        states = [waiting.get(record.cons[key].durable_name) for key in keys] if record is not None else []
        known = [state for state in states if state is not None]
        subscriptions.append(
            {
                "filter": _filter(subject),
                "qos": qos,
                "queued": sum(state[0] for state in known) if keys else None,
                "inflight": sum(state[1] for state in known) if keys else None,
                "consumers": len(keys),
                "missing": len(states) - len(known),
            }
        )
    if record is not None and record.v5 is not None:
        subscriptions += [
            {"filter": text, "qos": one.qos, "queued": None, "inflight": None, "consumers": 0, "missing": 0}
            for text, one in record.v5.shared.items()
        ]
    return {**about, "subscribed": subscriptions, "silent": silent}


def _filter(subject: str) -> str:
    try:
        return subject_to_filter(subject)
    except ValueError:
        return subject


def shown_one(one: dict[str, Any]) -> str:
    """The same for people."""
    now = time.time()
    where = f"to gateway {one['gateway']}" if one["connected"] else "no"
    queued = "not known" if one["queued"] is None else f"{one['queued']:,}, {one['inflight']:,} in flight"
    lines = sheet(
        ("client", plain(one["client"])),
        ("connected", where),
        ("record", f"written {ago(one['written'], now)} by gateway {one['owner'] or 'unknown'}"),
        ("ends", _ends(one, now)),
        ("queued", queued),
    )
    if one["problem"]:
        lines.append(f"problem  {plain(one['problem'])}")
    rows = [
        [
            plain(each["filter"]),
            str(each["qos"]),
            "" if each["queued"] is None else f"{each['queued']:,}",
            "" if each["inflight"] is None else f"{each['inflight']:,}",
            f"{each['missing']} of {each['consumers']} consumers are gone" if each["missing"] else "",
        ]
        for each in one["subscribed"]
    ]
    lines += ["", *table(["subscription", "QoS", "queued", "in flight", ""], rows)]
    return "\n".join([*lines, *(f"gateway {each} has not answered" for each in one["silent"])])


async def clean(inbox: Inbox, asked: Cleaned) -> dict[str, Any]:
    """End sessions of clients that are not connected, with all that waits for them; remove what belongs to nobody.

    Raises:
        Refused: nothing is named, or it cannot be told who is connected.
    """
    if not (asked.clients or asked.match or asked.orphans):
        raise Refused("nothing is named: give client ids, --match or --orphans")
    # Records are read before it is asked who is connected: who connects later writes another one.
    written: dict[str, int] = {}
    for client_id in asked.clients:
        async for one in records(inbox, client_id):
            written[one.client_id] = one.seq
    if asked.match or asked.orphans:
        async for one in records(inbox):
            written[one.client_id] = one.seq
    connected, silent = await _connected(inbox, surely=True)
    if silent:
        raise Refused(f"gateway {', '.join(silent)} has not answered: nobody knows who is connected there", 504)
    wanted = dict.fromkeys(asked.clients)
    consumers: list[tuple[str, str]] = []
    if asked.match:
        wanted |= {one: None for one in written if fits(asked.match, one) and one not in connected}
    if asked.orphans:
        consumers, broken = await find(inbox, connected)
        wanted |= {one: None for one in broken if one in written}
    # The gateway that ends them knows only of its own clients.
    kept = [{"client": one, "why": "the client is connected"} for one in wanted if one in connected]
    names = [name for name in wanted if name not in connected]
    result: dict[str, Any] = {"dry_run": asked.dry_run, "sessions": [], "kept": kept}
    if asked.dry_run:
        return {**result, "sessions": names, "consumers": [name for _, name in consumers]}
    total = len(names) + len(consumers)
    for start in range(0, len(names), AT_ONCE):
        some = names[start : start + AT_ONCE]
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
    """The same for people."""
    would = "would be " if found["dry_run"] else ""
    lines = [f"{len(found['sessions']):,} sessions {would}ended, {len(found['consumers']):,} consumers {would}removed"]
    if found["dry_run"]:
        lines += [f"  session of {plain(one)}" for one in found["sessions"]]
        lines += [f"  consumer {plain(one)}" for one in found["consumers"]]
    return "\n".join([*lines, *(f"{plain(one['client'])}: {plain(one['why'])}" for one in found["kept"])])


VERBS: Final = (
    Verb(
        "sessions.list",
        "GET",
        "/sessions",
        Listing,
        listed,
        "Show sessions, of clients that are connected or not: how much waits, and when they end.",
        shown,
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
    ),
)
