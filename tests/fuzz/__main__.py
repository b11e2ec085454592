# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.fuzz``: the long version, `make fuzz`. Ends with status 1 when something was wrong."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.codec import STARTS, Outcome, fuzz_in_processes
from tests.fuzz.gateway import besiege
from tests.harness.bystanders import Bystanders
from tests.harness.gateway import Gateway
from tests.harness.nats import make_server

MIB = 1024 * 1024


def _codec(inputs: int, seed: str, jobs: int) -> list[Outcome]:
    """Fuzz the codec, and say what came of it."""
    outcomes = fuzz_in_processes(inputs, seed, jobs)
    done = sum(one.inputs for one in outcomes)
    arcs = set().union(*(one.arcs for one in outcomes))
    lines = {(file, line) for file, _, _, line in arcs}
    seconds = max(one.seconds for one in outcomes)
    failures = [each for one in outcomes for each in one.failures]
    print(
        f"codec: {done:,} inputs in {seconds:,.0f} s, {sum(one.refused for one in outcomes):,} refused, "
        f"{sum(one.packets for one in outcomes):,} packets; corpus {sum(len(one.corpus) for one in outcomes):,}, "
        f"{len(lines):,} lines, {len(arcs):,} steps between lines; "
        f"grown by {max(one.grown for one in outcomes) / MIB:.1f} MiB; {len(failures)} unexpected",
        flush=True,
    )
    for (start, data), text in failures:
        print(f"  {STARTS[start]} {data.hex()}: {text}", file=sys.stderr)
    return outcomes


def _gateway(packets: int, seed: str, material: list[bytes]) -> None:
    """Fuzz a gateway, and say what came of it."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        server = make_server("process", Path(name) / "nats")
        gateway = Gateway(Path(name) / "gateway.log", "")
        try:
            server.start()
            gateway = Gateway(Path(name) / "gateway.log", server.url)
            gateway.start()
            with Bystanders(gateway.port) as one, Bystanders(gateway.port) as two:
                grown = besiege(gateway, [one, two], packets, seed, material)
        except BaseException:
            print(gateway.log[-8000:], file=sys.stderr)
            raise
        finally:
            gateway.process.discard()
            server.discard()
    print(
        f"gateway: {packets:,} packets in {time.monotonic() - begin:,.0f} s, grown by {grown / MIB:.1f} MiB, as before"
    )


def main() -> int:
    """Run both; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000_000, help="through the codec")
    parser.add_argument("--packets", type=int, default=100_000, help="for a gateway with two pairs of other clients")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes for the codec")
    parser.add_argument("--seed", default=secrets.token_hex(8), help="repeats a run")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.jobs} processes", flush=True)
    outcomes = _codec(arguments.inputs, arguments.seed, arguments.jobs)
    if arguments.packets:
        material = sorted({data for one in outcomes for start, data in one.corpus if STARTS[start][1] == "client"})
        _gateway(arguments.packets, arguments.seed, material)
    return 1 if any(one.failures for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
