# SPDX-License-Identifier: Apache-2.0
"""Resource usage of this process, under Prometheus's names (without ``process_``)."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc/self")
_STARTED_AT: Final = time.time()


def process_usage() -> dict[str, float]:
    """Return CPU time, memory, open files and start time (seconds, bytes, Unix time). May block for a while.

    Without ``/proc`` some values are missing, and ``start_time_seconds`` is the time at which this module was loaded.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "cpu_seconds_total": usage.ru_utime + usage.ru_stime,
        "start_time_seconds": _STARTED_AT,
    }
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY:
        found["max_fds"] = float(limit)
    try:
        # The fields behind the name, which may contain any character and ends with the last parenthesis (proc(5)).
        fields = (_PROC / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        booted = next(
            float(line.split()[1])
            for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()
            if line.startswith("btime ")
        )
        found |= {
            "start_time_seconds": booted + float(fields[19]) / os.sysconf("SC_CLK_TCK"),
            "virtual_memory_bytes": float(fields[20]),
            "resident_memory_bytes": float(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
            "open_fds": float(len(os.listdir(_PROC / "fd"))),
        }
    except (OSError, ValueError, IndexError, StopIteration):
        pass
    return found
