# SPDX-License-Identifier: Apache-2.0
"""``ctl bans``: list, add and lift bans, which apply at all gateways of the account."""

from __future__ import annotations

import getpass
import os
import time
from datetime import UTC, datetime
from typing import Any, Final, Literal

from pydantic import Field

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.bans import Ban, ban
from mqtt_nats.base.logs import plain
from mqtt_nats.ctl.tables import cell, table
from mqtt_nats.ctl.verb import ADMINISTRATOR, Arguments, Length, Refused, Verb
from mqtt_streams.bans import BanStore


async def listed(inbox: RequestInbox) -> list[dict[str, Any]]:
    """Return the bans in force, in the form of ``--json``. Raises ApiError, NoResponders, RequestTimeout."""
    now = time.time()
    found = [
        one for one in await BanStore(inbox).all() if not one["lifted"] and (not one["until"] or one["until"] > now)
    ]
    return sorted(
        ({name: one[name] for name in ("kind", "value", "until", "reason", "by")} for one in found),
        key=lambda one: (one["kind"], one["value"]),
    )


def shown(found: list[dict[str, Any]]) -> str:
    """Return the result as text for a terminal."""
    rows = [
        [one["kind"], cell(one["value"]), _end(one["until"]), cell(one["by"]), plain(one["reason"])] for one in found
    ]
    return "\n".join(table(["what", "who", "until", "set by", "reason"], rows, "set by"))


def _end(until: float) -> str:
    return "always" if not until else f"{datetime.fromtimestamp(until, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _checked(kind: str, value: str, until: float = 0.0, reason: str = "", by: str = "") -> Ban:
    try:
        return ban(kind, value, until, reason, by)
    except ValueError as error:
        raise Refused(str(error)) from None


def _setter(given: str) -> str:
    """Return who sets a ban: as given, or the user of this machine; over HTTP the administrator is always named."""
    if administrator := ADMINISTRATOR.get():
        return f"{given} ({administrator}, over HTTP)" if given else f"{administrator}, over HTTP"
    if given:
        return given
    try:
        return f"{getpass.getuser()}, by hand"
    except (KeyError, OSError):  # the user id has no name, as in many containers
        return f"uid {os.getuid()}, by hand"


class Who(Arguments):
    """Subject of a ban: kind and value."""

    kind: Literal["client", "user", "address", "user-client", "address-client"]
    who: str = Field(description="A client id, a user name, an address or a network; USER/CLIENT or ADDRESS/CLIENT.")


class NewBan(Who):
    """Arguments of a new ban."""

    lasts: Length = Field(
        default=3600.0,
        description="90s, 15m, 2h, 7d or always.",
        json_schema_extra={"flag": "for", "metavar": "TIME", "default": "1h"},
    )
    reason: str = Field(default="", description="Why, for those who look at the list.")
    by: str = Field(
        default="",
        description="Who sets it; otherwise the user of this machine. Over HTTP the administrator is named too.",
        json_schema_extra={"metavar": "NAME"},
    )


async def add(inbox: RequestInbox, asked: NewBan) -> dict[str, Any]:
    """Set a ban and return it.

    Raises:
        Refused: the value does not conform to its kind.
        ApiError, NoResponders, RequestTimeout: JetStream does not store it.
    """
    now = time.time()
    one = _checked(asked.kind, asked.who, now + asked.lasts if asked.lasts else 0.0, asked.reason, _setter(asked.by))
    await BanStore(inbox).add(*one, now)
    return one._asdict()


async def remove(inbox: RequestInbox, asked: Who) -> dict[str, Any]:
    """Lift a ban and return its kind and value.

    Raises:
        Refused: there is no such ban.
        ApiError, NoResponders, RequestTimeout: JetStream does not store it.
    """
    one = _checked(asked.kind, asked.who)
    if not any((each["kind"], each["value"]) == (one.kind, one.value) for each in await listed(inbox)):
        raise Refused(f"{asked.kind} {plain(asked.who)} is not banned: `mqtt-nats ctl bans list` shows who is", 404)
    await BanStore(inbox).remove(one.kind, one.value)
    return {"kind": one.kind, "value": one.value}


def _added(one: dict[str, Any]) -> str:
    who = f"{one['kind']} {plain(one['value'])}"
    return f"{who} is banned until {_end(one['until'])}; who is connected is disconnected"


async def _list(inbox: RequestInbox, _: Arguments) -> list[dict[str, Any]]:
    return await listed(inbox)


VERBS: Final = (
    Verb("bans.list", "GET", "/bans", Arguments, _list, "Show who is banned, until when, and why.", shown),
    Verb(
        "bans.add",
        "POST",
        "/bans",
        NewBan,
        add,
        "Ban WHO, a client id, a user name, an address or a network, or a client id of one of them, at all gateways.",
        _added,
        ("kind", "who"),
    ),
    Verb(
        "bans.remove",
        "DELETE",
        "/bans/{kind}/{who}",
        Who,
        remove,
        "Lift the ban of WHO.",
        lambda one: f"{one['kind']} {plain(one['value'])} is not banned any more",
    ),
)
