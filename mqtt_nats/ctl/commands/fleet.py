# SPDX-License-Identifier: Apache-2.0
"""``ctl reload``, ``history``, ``audit``; requests to all gateways (wishes), which apply to later gateways too."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import Field

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.control.list_page import ListPage
from mqtt_nats.ctl.gateway_requests import ask, chosen, have_done, missing
from mqtt_nats.ctl.tables import cell, quantity, rest, table
from mqtt_nats.ctl.verb import Arguments, Paged, Refused, Verb
from mqtt_nats.observability.history import POINT_INTERVAL_S
from mqtt_streams.fleet import FleetStore, Wish
from mqtt_streams.gateway_subjects import RELOAD


async def remember(inbox: RequestInbox, name: str, loaded: bool, answers: Collection[dict[str, Any]]) -> None:
    """Store a wish that gateways that start later load or unload a plugin, if all answering gateways have done so."""
    states = [{plugin["name"]: plugin["loaded"] for plugin in one["plugins"]} for one in answers]
    done = all(state.get(name, False) == loaded for state in states)
    if done and any(name in state for state in states):
        await _wish(inbox, Wish("plugin", secrets.token_hex(8), name, loaded))
    elif done:
        await take_back(inbox, name)


async def take_back(inbox: RequestInbox, name: str) -> bool:
    """Replace a stored wish about a plugin by a wish not to load it; return whether there was one."""
    known = any(wish.kind == "plugin" and wish.name == name for wish in await FleetStore(inbox).all())
    if known:
        await _wish(inbox, Wish("plugin", secrets.token_hex(8), name, False))
    return known


async def _wish(inbox: RequestInbox, wish: Wish) -> None:
    await FleetStore(inbox).put(wish)


class Where(Arguments):
    """Selection of gateways."""

    gateway: str = Field("", description="Only this one; otherwise all.", json_schema_extra={"metavar": "ID"})


async def reload(inbox: RequestInbox, asked: Where) -> list[dict[str, Any]]:
    """Reload the files of gateways.

    Raises:
        Refused: no gateway runs, a gateway has not answered, or a gateway keeps its files because one is wrong.
    """
    wanted = await chosen(inbox, asked.gateway)
    wish = Wish("reload", secrets.token_hex(8))
    if not asked.gateway:
        await _wish(inbox, wish)
    found = await have_done(inbox, RELOAD, {"id": wish.identity, "gateway": asked.gateway}, wanted)
    wrong = [f"gateway {one['id']}: not changed: {problem}" for one in found for problem in one["problems"]]
    if wrong:
        read = ", ".join(one["id"] for one in found if not one["problems"])
        raise Refused("; ".join([*wrong, *([f"gateway {read}: files are read again"] if read else [])]), 409)
    return found


def _shown(found: list[dict[str, Any]]) -> str:
    return "\n".join(f"gateway {one['id']}: files are read again" for one in found)


class Since(Where):
    """Selection of gateways and of a time."""

    since: float = Field(
        default=0.0,
        ge=0,
        le=1e11,
        description="Only points after this Unix time; otherwise of an hour.",
        json_schema_extra={"metavar": "SECONDS"},
    )


async def history(inbox: RequestInbox, asked: Since) -> dict[str, Any]:
    """Return the points of the last hour by gateway, the oldest first, and the gateways that have not answered."""
    answers = await ask(inbox, "history", {"since": asked.since}, gateway=asked.gateway)
    found: dict[str, list[dict[str, Any]]] = {one: [] for one in sorted(answers.heard)}
    for one in answers.items:
        found[one["gateway"]].append({name: value for name, value in one.items() if name != "gateway"})
    gateways = [{"gateway": name, "points": points} for name, points in found.items()]
    return {"step": POINT_INTERVAL_S, "gateways": gateways, "silent": answers.silent}


def shown_history(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    rows = [
        [
            one["gateway"],
            datetime.fromtimestamp(point["time"], UTC).strftime("%H:%M:%S"),
            f"{point['clients']:,}",
            f"{point['connects']:,.1f}",
            f"{point['received']:,.1f}",
            f"{point['sent']:,.1f}",
            f"{sum(point['dropped'].values()):,.1f}",
            f"{point['cpu']:.0%}",
            "" if point["memory"] is None else quantity(point["memory"]),
        ]
        for one in found["gateways"]
        for point in one["points"]
    ]
    heading = ["gateway", "UTC", "clients", "connects/s", "received/s", "sent/s", "dropped/s", "CPU", "memory"]
    return "\n".join([*table(heading, rows, "connects/s, memory"), *missing(found["silent"], "its points")])


class Audited(Paged):
    """Selection of actions of administrators."""

    who: str = Field(default="", description="Of this administrator.", json_schema_extra={"metavar": "NAME"})


async def audit(inbox: RequestInbox, asked: Audited) -> dict[str, Any]:
    """Return what administrators have done over HTTP, the newest first, and the gateways that have not answered."""
    most = asked.offset + asked.limit if asked.limit and not asked.reverse else 0
    answers = await ask(inbox, "audit", {"who": asked.who, "most": most})
    page = ListPage[dict[str, Any]](asked.offset, asked.limit, lambda one: -one["time"], reverse=asked.reverse)
    for one in answers.items:
        page.add(one)
    return {"actions": page.entries(), "silent": answers.silent, "total": answers.total}


def shown_audit(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    rows = [
        [
            datetime.fromtimestamp(one["time"], UTC).strftime("%Y-%m-%d %H:%M:%S"),
            cell(one["who"]),
            one["address"],
            one["operation"],
            cell(one["arguments"]),
            cell(one["outcome"] or "not ended"),
            one["gateway"],
        ]
        for one in found["actions"]
    ]
    heading = ["UTC", "who", "from", "operation", "arguments", "outcome", "gateway"]
    lines = table(heading, rows, "gateway, from")
    return "\n".join([*lines, *missing(found["silent"], "actions at it"), *rest(len(found["actions"]), found["total"])])


VERBS: Final = (
    Verb(
        "history",
        "GET",
        "/history",
        Since,
        history,
        "Show the last hour of each gateway: rates and present numbers every ten seconds.",
        shown_history,
    ),
    Verb(
        "audit",
        "GET",
        "/audit",
        Audited,
        audit,
        "Show what administrators have done over HTTP, the newest first.",
        shown_audit,
    ),
    Verb(
        "reload",
        "POST",
        "/reload",
        Where,
        reload,
        "Have all gateways read certificates, users and rules again, as on SIGHUP.",
        _shown,
    ),
)
