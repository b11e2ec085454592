# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats ctl``: its commands, and all that they need, are imported when they are asked for."""

from __future__ import annotations

import click


class Ctl(click.Group):
    """The group of all commands."""

    def _made(self) -> None:
        if not self.commands:
            from mqtt_nats.ctl.parser import made  # not needed by gateways

            self.commands.update(made())

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands."""
        self._made()
        return super().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One command."""
        self._made()
        return super().get_command(ctx, cmd_name)
