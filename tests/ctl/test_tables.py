# SPDX-License-Identifier: Apache-2.0
"""Names in tables: on one line, not wider than a screen, and nothing in them that cannot be seen."""

import pytest

from mqtt_nats.base.logs import plain
from mqtt_nats.ctl.commands import retained
from mqtt_nats.ctl.tables import CELL, WIDTH, cell, quantity, table

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


HEADING = ["client", "gateway", "from", "subs"]
ROWS = [["lamp-1", "T2k9ZpQa", "10.0.0.7:51812", "12"], ["x" * 40, "T2k9ZpQa", "10.0.0.7:1", "3"]]


@pytest.mark.parametrize(
    ("width", "shown", "hidden"),
    [
        (0, HEADING, ""),
        (80, HEADING, ""),
        (70, ["client", "gateway", "subs"], "from"),
        (52, ["client", "gateway"], "from, subs"),
        (30, ["client", "gateway"], "from, subs"),
    ],
)
def test_a_table_fits_the_terminal(width: int, shown: list[str], hidden: str) -> None:
    token = WIDTH.set(width)
    try:
        lines = table(HEADING, ROWS, "from, subs")
    finally:
        WIDTH.reset(token)
    assert lines[0].split() == shown
    assert lines[3:] == ([f"--wide also shows: {hidden}"] if hidden else [])
    assert max(map(len, lines[:3])) <= (width or 80)
    assert lines[1].startswith("lamp-1 ")
    assert ("…" in lines[2]) == (width == 30)


def test_an_empty_table_says_so() -> None:
    assert table(HEADING, []) == ["none"]
    assert table(HEADING, [], none="no clients") == ["no clients"]


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (300 << 20, "300 MiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_bytes_have_the_units_of_the_settings(size: int, shown: str) -> None:
    assert quantity(size) == shown


def test_one_long_name_leaves_the_table_readable() -> None:
    long = "t/" * 500
    one = {"qos": 1, "bytes": 1, "stored": 0.0}
    text = retained.shown({"retained": [{"topic": long, **one}, {"topic": "a", **one}], "total": 2})
    assert max(map(len, text.splitlines())) < 2 * CELL
    assert long[: CELL - 1] + "… " in text
