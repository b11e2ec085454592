# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.profile``: a flame graph of the gateway under each main scenario, by py-spy.

The page says which functions take the time; what follows from that is written there by hand and stays.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import flame, page, peers
from benchmarks.growth import DOCS
from benchmarks.job import Job
from benchmarks.report import figure
from benchmarks.runner import generate, machine
from benchmarks.scenarios import Scenario, select

MAIN: Final = (
    "pairs10-q0",
    "pairs500-q0",
    "fanout1000-q0",
    "fanin50-q0",
    "pairs10-q1",
    "fanout100-q1",
    "pairs10-q1-durable",
    "fanout100-q1-durable",
    "drain",
    "pairs10-q2",
    "from-nats",
    "retained",
    "connections",
)
RATE: Final = 500
"""Samples per second."""


class ProfileError(Exception):
    """py-spy is not there, or may not look into the gateway."""


def record(scenario: Scenario, seconds: float) -> tuple[dict[str, object], list[str]]:
    """Run a scenario once; its result, and the folded stacks of the gateway meanwhile."""
    program = peers.find("py-spy")
    if program is None:
        raise ProfileError("py-spy is not installed: it comes with the extra `bench`")
    with peers.running("ours", split=scenario.split) as broker, tempfile.TemporaryDirectory() as folder:
        folded = Path(folder) / "folded"
        gateway = next(pid for label, pid in broker.processes.items() if label.startswith("gateway"))
        command = [program, "record", "--pid", str(gateway), "--rate", str(RATE), "--format", "raw", "--function"]
        command += ["--native", "--output", str(folded), "--duration", "unlimited"]
        spy = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            result = generate(
                Job(
                    scenario.name,
                    peers.HOST,
                    broker.port,
                    seconds=seconds,
                    processes=broker.processes,
                    subscribers_port=broker.other_port,
                    nats_port=broker.nats_port,
                )
            )
        finally:
            spy.send_signal(signal.SIGINT)
            try:
                said, _ = spy.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                spy.kill()
                said, _ = spy.communicate()
        if not folded.exists():
            lines = said.decode(errors="replace").strip().splitlines()
            raise ProfileError(f"py-spy: {lines[-1] if lines else 'no output'}")
        return result, folded.read_text().splitlines()


def section(scenario: Scenario, result: dict[str, object], root: flame.Node, about: str) -> str:
    """What the page says of a scenario, apart from what is written by hand."""
    cpu, metrics = result["cpu"], result["metrics"]
    assert isinstance(cpu, dict)
    assert isinstance(metrics, dict)
    unit = "connection" if scenario.kind == "connections" else "message"
    costs = ", ".join(f"{label} {value * 1000:.1f} µs" for label, value in cpu.items())
    busy = ", ".join(f"{who} {float(str(result[f'{who}_busy'])):.0%}" for who in ("broker", "generator", "other"))
    rate = figure(next(iter(metrics.values())))
    return "\n".join(
        [
            f"## {scenario.title}",
            "",
            f"![Flame graph: {scenario.title}](charts/flame-{scenario.name}.svg)",
            "",
            f"{about}. While it was watched: {rate}/s; CPU per {unit}: {costs}; parts of one CPU: {busy}.",
            "",
            "| function | of the gateway's CPU |",
            "|---|---|",
            *(f"| `{name}` | {share:.0%} |" for name, share in flame.longest(root, 6)),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if a run was void."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--only", default=",".join(MAIN), metavar="GLOB[,GLOB]", help="scenarios (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured per scenario (%(default)s)")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where profiles.md and the pictures go")
    options = parser.parse_args(arguments)
    try:
        scenarios = select(options.only.split(","))
    except ValueError as error:
        parser.error(str(error))
    void = False
    for scenario in scenarios:
        try:
            result, lines = record(scenario, options.seconds)
        except (ProfileError, peers.PeerError) as error:
            print(f"{scenario.name}: {error}", file=sys.stderr)
            return 2
        if "error" in result:
            print(f"{scenario.name}: VOID: {result['error']}", flush=True)
            void = True
            continue
        root = flame.tree(lines)
        picture = options.docs / "charts" / f"flame-{scenario.name}.svg"
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_text(flame.graph(root, f"Gateway: {scenario.title}"))
        text = section(scenario, result, root, machine(["ours", "nats"]))
        page.put(options.docs / "profiles.md", "What limits each scenario", f"profile {scenario.name}", text)
        print(f"{scenario.name}: {root.total} samples, {picture.stat().st_size // 1024} KB", flush=True)
    return int(void)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that brokers are ended
    sys.exit(main())
