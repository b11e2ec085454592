# SPDX-License-Identifier: Apache-2.0
"""What the process has of file descriptors: the standard ones, and one for each connection."""

from __future__ import annotations

import logging
import os
import resource
import sys
from typing import TYPE_CHECKING, Final

import click

from mqtt_nats.base.errors import StartupError

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings

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
