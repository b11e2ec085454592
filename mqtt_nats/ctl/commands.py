# SPDX-License-Identifier: Apache-2.0
"""The command lines below ``mqtt-nats ctl``. What they need is imported when they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import click
import orjson

from mqtt_nats.config import Settings

if TYPE_CHECKING:
    from mqtt_nats.backbone.inbox import Inbox


def _run(settings: Settings, work: Callable[[Inbox], Awaitable[Any]]) -> Any:
    from mqtt_nats.ctl.connecting import connected

    async def run() -> Any:
        async with connected(settings) as inbox:
            return await work(inbox)

    return anyio.run(run, backend="asyncio", backend_options={"use_uvloop": True})


@click.group()
def cluster() -> None:
    """Gateways and nats-servers."""


@cluster.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_obj
def status(settings: Settings, as_json: bool) -> None:
    """Show the gateways, from their leases and answers, and the streams with their nats-servers."""
    from mqtt_nats.ctl.cluster import shown
    from mqtt_nats.ctl.cluster import status as look

    found = _run(settings, look)
    click.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() if as_json else shown(found))


@cluster.command()
@click.argument("gateway")
@click.pass_obj
def remove(settings: Settings, gateway: str) -> None:
    """Have others deal with the clients of a dead GATEWAY now, and not only when its lease has lapsed."""
    from mqtt_nats.ctl.cluster import remove as end_lease

    click.echo(_run(settings, lambda inbox: end_lease(inbox, gateway)))


@click.group()
def bans() -> None:
    """Client ids, user names and addresses that may not connect."""


@bans.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="For programs; times are Unix times, 0 for always.")
@click.pass_obj
def list_bans(settings: Settings, as_json: bool) -> None:
    """Show who is banned, until when, and why."""
    from mqtt_nats.ctl.bans import listed, shown

    found = _run(settings, listed)
    click.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() if as_json else shown(found))


@bans.command(name="add")
@click.argument("kind", type=click.Choice(("client", "user", "address")))
@click.argument("who")
@click.option("--for", "lasts", default="1h", show_default=True, metavar="TIME", help="90s, 15m, 2h, 7d or always.")
@click.option("--reason", default="", help="Why, for those who look at the list.")
@click.pass_obj
def add_ban(settings: Settings, kind: str, who: str, lasts: str, reason: str) -> None:
    """Ban WHO, a client id, a user name, an address or a network, at all gateways."""
    from mqtt_nats.ctl.bans import add, seconds

    length = seconds(lasts)
    click.echo(_run(settings, lambda inbox: add(inbox, kind, who, length, reason)))


@bans.command(name="remove")
@click.argument("kind", type=click.Choice(("client", "user", "address")))
@click.argument("who")
@click.pass_obj
def remove_ban(settings: Settings, kind: str, who: str) -> None:
    """Lift the ban of WHO."""
    from mqtt_nats.ctl.bans import remove as lift

    click.echo(_run(settings, lambda inbox: lift(inbox, kind, who)))


@click.group()
def plugins() -> None:
    """Plugins of gateways."""


_gateway = click.option("--gateway", default="", metavar="ID", help="Only this one; otherwise all that run.")


@plugins.command("list")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@_gateway
@click.pass_obj
def list_plugins(settings: Settings, as_json: bool, gateway: str) -> None:
    """Show what is installed, what is loaded, and what its hooks have done."""
    from mqtt_nats.ctl.plugins import ask, shown

    found = _run(settings, lambda inbox: ask(inbox, "list", gateway=gateway))
    click.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode() if as_json else shown(found))


@plugins.command()
@click.argument("name")
@_gateway
@click.pass_obj
def load(settings: Settings, name: str, gateway: str) -> None:
    """Load the plugin NAME, with the options of each gateway's configuration, until the gateway ends."""
    _change(settings, "load", name, gateway)


@plugins.command()
@click.argument("name")
@_gateway
@click.pass_obj
def unload(settings: Settings, name: str, gateway: str) -> None:
    """Unload the plugin NAME and remove its hooks."""
    _change(settings, "unload", name, gateway)


def _change(settings: Settings, action: str, name: str, gateway: str) -> None:
    from mqtt_nats.ctl.plugins import ask

    for one in _run(settings, lambda inbox: ask(inbox, action, name, gateway)):
        click.echo(f"gateway {one['id']}: plugin {name} is {action}ed")
