# SPDX-License-Identifier: Apache-2.0
"""``ctl reload``, and requests to all gateways (wishes) that also hold for gateways that start later."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any, Final

from pydantic import Field

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.ctl.gateway_requests import chosen, have_done
from mqtt_nats.ctl.verb import Arguments, Refused, Verb
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


VERBS: Final = (
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
