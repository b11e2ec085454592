# SPDX-License-Identifier: Apache-2.0
"""Base classes of plugins and their options."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from mqtt_nats.plugins.host import Host


class Options(BaseModel):
    """Base of the options of a plugin, read from its table of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class NoOptions(Options):
    """Options of a plugin without options."""


O_ = TypeVar("O_", bound=Options)


class Plugin(Generic[O_]):
    """One loaded plugin; subclasses set ``options_type``, and add hooks in :meth:`load`.

    Args:
        options: validated options.
        gateway: the gateway's interface for the plugin; everything begun through it ends when the plugin is unloaded.
    """

    options_type: ClassVar[type[Any]] = NoOptions

    def __init__(self, options: O_, gateway: Host) -> None:
        self.options = options
        self.gateway = gateway

    async def load(self) -> None:
        """Begin the plugin's work. After an exception here, hooks and tasks of the plugin are removed."""

    async def unload(self) -> None:
        """Free the plugin's other resources; its hooks are removed and its spawned tasks cancelled before."""
