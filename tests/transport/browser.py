# SPDX-License-Identifier: Apache-2.0
"""A real browser without a screen, and MQTT.js for its pages."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

MQTT_JS = "mqtt@5"

DOWNLOAD = 120.0
"""Seconds for what has some megabytes."""


def find_chromium() -> str:
    """Debian's Chromium, or another one; without it, or playwright to drive it, the test is skipped."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed", exc_type=ImportError)
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no `chromium` is installed (Debian: apt-get install chromium)")


def find_mqtt_js(directory: Path) -> Path:
    """MQTT.js as browsers take it: from the user's cache, else from the npm registry, else the test is skipped."""
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mqtt-nats-tests" / "mqtt.min.js"
    if cached.exists():
        return cached
    if shutil.which("npm") is None:
        pytest.skip("`npm`, which fetches MQTT.js, is not installed")
    try:
        done = subprocess.run(
            ["npm", "pack", "--silent", MQTT_JS],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"the npm registry does not give {MQTT_JS} in {DOWNLOAD:.0f} s")
    if done.returncode:
        pytest.skip(f"the npm registry does not give {MQTT_JS}: {done.stderr.strip()[-200:]}")
    with tarfile.open(directory / done.stdout.split()[-1]) as archive:
        member = archive.extractfile("package/dist/mqtt.min.js")
        assert member is not None
        script = directory / "mqtt.min.js"
        script.write_bytes(member.read())
    cached.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(script, cached)
    return cached
