# SPDX-License-Identifier: Apache-2.0
"""One scenario with one broker, from its start to its end."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks import peers
from benchmarks.job import Job
from benchmarks.report import BASE

JOB_TIMEOUT: Final = 600.0
"""Seconds; what the load generator waits for has limits of its own."""

BESIDE: Final = f"{BASE} 3.1.1"
"""With 5.0 clients, the column of the gateway with 3.1.1 clients."""

_FEWER: Final = {
    (peer, kind): count
    for peer in ("amqtt", "aedes", "emqx")
    for kind, count in (("connections", 500), ("drain", 2000), ("retained", 2000))
} | {("nats", "retained"): 4000}
"""Fewer connections and stored messages for brokers that would take minutes, or never send all; the results are per
second. Of 32,000 retained messages nats-server's listener sends 15,000 to 20,000, and then nothing more."""


def peer_of(column: str) -> str:
    """The peer whose figures are in a column."""
    return BASE if column == BESIDE else column


def fewer(peer: str, kind: str) -> int:
    """How many connections or messages a broker gets in place of the scenario's; 0: as many as it says."""
    return _FEWER.get((peer, kind), 0)


def generate(job: Job) -> dict[str, object]:
    """Run the load generator in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.load"],
            input=json.dumps(asdict(job)),
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent.parent,
            timeout=JOB_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"load generator not done after {JOB_TIMEOUT:.0f} s"}
    if done.returncode:
        return {"error": "load generator failed: " + (done.stderr.strip().splitlines() or ["no output"])[-1]}
    result: dict[str, object] = json.loads(done.stdout)
    return result


def machine(columns: Sequence[str], command: str = peers.OURS_COMMAND) -> str:
    """What the figures were measured on, and with which versions; ``command`` starts ours."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    versions = "; ".join(f"{each}: {found}" for each in columns if (found := peers.version(peer_of(each), command)))
    return (
        f"{os.cpu_count()} CPUs ({model}), Linux {platform.release()}, Python {platform.python_version()}; {versions}; "
        f"{time.strftime('%Y-%m-%d')}"
    )


def unusable(peer: str, command: str, *, v5: bool = False) -> str | None:
    """Why a peer cannot be measured: it is not installed, does not start or does not speak 5.0."""
    try:
        with peers.running(peer, command) as broker:
            return "it does not speak MQTT 5.0" if v5 and not peers.greets(broker.port, 5) else None
    except peers.PeerError as error:
        return str(error)
