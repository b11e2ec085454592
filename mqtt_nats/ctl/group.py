# SPDX-License-Identifier: Apache-2.0
"""Command group ``mqtt-nats ctl``: its commands and their dependencies are imported on use."""

from __future__ import annotations

import click


class Ctl(click.Group):
    """The group of all commands."""

    def _made(self) -> None:
        if not self.commands:
            from mqtt_nats.ctl.parser import made  # gateways do not import it

            self.commands.update(made())

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        self._made()
        return super().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name."""
        self._made()
        return super().get_command(ctx, cmd_name)
