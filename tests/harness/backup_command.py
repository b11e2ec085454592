# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats backup`` and ``mqtt-nats restore`` as operators run them."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from pathlib import Path

from tests.harness.nats import ROOT

WAIT = 120.0
"""Seconds for a command."""


async def begin(name: str, url: str, directory: Path, *arguments: str) -> Process:
    """Start a command."""
    command = [sys.executable, "-m", "mqtt_nats", name, "--nats", url, *arguments, str(directory)]
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=STDOUT)


async def run(name: str, url: str, directory: Path, *arguments: str) -> tuple[int, str]:
    """Run a command to its end; its exit status and output."""
    process = await begin(name, url, directory, *arguments)
    async with asyncio.timeout(WAIT):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def succeed(name: str, url: str, directory: Path, *arguments: str) -> str:
    """Run a command that must succeed; its output."""
    status, output = await run(name, url, directory, *arguments)
    assert status == 0, output
    return output


async def fail(name: str, url: str, directory: Path, *arguments: str) -> str:
    """Run a command that must fail with one line; the line."""
    status, output = await run(name, url, directory, *arguments)
    assert status == 1, output
    line = output.splitlines()[-1]
    assert line.startswith("mqtt-nats: "), output
    return line
