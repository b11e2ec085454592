# SPDX-License-Identifier: Apache-2.0
"""``ctl plugins``: what gateways have installed and loaded, and loading and unloading it."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson
from pydantic import Field

from mqtt_nats.backbone.inbox import NO_RESPONDERS, Inbox
from mqtt_nats.broker.control import PLUGINS
from mqtt_nats.ctl.asking import present
from mqtt_nats.ctl.fleet import remember, take_back
from mqtt_nats.ctl.tables import table
from mqtt_nats.ctl.verb import Arguments, Refused, Verb

WORKING: Final = 25.0
"""Seconds that a gateway has for loading or unloading."""


async def ask(inbox: Inbox, action: str, name: str = "", gateway: str = "") -> list[dict[str, Any]]:
    """Have one gateway, or all (``gateway`` empty), do something, and tell what they have then.

    Raises:
        Refused: no gateway is there, or not all have answered.
    """
    there = {one["id"] for one in await present(inbox)}
    wanted = there & {gateway} if gateway else there
    if not there and action == "unload" and await take_back(inbox, name):
        return []
    if not wanted:
        missing = f"gateway {gateway} does not answer" if gateway else "no gateway answers"
        raise Refused(f"{missing}: `mqtt-nats ctl cluster status` lists them", 404)
    answers: dict[str, dict[str, Any]] = {}
    done = asyncio.Event()

    def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if payload and not headers.startswith(NO_RESPONDERS):
            one = orjson.loads(payload)
            answers[one["id"]] = one
            if wanted <= answers.keys():
                done.set()

    link = inbox.link
    reply = inbox.prefix + b"plugins." + inbox.token()
    sid = link.subscribe_raw(reply, arrived)
    body = orjson.dumps({"do": action, "name": name, "gateway": gateway})
    link.out.append(b"PUB %b %b %d\r\n%b\r\n" % (PLUGINS, reply, len(body), body))
    link.kick()
    try:
        async with asyncio.timeout(WORKING):
            await done.wait()
    except TimeoutError:
        missing = ", ".join(sorted(wanted - answers.keys()))
        raise Refused(f"no answer from gateway {missing} in {WORKING:g} seconds", 504) from None
    finally:
        link.unsubscribe_raw(sid)
    if not gateway and action != "list":
        await remember(inbox, name, action == "load", answers.values())
    failed = [f"gateway {one['id']}: {one['error']}" for one in answers.values() if one["error"]]
    if failed:
        raise Refused("; ".join(sorted(failed)), 409)
    return sorted(answers.values(), key=lambda one: str(one["id"]))


def shown(found: list[dict[str, Any]]) -> str:
    """What gateways have, for people."""
    rows = []
    for one in found:
        for plugin in one["plugins"]:
            hooks = plugin["hooks"]
            calls, failures = (sum(hook[what] for hook in hooks) for what in ("calls", "failures"))
            points = ", ".join(dict.fromkeys(hook["point"] for hook in hooks))
            state = "loaded" if plugin["loaded"] else ""
            numbers = [f"{calls:,}", f"{failures:,}"] if hooks else ["", ""]
            rows.append([one["id"], plugin["name"], state, plugin["package"], *numbers, points])
    return "\n".join(table(["gateway", "plugin", "state", "package", "calls", "failures", "hooks"], rows))


class Where(Arguments):
    """Which gateways."""

    gateway: str = Field(
        default="", description="Only this one; otherwise all that run.", json_schema_extra={"metavar": "ID"}
    )


class Which(Where):
    """Which plugin, at which gateways."""

    name: str


async def _list(inbox: Inbox, asked: Where) -> list[dict[str, Any]]:
    return await ask(inbox, "list", gateway=asked.gateway)


async def _load(inbox: Inbox, asked: Which) -> list[dict[str, Any]]:
    return [
        {"id": one["id"], "name": asked.name, "loaded": True}
        for one in await ask(inbox, "load", asked.name, asked.gateway)
    ]


async def _unload(inbox: Inbox, asked: Which) -> list[dict[str, Any]]:
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
