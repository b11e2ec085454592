# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory of processes and their children, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def tree(pid: int) -> list[int]:
    """``pid`` and all its living descendants."""
    found, todo = [], [pid]
    while todo:
        current = todo.pop()
        found.append(current)
        try:
            for task in Path(f"/proc/{current}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def cpu_seconds(pid: int) -> float:
    """User and system CPU time of the process tree at ``pid``."""
    return sum(sum(_ticks(each)[:2]) for each in tree(pid)) / _TICK


def cpu_seconds_alone(pid: int) -> float:
    """User and system CPU time of one process."""
    return sum(_ticks(pid)[:2]) / _TICK


def cpu_seconds_below(pid: int) -> float:
    """User and system CPU time of all descendants of ``pid``, those that have ended included."""
    return sum(sum(_ticks(each)) for each in tree(pid)) / _TICK - cpu_seconds_alone(pid)


def _ticks(pid: int) -> list[int]:
    """User and system time of a process, and both of its children that have ended; zeros for none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return [0] * 4
    return list(map(int, stat[stat.rindex(")") + 2 :].split()[11:15]))


def machine_seconds() -> float:
    """CPU time that all CPUs have spent on anything since boot, stolen time included."""
    fields = list(map(int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]))
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / _TICK


def resident_bytes(pid: int) -> int:
    """Resident memory of the process tree at ``pid``."""
    total = 0
    for each in tree(pid):
        try:
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * _PAGE
        except OSError:
            continue
    return total
