# SPDX-License-Identifier: Apache-2.0
"""Runs an experiment, whoever asks: a test or the command line."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.chaos.experiment import Experiment, Result, Setting, running
from tests.chaos.moving import Moves


async def conduct(
    experiment: Experiment, directory: Path, *, long: bool = False, seed: int = 1, positions: str = ""
) -> Result:
    """Run an experiment in an empty directory. An error that a gateway did not handle is a violation, too.

    With ``positions = "auto"`` sessions have to move in both directions.
    """
    with running(directory, long=long, seed=seed, positions=positions) as setting:
        result = await (_with_moves(experiment, setting) if positions == "auto" else experiment.run(setting))
        for number, gateway in enumerate(setting.gateways):
            log = gateway.process.log
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            if "Traceback" in text:
                start = text.index("Traceback")
                result.violations.append(f"gateway {number} has not handled an error: {text[start : start + 2000]}")
    return result


async def _with_moves(experiment: Experiment, setting: Setting) -> Result:
    moves = setting.moves = Moves(setting.urls)
    moving = asyncio.create_task(moves.run())
    try:
        result = await experiment.run(setting)
    finally:
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
    result.figures |= moves.figures
    result.violations += moves.violations
    return result
