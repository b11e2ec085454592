# SPDX-License-Identifier: Apache-2.0
"""Predecessor: the gateway that had this gateway's name before, and whether its process is gone.

The registration of a gateway names its process. A gateway that starts under the same name on the same machine finds
out by this, without a wait for the lapse of the lease, that the former process is gone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

PROCESS: Final = "process"
"""Key of a registration: the process of the gateway, as :func:`own_process` tells."""

NAME: Final = "name"
"""Key of a registration: the name of the gateway."""


def own_process() -> dict[str, Any]:
    """Return what identifies this process (host, boot, namespace, id, start time) as far as the system tells it."""
    found: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    boot = _text("/proc/sys/kernel/random/boot_id")
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    found |= {"boot": boot, "namespace": namespace, "begun": _begun(os.getpid())}
    return {key: value for key, value in found.items() if value}


def is_gone(process: object, own: Mapping[str, Any]) -> bool | None:
    """Whether the process of a gateway is gone.

    Args:
        process: the process in the registration of that gateway.
        own: :func:`own_process`.

    Returns:
        None where this is unknown: the process ran on another machine, or in another container.
    """
    if not isinstance(process, dict) or "boot" not in process or process.get("host") != own["host"]:
        return None
    if process["boot"] != own.get("boot"):
        return None  # the machine was restarted, or the host is a copy of this one: the lease decides
    pid = process.get("pid")
    if process.get("namespace", 0) != own.get("namespace") or not isinstance(pid, int) or pid <= 0:
        return None
    begun = _begun(pid)
    return begun != process.get("begun") if begun else _is_absent(pid)


def free_name(wanted: str, taken: Collection[str]) -> str:
    """Return the first of the names `wanted`, `wanted-2`, `wanted-3` and so on that is not taken."""
    number = 1
    while (name := wanted if number == 1 else f"{wanted}-{number}") in taken:
        number += 1
    return name


def _is_absent(pid: int) -> bool | None:
    """Whether no process has this id; None: a process may have it, but this user may not see it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return None


def _begun(pid: int) -> str:
    """Return the start of a process in ticks since the boot; "" = no such process, or this user may not see it."""
    status = _text(f"/proc/{pid}/stat")
    return status.rpartition(")")[2].split()[19] if status else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
