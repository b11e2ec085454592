# SPDX-License-Identifier: Apache-2.0
"""``ctl status``, ``listeners``, ``hooks``, ``acl check`` and ``drain``: show and stop gateways."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Final, Literal

from pydantic import Field

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.logs import plain
from mqtt_nats.ctl.gateway_requests import ask, known, missing, present, progress
from mqtt_nats.ctl.tables import ago, quantity, sheet, span, table
from mqtt_nats.ctl.verb import Arguments, Length, Verb
from mqtt_streams.account import account_storage
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.stored import records_in

DRAIN_POLL_S: Final = 0.5
"""Seconds between two requests for the state of a draining gateway."""

LEAST: Final = "subs, queued, unstored, memory, loop lag, slow, up, dropped"
"""Columns of `status` that a narrow terminal leaves out, the first ones first."""

STORED: Final = 2.0
"""Seconds in which JetStream answers what is stored; after them it is not known, and the rest is shown."""

LIMITED: Final = {"messages": MESSAGES, "retained": RETAINED, "sessions": SESSIONS}


class Where(Arguments):
    """Selection of gateways."""

    gateway: str = Field(
        default="", description="Only this one; otherwise all that run.", json_schema_extra={"metavar": "ID"}
    )


class Check(Where):
    """Access whose permission is checked."""

    user: str = Field(description="A user name; - for an anonymous client.")
    topic: str = Field(description="A topic or a topic filter.")
    access: Literal["publish", "subscribe"] | None = Field(default=None, description="Only this; otherwise both.")
    qos: int | None = Field(
        default=None, ge=0, le=2, description="At this QoS; otherwise at each.", json_schema_extra={"metavar": "QOS"}
    )
    retain: bool = Field(default=False, description="Of a retained publish.")
    client: str = Field(
        default="",
        description="With this client id. Where it is connected, its address, groups and own rules count too.",
        json_schema_extra={"metavar": "CLIENT_ID"},
    )
    address: str = Field(default="", description="From this address.", json_schema_extra={"metavar": "ADDRESS"})
    group: tuple[str, ...] = Field(
        default=(), description="In this group, besides those of the ACL file.", json_schema_extra={"metavar": "NAME"}
    )


class Levels(Where):
    """Selection of gateways whose log levels are shown."""


class Level(Where):
    """A logger and its new level."""

    logger: str = Field(description="A logger: `mqtt_nats` for all, or one that `log list` shows.")
    level: Literal["debug", "info", "warning", "error", "critical", "default"] = Field(
        description="Least severe records that are logged; default: the level of the logger above it."
    )


class Drained(Arguments):
    """Selection of a gateway to drain."""

    gateway: str
    wait: Length = Field(
        default=300.0,
        description="How long to wait for its end; 0 does not wait.",
        json_schema_extra={"metavar": "TIME", "default": "5m"},
    )


async def status(inbox: RequestInbox, asked: Where) -> dict[str, Any]:
    """Return the counters of the gateways, the numbers of stored messages, retained messages and sessions, and storage.

    ``received`` and ``sent`` are counts by QoS since the start of each gateway.
    """
    answers, storage, counts = await asyncio.gather(
        ask(inbox, "counters", gateway=asked.gateway),
        _storage_of(inbox),
        asyncio.gather(*(_messages_of(inbox, stream) for stream in LIMITED.values())),
    )
    stored = dict(zip(LIMITED, counts, strict=True))
    return {"gateways": answers.items, "stored": stored, "storage": storage, "silent": answers.silent}


async def _messages_of(inbox: RequestInbox, stream: str) -> int | None:
    try:
        async with asyncio.timeout(STORED):
            state = (await call(inbox, f"STREAM.INFO.{stream}"))["state"]
            count = int(state["messages"]) if stream == MESSAGES else records_in(state)
    except (ApiError, NoResponders, RequestTimeout, TimeoutError):
        return None
    return count


async def _storage_of(inbox: RequestInbox) -> dict[str, int | None]:
    try:
        async with asyncio.timeout(STORED):
            used, allowed = account_storage(await call(inbox, "INFO"))
    except (ApiError, NoResponders, RequestTimeout, TimeoutError):
        return {"used": None, "allowed": None}
    return {"used": used, "allowed": allowed}


def shown(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    rows = []
    for one in found["gateways"]:
        lag = one["lag"]
        average = lag["sum"] / max(sum(lag["counts"]), 1)
        rows.append(
            [
                one["gateway"],
                "draining" if one["draining"] else f"not ready: {one['obstacle']}" if one["obstacle"] else "running",
                ago(one["since"], one["time"]).removesuffix(" ago"),
                f"{one['clients']:,}",
                f"{one['subscriptions']:,}",
                f"{sum(one['received']):,}",
                f"{sum(one['sent']):,}",
                f"{sum(one['dropped'].values()):,}",
                f"{one['slow'] + one['stalled']:,}",
                f"{one['queued']:,}",
                f"{one['pending_stores']:,}",
                _stored_in(one["stored"]),
                f"{average * 1000:.1f} ms",
                quantity(one["memory"]),
            ]
        )
    heading = ["gateway", "state", "up", "clients", "subs", "received", "sent", "dropped", "slow", "queued"]
    heading += ["unstored", "stored in", "loop lag", "memory"]
    stored = found["stored"]
    counts = {name: "not known" if count is None else f"{count:,}" for name, count in stored.items()}
    lines = [*table(heading, rows, LEAST), *missing(found["silent"], "its clients"), ""]
    lines += sheet(
        ("sessions", counts["sessions"]),
        ("retained messages", counts["retained"]),
        ("messages in $MQTT_msgs", counts["messages"]),
        ("JetStream storage", _storage(found["storage"])),
        ("build", _builds(one.get("build", "not known") for one in found["gateways"])),
        ("refused stores", _reasons(one.get("refused_stores", {}) for one in found["gateways"])),
        ("dropped", _reasons(one["dropped"] for one in found["gateways"])),
        ("disconnects", _reasons(one["disconnects"] for one in found["gateways"])),
        *_refused_tenants(found["gateways"]),
    )
    return "\n".join(lines)


def _refused_tenants(gateways: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Return a row for each tenant that a gateway does not serve."""
    for one in gateways:
        for name, why in one.get("refused_tenants", {}).items():
            yield "tenant not served", f"{name}, at {one['gateway']}: {why}"


def _builds(builds: Iterable[str]) -> str:
    """Return the build of all gateways, or each build with the number of its gateways, the largest number first."""
    counts = Counter(builds).most_common()
    return counts[0][0] if len(counts) == 1 else "; ".join(f"{count:,} {build}" for build, count in counts) or "none"


def _stored_in(found: Mapping[str, Any]) -> str:
    """Return how long the last measured store took as text; empty before the first."""
    return f"{found['last'] * 1000:,.1f} ms" if found.get("last") else ""


def _storage(found: Mapping[str, int | None]) -> str:
    used, allowed = found["used"], found["allowed"]
    if used is None:
        return "not known"
    if allowed is None:
        return f"{quantity(used)}, the account has no limit"
    return f"{quantity(used)} of {quantity(allowed)} ({used / max(allowed, 1):.0%})"


def _reasons(each: Iterable[Mapping[str, int]]) -> str:
    """Return the sums of several gateways' counts by reason as text."""
    total: dict[str, int] = {}
    for one in each:
        for reason, count in one.items():
            total[reason] = total.get(reason, 0) + count
    said = (f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(total.items()) if count)
    return ", ".join(said) or "none"


async def listeners(inbox: RequestInbox, asked: Where) -> dict[str, Any]:
    """Return the listeners of the gateways, with their authenticators."""
    answers = await ask(inbox, "listeners", gateway=asked.gateway)
    return {"listeners": answers.items, "silent": answers.silent}


def shown_listeners(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    rows = [
        [
            one["gateway"],
            ", ".join(one["listen"]),
            one["type"],
            f"{one['connections']:,}",
            "" if one["max_connections"] is None else f"{one['max_connections']:,}",
            _who(one),
        ]
        for one in found["listeners"]
    ]
    heading = ["gateway", "listens on", "type", "connections", "at most", "who gets in"]
    return "\n".join([*table(heading, rows, "at most, type"), *missing(found["silent"], "its listeners")])


def _who(one: dict[str, Any]) -> str:
    if one["use_identity"]:
        return f"certificates ({one['use_identity']})"
    parts = [*map(str, one["authenticators"]), *(["anonymous"] if one["anonymous"] else [])]
    return ", ".join(parts) or "nobody"


async def hooks(inbox: RequestInbox, asked: Where) -> dict[str, Any]:
    """Return the callbacks of every point, in their order."""
    answers = await ask(inbox, "hooks", gateway=asked.gateway)
    return {"hooks": answers.items, "silent": answers.silent}


def shown_hooks(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    rows = [
        [
            one["gateway"],
            one["point"],
            one["callback"],
            one["owner"],
            str(one["priority"]),
            f"{one['calls']:,}",
            f"{one['failures']:,}",
        ]
        for one in found["hooks"]
    ]
    heading = ["gateway", "point", "callback", "of", "priority", "calls", "failures"]
    return "\n".join([*table(heading, rows, "priority, of, gateway"), *missing(found["silent"], "its hooks")])


async def acl(inbox: RequestInbox, asked: Check) -> dict[str, Any]:
    """Return the decisions of the gateways' rules; ``why`` names the deciding rule."""
    question = asked.model_dump(exclude={"gateway", "group"})
    question |= {"user": None if asked.user == "-" else asked.user, "groups": list(asked.group)}
    answers = await ask(inbox, "acl", question, gateway=asked.gateway)
    return {"decisions": answers.items, "silent": answers.silent}


def shown_acl(found: dict[str, Any]) -> str:
    """Return the decisions as text for a terminal; equal decisions at several QoS share one line."""
    rows = []

    def same(one: dict[str, Any]) -> tuple[str, ...]:
        return (one["gateway"], one["access"], "allowed" if one["allowed"] else "denied", one["why"])

    for key, several in groupby(found["decisions"], key=same):
        levels = ", ".join(str(one["qos"]) for one in several)
        rows.append([*key[:2], levels, key[2], plain(key[3])])
    lines = table(["gateway", "access", "QoS", "decision", "decided by"], rows)
    if any(one["hooks"] for one in found["decisions"]):
        lines.append("hooks of client.authorize are asked after the rules, and have the last word")
    return "\n".join([*lines, *(f"gateway {one} has not answered" for one in found["silent"])])


async def log_levels(inbox: RequestInbox, asked: Levels) -> dict[str, Any]:
    """Return the level in force of each logger of the gateways."""
    answers = await ask(inbox, "log.levels", gateway=asked.gateway)
    return {"loggers": answers.items, "silent": answers.silent}


async def set_log_level(inbox: RequestInbox, asked: Level) -> dict[str, Any]:
    """Set the level of a logger, until the gateway is started again; return the levels as `log_levels`.

    Raises:
        Refused: a gateway has no such logger.
    """
    question = {"logger": asked.logger, "level": asked.level}
    answers = await ask(inbox, "log.levels", question, gateway=asked.gateway)
    return {"loggers": answers.items, "silent": answers.silent}


def shown_levels(found: dict[str, Any]) -> str:
    """Return the levels as text for a terminal."""
    rows = [[one["gateway"], one["logger"], one["level"]] for one in found["loggers"]]
    return "\n".join([*table(["gateway", "logger", "level"], rows), *missing(found["silent"], "its loggers")])


async def drain(inbox: RequestInbox, asked: Drained) -> dict[str, Any]:
    """Drain a gateway as on SIGTERM: it disconnects its clients and ends; return at its end or after `asked.wait`.

    Raises:
        Refused: the gateway does not run.
    """
    (begun,) = (await ask(inbox, "drain", gateway=asked.gateway)).items
    deadline = time.monotonic() + asked.wait
    left = total = int(begun["connections"])
    ended = False
    while not ended and time.monotonic() < deadline:
        await asyncio.sleep(DRAIN_POLL_S)
        there = {str(one["id"]): one for one in await present(inbox)}
        if asked.gateway in there:
            left = int(there[asked.gateway]["connections"])
        else:
            running = await known(inbox)
            ended = running is not None and asked.gateway not in running.live
            left = 0
        progress(total - min(left, total), total)
    return {"gateway": asked.gateway, "connections": total, "left": left, "ended": ended, "seconds": begun["seconds"]}


def shown_drained(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    if found["ended"]:
        return f"gateway {found['gateway']} has let go of {found['connections']:,} connections, and has ended"
    about = f"gateway {found['gateway']} lets go of {found['connections']:,} connections"
    return f"{about} within {span(found['seconds'])}, and ends then: {found['left']:,} are left"


def left(asked: Drained, found: dict[str, Any]) -> str:
    """Return a line about a gateway that has not ended within the given time."""
    if found["ended"] or not asked.wait:
        return ""
    return f"gateway {found['gateway']} has not ended in {span(asked.wait)}: {found['left']:,} connections are left"


VERBS: Final = (
    Verb(
        "status",
        "GET",
        "/status",
        Where,
        status,
        "Show what the gateways do: clients, messages, what waits and what was dropped, since they have started.",
        shown,
    ),
    Verb(
        "listeners",
        "GET",
        "/listeners",
        Where,
        listeners,
        "Show the listeners, how many connections they have, and who gets in.",
        shown_listeners,
    ),
    Verb("hooks", "GET", "/hooks", Where, hooks, "Show the hooks, and what they have done.", shown_hooks),
    Verb(
        "acl.check",
        "GET",
        "/acl/check",
        Check,
        acl,
        "Show whether USER may publish to, and subscribe, TOPIC, and which rule decides that. USER - is anonymous.",
        shown_acl,
        ("user", "topic"),
    ),
    Verb("log.list", "GET", "/log", Levels, log_levels, "Show the log levels in force.", shown_levels),
    Verb(
        "log.level",
        "POST",
        "/log/level",
        Level,
        set_log_level,
        "Set the log level of LOGGER in running gateways, until they are started again.",
        shown_levels,
        ("logger", "level"),
    ),
    Verb(
        "drain",
        "POST",
        "/gateways/{gateway}/drain",
        Drained,
        drain,
        "Have GATEWAY move everybody off and end, as on SIGTERM: before maintenance.",
        shown_drained,
        lacking=left,
    ),
)
