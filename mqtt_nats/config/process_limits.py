# SPDX-License-Identifier: Apache-2.0
"""File descriptors and memory of the process: standard streams, and limits of connections."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mqtt_nats.base.admission import CONNECT_WAIT_MOST_S
from mqtt_nats.base.errors import StartupError

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings

log = logging.getLogger("mqtt_nats.gateway")

BESIDES: Final = 200
"""File descriptors for everything except clients: NATS, listeners, files, administrators."""


CONNECTION_BYTES: Final = 32 * 1024
"""Memory of a connection: 21 KB for a connected durable session (docs/sizing.md), and more for TLS."""

SUBSCRIPTION_BYTES: Final = 2 * 1024
"""Memory of a subscription: 2 KB for a filter of its own, 3 KB with wildcards, little for one that others have too."""

CONNECTS_PER_S_MIN: Final = 100.0
CONNECTS_PER_S_MAX: Final = 2000.0
"""Bounds of the default connection rate per second; a gateway does not answer more CONNECTs than the upper one."""

OPEN_FILES: Final = (1 << 20, 10_240)
"""Limits of open files that are tried in order, within the hard limit."""

CGROUP_FILES: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files of Linux with the memory limit of a container in bytes; `max`: no limit."""


def raise_open_files() -> None:
    """Raise the soft limit of open files as far as the hard limit allows: each connection needs a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in OPEN_FILES:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= most:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):
            continue  # the system has a lower limit
        return


def memory_bytes() -> int:
    """Return the bytes of memory of the machine or of the container, whichever is less."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):
            found.append(int(file.read_text(encoding="ascii")))
    return min(found)


def within_process(settings: Settings) -> Settings:
    """Return the settings with limits of connections and subscriptions derived from open files and memory if unset.

    Without free descriptors the system closes connections, also of administrators, without an error for the client.
    """
    changes: dict[str, Any] = {}
    most = settings.max_connections
    memory = memory_bytes() // settings.workers
    if most is None:
        most = memory // 2 // CONNECTION_BYTES
    if settings.max_subscriptions_per_gateway is None:
        changes["max_subscriptions_per_gateway"] = max(settings.max_subscriptions, memory // 4 // SUBSCRIPTION_BYTES)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY:
        most = min(most, allowed - BESIDES)
    most = max(1, most)
    if most != settings.max_connections:
        changes["max_connections"] = most
    if settings.connect_rate is None:
        rate = most / (settings.rate_burst + CONNECT_WAIT_MOST_S)
        changes["connect_rate"] = min(CONNECTS_PER_S_MAX, max(CONNECTS_PER_S_MIN, rate))
    return settings.model_copy(update=changes) if changes else settings


def warn_of_few(settings: Settings) -> None:
    """Log a warning when the limit of open files is too low for `max_connections`: fewer clients can connect."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if settings.max_connections is None or allowed == resource.RLIM_INFINITY:
        return
    needed = settings.max_connections + BESIDES
    if needed > allowed:
        log.warning(
            "max_connections is %d and needs up to %d open files, but the limit is %d: at most %d clients can connect. "
            "Raise the limit (LimitNOFILE of systemd, ulimit -n), or lower max_connections",
            settings.max_connections,
            needed,
            allowed,
            max(1, allowed - BESIDES),
        )


def complete() -> None:
    """Open closed standard streams: libraries such as uvloop mistake other files with these descriptors for them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # `open` takes the lowest free number: this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def say(text: str, *, newline: bool = True) -> None:
    """Print lines to standard output, without a line end where ``newline`` is false.

    The reader may close a pipe, as `head` does: click then ends the command.

    Raises:
        StartupError: the lines cannot be written.
    """
    try:
        click.echo(text, nl=newline)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)  # otherwise Python writes the buffered rest again at exit, and fails again
        os.close(nothing)
        raise StartupError(f"standard output cannot be written: {error.strerror}") from None
