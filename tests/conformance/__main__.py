# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.conformance``: print the coverage; exit code 1 when something is missing or wrong."""

from __future__ import annotations

import sys

from tests.conformance.citations import scan
from tests.conformance.coverage import problems, standards, summary, table


def main() -> int:
    """Print the table of every standard, its numbers, and what is wrong."""
    found = scan()
    everything = standards()
    for standard in everything:
        print("\n".join(table(found, standard)), end="\n\n")
    for standard in everything:
        print(summary(found, standard))
    wrong = problems(found, everything)
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
