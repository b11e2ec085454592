# SPDX-License-Identifier: Apache-2.0
"""The short version of every experiment: all that is promised is kept."""

from pathlib import Path

import pytest

from tests.chaos.conduct import conduct
from tests.chaos.experiments import all_experiments
from tests.chaos.report import text_of

pytestmark = pytest.mark.processes

EXPERIMENTS = all_experiments()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
async def test_experiment(name: str, tmp_path: Path) -> None:
    result = await conduct(EXPERIMENTS[name], tmp_path)
    print(text_of(result.figures))
    assert not result.violations, "\n".join(result.violations)
    assert result.figures, "an experiment without figures has done nothing"
