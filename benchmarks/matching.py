# SPDX-License-Identifier: Apache-2.0
"""Worst cases of finding the filters that match a topic: ``python -m benchmarks.matching``.

Each set of filters was made to be as bad as possible for an index of some kind: a trie of levels, one that shares
ends, a table by number of levels, a table by one literal. The time is that of one topic, the worst of the set's.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice, product
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import page
from benchmarks.report import figure, table
from benchmarks.runner import machine
from mqtt_nats.pubsub.filter_index import FilterIndex

DOCS: Final = Path(__file__).parents[1] / "docs"


class Case(NamedTuple):
    """Filters and topics of so many levels."""

    name: str
    filters: Callable[[int], Iterator[str]]
    topics: Callable[[int], list[str]]


def same(levels: int) -> list[str]:
    """The topic that is ``a`` in each level."""
    return ["/".join("a" * levels)]


def spread(levels: int) -> list[str]:
    """Topics of one kind in each level, and of another at the end."""
    numbers = random.Random(levels)
    return [*same(levels), *("/".join(numbers.choice("ab") for _ in range(levels)) for _ in range(4))]


def mixed(choices: str, levels: int, end: str = "", shares: Sequence[int] | None = None) -> Iterator[str]:
    """Filters at random, without end where there are so many."""
    numbers = random.Random(levels)
    while True:
        yield "/".join(numbers.choices(choices, shares, k=levels)) + end


def moving(levels: int, outer: str, inner: str, end: str = "") -> Iterator[str]:
    """``inner`` from each level to each other, ``outer`` around it."""
    for start, stop in product(range(levels), repeat=2):
        if start <= stop:
            yield "/".join([outer] * start + [inner] * (stop - start + 1) + [outer] * (levels - stop - 1)) + end


def pairs(levels: int, outer: str, inner: str) -> Iterator[str]:
    """``inner`` in every choice of three levels."""
    for places in product(range(levels), repeat=3):
        if places[0] < places[1] < places[2]:
            yield "/".join(inner if level in places else outer for level in range(levels))


def ends(levels: int) -> Iterator[str]:
    """``#`` behind every beginning of each length."""
    numbers = random.Random(levels)
    for turn in count(1):
        size = turn % (levels - 1) + 1
        yield "/".join(numbers.choice("a+") for _ in range(size)) + "/#"


def numbered(levels: int, before: str, after: str) -> Iterator[str]:
    """Filters that differ in a literal that no topic has, in each level in turn."""
    for number in count():
        at = number % levels
        yield "/".join([before] * at + [f"n{number}"] + [after] * (levels - at - 1))


def late(levels: int) -> Iterator[str]:
    """Filters that match up to the last level, and not there."""
    return (f"{text}/b" for text in mixed("a+", levels - 1))


def wide(levels: int) -> Iterator[str]:
    """A literal of its own in the second level, the others open."""
    for number in count():
        yield "/".join(["+", str(number)] + ["+"] * (levels - 2)) if levels > 2 else f"+/{number}"


def devices(levels: int) -> Iterator[str]:
    """What gateways of devices have: a name of its own, and an open level."""
    for number in count():
        yield "/".join(["site", str(number), "+", *["x"] * (levels - 3)][:levels])


CASES: Final = (
    Case("`a` or `+` in each level", lambda n: mixed("a+", n), same),
    Case("the same, and `#`", lambda n: mixed("a+", n, "/#"), same),
    Case("`a`, `b` or `+`", lambda n: mixed("ab+", n), spread),
    Case("few `+` among `a`", lambda n: mixed("a+", n, shares=(9, 1)), same),
    Case("few `a` among `+`", lambda n: mixed("a+", n, shares=(1, 9)), same),
    Case("few `a` among `+`, and `#`", lambda n: mixed("a+", n, "/#", (1, 9)), same),
    Case("`#` behind every beginning", ends, same),
    Case("a run of `+` in `a`", lambda n: moving(n, "a", "+"), same),
    Case("a run of `a` in `+`", lambda n: moving(n, "+", "a"), same),
    Case("the same, and `#`", lambda n: moving(n, "+", "a", "/#"), same),
    Case("three `+` in `a`", lambda n: pairs(n, "a", "+"), same),
    Case("three `a` in `+`", lambda n: pairs(n, "+", "a"), same),
    Case("another literal, after `a`", lambda n: numbered(n, "a", "+"), same),
    Case("another literal, after `+`", lambda n: numbered(n, "+", "a"), same),
    Case("no match in the last level", late, same),
    Case("empty levels and `+`", lambda n: mixed("x+", n), lambda n: ["/".join("x" * n)]),
    Case("a literal of its own in the second level", wide, lambda n: ["/".join(["a", "7"] + ["a"] * (n - 2))]),
    Case("devices", devices, lambda n: ["/".join(["site", "7", "a", *["x"] * (n - 3)][:n])]),
    Case(
        "every level of another length",
        lambda n: ("/".join("a+"[i >> k & 1] for k in range(i % n + 1)) for i in count()),
        same,
    ),
    Case(
        "filters of a topic with `$`",
        lambda n: (f"$a/{text}" for text in mixed("a+", n - 1)),
        lambda n: ["$a/" + same(n - 1)[0]],
    ),
)


def distinct(filters: Iterator[str], number: int) -> list[str]:
    """As many different ones as there are, ``number`` at most."""
    found: dict[str, None] = {}
    for text in islice(filters, 20 * number):
        found[text] = None
        if len(found) == number:
            break
    return list(found)


def measure(case: Case, levels: int, number: int, seconds: float) -> tuple[float, int, int]:
    """Milliseconds for the worst topic; how many filters there were, and how many it matches at most."""
    index: FilterIndex[str] = FilterIndex()
    filters = distinct(case.filters(levels), number)
    for text in filters:
        index.add(text, text)
    worst, most = 0.0, 0
    for topic in case.topics(levels):
        most = max(most, len(index.match(topic)))
        best, end = 1e9, time.perf_counter() + seconds
        while time.perf_counter() < end:
            begun = time.perf_counter()
            index.match(topic)
            best = min(best, time.perf_counter() - begun)
        worst = max(worst, best)
    return worst * 1000, len(filters), most


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matching", description=__doc__)
    parser.add_argument("--levels", default="4,16,120", help="of filters and topics (%(default)s)")
    parser.add_argument("--filters", default="1000,10000,100000", help="how many (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.05, help="for each topic (%(default)s)")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="write the table into growth.md there")
    options = parser.parse_args(arguments)
    levels = [int(each) for each in options.levels.split(",")]
    numbers = [int(each) for each in options.filters.split(",")]
    if min(levels) < 3 or min(numbers) < 1 or options.seconds <= 0:
        parser.error("three levels at least, one filter, and some time")
    columns = list(product(levels, numbers))
    rows = [["filters", *(f"{depth} levels, {number:,}" for depth, number in columns)]]
    for case in CASES:
        row = [case.name]
        for depth, number in columns:
            spent, there, most = measure(case, depth, number, options.seconds)
            row.append(f"{spent:.3f}" + ("" if there == number else f" ({figure(there)})"))
            print(f"{case.name}, {depth} levels, {there:,} filters: {spent:.4f} ms, {most:,} match", flush=True)
        rows.append(row)
    lines = table(rows)
    print("\n".join(lines))
    if options.docs is not None:
        about = (
            f"Milliseconds for one topic, the worst of the set; in brackets how many filters there are where no more "
            f"exist. {machine([], '')}"
        )
        text = "\n".join(
            ["## Filters that match a topic", "", about, "", "`python -m benchmarks.matching`", "", *lines]
        )
        page.put(options.docs / "growth.md", "How cost grows", "matching", text)


if __name__ == "__main__":
    main()
