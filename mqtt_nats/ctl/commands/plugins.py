# SPDX-License-Identifier: Apache-2.0
"""``ctl plugins``: list, load and unload the plugins of gateways."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.logs import plain
from mqtt_nats.ctl.commands.fleet import remember, take_back
from mqtt_nats.ctl.gateway_requests import chosen, have_done
from mqtt_nats.ctl.tables import table
from mqtt_nats.ctl.verb import Arguments, Refused, Verb
from mqtt_streams.gateway_subjects import PLUGINS


async def ask(inbox: RequestInbox, action: str, name: str = "", gateway: str = "") -> list[dict[str, Any]]:
    """Send an action on plugins to one gateway or all (``gateway`` empty), and return the plugins that they have then.

    Raises:
        Refused: no gateway runs, a gateway has not answered, or the action has failed at a gateway.
    """
    try:
        wanted = await chosen(inbox, gateway)
    except Refused:
        if not gateway and action == "unload" and await take_back(inbox, name):
            return []
        raise
    answers = await have_done(inbox, PLUGINS, {"do": action, "name": name, "gateway": gateway}, wanted)
    if not gateway and action != "list":
        await remember(inbox, name, action == "load", answers)
    failed = [f"gateway {one['id']}: {one['error']}" for one in answers if one["error"]]
    if failed:
        raise Refused("; ".join(failed), 409)
    return answers


def shown(found: list[dict[str, Any]]) -> str:
    """Return the plugins of gateways as text for a terminal."""
    rows = []
    for one in found:
        for plugin in one["plugins"]:
            hooks = plugin["hooks"]
            calls, failures = (sum(hook[what] for hook in hooks) for what in ("calls", "failures"))
            points = ", ".join(dict.fromkeys(hook["point"] for hook in hooks))
            state = "loaded" if plugin["loaded"] else plain(plugin.get("error", ""))
            numbers = [f"{calls:,}", f"{failures:,}"] if hooks else ["", ""]
            rows.append([one["id"], plugin["name"], state, plugin["package"], *numbers, points])
    return "\n".join(
        table(["gateway", "plugin", "state", "package", "calls", "failures", "hooks"], rows, "package, hooks")
    )


class Where(Arguments):
    """Selection of gateways."""

    gateway: str = Field(
        default="", description="Only this one; otherwise all that run.", json_schema_extra={"metavar": "ID"}
    )


class Which(Where):
    """Selection of a plugin, and of gateways."""

    name: str


async def _list(inbox: RequestInbox, asked: Where) -> list[dict[str, Any]]:
    return await ask(inbox, "list", gateway=asked.gateway)


async def _load(inbox: RequestInbox, asked: Which) -> list[dict[str, Any]]:
    return [
        {"id": one["id"], "name": asked.name, "loaded": True}
        for one in await ask(inbox, "load", asked.name, asked.gateway)
    ]


async def _unload(inbox: RequestInbox, asked: Which) -> list[dict[str, Any]]:
    return [
        {"id": one["id"], "name": asked.name, "loaded": False}
        for one in await ask(inbox, "unload", asked.name, asked.gateway)
    ]


def _done(found: list[dict[str, Any]]) -> str:
    what = {True: "loaded", False: "unloaded"}
    lines = [f"gateway {one['id']}: plugin {one['name']} is {what[one['loaded']]}" for one in found]
    return "\n".join(lines) or "no gateway runs; those that start do not load it"


VERBS: Final = (
    Verb(
        "plugins.list",
        "GET",
        "/plugins",
        Where,
        _list,
        "Show what is installed, what is loaded, and what its hooks have done.",
        shown,
    ),
    Verb(
        "plugins.load",
        "POST",
        "/plugins/{name}/load",
        Which,
        _load,
        "Load the plugin NAME, with the options of each gateway's configuration; also at gateways that start later.",
        _done,
    ),
    Verb(
        "plugins.unload",
        "POST",
        "/plugins/{name}/unload",
        Which,
        _unload,
        "Unload the plugin NAME and remove its hooks; gateways that start later do not load it.",
        _done,
    ),
)
