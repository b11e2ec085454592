# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks``: the same scenarios with each broker in turn, and a table of the ratios."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import compare, page, peers, quick, report, targets
from benchmarks.job import Job
from benchmarks.report import BASE, Cell, Results
from benchmarks.runner import BESIDE, fewer, generate, machine, peer_of, unusable
from benchmarks.scenarios import OUTSTANDING, WINDOW, Scenario, select


def _on_nats(column: str) -> bool:
    return peer_of(column) in peers.ON_NATS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default="", metavar="GLOB[,GLOB]", help="scenarios, e.g. 'pairs*,latency-q1'")
    parser.add_argument(
        "--table",
        action="store_true",
        help="the scenarios that have targets, and without --peers, each with the peers that its targets name",
    )
    parser.add_argument("--peers", default="", help="of: " + ", ".join(peers.PEERS))
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
    parser.add_argument(
        "--part", default="table", metavar="NAME", help="into this part of the report; the others stay (%(default)s)"
    )
    parser.add_argument("--title", default="Beside other brokers", help="of that part (%(default)s)")
    parser.add_argument("--ratios", type=Path, metavar="FILE", help="write what is compared with targets, for --check")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="compare the ratios with those of an earlier run; 1 if one is worse by more than the spread explains",
    )
    parser.add_argument("--quick", action="store_true", help="the rows of the README's table, and nothing else")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="with --quick, write the rows for the README")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run as JSON")
    parser.add_argument("--list", action="store_true", help="name the scenarios")
    parser.add_argument("--keep", action="store_true", help="start the first peer, print its pids, wait for Ctrl-C")
    return parser


def _run(scenario: Scenario, column: str, options: argparse.Namespace) -> dict[str, object]:
    peer = peer_of(column)
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
                    fewer(peer, scenario.kind),
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


def _keep(peer: str, command: str) -> None:
    with peers.running(peer, command) as broker:
        print(f"{peer} on {peers.HOST}:{broker.port}, pids {broker.processes}; Ctrl-C ends it", flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return


def _columns(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """The columns of the table, and what is said of peers that are skipped."""
    three = options.table or options.quick
    default = ("ours", "nats") if options.check else tuple(quick.COLUMNS) if three else peers.ALL
    names: list[str] = []
    skipped: list[str] = []
    for peer in options.peers.split(",") if options.peers else default:
        if peer not in peers.PEERS:
            parser.error(f"no peer is called {peer!r}; there are {', '.join(peers.PEERS)}")
        if reason := unusable(peer, options.ours, v5=options.v5):
            skipped.append(f"{peer} ({reason})")
            print(f"skipped: {skipped[-1]}", flush=True)
        else:
            names.append(peer)
            if options.v5 and peer == BASE:
                names.append(BESIDE)
    if not names:
        parser.error("no peer is left")
    return names, skipped


def _scenarios(options: argparse.Namespace, version: int) -> list[Scenario]:
    """Return the scenarios to measure; raises ValueError for a glob without a match."""
    only = [each for each in options.only.split(",") if each]
    if options.check and not only:
        only = list(compare.CHECKED)
    if options.quick and not only:
        only = list(quick.SCENARIOS)
    found = select(only, version=version)
    return [each for each in found if each.name in targets.scenarios()] if options.table else found


def _measured(scenario: Scenario, column: str, options: argparse.Namespace) -> bool:
    """Whether a scenario is measured with the peer of a column."""
    if (column == BESIDE and scenario.properties) or (scenario.behind_nats and not _on_nats(column)):
        return False
    return bool(options.peers) or not (options.table or options.check) or column in targets.needed(scenario.name)


def _notes(
    options: argparse.Namespace,
    scenarios: Sequence[Scenario],
    names: Sequence[str],
    skipped: Sequence[str],
    took: float,
) -> list[str]:
    """Return the notes that a reader of the figures needs. ``took``: seconds of the whole run."""
    notes = [
        f"{options.payload}-byte payload; median of {options.rounds} interleaved rounds of {options.seconds:g} s, "
        f"± half the range; {took / 60:.0f} minutes in all; the load generator shares the CPUs with the broker.",
        "Count and order of every publisher's messages are verified at every subscriber; a result with a lost, "
        "repeated or reordered message is void.",
        f"QoS 1 and 2: at most {WINDOW} messages of a publisher unacknowledged. A publisher waits where a subscriber "
        f"is behind: at most 2,000 messages (QoS 1 and 2: 200) and {OUTSTANDING:,} deliveries are outstanding.",
        "Fresh data directory for each run. Both NATS peers: JetStream in files, `sync_interval` 1 s, up to 1,024 "
        "messages in flight to a subscriber, as nats-server's listener has it. The other brokers store nothing.",
    ]
    less = [
        f"{name} {count:,} ({scenario.name})"
        for scenario in scenarios
        for name in names
        if (count := fewer(peer_of(name), scenario.kind))
    ]
    if less:
        notes.append(
            "Less than the title says, per second all the same, for brokers that would take minutes, or do not always "
            f"send all (nats-server's listener and retained messages): {', '.join(less)}."
        )
    if options.v5:
        notes.append(
            f"Clients speak MQTT 5.0, except in the column `{BESIDE}`. Publishers keep to the Receive Maximum of the "
            "broker; durable sessions expire after an hour."
        )
    if skipped:
        notes.append("Skipped: " + ", ".join(skipped) + ".")
    return notes


def _results(scenarios: Sequence[Scenario], names: Sequence[str], options: argparse.Namespace) -> Results:
    """Run every scenario with every peer in each round, in turn."""
    results: Results = {scenario.name: {peer: Cell() for peer in names} for scenario in scenarios}
    for number in range(options.rounds):
        for scenario in scenarios:
            for name in names if number % 2 == 0 else reversed(names):
                if not _measured(scenario, name, options):
                    continue
                result = _run(scenario, name, options)
                results[scenario.name][name].runs.append(result)
                print(f"round {number + 1}: {scenario.name}, {name}: {_summary(result)}", flush=True)
    return results


def _quick(scenarios: Sequence[Scenario], names: Sequence[str], results: Results, options: argparse.Namespace) -> int:
    """Print the rows of the README; 1 if a result is void."""
    here = machine(names, options.ours)
    busy = quick.others(results)
    about = quick.conditions(here, payload=options.payload, rounds=options.rounds, seconds=options.seconds, busy=busy)
    found = quick.rows(results)
    errors = report.error_list(scenarios, names, results)
    print("\n".join(["", quick.shown(found, about), *errors]))
    if options.figures:
        quick.save(options.figures, found, about)
    return 1 if errors else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if a result is void or a ratio is worse than it was, 2 for wrong arguments."""
    parser = _parser()
    options = parser.parse_args(arguments)
    version = 5 if options.v5 else 4
    if options.list:
        print("\n".join(f"{each.name:20} {each.title}" for each in select([], version=version)))
        return 0
    try:
        scenarios = _scenarios(options, version)
        before = compare.load(options.check) if options.check else ("", {})
    except (ValueError, compare.ReportError) as error:
        parser.error(str(error))
    names, skipped = _columns(options, parser)
    if options.keep:
        _keep(peer_of(names[0]), options.ours)
        return 0
    began = time.monotonic()
    results = _results(scenarios, names, options)
    if options.quick:
        return _quick(scenarios, names, results, options)
    verdicts = targets.judged({each.name for each in scenarios}, names, results)
    if options.check:
        return _checked(before, verdicts, machine(names, options.ours))
    command = "python -m benchmarks " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    text = report.document(
        scenarios,
        names,
        results,
        title=options.title,
        about=machine(names, options.ours),
        command=command.strip().replace(str(Path.cwd()), "$PWD"),
        notes=_notes(options, scenarios, names, skipped, time.monotonic() - began),
        reached=targets.target_table(verdicts),
    )
    print("\n" + text)
    if options.report:
        page.put(options.report, "Benchmarks", options.part, text)
    if options.ratios:
        compare.save(options.ratios, machine(names, options.ours), verdicts)
    if options.json:
        runs = {name: {peer: cell.runs for peer, cell in cells.items()} for name, cells in results.items()}
        options.json.write_text(json.dumps(runs, indent=1))
    return 1 if report.error_list(scenarios, names, results) else 0


def _checked(
    before: tuple[str, dict[tuple[str, str, str], compare.Kept]], verdicts: Sequence[targets.Verdict], here: str
) -> int:
    """Say what has changed since an earlier run."""
    machine_before, kept = before
    found = compare.changes(verdicts, kept)
    print(f"\nthen: {machine_before}\nnow:  {here}\n")
    print("\n".join(compare.change_table(found)))
    if compare.failed(found):
        print("\nREGRESSION: a ratio is worse than the spread explains, or a message was lost, repeated or reordered")
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that brokers are ended
    sys.exit(main())
