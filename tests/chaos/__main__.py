# SPDX-License-Identifier: Apache-2.0
"""Runs experiments: ``python -m tests.chaos [NAME...] [--long] [--seed N] [--report FILE] [--positions KIND]``.

Exit status: 0 when every promise was kept, 1 when one was not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.chaos.conduct import conduct
from tests.chaos.experiment import Experiment, Result
from tests.chaos.experiments import all_experiments
from tests.chaos.moving import POSITIONS
from tests.chaos.report import BEGIN, END, has_place, text_of, write


def main() -> int:
    """Parse the command line, run, and print what came out."""
    known = all_experiments()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Faults on purpose.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(known)}; all when left out")
    parser.add_argument("--long", action="store_true", help="the long versions, which take minutes to an hour each")
    parser.add_argument("--seed", type=int, default=1, help="for what is left to chance (default: 1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="Markdown file whose table gets the figures")
    parser.add_argument(
        "--positions",
        choices=POSITIONS,
        default="",
        help="session_positions of the gateways; with auto, sessions have to move in both directions all the time",
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no experiment is called {', '.join(unknown)}; there are {', '.join(known)}")
    if arguments.report is not None and arguments.positions:
        parser.error("--report and --positions exclude each other: the page has figures of the experiments as they are")
    if arguments.report is not None and not arguments.report.is_file():
        parser.error(f"there is no file {arguments.report}")
    if arguments.report is not None and not has_place(arguments.report.read_text(encoding="utf-8")):
        parser.error(f"{arguments.report} has no lines between which the figures belong: {BEGIN} and {END}")
    kept = True
    for name in arguments.names or known:
        result = _run(known[name], arguments.long, arguments.seed, arguments.positions)
        kept = kept and not result.violations
        if arguments.report is not None:
            write(arguments.report, known[name], result, long=arguments.long)
    return 0 if kept else 1


def _run(experiment: Experiment, long: bool, seed: int, positions: str) -> Result:
    print(f"{experiment.name}: {experiment.title}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix=f"chaos-{experiment.name}-"))
    began = time.monotonic()
    try:
        result = asyncio.run(conduct(experiment, directory, long=long, seed=seed, positions=positions))
    except Exception as error:  # the others are run all the same
        (directory / "traceback").write_text(traceback.format_exc(), encoding="utf-8")
        result = Result(violations=[f"experiment failed: {str(error).partition(chr(10))[0]}"])
    for who, one in (("", result), *result.peers.items()):
        print(f"  {who}{': ' if who else ''}{text_of(one.figures)}")
        for line in one.violations:
            print(f"    {'not kept: ' if not who else ''}{line}")
        for line in one.remarks:
            print(f"    ({line})")
    print(f"  {'not kept' if result.violations else 'kept'}, {time.monotonic() - began:.0f} s", flush=True)
    if result.violations:
        print(f"  histories and logs are in {directory}")
    else:
        shutil.rmtree(directory)
    return result


if __name__ == "__main__":
    sys.exit(main())
