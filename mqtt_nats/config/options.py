# SPDX-License-Identifier: Apache-2.0
"""Options of the command line for the settings, and their help in groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, get_args

import click

from mqtt_nats.access.settings import AccessSettings
from mqtt_nats.base.limit_settings import ClientLimits, with_unit
from mqtt_nats.config.accounts import AccountSettings
from mqtt_nats.config.admin_settings import AdminSettings
from mqtt_nats.config.settings import Settings, env_name, flag_name, has_flag

PROCESS: Final = (
    "listen",
    "workers",
    "name",
    "embedded",
    "embedded_port",
    "data",
    "drain_time",
    "server_reference",
    "backlog",
    "max_connections",
)

NATS: Final = (
    "nats",
    *AccountSettings.model_fields,
    "stream_replicas",
    "message_retention",
    "message_ids",
    "gateway_lease",
)

OBSERVED: Final = ("log_level", "log_format", "log_connections", "sys_interval", "presence")

GROUPS: Final = {
    "Gateway": PROCESS,
    "NATS": NATS,
    "Authentication and authorization": tuple(AccessSettings.model_fields),
    "Sessions and messages": tuple(
        name
        for name in Settings.model_fields
        if name not in (*PROCESS, *NATS, *OBSERVED, *AccessSettings.model_fields, *AdminSettings.model_fields)
        and name not in ClientLimits.model_fields
    ),
    "Limits": tuple(name for name in ClientLimits.model_fields if name not in PROCESS),
    "Administration": tuple(AdminSettings.model_fields),
    "Log and monitoring": OBSERVED,
}
"""Settings by the headings of ``serve --help``, in its order."""

METAVARS: Final = {"listen": "HOST:PORT", "admin_listen": "HOST:PORT", "nats": "URL[,URL]", "data": "DIR"}


class SettingOption(click.Option):
    """Option for a setting."""

    def __init__(self, words: list[str], group: str, **more: Any) -> None:
        super().__init__(words, **more)
        self.group = group
        """Heading in the help."""


class SettingsCommand(click.Command):
    """Command with an option for each setting that has a flag; in the help they are in groups, behind the others."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters; the options for settings are made when they are first needed."""
        if not any(isinstance(one, SettingOption) for one in self.params):
            self.params += setting_options(*(name for members in GROUPS.values() for name in members))
        return super().get_params(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, each group under its heading."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], **{group: [] for group in GROUPS}}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is not None:
                sections[one.group if isinstance(one, SettingOption) else "Options"].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def setting_options(*names: str) -> list[click.Parameter]:
    """Return an option for each of these settings that has a flag; `Settings` checks the values."""
    groups = {name: group for group, members in GROUPS.items() for name in members}
    return [_option(name, groups[name]) for name in names if has_flag(name)]


def _option(name: str, group: str) -> SettingOption:
    field = Settings.model_fields[name]
    flag = flag_name(name)
    shown = f"{field.description} [{env_name(name)}; default: {default_text(with_unit(field.default, field))}]"
    if bool in _kinds(field.annotation):
        return SettingOption([f"{flag}/--no-{flag[2:]}", name], group, default=None, help=shown)
    return SettingOption([flag, name], group, metavar=METAVARS.get(name) or _metavar(name), help=shown)


def _kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    yield from get_args(annotation)


def _metavar(name: str) -> str:
    field = Settings.model_fields[name]
    kind = str(field.annotation)
    if "Path" in kind:
        return "FILE"
    if "str" in kind or "Literal['" in kind:
        return "TEXT"
    if "ByteSize" in kind:
        return "SIZE"
    return "DURATION" if with_unit(1, field) == "1s" else "NUMBER"


def default_text(value: Any) -> str:
    """Return a default as a user would write it; "none" for None."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return "none" if value is None or value == {} else str(value)
