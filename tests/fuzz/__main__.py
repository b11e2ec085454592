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

from tests.fuzz import codec
from tests.fuzz.engine import GROWTH_BYTES_MAX, Outcome
from tests.fuzz.gateway import besiege
from tests.fuzz.targets import TARGETS, fuzz_in_processes
from tests.harness.bystanders import Bystanders
from tests.harness.gateway import Gateway
from tests.harness.nats import make_server

MIB = 1024 * 1024


def _say(one: Outcome) -> bool:
    """Say what came of a target; whether all was as it must be."""
    lines = {(file, line) for file, _, _, line in one.arcs}
    print(
        f"{one.name}: {one.inputs:,} inputs in {one.seconds:,.0f} s, {one.refused:,} refused, {one.read:,} read; "
        f"corpus {len(one.corpus):,}, {len(lines):,} lines, {len(one.arcs):,} steps between lines; "
        f"grown by {one.grown / MIB:.1f} MiB; {len(one.failures)} unexpected",
        flush=True,
    )
    for (variant, data), text in one.failures:
        print(f"  {one.name} variant {variant} {data.hex()}: {text}", file=sys.stderr)
    if one.grown > GROWTH_BYTES_MAX:
        print(f"  {one.name} has grown by more than {GROWTH_BYTES_MAX // MIB} MiB", file=sys.stderr)
    return not one.failures and one.grown <= GROWTH_BYTES_MAX


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
    """Run all targets and the gateway; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each target")
    parser.add_argument("--inputs", type=int, help="for each target, at most")
    parser.add_argument("--packets", type=int, default=100_000, help="for a gateway with two pairs of other clients")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at a time")
    parser.add_argument("--seed", default=secrets.token_hex(8), help="repeats a run")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    print(f"seed {arguments.seed}, {arguments.jobs} processes", flush=True)
    right = True
    material = [data for _, data in codec.seeds()]
    names = arguments.targets or list(TARGETS)
    for one in fuzz_in_processes(names, arguments.seed, arguments.jobs, arguments.inputs, arguments.seconds):
        right &= _say(one)
        if one.name == "decoder":
            material = sorted({data for start, data in one.corpus if codec.STARTS[start][1] == "client"})
    if arguments.packets and not arguments.targets:
        _gateway(arguments.packets, arguments.seed, material)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
