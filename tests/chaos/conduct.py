# SPDX-License-Identifier: Apache-2.0
"""Runs an experiment, whoever asks: a test or the command line."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.experiment import Experiment, Result, running


async def conduct(experiment: Experiment, directory: Path, *, long: bool = False, seed: int = 1) -> Result:
    """Run an experiment in an empty directory. An error that a gateway did not handle is a violation, too."""
    with running(directory, long=long, seed=seed) as setting:
        result = await experiment.run(setting)
        for number, gateway in enumerate(setting.gateways):
            log = gateway.process.log
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            if "Traceback" in text:
                start = text.index("Traceback")
                result.violations.append(f"gateway {number} has not handled an error: {text[start : start + 2000]}")
    return result
