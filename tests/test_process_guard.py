# SPDX-License-Identifier: Apache-2.0
"""What `make test-unit` leaves out, and that a test which starts a process fails there."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import STARTERS
from tests.harness.nats import ROOT
from tests.harness.process_guard import ProcessGuard

pytestmark = pytest.mark.processes

GUARD = ProcessGuard()
STARTS = """
import subprocess, sys
def test_one(): subprocess.run([sys.executable, "-c", ""], check=True)
"""


def fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def by_uvloop() -> None:
    import uvloop

    async def start() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
        await process.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(start())


def by_multiprocessing() -> None:
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()


WAYS: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "fork": fork,
    "system": lambda: os.system("true"),
    "posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "uvloop": by_uvloop,
    "multiprocessing": by_multiprocessing,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_start_a_process_fails(way: str) -> None:
    with pytest.raises(pytest.fail.Exception), GUARD.watch():
        WAYS[way]()


def test_nothing_is_said_of_what_starts_no_process() -> None:
    with GUARD.watch():
        pass
    assert subprocess.run([sys.executable, "-c", ""], check=True).returncode == 0


def test_an_error_of_the_test_itself_stays() -> None:
    with pytest.raises(ZeroDivisionError), GUARD.watch():
        print(1 // 0)


@pytest.mark.long
@pytest.mark.parametrize(("arguments", "outcome"), [((), "1 passed"), (("--unit",), "1 failed")])
def test_the_option(arguments: tuple[str, ...], outcome: str, tmp_path: Path) -> None:
    """A test that starts a process and has no mark."""
    path = tmp_path / "test_made_up.py"
    path.write_text(STARTS, encoding="utf-8")
    options = ("-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"))
    command = [sys.executable, "-m", "pytest", *options, *arguments, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert outcome in done.stdout, done.stdout


def test_tests_that_need_a_server_are_left_out(request: pytest.FixtureRequest) -> None:
    """By the fixtures that they need, whoever else needs them."""
    marked = [item for item in request.session.items if STARTERS.intersection(getattr(item, "fixturenames", ()))]
    assert all(any(item.iter_markers("processes")) for item in marked)
