# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats pub``, ``sub`` and ``request`` as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.harness.nats import ROOT
from tests.harness.process import LoggedProcess

PATIENCE = 30.0


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment, without settings, and with ``more``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MQTT_NATS_")}
    return {**kept, **(more or {})}


def run(
    *arguments: str, given: bytes = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run one command to its end, in the checkout."""
    return subprocess.run(
        [sys.executable, "-m", "mqtt_nats", *arguments],
        cwd=ROOT,
        env=environment(env),
        input=given,
        capture_output=True,
        timeout=PATIENCE * 2,
    )


def printed(*arguments: str, given: bytes = b"") -> str:
    """What a command prints that has to succeed without a word on stderr."""
    done = run(*arguments, given=given)
    assert (done.returncode, done.stderr) == (0, b""), done
    return done.stdout.decode()


def start(log: Path, *arguments: str) -> LoggedProcess:
    """Start a command in the background."""
    process = LoggedProcess(" ".join(arguments), log)
    process.start([sys.executable, "-m", "mqtt_nats", *arguments], environment(), ROOT)
    return process
