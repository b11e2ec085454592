# SPDX-License-Identifier: Apache-2.0
"""Make the pictures of the dashboard in README and docs: ``python -m scripts.screenshot``.

A gateway with an embedded nats-server gets clients and messages, and Chromium without a screen shows its dashboard.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
IMAGES: Final = ROOT / "docs" / "images"
PICTURES: Final = {"overview": IMAGES / "dashboard.png", "sessions": IMAGES / "sessions.png"}
"""Files by view."""
SIZE: Final = {"width": 1280, "height": 800}
RATES: Final = (
    (400, 1),
    (650, 1),
    (500, 0),
    (900, 1),
    (700, 2),
    (820, 1),
    (600, 1),
    (950, 0),
    (760, 1),
    (840, 1),
)
"""Messages per second, and QoS, of the runs before the picture is taken: the charts show five minutes at first."""

RUN_S: Final = 27

COMMAND: Final = [sys.executable, "-m", "mqtt_nats"]
GENERATOR: Final = [sys.executable, "-m", "benchmarks.generator"]
CLIENTS: Final = tuple(f"lamp-{number}" for number in range(1, 13))
"""Client identifiers of subscribers with sessions that stay connected."""


def started(log: Path, pattern: str) -> str:
    """Return the first group of ``pattern`` in a log, once it is there. RuntimeError after 30 seconds."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if found := re.search(pattern, log.read_text(encoding="utf-8"), re.MULTILINE):
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"no {pattern} in\n{log.read_text(encoding='utf-8')}")


def take(url: str, port: str) -> None:
    """Show the dashboard while messages are published, and keep what is seen."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        page.goto(url)
        for rate, qos in RATES:
            load = ["--publishers", "6", "--subscribers", "6", "--qos", str(qos), "--rate", str(rate)]
            run = [*GENERATOR, f"127.0.0.1:{port}", *load, "--seconds", str(RUN_S), "--json"]
            subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
        IMAGES.mkdir(parents=True, exist_ok=True)
        for view, picture in PICTURES.items():
            page.evaluate(f"location.hash = '#/{view}'")
            page.wait_for_selector(f"section#{view}:not([hidden]) :is(path, td)")
            page.screenshot(path=picture)
        browser.close()


def main() -> int:
    """Start everything, take the pictures, and end everything."""
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        data = ["--embedded", "--embedded-port", "0", "--data", f"{directory}/data"]
        listen = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        try:
            with log.open("wb") as output:
                running.append(subprocess.Popen([*COMMAND, "serve", *data, *listen], stdout=output, stderr=output))
            port, url = started(log, r"\bMQTT +127\.0\.0\.1:(\d+)"), started(log, r"\bADMIN +(\S+)")
            for name in CLIENTS:
                session = ["-i", name, "-c", "-q", "1", "-t", f"home/{name}/state"]
                running.append(subprocess.Popen([*COMMAND, "sub", "-p", port, *session]))
                subprocess.run(
                    [*COMMAND, "pub", "-p", port, "-t", f"home/{name}/level", "-q", "1", "-r", "-m", "7"], check=True
                )
            take(url, port)
        finally:
            for process in reversed(running):
                process.terminate()
                process.wait(30)
    for picture in PICTURES.values():
        print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
