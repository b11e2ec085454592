# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats check-config``: shows the settings of a gateway, and where each value comes from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import anyio
from pydantic import BaseModel, SecretStr

from mqtt_nats.access.settings import is_loopback
from mqtt_nats.base.config_files import HIDDEN, nearest, without_secrets
from mqtt_nats.base.errors import StartupError
from mqtt_nats.base.limit_settings import with_unit
from mqtt_nats.config.settings import ENV_PREFIX, TABLES, Settings, env_name, gather
from mqtt_nats.ctl.tables import table
from mqtt_nats.gateway.payload_limits import advice

DEFAULT: Final = "default"

LEASE_LEAST: Final = 20
"""Least seconds of `gateway_lease` that are safe in a cluster."""

OTHERS: Final = frozenset(
    f"{ENV_PREFIX}{name}" for name in ("SPARK_PASSWORD", "SPARK_TOKEN", "CLIENT_PASSWORD", "BUILD")
)
"""Environment variables of `mqtt-nats spark`, `pub`, `sub` and `request`, and of `pip install`."""

_KUBERNETES: Final = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)?)")
"""Environment variables that Kubernetes makes for services whose names begin with the gateway's prefix."""


class Row(NamedTuple):
    """Setting with its value and origin."""

    name: str
    value: str
    """Value as in the configuration file; empty = not set."""
    origin: str
    """`default`, an environment variable, a flag, or a file and its line."""


def check(flags: Mapping[str, Any], config: Path | None) -> tuple[list[Row], list[str]]:
    """Return the settings in force, and warnings; reads every file that a gateway reads before it connects to NATS.

    The arguments are those of :meth:`mqtt_nats.config.Settings.load`.

    Raises:
        StartupError: a gateway would not start with these settings, or an environment variable is unknown; the errors
            of values, or where these are valid the errors of plugins and files, are all there.
    """
    problems = _unknown_variables()
    try:
        settings = Settings.load(flags, config)
    except StartupError as error:
        raise StartupError(*problems, *error.problems) from None
    tables: dict[str, dict[str, Any]] = {}
    for name, given in settings.plugins.items():
        with _collected(problems):
            tables[name] = _plugin(name, given)
    anyio.run(_read_files, settings, problems, backend="asyncio", backend_options={"use_uvloop": True})
    if problems:
        raise StartupError(*dict.fromkeys(problems))
    origins = gather(flags, config).origins
    rows = [row for name in Settings.model_fields for row in _rows(settings, name, origins, tables)]
    return rows, list(_unsafe(settings))


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Add the errors of the body to ``problems``."""
    try:
        yield
    except StartupError as error:
        problems += error.problems


def shown(rows: list[Row]) -> str:
    """Return the settings as a text table."""
    return "\n".join(table(["setting", "from", "value"], [[row.name, row.origin, row.value] for row in rows]))


def _unknown_variables() -> list[str]:
    """Return an error for each environment variable with the prefix of the settings that no command reads."""
    known = {env_name(name) for name in (*Settings.model_fields, "config")} | OTHERS
    unknown = []
    for variable in sorted(os.environ):
        rest = variable.removeprefix(ENV_PREFIX)
        if rest != variable and variable not in known and not _KUBERNETES.fullmatch(rest):
            hint = nearest(variable, known) or "docs/configuration.md lists the settings"
            unknown.append(f"unknown environment variable {variable}: {hint}")
    return unknown


async def _read_files(settings: Settings, problems: list[str]) -> None:
    """Read the files of listeners, authenticators, rules and NATS logins; add an error for each that is unusable."""
    from mqtt_nats.admin import check as check_admin
    from mqtt_nats.config.access_control import AccessControl  # not needed where settings are wrong
    from mqtt_nats.config.nats_connect import nats_access, nats_options
    from mqtt_nats.transport.tls import make_context

    for listener in settings.all_listeners:
        with _collected(problems):
            if listener.secure:
                make_context(listener)
    for part in _access_parts(settings):
        with _collected(problems):
            await AccessControl(part, nats_access).close()
    for account in (settings, *map(settings.of, settings.tenants)):
        with _collected(problems):
            nats_options(account)
    with _collected(problems):
        check_admin(settings)


def _access_parts(settings: Settings) -> Iterator[Settings]:
    """Yield the settings with one file or authenticator each, so that the error of one does not hide the others."""
    none = {"acl_file": None, "scram_file": None, "password_file": None, "authenticators": ()}
    for name in ("acl_file", "scram_file", "password_file"):
        yield settings.model_copy(update={**none, name: getattr(settings, name)})
    for one in settings.authenticators:
        yield settings.model_copy(update={**none, "authenticators": (one,)})


def _unsafe(settings: Settings) -> Iterator[str]:
    """Yield a warning for each setting that is valid, and unsafe or of no use without another program's setting."""
    for one in settings.all_listeners:
        if settings.exposes_passwords(one):
            yield f"listener {one.listen}: passwords are sent without encryption: use TLS"
        if not settings.is_near(one) and settings.is_open(one) and one.tls_client_ca is None:
            yield f"listener {one.listen}: every client that reaches it is accepted (allow_anonymous)"
    if settings.admin_has_tokens and settings.admin_tls_cert is None and not settings.admin_is_near:
        yield f"admin_listen {settings.admin_listen}: the token is sent without encryption: set admin_tls_cert"
    secret = settings.nats_password or settings.nats_token or any("@" in url for url in settings.nats)
    hosts = [urlsplit(url).hostname or "" for url in settings.nats]
    if secret and not settings.requires_tls(settings.nats) and not all(map(is_loopback, hosts)):
        yield f"nats {settings.nats_display}: the login is sent without encryption: use tls://"
    if settings.gateway_lease < LEASE_LEAST:
        yield f"gateway_lease: less than {LEASE_LEAST} s is not safe in a cluster, where a leader has to be elected"
    if text := advice(settings):
        yield text


def _plugin(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a plugin; no options if it cannot be loaded and need not be.

    Raises:
        StartupError: the plugin has to be loaded, and cannot be loaded with its options.
    """
    from mqtt_nats.plugins.manager import PluginError, checked

    load = given.get("load", True)
    if not isinstance(load, bool):
        raise StartupError(f"plugins.{name}.load: expected true or false")
    try:
        _, options = checked(name, given)
    except PluginError as error:
        if load:
            raise StartupError(str(error)) from None
        return {"load": load}
    return {"load": load, **_open(options)}


def _open(options: BaseModel) -> dict[str, Any]:
    """Return the options with secret values hidden."""
    kinds = type(options).model_fields
    found = options.model_dump(mode="json").items()
    return {name: with_unit(value, kinds[name]) if kinds[name].repr else HIDDEN for name, value in found}


def _rows(
    settings: Settings, name: str, origins: Mapping[str, Sequence[str]], plugins: dict[str, dict[str, Any]]
) -> Iterator[Row]:
    found = origins.get(name, ())
    origin = found[0] if found else DEFAULT

    def of(entry: str) -> str:
        return origins.get(f"{name}.{entry}", (origin,))[0]

    value = getattr(settings, name)
    if name == "listen" and origin == DEFAULT and settings.listeners:
        value = None  # no address but those of the listeners is open
    if name not in TABLES or not value:
        yield Row(name, _text(with_unit(value, Settings.model_fields[name])), origin)
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
            yield Row(f"{name}[{number}].{option}", _text(with_unit(one, type(entry).model_fields[option])), own)


def _text(value: Any) -> str:
    """Return a value as in the configuration file."""
    if value is None:
        return ""
    if isinstance(value, SecretStr):
        return HIDDEN
    shown = without_secrets(value)
    return json.dumps(shown, default=str, ensure_ascii=False, separators=(",", ":"))  # of any size, unlike orjson
