# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats check-config``: shows the settings of a gateway, and where each value comes from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
from pydantic import BaseModel, SecretStr

from mqtt_nats.base.config_files import HIDDEN, nearest, without_secrets
from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.settings import ENV_PREFIX, TABLES, Settings, env_name, gather
from mqtt_nats.ctl.tables import table

DEFAULT: Final = "default"

OTHERS: Final = frozenset(f"{ENV_PREFIX}{name}" for name in ("SPARK_PASSWORD", "SPARK_TOKEN", "BENCH_PASSWORD"))
"""Environment variables of `mqtt-nats spark` and `mqtt-nats bench`."""

_KUBERNETES: Final = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)?)")
"""Environment variables that Kubernetes makes for services whose names begin with the gateway's prefix."""


class Row(NamedTuple):
    """Setting with its value and origin."""

    name: str
    value: str
    """Value as in the configuration file; empty = not set."""
    origin: str
    """`default`, an environment variable, a flag, or a file and its line."""


def check(flags: Mapping[str, Any], config: Path | None) -> list[Row]:
    """Return the settings in force; reads every file that a gateway reads before it connects to NATS.

    The arguments are those of :meth:`mqtt_nats.config.Settings.load`.

    Raises:
        StartupError: a gateway would not start with these settings, or an environment variable is unknown.
    """
    settings = Settings.load(flags, config)
    _, origins = gather(flags, config)
    _check_environment()
    tables = dict(_plugins(settings))
    anyio.run(_read_files, settings, backend="asyncio", backend_options={"use_uvloop": True})
    return [row for name in Settings.model_fields for row in _rows(settings, name, origins, tables)]


def shown(rows: list[Row]) -> str:
    """Return the settings as a text table."""
    return "\n".join(table(["setting", "from", "value"], [[row.name, row.origin, row.value] for row in rows]))


def _check_environment() -> None:
    known = {env_name(name) for name in (*Settings.model_fields, "config")} | OTHERS
    unknown = []
    for variable in sorted(os.environ):
        rest = variable.removeprefix(ENV_PREFIX)
        if rest != variable and variable not in known and not _KUBERNETES.fullmatch(rest):
            hint = nearest(variable, known) or "docs/configuration.md lists the settings"
            unknown.append(f"unknown environment variable {variable}: {hint}")
    if unknown:
        raise StartupError("; ".join(unknown))


async def _read_files(settings: Settings) -> None:
    from mqtt_nats.admin import check as check_admin
    from mqtt_nats.config.nats_connect import nats_options
    from mqtt_nats.gateway.gateway import Gateway  # not needed where settings are wrong

    await Gateway(settings).access.close()
    for account in (settings, *map(settings.of, settings.tenants)):
        nats_options(account)
    check_admin(settings)


def _plugins(settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the options of each plugin that has a table; no options if it cannot be loaded and need not be."""
    from mqtt_nats.plugins.manager import PluginError, checked

    for name, given in settings.plugins.items():
        load = given.get("load", True)
        if not isinstance(load, bool):
            raise StartupError(f"plugins.{name}.load: expected true or false")
        try:
            _, options = checked(name, given)
        except PluginError as error:
            if load:
                raise StartupError(str(error)) from None
            yield name, {"load": load}
        else:
            yield name, {"load": load, **_open(options)}


def _open(options: BaseModel) -> dict[str, Any]:
    """Return the options with secret values hidden."""
    kinds = type(options).model_fields
    return {name: value if kinds[name].repr else HIDDEN for name, value in options.model_dump(mode="json").items()}


def _rows(
    settings: Settings, name: str, origins: Mapping[str, Sequence[str]], plugins: dict[str, dict[str, Any]]
) -> Iterator[Row]:
    found = origins.get(name, ())
    origin = found[0] if found else DEFAULT

    def of(entry: str) -> str:
        return origins.get(f"{name}.{entry}", (origin,))[0]

    value = getattr(settings, name)
    if name not in TABLES or not value:
        yield Row(name, _text(value), origin)
        return
    if name == "plugins":
        for plugin, options in plugins.items():
            for option, one in options.items():
                yield Row(f"{name}.{plugin}.{option}", _text(one), of(plugin))
        return
    if name == "mappings":
        for source, target in value.items():
            yield Row(f"{name}.{source}", _text(target), of(source))
        return
    if name == "tenants":
        for tenant, entry in value.items():
            for option, one in entry:
                own = of(tenant) if option in entry.model_fields_set else DEFAULT
                yield Row(f"{name}.{tenant}.{option}", _text(one), own)
        return
    for number, entry in enumerate(value, 1):
        where = found[number - 1] if len(found) == len(value) else origin
        for option, one in entry.model_dump(mode="json").items():
            own = where if option in entry.model_fields_set else DEFAULT
            yield Row(f"{name}[{number}].{option}", _text(one), own)


def _text(value: Any) -> str:
    """Return a value as in the configuration file."""
    if value is None:
        return ""
    if isinstance(value, SecretStr):
        return HIDDEN
    shown = without_secrets(value)
    return json.dumps(shown, default=str, ensure_ascii=False, separators=(",", ":"))  # of any size, unlike orjson
