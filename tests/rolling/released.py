# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.rolling.released serve ...``: the gateway whose source is in the directory ``RELEASED``."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

from tests.harness.nats import ROOT

BEFORE = "1beb5b768cbc94c33cb6bb5d60a7c877e5728c3f"
"""The last commit before records were read with an eye on other versions."""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """The last release, or else `BEFORE`; empty: the history that is here, if any, does not have it."""
    if not (ROOT / ".git").exists():
        return ""
    tag = _git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^")
    return tag or _git("rev-parse", "--verify", "--quiet", BEFORE + "^{commit}")


def unpack(name: str, directory: Path) -> None:
    """Write the source of a commit to a directory."""
    directory.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "archive", name, "mqtt_nats", "streams", "nats-server.conf"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    )
    subprocess.run(["tar", "-x", "-C", str(directory)], input=archive.stdout, check=True, timeout=60)


if __name__ == "__main__":
    source = Path(os.environ["RELEASED"])
    sys.path[:0] = [str(source), str(source / "streams")]
    sys.argv[0] = "mqtt-nats"
    runpy.run_module("mqtt_nats", run_name="__main__", alter_sys=True)
