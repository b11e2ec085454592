# SPDX-License-Identifier: Apache-2.0
"""Which of several gateways that were started together this process is."""

from __future__ import annotations

import re
import secrets
import socket
from contextvars import ContextVar
from typing import Final, NamedTuple

NAME_LENGTH_MAX: Final = 60
"""Characters of a host's name that become the name of its gateway."""


class WorkerIdentity(NamedTuple):
    """One worker among its siblings."""

    group: str
    """The same for all that one supervisor has started; nobody else has it."""
    number: int
    """From 1 on."""
    workers: int
    """How many there are."""


PLACE: Final[ContextVar[WorkerIdentity | None]] = ContextVar("place", default=None)
"""Set once, before the gateway of a worker is made."""


def default_name() -> str:
    """The name of a gateway that was given none: its host's, with the number of the worker where there are several."""
    name = re.sub(r"[^\w.-]", "-", socket.gethostname(), flags=re.ASCII)[:NAME_LENGTH_MAX] or "gateway"
    place = PLACE.get()
    return name if place is None or place.workers == 1 else f"{name}-{place.number}"


def own_place() -> WorkerIdentity:
    """The place of a gateway that is made now; one without siblings is a group of its own."""
    return PLACE.get() or WorkerIdentity(secrets.token_hex(8), 1, 1)
