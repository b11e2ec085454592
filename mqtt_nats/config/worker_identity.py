# SPDX-License-Identifier: Apache-2.0
"""Identity of a worker among the gateway processes of one supervisor, and the default name of a gateway."""

from __future__ import annotations

import re
import secrets
import socket
from contextvars import ContextVar
from typing import Final, NamedTuple

NAME_LENGTH_MAX: Final = 60
"""Most characters of a host name in the default name of a gateway."""


class WorkerIdentity(NamedTuple):
    """Identity of a worker in its group."""

    group: str
    """Random id of the group: all workers of one supervisor have the same."""
    number: int
    """Number of the worker, from 1."""
    workers: int
    """Number of workers in the group."""


PLACE: Final[ContextVar[WorkerIdentity | None]] = ContextVar("place", default=None)
"""Identity of this worker, set once before its gateway is made; None: a gateway without a supervisor."""


def default_name() -> str:
    """Return the name of a gateway without a configured one: the host name, with the worker's number if several run."""
    name = re.sub(r"[^\w.-]", "-", socket.gethostname(), flags=re.ASCII)[:NAME_LENGTH_MAX] or "gateway"
    place = PLACE.get()
    return name if place is None or place.workers == 1 else f"{name}-{place.number}"


def own_place() -> WorkerIdentity:
    """Return the identity of the gateway that is being made; one without a supervisor is a group of its own."""
    return PLACE.get() or WorkerIdentity(secrets.token_hex(8), 1, 1)
