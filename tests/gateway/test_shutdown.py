# SPDX-License-Identifier: Apache-2.0
"""A process ends although something in it does not."""

import subprocess
import sys

import pytest

from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.shutdown import run_to_end

DEAF = """
import asyncio, logging
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.shutdown import run_to_end

async def deaf():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def work(settings):
    task = asyncio.create_task(deaf(), name="the deaf one")
    await asyncio.sleep(0)
    print("done", flush=True)

logging.basicConfig()
run_to_end(work, Settings(), 0.5)
"""


@pytest.mark.processes
def test_a_task_that_does_not_end_is_named_and_left() -> None:
    done = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == "done\n"
    assert "stops without waiting for the deaf one (" in done.stderr


def test_what_ends_by_itself_is_left_alone() -> None:
    async def work(settings: Settings) -> int:
        return settings.workers

    async def fails(settings: Settings) -> None:
        raise ValueError("no")

    assert run_to_end(work, Settings()) == 1
    with pytest.raises(ValueError, match="no"):
        run_to_end(fails, Settings())
