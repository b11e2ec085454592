# SPDX-License-Identifier: Apache-2.0
"""Names in tables: on one line, not wider than a screen, and nothing in them that cannot be seen."""

import pytest

from mqtt_nats.ctl.commands import retained
from mqtt_nats.ctl.tables import CELL, cell, plain

ESC = "\x1b"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("lamp/1 ü 灯", "lamp/1 ü 灯"),
        ("a\u202eb", r"a\u{202e}b"),
        (f"{ESC}[2J\n", r"\u{1b}[2J\u{a}"),
        ("\N{NO-BREAK SPACE}\U000e0001", r"\u{a0}\u{e0001}"),
    ],
)
def test_what_cannot_be_seen_is_spelled(text: str, shown: str) -> None:
    assert plain(text) == cell(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x" * CELL, "x" * CELL),
        ("x" * (CELL + 1), "x" * (CELL - 1) + "…"),
        ("x" * 65_535, "x" * (CELL - 1) + "…"),
        ("x" * (CELL - 3) + "\u202exx", "x" * (CELL - 3) + "…"),  # none is cut in two
    ],
)
def test_what_is_long_is_cut(text: str, shown: str) -> None:
    assert cell(text) == shown
    assert plain("x" * 1000) == "x" * 1000


def test_one_long_name_leaves_the_table_readable() -> None:
    long = "t/" * 500
    one = {"qos": 1, "bytes": 1, "stored": 0.0}
    text = retained.shown({"retained": [{"topic": long, **one}, {"topic": "a", **one}], "total": 2})
    assert max(map(len, text.splitlines())) < 2 * CELL
    assert long[: CELL - 1] + "… " in text
