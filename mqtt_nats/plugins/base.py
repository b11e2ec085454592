# SPDX-License-Identifier: Apache-2.0
"""What a plugin is."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from mqtt_nats.plugins.host import Host


class Options(BaseModel):
    """Base of the options of a plugin: what is in its table of the configuration, and nothing else."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class NoOptions(Options):
    """For a plugin that has none."""


O_ = TypeVar("O_", bound=Options)


class Plugin(Generic[O_]):
    """One loaded plugin; subclasses name the model of their options, and add hooks in :meth:`load`.

    Args:
        options: valid ones.
        gateway: what the plugin can do; all of it ends with the plugin.
    """

    options_type: ClassVar[type[Any]] = NoOptions

    def __init__(self, options: O_, gateway: Host) -> None:
        self.options = options
        self.gateway = gateway

    async def load(self) -> None:
        """Begin. Whatever is raised here leaves nothing of the plugin behind."""

    async def unload(self) -> None:
        """End what the gateway cannot know of: its hooks, and the tasks that it has spawned, have ended already."""
