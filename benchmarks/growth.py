# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.growth``: how throughput and CPU per message change with size, one chart for each curve."""

from __future__ import annotations

import argparse
import shlex
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks import page, peers
from benchmarks.chart import Line, Panel, chart
from benchmarks.job import Job
from benchmarks.report import figure, table
from benchmarks.runner import generate, machine, unusable

DOCS: Final = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Curve:
    """One chart: ``change`` makes of a value on the x axis what is different in the scenario."""

    name: str
    title: str
    axis: str
    scenario: str
    values: tuple[int, ...]
    change: Callable[[int], dict[str, int]]


CURVES: Final = (
    Curve(
        "durable",
        "Durable sessions that all get messages (QoS 1, one outstanding each)",
        "durable sessions",
        "pairs500-q1-durable",
        (10, 50, 200, 1000, 5000),
        lambda value: {"publishers": value, "subscribers": value},
    ),
    Curve(
        "filters",
        "Distinct filters of other clients (10 pairs, QoS 0)",
        "filters",
        "pairs10-q0",
        (100, 1000, 10_000, 100_000),
        lambda value: {"filters": value},
    ),
    Curve(
        "connections",
        "Other connections (10 pairs, QoS 0)",
        "connections",
        "pairs10-q0",
        (100, 1000, 5000, 15_000),
        lambda value: {"idle": value},
    ),
    Curve(
        "retained",
        "Retained messages to one subscriber (QoS 1)",
        "retained messages",
        "retained",
        (1000, 10_000, 50_000, 200_000),
        lambda value: {"clients": value},
    ),
    Curve(
        "payload",
        "Payload (10 pairs, QoS 1)",
        "bytes",
        "pairs10-q1",
        (32, 128, 1024, 8192, 65_536, 262_144),
        lambda value: {"payload": value},
    ),
)


@dataclass
class Point:
    """All rounds at one value."""

    value: int
    rates: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """Microseconds per message by process."""
    joined: list[float] = field(default_factory=list)
    """How many of those who only stand by were connected, or subscribed, per second."""
    memory: list[float] = field(default_factory=list)
    """What each of them takes of the broker's memory (KB)."""
    effort: list[float] = field(default_factory=list)
    """What it takes of the broker's CPU (µs) that one joins."""
    error: str = ""

    @property
    def rate(self) -> float:
        """Median of the messages per second."""
        return statistics.median(self.rates)

    def cost(self) -> dict[str, float]:
        """Median of the CPU time per message (µs) by process."""
        return {label: statistics.median(found) for label, found in self.cpu.items()}


def usable(peer: str, ours: str) -> bool:
    """Whether a peer can be measured here; says so if not."""
    if reason := unusable(peer, ours):
        print(f"skipped: {peer} ({reason})", flush=True)
    return not reason


def measure(curve: Curve, value: int, peer: str, ours: str, seconds: float, point: Point) -> None:
    """Run the scenario once; ``ours`` is the command that starts our gateway."""
    try:
        with peers.running(peer, ours) as broker:
            processes = broker.processes
            changes = curve.change(value)
            job = Job(curve.scenario, peers.HOST, broker.port, seconds=seconds, processes=processes, changes=changes)
            result = generate(job)
    except peers.PeerError as error:
        result = {"error": str(error)}
    if "error" in result:
        point.error = str(result["error"])
        return
    metrics, cpu = result["metrics"], result["cpu"]
    assert isinstance(metrics, dict)
    assert isinstance(cpu, dict)
    point.rates.append(metrics["rate"])
    if "joined" in metrics:
        point.joined.append(metrics["joined"])
        point.memory.append(metrics["memory"])
        point.effort.append(metrics["effort"])
    for label in processes:
        point.cpu.setdefault(label, []).append(cpu[label] * 1000)


def rows(found: dict[str, list[Point]], axis: str) -> list[str]:
    """A curve as a table."""
    lines = [[axis, "peer", "msg/s", "CPU per message", "joined per second", "CPU of each", "memory of each"]]
    for peer, points in found.items():
        for point in points:
            if point.error or not point.rates:
                lines.append([f"{point.value:,}", peer, "void", point.error, "", "", ""])
                continue
            cost = ", ".join(f"{label} {value:.1f} µs" for label, value in point.cost().items())
            crowd = ["", "", ""]
            if point.joined:
                joined, effort, memory = map(statistics.median, (point.joined, point.effort, point.memory))
                crowd = [figure(joined), f"{figure(effort)} µs", f"{memory:.1f} KB"]
            lines.append([f"{point.value:,}", peer, figure(point.rate), cost, *crowd])
    if not any(line[4] for line in lines[1:]):
        lines = [line[:4] for line in lines]
    return table(lines)


def draw(curve: Curve, found: dict[str, list[Point]]) -> str:
    """Rate and CPU per message against the value, both axes logarithmic."""
    rates, costs = [], []
    for peer, points in found.items():
        good = [point for point in points if point.rates and not point.error]
        rates.append(Line(peer, peer, [(point.value, point.rate) for point in good]))
        for dash, label in enumerate(good[0].cpu if good else {}):
            name = label if label.startswith(peer) else f"{peer}: {label}"
            costs.append(Line(name, peer, [(point.value, point.cost()[label]) for point in good], dash))
    panels = [Panel("Messages per second", curve.axis, rates), Panel("CPU per message (µs)", curve.axis, costs)]
    return chart(curve.title, panels)


def section(curve: Curve, found: dict[str, list[Point]], *, about: str, command: str) -> str:
    """What the page says of a curve."""
    image = f"![{curve.title}](charts/growth-{curve.name}.svg)"
    return "\n".join([f"## {curve.title}", "", f"{about}  ", f"`{command}`", "", image, "", *rows(found, curve.axis)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if a point is void."""
    names = [curve.name for curve in CURVES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--only", default="", metavar="CURVE[,CURVE]", help="of: " + ", ".join(names))
    parser.add_argument("--peers", default="ours,nats,mosquitto", help="of: " + ", ".join(peers.PEERS))
    parser.add_argument("--ours", default=peers.OURS_COMMAND, metavar="COMMAND", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="the charts have medians over the rounds (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="measured per point (%(default)s)")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="leave out what is larger on the x axis")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where growth.md and the charts go")
    options = parser.parse_args(arguments)
    wanted = [each for each in options.only.split(",") if each]
    for each in wanted:
        if each not in names:
            parser.error(f"no curve is called {each!r}; there are {', '.join(names)}")
    for peer in options.peers.split(","):
        if peer not in peers.PEERS:
            parser.error(f"no peer is called {peer!r}; there are {', '.join(peers.PEERS)}")
    command = shlex.join(["python", "-m", "benchmarks.growth", *(sys.argv[1:] if arguments is None else arguments)])
    command = command.replace(str(Path.cwd()), "$PWD")
    names = [peer for peer in options.peers.split(",") if usable(peer, options.ours)]
    if not names:
        parser.error("no peer is left")
    void = False
    for curve in [each for each in CURVES if not wanted or each.name in wanted]:
        values = [value for value in curve.values if not options.most or value <= options.most]
        found = {peer: [Point(value) for value in values] for peer in names}
        for number in range(options.rounds):
            for index, value in enumerate(values):
                for peer in list(found) if number % 2 == 0 else reversed(found):
                    point = found[peer][index]
                    measure(curve, value, peer, options.ours, options.seconds, point)
                    said = point.error or f"{figure(point.rates[-1])} msg/s"
                    print(f"round {number + 1}: {curve.name} {value:,}, {peer}: {said}", flush=True)
        picture = options.docs / "charts" / f"growth-{curve.name}.svg"
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_text(draw(curve, found))
        text = section(curve, found, about=machine(names, options.ours), command=command)
        page.put(options.docs / "growth.md", "How cost grows", f"growth {curve.name}", text)
        void = void or any(point.error for points in found.values() for point in points)
    return int(void)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that brokers are ended
    sys.exit(main())
