# SPDX-License-Identifier: Apache-2.0
"""Durable sessions whose clients are absent: clients connect, subscribe and leave."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import Final

from benchmarks import peers
from benchmarks.generator.clients import Client, Loop, connect_all
from benchmarks.job import CROWD_TIMEOUT

AT_ONCE: Final = 50
"""Clients that connect at the same time."""

MANY: Final = ("--max-sessions", "10000000", "--max-durable-consumers", "10000000")
"""Arguments of gateways without which one address has 10,000 sessions at most."""

UNLIMITED: Final = (*MANY, "--consumer-rate", "1000000", "--connect-rate", "1000000")
"""Arguments without which one address also connects and subscribes less often."""


def make_absent(ports: Sequence[int], clients: Iterable[Client], *, at_once: int = AT_ONCE) -> float:
    """Let clients begin their sessions and leave, so many at a time, at each port in turn; return the seconds.

    Clients are taken from `clients` immediately before they connect.
    """
    begun, turns, coming = time.monotonic(), cycle(ports), iter(clients)
    while some := list(islice(coming, at_once)):
        loop = Loop()
        try:
            connect_all(loop, (peers.HOST, next(turns)), some, timeout=CROWD_TIMEOUT, at_once=at_once)
        finally:
            loop.close()
    return time.monotonic() - begun
