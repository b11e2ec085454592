# SPDX-License-Identifier: Apache-2.0
"""Command group ``mqtt-nats ctl``: its commands and their dependencies are imported on use."""

from __future__ import annotations

from typing import Final

import click

MODULES: Final = {
    "acl": "gateways",
    "audit": "fleet",
    "bans": "bans",
    "clients": "clients",
    "cluster": "cluster",
    "drain": "gateways",
    "groups": "topics",
    "history": "fleet",
    "hooks": "gateways",
    "listeners": "gateways",
    "log": "gateways",
    "plugins": "plugins",
    "publish": "retained",
    "reload": "fleet",
    "retained": "retained",
    "sessions": "sessions",
    "status": "gateways",
    "streams": "streams",
    "subscriptions": "topics",
    "topics": "topics",
    "trace": "trace_output",
}
"""Modules of ``ctl/commands`` by the first words of their commands."""


class Ctl(click.Group):
    """The group of all commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return sorted(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name; only its module is imported."""
        if cmd_name not in MODULES:
            return None
        from mqtt_nats.ctl.parser import made  # gateways do not import it

        return made(cmd_name, MODULES[cmd_name])
