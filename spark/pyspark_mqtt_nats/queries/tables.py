# SPDX-License-Identifier: Apache-2.0
"""The result of a query as lines of text.

What is shown has been published by strangers: characters that a terminal would act on are replaced.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import orjson
from pyspark.sql.types import NumericType, StructType

CELL_MOST: Final = 60
"""Characters of a value that are shown."""

_GAP: Final = "  "
"""Between two columns."""


def table(schema: StructType, rows: Sequence[Any], heading: bool = True, width: int | None = None) -> list[str]:
    """Return rows as lines, their columns as wide as necessary; numbers are on the right.

    Args:
        width: columns of the terminal. A row that has no place on a line of it becomes a line for each column.
    """
    names = [cell(name) for name in schema.names]
    cells = [[cell(value) for value in row] for row in rows]
    shown = [names, *cells] if heading else cells
    if not shown or not names:
        return []
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    if width is not None and cells and sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        return _records(names, cells)
    right = [isinstance(field.dataType, NumericType) for field in schema.fields]
    return [
        _GAP.join(
            text.rjust(size) if number else text.ljust(size)
            for text, size, number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in shown
    ]


def _records(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with a name and a value, an empty line after each row."""
    most = max(map(len, names))
    return [line for row in rows for line in (*map(f"{{:{most}}}{_GAP}{{}}".format, names, row), "")]


def cell(value: Any) -> str:
    """Return a value as one line of at most CELL_MOST characters; "-" for null."""
    text = _text(value)
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return text if len(text) <= CELL_MOST else f"{text[: CELL_MOST - 1]}…"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, (bytes, bytearray)):
        return _bytes(bytes(value))
    if isinstance(value, (list, dict, tuple)):
        return orjson.dumps(_plain(value), default=str).decode()
    return str(value)


def _bytes(value: bytes) -> str:
    """Return bytes as text when they are printable UTF-8, else in hexadecimal."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"0x{value[:CELL_MOST].hex()}"
    return text if text.isprintable() else f"0x{value[:CELL_MOST].hex()}"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "asDict"):
        return {name: _plain(item) for name, item in value.asDict().items()}
    if isinstance(value, dict):
        return {_text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return _bytes(bytes(value)) if isinstance(value, (bytes, bytearray)) else value
