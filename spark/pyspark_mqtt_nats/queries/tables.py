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


def table(schema: StructType, rows: Sequence[Any], heading: bool = True) -> list[str]:
    """Return rows as lines, their columns as wide as necessary; numbers are on the right."""
    cells = [[cell(value) for value in row] for row in rows]
    if heading:
        cells.insert(0, [cell(name) for name in schema.names])
    if not cells or not schema.names:
        return []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [isinstance(field.dataType, NumericType) for field in schema.fields]
    return [
        "  ".join(
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]


def cell(value: Any) -> str:
    """Return a value as one line of at most CELL_MOST characters; "-" for null."""
    text = _text(value)
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return text if len(text) <= CELL_MOST else f"{text[: CELL_MOST - 1]}…"


def _text(value: Any) -> str:
    if value is None:
        return "-"
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
