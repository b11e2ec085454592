# SPDX-License-Identifier: Apache-2.0
"""Kills servers in turn, and starts them again, while a workload goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from tests.chaos.history import History


class Victim(Protocol):
    """A server that keeps its port, and its store where it has one."""

    def kill(self) -> None:
        """End it at once (SIGKILL)."""

    def start(self) -> None:
        """Start it, and wait until it accepts clients."""


async def kill_in_turn(
    victims: Sequence[Victim],
    history: History,
    chance: random.Random,
    *,
    kills: int,
    pause: tuple[float, float],
    ended: Callable[[], bool] = lambda: False,
) -> int:
    """Kill one after the other, each ``pause`` seconds (at least, at most) after the last is up again.

    Returns:
        How many were killed: ``kills``, or more when ``ended`` is not true by then, as it has to be at the end.
    """
    done = 0
    while done < kills or not ended():
        await asyncio.sleep(chance.uniform(*pause))
        if done >= kills and ended():
            break
        number = done % len(victims)
        await asyncio.to_thread(victims[number].kill)
        history.note("killed", victim=number)
        await asyncio.to_thread(victims[number].start)
        history.note("started", victim=number)
        done += 1
    return done
