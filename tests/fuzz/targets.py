# SPDX-License-Identifier: Apache-2.0
"""The table of targets: all code that reads bytes which a stranger, or another program, has written.

``docs/internals/fuzzing.md`` says of each what must hold.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from functools import partial
from math import inf
from typing import Final

from tests.fuzz import codec, files, headers, payloads, proxy, records, spark, topics, websocket
from tests.fuzz.engine import Outcome, Target, fuzz

TARGETS: Final[dict[str, Target]] = {
    target.name: target
    for target in (
        codec.target(),
        records.TARGET,
        headers.TARGET,
        proxy.TARGET,
        websocket.TARGET,
        topics.TARGET,
        files.RULES,
        files.USERS,
        spark.TARGET,
        payloads.TARGET,
    )
}


def run(name: str, seed: str, inputs: int | None, seconds: float) -> Outcome:
    """Fuzz one target of the table; see :func:`tests.fuzz.engine.fuzz`."""
    return fuzz(TARGETS[name], seed, inputs, seconds)


def fuzz_in_processes(
    names: Iterable[str], seed: str, jobs: int, inputs: int | None = None, seconds: float = inf
) -> Iterable[Outcome]:
    """Fuzz several targets, each in a process, ``jobs`` at a time; what came of each, as soon as it is there.

    Args:
        inputs: for each target; None for no limit.
        seconds: for each target.
    """
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(partial(run, seed=seed, inputs=inputs, seconds=seconds), names)
