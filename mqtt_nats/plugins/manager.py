# SPDX-License-Identifier: Apache-2.0
"""Loading and unloading of the plugins of one gateway."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final

import orjson
from pydantic import BaseModel, ValidationError

from mqtt_nats.base.config_files import unknown_key
from mqtt_nats.base.errors import StartupError, describe, ends_task, worded
from mqtt_nats.plugins.base import Plugin
from mqtt_nats.plugins.host import Host

if TYPE_CHECKING:
    from mqtt_nats.client.account import Account

log = logging.getLogger("mqtt_nats.plugins")

GROUP: Final = "mqtt_nats.plugins"

LOAD_TIMEOUT: Final = 10.0
"""Time-out of loading or unloading a plugin, in seconds."""


class PluginError(Exception):
    """A plugin cannot be loaded or unloaded; the text is one line with the reason."""


class Plugins:
    """The plugins of one gateway.

    Args:
        options: the tables of the configuration, by the plugin's name. ``load = false`` in one keeps its plugin from
            being loaded at the start.
    """

    def __init__(self, account: Account, options: Mapping[str, Mapping[str, Any]]) -> None:
        self._account = account
        self._options = options
        self._loaded: dict[str, Plugin[Any]] = {}
        self._failed: dict[str, str] = {}
        """Reason, by plugin, why a request to all gateways is not carried out here."""
        self._busy = asyncio.Lock()

    def has(self, name: str) -> bool:
        """Whether a plugin is loaded."""
        return name in self._loaded

    async def start(self, wanted: Mapping[str, bool]) -> None:
        """Load the plugins of the configuration, unless requests to all gateways override it.

        A request that cannot be carried out is logged and passed over: whoever may write requests could otherwise keep
        every gateway from starting.

        Args:
            wanted: requests to all gateways by plugin: True = load it, False = do not load it.

        Raises:
            StartupError: a plugin of the configuration cannot be loaded.
        """
        for name, options in self._options.items():
            given = options.get("load", True)
            if not isinstance(given, bool):
                raise StartupError(f"plugins.{name}.load: expected true or false")
            if given and wanted.get(name, True):
                try:
                    await self.load(name)
                except PluginError as error:
                    raise StartupError(str(error)) from None
        for name, loaded in wanted.items():
            await self.fulfil(name, loaded)

    async def fulfil(self, name: str, loaded: bool) -> None:
        """Load or unload a plugin as all gateways are requested to; log and keep the reason where that fails."""
        self._failed.pop(name, None)
        if loaded == self.has(name):
            return
        try:
            await (self.load if loaded else self.unload)(name)
        except PluginError as error:
            self._failed[name] = str(error)
            log.error("%s; `mqtt-nats ctl plugins unload` withdraws the request to all gateways", error)

    async def unload_all(self) -> None:
        """Unload all plugins in reverse order of loading."""
        for name in reversed(list(self._loaded)):
            try:
                await self.unload(name)
            except PluginError as error:
                log.error("%s", error)

    async def load(self, name: str) -> None:
        """Load a plugin; after a failure its hooks and tasks are removed.

        Raises:
            PluginError: the plugin cannot be loaded.
        """
        async with self._busy:
            if name in self._loaded:
                raise PluginError(f"plugin {name!r} is loaded already")
            kind, options = checked(name, self._options.get(name, {}))
            host = Host(self._account, name)
            try:
                plugin: Plugin[Any] = kind(options, host)
                async with asyncio.timeout(LOAD_TIMEOUT):
                    await plugin.load()
            except BaseException as error:
                host.withdraw()
                if isinstance(error, TimeoutError):
                    raise PluginError(f"plugin {name!r} does not load within {LOAD_TIMEOUT:g} seconds") from None
                if isinstance(error, ValueError):  # an error of the options, whose text may be shown
                    raise PluginError(f"plugin {name!r}: {' '.join(str(error).split())}") from None
                if isinstance(error, Exception) or (isinstance(error, asyncio.CancelledError) and not ends_task(error)):
                    raise PluginError(f"plugin {name!r} cannot be loaded: {describe(error)}") from None
                raise
            self._loaded[name] = plugin
            self._failed.pop(name, None)
            log.info("plugin %r is loaded", name)

    async def unload(self, name: str) -> None:
        """Unload a plugin; its hooks do not run any more afterwards, also when this raises.

        Raises:
            PluginError: the plugin is not loaded, or has failed in `unload`.
        """
        async with self._busy:
            plugin = self._loaded.pop(name, None)
            withdrawn = self._failed.pop(name, None)
            if plugin is None and withdrawn is not None:
                return
            if plugin is None:
                raise PluginError(f"plugin {name!r} is not loaded")
            plugin.gateway.withdraw()
            log.info("plugin %r is unloaded", name)
            try:
                async with asyncio.timeout(LOAD_TIMEOUT):
                    await plugin.unload()
            except TimeoutError:
                raise PluginError(
                    f"plugin {name!r} is unloaded, but did not end within {LOAD_TIMEOUT:g} seconds"
                ) from None
            except (Exception, asyncio.CancelledError) as error:  # `unload` may await a task that was just cancelled
                if ends_task(error):
                    raise
                raise PluginError(f"plugin {name!r} is unloaded, but failed: {describe(error)}") from None

    def state(self) -> list[dict[str, Any]]:
        """Return every plugin that is installed, loaded or requested of all gateways.

        With each: whether it is loaded, why it could not be, and calls and failures of its hooks.
        """
        accounts = self._account.services.hooks.accounts()
        found = {one.name: one for one in _installed()}
        return [
            {
                "name": name,
                "loaded": name in self._loaded,
                "error": self._failed.get(name, ""),
                "package": _package(found.get(name)),
                "hooks": [
                    {
                        "point": one.point,
                        "callback": one.callback,
                        "priority": one.priority,
                        "calls": one.calls,
                        "failures": one.failures,
                    }
                    for one in accounts
                    if one.owner == name and name in self._loaded
                ],
            }
            for name in sorted({*found, *self._loaded, *self._failed})
        ]

    async def asked(self, payload: bytes) -> dict[str, Any] | None:
        """Carry out a request of ``mqtt-nats ctl plugins`` and return the answer; None: not for this gateway."""
        try:
            question = orjson.loads(payload)
            action, name, gateway = question["do"], question.get("name", ""), question.get("gateway", "")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return None
        if gateway and gateway != self._account.services.identity.id:
            return None
        error = ""
        try:
            if action == "load":
                await self.load(str(name))
            elif action == "unload":
                await self.unload(str(name))
        except PluginError as failure:
            error = str(failure)
            log.warning("%s", error)
        return {"error": error, "plugins": self.state()}


def checked(name: str, table: Mapping[str, Any]) -> tuple[type[Plugin[Any]], Any]:
    """Return the class of a plugin, and its options from its table of the configuration.

    Raises:
        PluginError: no such plugin is installed, or its options are wrong.
    """
    kind = _kind(name)
    given = {key: value for key, value in table.items() if key != "load"}
    try:
        return kind, kind.options_type.model_validate(given)
    except ValidationError as error:
        raise PluginError(f"plugin {name!r}: {_wrong(error, kind.options_type)}") from None


def _installed() -> list[EntryPoint]:
    importlib.invalidate_caches()  # finds plugins that were installed since the start
    found = {(one.name, one.value): one for one in entry_points(group=GROUP)}
    return list(found.values())


def _package(one: EntryPoint | None) -> str:
    return f"{one.dist.name} {one.dist.version}" if one is not None and one.dist is not None else ""


def _kind(name: str) -> type[Plugin[Any]]:
    """Return the class of a plugin.

    Raises:
        PluginError: there is no such class.
    """
    found = [one for one in _installed() if one.name == name]
    if not found:
        raise PluginError(f"no plugin {name!r} is installed: a package with an entry point in {GROUP} has it")
    if len(found) > 1:
        raise PluginError(f"several packages have a plugin {name!r}: {', '.join(sorted(map(_package, found)))}")
    try:
        kind = found[0].load()
    except Exception as error:
        raise PluginError(f"plugin {name!r} cannot be imported: {describe(error)}") from None
    if not (isinstance(kind, type) and issubclass(kind, Plugin)):
        raise PluginError(f"plugin {name!r} is no subclass of mqtt_nats.plugins.Plugin")
    return kind


def _wrong(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the errors of options in one line, without the values."""
    problems = []
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(str(part) for part in detail["loc"])
        message = worded(detail)
        if detail["type"] == "extra_forbidden":
            message = unknown_key(model, detail["loc"])
        problems.append(f"{where}: {message}" if where else message)
    return "; ".join(problems)
