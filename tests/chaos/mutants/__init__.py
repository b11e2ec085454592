# SPDX-License-Identifier: Apache-2.0
"""Gateways that are broken on purpose, each in one way that the checker of histories has to notice.

``python -m tests.chaos.mutants.<name> serve ...`` takes the arguments of ``mqtt-nats``.

They replace functions, which compiled callers would not notice: so they run from the sources on both builds.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from types import ModuleType

PACKAGES = ("mqtt_nats", "mqtt_streams")


class Sources:
    """Finds the modules of the gateway, in packages that are known already, without what was compiled."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The source of a module below one of our packages."""
        if path is None or name.split(".")[0] not in PACKAGES:
            return None
        for directory in path:
            spec = FileFinder(directory, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(name)
            if spec is not None:
                return spec
        return None


sys.meta_path.insert(0, Sources)
