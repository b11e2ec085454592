# SPDX-License-Identifier: Apache-2.0
"""What the process has of file descriptors and memory: for the standard streams, and for each connection."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mqtt_nats.base.errors import StartupError

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings

log = logging.getLogger("mqtt_nats.gateway")

BESIDES: Final = 200
"""Descriptors for all that is no connection of a client: NATS, listeners, files, administrators."""


CONNECTION_BYTES: Final = 32 * 1024
"""Memory of a connection: docs/sizing.md has 21 KB for a durable session that is connected, TLS takes some more."""

CONNECTS_PER_S_MIN: Final = 100.0
CONNECTS_PER_S_MAX: Final = 2000.0
"""Connections per second that are let in, however few or many there may be: a gateway does not answer more CONNECTs."""

OPEN_FILES: Final = (1 << 20, 10_240)
"""Limits of open files that are tried, where the hard limit allows them."""

CGROUP_FILES: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux has the memory limit of a container, in bytes; `max`: there is none."""


def raise_open_files() -> None:
    """Raise the soft limit of open files as far as the hard one allows: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in OPEN_FILES:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= most:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):
            continue  # the system has a limit of its own
        return


def memory_bytes() -> int:
    """Memory that the process may use: that of the machine, or of its container."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):
            found.append(int(file.read_text(encoding="ascii")))
    return min(found)


def within_process(settings: Settings) -> Settings:
    """The settings with limits of connections that follow from open files, and from memory where none are given.

    A connection for which there is no descriptor would be closed without a word, and administrators would not get in.
    """
    changes: dict[str, Any] = {}
    most = settings.max_connections
    if most is None:
        most = memory_bytes() // 2 // CONNECTION_BYTES // settings.workers
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY:
        most = min(most, allowed - BESIDES)
    most = max(1, most)
    if most != settings.max_connections:
        changes["max_connections"] = most
    if settings.connect_rate is None:
        changes["connect_rate"] = min(CONNECTS_PER_S_MAX, max(CONNECTS_PER_S_MIN, most / settings.connect_timeout))
    return settings.model_copy(update=changes) if changes else settings


def warn_of_few(settings: Settings) -> None:
    """Say so when `max_connections` needs more open files than there may be: fewer clients are let in."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if settings.max_connections is None or allowed == resource.RLIM_INFINITY:
        return
    needed = settings.max_connections + BESIDES
    if needed > allowed:
        log.warning(
            "max_connections is %d, for which %d open files may be needed, but the limit is %d: %d clients are let in. "
            "Raise the limit (LimitNOFILE of systemd, ulimit -n), or lower max_connections",
            settings.max_connections,
            needed,
            allowed,
            max(1, allowed - BESIDES),
        )


def complete() -> None:
    """Open those of the standard ones that are closed: what takes their place is mistaken for them, as by uvloop."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def say(text: str, *, until_left: bool = True) -> None:
    """Print lines.

    Args:
        until_left: whoever reads may leave, as `head` does; click ends the command then, and says nothing.

    Raises:
        StartupError: they cannot be written.
    """
    try:
        click.echo(text)
    except OSError as error:
        if until_left and isinstance(error, BrokenPipeError):
            raise
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)  # what is left for it would be tried again at the end
        os.close(nothing)
        raise StartupError(f"standard output cannot be written: {error.strerror}") from None
