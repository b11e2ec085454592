# SPDX-License-Identifier: Apache-2.0
"""``ctl bans``: who may not connect, at any gateway of the account."""

from __future__ import annotations

import getpass
import re
import time
from datetime import UTC, datetime
from typing import Any, Final

from mqtt_nats.backbone.inbox import Inbox
from mqtt_nats.ctl.tables import table
from mqtt_nats.errors import StartupError
from mqtt_nats.limits.bans import Ban, ban
from mqtt_streams.bans import BanStore

UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds(text: str) -> float:
    """``90``, ``90s``, ``15m``, ``2h`` or ``7d``; ``always`` is 0.

    Raises:
        StartupError: it is none of these.
    """
    if text == "always":
        return 0.0
    found = re.fullmatch(r"([0-9]{1,9})([smhd]?)", text)
    if found is None or not int(found[1]):
        raise StartupError(f"{text!r} is no time such as 90s, 15m, 2h, 7d or always")
    return float(int(found[1]) * UNITS[found[2] or "s"])


async def listed(inbox: Inbox) -> list[dict[str, Any]]:
    """The bans that hold, as ``--json`` prints them. Raises ApiError, NoResponders, RequestTimeout."""
    now = time.time()
    found = [
        one for one in await BanStore(inbox).all() if not one["lifted"] and (not one["until"] or one["until"] > now)
    ]
    return sorted(
        ({name: one[name] for name in ("kind", "value", "until", "reason", "by")} for one in found),
        key=lambda one: (one["kind"], one["value"]),
    )


def shown(found: list[dict[str, Any]]) -> str:
    """The same for people."""
    rows = [[one["kind"], _plain(one["value"]), _end(one["until"]), one["by"], _plain(one["reason"])] for one in found]
    return "\n".join(table(["what", "who", "until", "set by", "reason"], rows))


def _end(until: float) -> str:
    return "always" if not until else f"{datetime.fromtimestamp(until, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _plain(text: str) -> str:
    """A name on one line, without what a terminal would take for a command."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


def _checked(kind: str, value: str, until: float = 0.0, reason: str = "") -> Ban:
    try:
        return ban(kind, value, until, reason, f"{getpass.getuser()}, by hand")
    except ValueError as error:
        raise StartupError(str(error)) from None


async def add(inbox: Inbox, kind: str, value: str, lasts: float, reason: str) -> str:
    """Ban somebody for ``lasts`` seconds, 0 = for good; says what was done.

    Raises:
        StartupError: the value is none of its kind.
        ApiError, NoResponders, RequestTimeout: JetStream does not do it.
    """
    now = time.time()
    one = _checked(kind, value, now + lasts if lasts else 0.0, reason)
    await BanStore(inbox).add(*one, now)
    return f"{one.kind} {_plain(one.value)} is banned until {_end(one.until)}; who is connected is disconnected"


async def remove(inbox: Inbox, kind: str, value: str) -> str:
    """Lift a ban; says what was done.

    Raises:
        StartupError: there is none.
        ApiError, NoResponders, RequestTimeout: JetStream does not do it.
    """
    one = _checked(kind, value)
    if not any((each["kind"], each["value"]) == (one.kind, one.value) for each in await listed(inbox)):
        raise StartupError(f"{kind} {_plain(value)} is not banned: `mqtt-nats ctl bans list` shows who is")
    await BanStore(inbox).remove(one.kind, one.value)
    return f"{one.kind} {_plain(one.value)} is not banned any more"
