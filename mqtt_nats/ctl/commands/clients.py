# SPDX-License-Identifier: Apache-2.0
"""``ctl clients``: list, show and disconnect connected clients."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any, Final, Literal

from pydantic import Field

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.logs import plain
from mqtt_nats.control.list_page import ListPage, client_order
from mqtt_nats.ctl.gateway_requests import Answers, ask, missing, tell
from mqtt_nats.ctl.tables import ago, cell, quantity, rest, sheet, span, table
from mqtt_nats.ctl.verb import Arguments, Length, Paged, Pattern, Refused, Verb

KICK_RENEWAL_S: Final = 5.0
"""Seconds between two renewals of a disconnection in progress at the gateways."""


LEAST: Final = "MQTT, subs, from, user, connected, dropped, gateway, in flight, oldest"
"""Columns of the clients that a narrow terminal leaves out, the first ones first."""


class Selection(Arguments):
    """Selection of clients; a client has to match all given criteria."""

    match: Pattern = Field(
        default="",
        description="Client ids like this: * stands for any characters, ? for one.",
        json_schema_extra={"metavar": "PATTERN"},
    )
    user: str = Field(default="", description="Of this user.", json_schema_extra={"metavar": "NAME"})
    address: str = Field(
        default="", description="From this address, or network.", json_schema_extra={"metavar": "NETWORK"}
    )
    listener: str = Field(
        default="", description="Who came by this listener.", json_schema_extra={"metavar": "ADDRESS"}
    )
    gateway: str = Field(default="", description="At this gateway only.", json_schema_extra={"metavar": "ID"})
    slow: bool = Field(default=False, description="Those that do not take what is there for them.")


class Listing(Selection, Paged):
    """Selection of clients, and of a part of their list."""

    sort: Literal["slowest", "client", "user", "since", "unread", "queued", "inflight", "dropped"] = Field(
        default="slowest", description="Order of the list."
    )


class Who(Arguments):
    """Selection of one client."""

    client_id: str


class Kicked(Selection):
    """Selection of clients to disconnect, and how."""

    clients: tuple[str, ...] = Field(
        default=(), description="Client ids.", json_schema_extra={"metavar": "[CLIENT_ID]..."}
    )
    everybody: bool = Field(default=False, description="Everybody, also without any of the above.")
    reason: str = Field(
        default="", description="What clients of MQTT 5.0 and the log are told.", json_schema_extra={"metavar": "TEXT"}
    )
    over: Length = Field(
        default=0.0,
        description="Spread over so much time, so that not all of them come back at once. Ctrl-C ends it: who is still "
        "connected stays.",
        json_schema_extra={"metavar": "TIME", "default": "at once"},
    )
    dry_run: bool = Field(default=False, description="Only show whom it would be.")


async def listed(inbox: RequestInbox, asked: Listing) -> dict[str, Any]:
    """Return clients in an order, their total number, and the gateways that have not answered."""
    question = asked.model_dump(exclude={"gateway", "limit", "offset"})
    question["most"] = asked.offset + asked.limit if asked.limit else 0
    answers = await ask(inbox, "clients", question, gateway=asked.gateway)
    page = ListPage(asked.offset, asked.limit, client_order(asked.sort), reverse=asked.reverse)
    for one in answers.items:
        page.add(one)
    return {"clients": page.entries(), "silent": answers.silent, "total": answers.total}


def kept(one: dict[str, Any], now: float) -> str:
    """Return for how long a client has kept its oldest message unacknowledged, as text; empty = for no time."""
    since = one["unacknowledged_since"]
    return "" if since is None else span(max(now - since, 0.0))


def shown(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    now = time.time()
    rows = [
        [
            cell(one["client"]),
            one["gateway"],
            cell(one["user"] or ""),
            one["address"],
            one["version"],
            ago(one["since"], now),
            f"{one['subscriptions']:,}",
            f"{one['inflight']:,}/{one['window']:,}",
            kept(one, now),
            f"{one['queued']:,}",
            quantity(one["unread"]),
            f"{one['dropped']:,}",
            "slow" if one["slow"] else "",
        ]
        for one in found["clients"]
    ]
    heading = ["client", "gateway", "user", "from", "MQTT", "connected", "subs"]
    heading += ["in flight", "oldest", "queued", "unread", "dropped", ""]
    return "\n".join(
        [
            *table(heading, rows, LEAST),
            *missing(found["silent"], "its clients"),
            *rest(len(found["clients"]), found["total"]),
        ]
    )


async def show(inbox: RequestInbox, asked: Who) -> dict[str, Any]:
    """Return one client with its subscriptions.

    Raises:
        Refused: the client is not connected.
    """
    answers = await ask(inbox, "client", {"client": asked.client_id})
    if not answers.items:
        silent = "".join(f"; gateway {one} has not answered" for one in answers.silent)
        hint = f"`mqtt-nats ctl sessions show {plain(asked.client_id)}` shows its session, if it has one{silent}"
        raise Refused(f"client {plain(asked.client_id)} is not connected: {hint}", 404)
    # During a takeover the client may be connected to two gateways: the later connection counts.
    found = max((one for one in answers.items if "epoch" in one), key=lambda one: int(one["epoch"]))
    keys = ("filter", "qos", "no_local", "retain_as_published", "identifier")
    subscriptions = [one for one in answers.items if "filter" in one and one["gateway"] == found["gateway"]]
    return {**found, "subscribed": [{key: one[key] for key in keys} for one in subscriptions]}


def shown_one(one: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    now = time.time()
    unread = quantity(one["unread"])
    if one["unread_since"] is not None:
        unread += f", has not read for {now - one['unread_since']:.0f} s"
    expiry = "never" if one["expiry"] is None else f"{one['expiry']:,} s after the connection"
    lines = sheet(
        ("client", plain(one["client"])),
        ("gateway", one["gateway"]),
        ("user", plain(one["user"] or "anonymous")),
        ("from", f"{one['address']}, by listener {one['listener']}"),
        ("MQTT", f"{one['version']}, keepalive {one['keepalive']:g} s"),
        ("connected", f"{ago(one['since'], now)}, heard {ago(one['heard'], now)}"),
        ("session", f"{'durable' if one['durable'] else 'ends with the connection'}, expires {expiry}"),
        ("will", plain(one["will"] or "none")),
        ("in flight", f"{one['inflight']:,} of {one['window']:,} messages, {one['queued']:,} wait for a place"),
        ("oldest", f"unacknowledged for {kept(one, now)}" if kept(one, now) else "acknowledged within seconds"),
        ("unread", unread),
        ("dropped", f"{one['dropped']:,} QoS 0 messages, because it did not read"),
        ("unstored", f"{one['unstored']:,} of its publishes wait for JetStream"),
        ("state", "slow: it does not take what is there for it" if one["slow"] else "keeps up"),
        ("not read from", "; ".join(one["not_read_from"]) or "it is read from"),
    )
    rows = [
        [cell(each["filter"]), str(each["qos"]), "yes" if each["no_local"] else "", str(each["identifier"] or "")]
        for each in one["subscribed"]
    ]
    return "\n".join(
        [*lines, "", *table(["subscription", "QoS", "no local", "identifier"], rows, none="no subscriptions")]
    )


async def kick(inbox: RequestInbox, asked: Kicked) -> dict[str, Any]:
    """Disconnect clients; their sessions stay, their wills are published.

    Raises:
        Refused: no client is selected, or no client was disconnected and a named one is not connected.
    """
    chosen = (asked.clients, asked.match, asked.user, asked.address, asked.listener, asked.slow, asked.everybody)
    if not any(chosen):
        raise Refused("no client is selected: give ids, --match, --user, --address, --listener, --slow or --everybody")
    answers = await _kick(inbox, asked)
    kicked = [{"client": one["value"], "gateway": one["gateway"]} for one in answers.items]
    absent = sorted(set(asked.clients) - {one["client"] for one in kicked})
    if absent and not kicked:
        raise Refused(f"not connected: {', '.join(map(plain, absent))}", 404)
    return {"clients": kicked, "absent": absent, "silent": answers.silent, "dry_run": asked.dry_run}


async def _kick(inbox: RequestInbox, asked: Kicked) -> Answers:
    """Send the request to the gateways and renew it while it is in progress; stop it at the end."""
    question = asked.model_dump(exclude={"gateway"})
    if not asked.over or asked.dry_run:
        return await ask(inbox, "kick", question, gateway=asked.gateway)
    name = secrets.token_hex(8)
    renewing = asyncio.create_task(_renew(inbox, name))
    try:
        return await ask(inbox, "kick", {**question, "kick": name}, gateway=asked.gateway)
    finally:
        renewing.cancel()
        tell(inbox, "kicking", {"kick": name, "stop": True})


async def _renew(inbox: RequestInbox, name: str) -> None:
    while True:
        await asyncio.sleep(KICK_RENEWAL_S)
        tell(inbox, "kicking", {"kick": name})


def shown_kicked(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    count = len(found["clients"])
    done = "would be disconnected" if found["dry_run"] else "disconnected"
    lines = [f"{count:,} {'client' if count == 1 else 'clients'} {done}"]
    if found["dry_run"]:
        lines += [f"  {plain(one['client'])} at gateway {one['gateway']}" for one in found["clients"]]
    lines += [f"{plain(one)} is not connected" for one in found["absent"]]
    return "\n".join([*lines, *(f"gateway {one} has not answered: its clients stay" for one in found["silent"])])


def left(asked: Kicked, found: dict[str, Any]) -> str:
    """Return the named clients that are not connected, and the gateways that have not answered, as text."""
    parts = [f"{plain(one)} is not connected" for one in found["absent"]]
    parts += [f"gateway {one} has not answered" for one in found["silent"]]
    return f"not all clients are disconnected: {'; '.join(parts)}" if parts else ""


VERBS: Final = (
    Verb(
        "clients.list",
        "GET",
        "/clients",
        Listing,
        listed,
        "Show who is connected, the slowest first or in another order.",
        shown,
    ),
    Verb(
        "clients.show",
        "GET",
        "/clients/{client_id}",
        Who,
        show,
        "Show one client: where, since when, what it has subscribed, and how it keeps up.",
        shown_one,
    ),
    Verb(
        "clients.kick",
        "POST",
        "/clients/kick",
        Kicked,
        kick,
        "Disconnect clients. Their sessions stay, and they may come back at once: see `bans add`.",
        shown_kicked,
        ("clients",),
        lacking=left,
        waits=True,
    ),
)
