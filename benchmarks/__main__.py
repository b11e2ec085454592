# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks``: the same scenarios with each broker in turn, and a table of the ratios."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import peers, report
from benchmarks.job import Job
from benchmarks.report import BASE, Cell, Results
from benchmarks.scenarios import OUTSTANDING, WINDOW, Scenario, select

JOB_TIMEOUT = 240.0
SLOW_PEER_CLIENTS = {("amqtt", "connections"): 500, ("amqtt", "drain"): 2000, ("amqtt", "retained"): 2000}
"""Fewer connections and stored messages for a broker that would take minutes; the results are per second."""


BESIDE = f"{BASE} 3.1.1"
"""With ``--v5``, the column of the gateway with 3.1.1 clients."""


def _peer(column: str) -> str:
    return BASE if column == BESIDE else column


def _on_nats(column: str) -> bool:
    return _peer(column) in peers.ON_NATS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default="", metavar="GLOB[,GLOB]", help="scenarios, e.g. 'pairs*,latency-q1'")
    parser.add_argument("--peers", default=",".join(peers.DEFAULT_PEERS), help="of: " + ", ".join(peers.PEERS))
    parser.add_argument("--rounds", type=int, default=3, help="the table has medians over the rounds (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="measured per scenario (%(default)s)")
    parser.add_argument("--warmup", type=float, default=0.5, help="seconds before that (%(default)s)")
    parser.add_argument("--payload", type=int, default=128, help="bytes (%(default)s)")
    parser.add_argument(
        "--v5",
        action="store_true",
        help="clients speak MQTT 5.0; peers that do not are left out, and ours with 3.1.1 clients is beside them",
    )
    parser.add_argument("--ours", default=peers.OURS_COMMAND, metavar="COMMAND", help="default: %(default)s")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the tables as markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run as JSON")
    parser.add_argument("--list", action="store_true", help="name the scenarios")
    parser.add_argument("--keep", action="store_true", help="start the first peer, print its pids, wait for Ctrl-C")
    return parser


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


def _run(scenario: Scenario, column: str, options: argparse.Namespace) -> dict[str, object]:
    peer = _peer(column)
    try:
        with peers.running(peer, options.ours, split=scenario.split) as broker:
            return generate(
                Job(
                    scenario.name,
                    peers.HOST,
                    broker.port,
                    options.payload,
                    options.seconds,
                    options.warmup,
                    broker.processes,
                    SLOW_PEER_CLIENTS.get((peer, scenario.kind), 0),
                    5 if options.v5 and column != BESIDE else 4,
                    broker.other_port,
                    broker.nats_port,
                )
            )
    except peers.PeerError as error:
        return {"error": str(error)}


def _summary(result: dict[str, object]) -> str:
    if "error" in result:
        return f"VOID: {result['error']}"
    metrics = result["metrics"]
    assert isinstance(metrics, dict)
    figures = ", ".join(f"{name} {report.figure(value)}" for name, value in metrics.items())
    shares = ", ".join(f"{who} {float(str(result[f'{who}_busy'])):.0%}" for who in ("generator", "broker", "other"))
    return f"{figures}; CPU: {shares}"


def machine(names: Sequence[str]) -> str:
    """What the figures were measured on, and with which versions."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    versions = "; ".join(f"{peer}: {found}" for peer in names if (found := peers.version(_peer(peer))))
    return (
        f"{os.cpu_count()} CPUs ({model}), Linux {platform.release()}, Python {platform.python_version()}; {versions}; "
        f"{time.strftime('%Y-%m-%d')}"
    )


def _unusable(peer: str, options: argparse.Namespace) -> str | None:
    """Why a peer cannot be measured: it is not installed, does not start or does not speak 5.0."""
    try:
        with peers.running(peer, options.ours) as broker:
            return "it does not speak MQTT 5.0" if options.v5 and not peers.greets(broker.port, 5) else None
    except peers.PeerError as error:
        return str(error)


def _keep(peer: str, command: str) -> None:
    with peers.running(peer, command) as broker:
        print(f"{peer} on {peers.HOST}:{broker.port}, pids {broker.processes}; Ctrl-C ends it", flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if a result is void, 2 for wrong arguments."""
    parser = _parser()
    options = parser.parse_args(arguments)
    version = 5 if options.v5 else 4
    if options.list:
        print("\n".join(f"{each.name:20} {each.title}" for each in select([], version=version)))
        return 0
    try:
        scenarios = select([each for each in options.only.split(",") if each], version=version)
    except ValueError as error:
        parser.error(str(error))
    names: list[str] = []
    skipped: list[str] = []
    for peer in options.peers.split(","):
        if peer not in peers.PEERS:
            parser.error(f"no peer is called {peer!r}; there are {', '.join(peers.PEERS)}")
        if reason := _unusable(peer, options):
            skipped.append(f"{peer} ({reason})")
            print(f"skipped: {skipped[-1]}", flush=True)
        else:
            names.append(peer)
            if options.v5 and peer == BASE:
                names.append(BESIDE)
    if not names:
        parser.error("no peer is left")
    if options.keep:
        _keep(_peer(names[0]), options.ours)
        return 0
    results: Results = {scenario.name: {peer: Cell() for peer in names} for scenario in scenarios}
    for number in range(options.rounds):
        for scenario in scenarios:
            for name in names if number % 2 == 0 else reversed(names):
                if (name == BESIDE and scenario.properties) or (scenario.behind_nats and not _on_nats(name)):
                    continue
                result = _run(scenario, name, options)
                results[scenario.name][name].runs.append(result)
                print(f"round {number + 1}: {scenario.name}, {name}: {_summary(result)}", flush=True)
    notes = [
        f"{options.payload}-byte payload; median of {options.rounds} interleaved rounds of {options.seconds:g} s, "
        "± half the range; the load generator shares the CPUs with the broker.",
        "Count and order of every publisher's messages are verified at every subscriber; a result with a lost, "
        "repeated or reordered message is void.",
        f"QoS 1 and 2: at most {WINDOW} messages of a publisher unacknowledged. A publisher waits where a subscriber "
        f"is behind: at most 2,000 messages (QoS 1 and 2: 200) and {OUTSTANDING:,} deliveries are outstanding.",
        "Fresh data directory for each run. Both NATS peers: JetStream in files, `sync_interval` 1 s. mosquitto and "
        "amqtt store nothing.",
    ]
    if options.v5:
        notes.append(
            f"Clients speak MQTT 5.0, except in the column `{BESIDE}`. Publishers keep to the Receive Maximum of the "
            "broker; durable sessions expire after an hour."
        )
    if skipped:
        notes.append("Skipped: " + ", ".join(skipped) + ".")
    command = "python -m benchmarks " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    text = report.document(scenarios, names, results, machine=machine(names), command=command.strip(), notes=notes)
    print("\n" + text)
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(text)
    if options.json:
        runs = {name: {peer: cell.runs for peer, cell in cells.items()} for name, cells in results.items()}
        options.json.write_text(json.dumps(runs, indent=1))
    return 1 if report.error_list(scenarios, names, results) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that brokers are ended
    sys.exit(main())
