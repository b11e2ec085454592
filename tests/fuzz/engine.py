# SPDX-License-Identifier: Apache-2.0
"""Mutated inputs for one target; inputs that reach new steps of its code are mutated further."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Final

import psutil

from tests.fuzz.arcs import Arc, Arcs
from tests.fuzz.mutation import mutated

Input = tuple[int, bytes]
"""Which variant of the target reads the input, and its bytes."""

Mutation = Callable[[bytes, bytes, Random], bytes]
"""Bytes, other bytes of the corpus, randomness -> changed bytes."""

SLOW_S: Final = 1.0
"""Processor seconds that one input of at most 4 KiB may take."""

GROWTH_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes by which the process may grow after the first tenth of a run."""

CLOCK_INPUTS: Final = 32
"""The clock is read once for so many inputs."""


class Unexpected(Exception):
    """The code under test has broken one of its invariants."""


def expect(condition: object, text: str) -> None:
    """Raise Unexpected unless an invariant holds.

    Raises:
        Unexpected: with ``text``.
    """
    if not condition:
        raise Unexpected(text)


@dataclass(frozen=True, slots=True)
class Target:
    """Code that reads bytes of strangers, and what must hold whatever these bytes are.

    Attributes:
        name: of the target, in the table and on the command line.
        sources: modules, or packages with all their modules, whose steps guide the search.
        seeds: makes the inputs to begin with.
        check: reads one input and tests the invariants, which its docstring names; its second argument is the number
            of the input, by which a target may vary limits and the sizes of reads. It returns how many things were
            read and whether the input was refused, and raises Unexpected.
        variants: how many variants there are.
        mutate: changes the bytes of an input.
        followed: of so many inputs one is followed through the code, which takes several times as long.
    """

    name: str
    sources: tuple[ModuleType, ...]
    seeds: Callable[[], list[Input]]
    check: Callable[[Input, int], tuple[int, bool]]
    variants: int = 1
    mutate: Mutation = mutated
    followed: int = 6

    @property
    def invariants(self) -> str:
        """What must hold, as the docstring of ``check`` says it, in one line."""
        check = self.check.func if isinstance(self.check, partial) else self.check
        return " ".join((check.__doc__ or "").split())


@dataclass
class Outcome:
    """What came of some inputs.

    Attributes:
        name: of the target.
        inputs: how many there were.
        refused: how many of them were refused.
        read: things that were read: packets, records, headers.
        corpus: inputs that have reached something new.
        arcs: what they have reached.
        failures: inputs with which something was wrong, and what.
        seconds: how long it took.
        grown: bytes by which the process has grown since a tenth of the inputs had been read.
    """

    name: str
    inputs: int = 0
    refused: int = 0
    read: int = 0
    corpus: list[Input] = field(default_factory=list)
    arcs: set[Arc] = field(default_factory=set)
    failures: list[tuple[Input, str]] = field(default_factory=list)
    seconds: float = 0.0
    grown: int = 0


def fuzz(target: Target, seed: str, inputs: int | None = None, seconds: float = inf, stop: int = 20) -> Outcome:
    """Feed mutated inputs to a target until ``inputs`` were read or ``seconds`` have passed, at the latest.

    Args:
        inputs: None for no limit.
        stop: failures after which it ends early.
    """
    random = Random(seed)
    arcs = Arcs(*map(_place, target.sources))
    outcome = Outcome(target.name, arcs=arcs.seen)
    begin = time.monotonic()
    material = outcome.corpus = _begin(target, arcs, outcome)
    process = psutil.Process()
    before = 0
    number = 0
    while len(outcome.failures) < stop and (inputs is None or number < inputs):
        if not number % CLOCK_INPUTS:
            passed = time.monotonic() - begin
            if passed >= seconds:
                break
            if not before and max(passed / seconds, number / inputs if inputs else 0.0) >= 0.1:
                before = process.memory_info().rss
        one = _next(target, material, random)
        try:
            read, refused = _run(target, one, number, arcs, material)
        except Unexpected as error:
            outcome.failures.append((one, str(error)))
        else:
            outcome.inputs += 1
            outcome.read += read
            outcome.refused += refused
        number += 1
    outcome.seconds = time.monotonic() - begin
    outcome.grown = max(process.memory_info().rss - before, 0) if before else 0
    return outcome


def _place(source: ModuleType) -> Path:
    """The file of a module, the directory of a package."""
    file = Path(source.__file__ or "")
    return file.parent if file.name == "__init__.py" else file


def _begin(target: Target, arcs: Arcs, outcome: Outcome) -> list[Input]:
    """The seeds that reach something new; what is wrong with any of them is a failure."""
    seeds = target.seeds()
    material = []
    for number, one in enumerate(seeds):
        try:
            if arcs.follow(partial(target.check, one, number)):
                material.append(one)
        except Unexpected as error:
            outcome.failures.append((one, str(error)))
    return material or seeds  # compiled code does not tell which of its lines run


def _next(target: Target, material: Sequence[Input], random: Random) -> Input:
    choose = random.random
    total = len(material)
    # What was found late has been tried less often.
    at = int(choose() * total) if choose() < 0.5 else total - 1 - int(choose() ** 3 * total)
    variant, base = material[at]
    if target.variants > 1 and choose() < 0.1:
        variant = int(choose() * target.variants)
    return variant, target.mutate(base, material[int(choose() * total)][1], random)


def _run(target: Target, one: Input, number: int, arcs: Arcs, material: list[Input]) -> tuple[int, bool]:
    """Check one input, of some also where it leads."""
    if number % target.followed:
        begin = time.process_time()
        result = target.check(one, number)
        if (took := time.process_time() - begin) > SLOW_S:
            raise Unexpected(f"it takes {took:.1f} s of processor time")
        return result
    results: list[tuple[int, bool]] = []
    if arcs.follow(lambda: results.append(target.check(one, number))):
        material.append(one)
    return results[0]
