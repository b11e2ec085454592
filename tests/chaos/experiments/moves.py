# SPDX-License-Identifier: Apache-2.0
"""R26: R1 to R4 while sessions move between consumers and records all the time."""

from __future__ import annotations

from tests.chaos.conduct import conduct
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.experiments import leaders, loss

ALL = {one.name: one for one in (*loss.EXPERIMENTS, *leaders.EXPERIMENTS) if one.name in ("R1", "R2", "R3", "R4")}
SHORT = ("R2", "R4")


async def run(setting: Setting) -> Result:
    """Run each; each is a row of its own in the report."""
    result = Result()
    for name in ALL if setting.long else SHORT:
        directory = setting.fresh(name)
        one = await conduct(ALL[name], directory, long=setting.long, seed=setting.seed, positions="auto")
        result.violations += [f"{name}: {line}" for line in one.violations]
        result.peers[f"{name} with moves"] = one
        result.peers |= {f"{name} with moves, {peer}": found for peer, found in one.peers.items()}
        for figure in ("moved_to_records", "moved_to_consumers"):
            result.figures[figure] = int(result.figures.get(figure, 0)) + int(one.figures[figure])
    return result


EXPERIMENTS = [
    Experiment(
        "R26",
        "R1 to R4 while sessions move between consumers and records (`session_positions = auto`)",
        "as R1 to R4; sessions have moved in both directions",
        run,
    )
]
