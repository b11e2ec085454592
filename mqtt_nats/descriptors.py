# SPDX-License-Identifier: Apache-2.0
"""What the process has of file descriptors: each connection is one."""

from __future__ import annotations

import logging
import resource
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mqtt_nats.config import Settings

log = logging.getLogger("mqtt_nats.gateway")

BESIDES: Final = 200
"""Descriptors for all that is no connection of a client: NATS, listeners, files, administrators."""


def warn_of_few(settings: Settings) -> None:
    """Say so when there are fewer than `max_connections` may need: nothing else tells why nobody more gets in."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if settings.max_connections is None or allowed == resource.RLIM_INFINITY:
        return
    needed = settings.max_connections + BESIDES
    if needed > allowed:
        log.warning(
            "max_connections is %d, for which %d open files may be needed, but the limit is %d: raise it "
            "(LimitNOFILE of systemd, ulimit -n), or lower max_connections",
            settings.max_connections,
            needed,
            allowed,
        )
