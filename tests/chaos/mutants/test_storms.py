# SPDX-License-Identifier: Apache-2.0
"""The experiments about ownership notice gateways that do not care for it. Sound ones are in `test_experiments`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.experiment import Setting, running
from tests.chaos.experiments import takeover, zombie

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    with running(tmp_path) as setting:
        yield setting


async def test_two_owners_are_noticed(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "SETTLE", 3.0)
    monkeypatch.setattr(takeover, "ROUNDS", 6)
    monkeypatch.setattr(takeover, "FINISH", 3.0)
    result = await takeover.run(setting, "tests.chaos.mutants.no_epoch_check")
    assert [line for line in result.violations if "still connected" in line], result


async def test_a_zombie_is_noticed(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """In most rounds: it is up to the kernel what a gateway reads first when it goes on."""
    monkeypatch.setattr(zombie, "WAIT", 20.0)
    violations: list[str] = []
    for _ in range(3):
        if not violations:
            result = await zombie.run(setting, "tests.chaos.mutants.no_standstill_check")
            violations = [line for line in result.violations if "had moved or ended were stored" in line]
    assert violations, result
