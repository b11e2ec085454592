# SPDX-License-Identifier: Apache-2.0
"""Columns written as DDL, such as `celsius DOUBLE, tags ARRAY<STRING>`, as Spark types.

Spark parses DDL in the JVM only. The process in which Spark makes a data source has no connection to the JVM.
"""

import re
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_SIMPLE: Final[dict[str, DataType]] = {
    "BOOLEAN": BooleanType(),
    "TINYINT": ByteType(),
    "SMALLINT": ShortType(),
    "INT": IntegerType(),
    "INTEGER": IntegerType(),
    "BIGINT": LongType(),
    "LONG": LongType(),
    "FLOAT": FloatType(),
    "DOUBLE": DoubleType(),
    "STRING": StringType(),
    "BINARY": BinaryType(),
    "DATE": DateType(),
    "TIMESTAMP": TimestampType(),
}
_TOKEN: Final = re.compile(r"\s*(?:`([^`]+)`|(\w+)|([<>,:()]))")
_DEPTH: Final = 32
"""Most types within each other."""

_PRECISION_MOST: Final = 38


def columns_of(text: str) -> StructType:
    """Parse DDL; raises ValueError for what is no list of names with types."""
    parser = _Parser(text)
    found = parser.fields("")
    parser.expect("")
    return found


class _Parser:
    """Recursive descent over the tokens of a DDL text; a name in backticks is never a keyword."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, bool]] = []
        at = 0
        text = text.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"unexpected {text[at : at + 20]!r}")
            quoted, word, sign = match.groups()
            self._tokens.append((quoted or word or sign, sign is None))
            at = match.end()
        self._depth = 0

    def _next(self) -> tuple[str, bool]:
        return self._tokens.pop(0) if self._tokens else ("", False)

    def _has(self, sign: str) -> bool:
        """Take the sign if it is next."""
        if self._tokens and self._tokens[0] == (sign, False):
            self._tokens.pop(0)
            return True
        return False

    def expect(self, sign: str) -> None:
        """Take the sign; "" is the end of the text."""
        found, _ = self._next()
        if found != sign:
            raise ValueError(f"expected {sign or 'the end'!r}, not {found or 'the end'!r}")

    def fields(self, end: str) -> StructType:
        """Names with types, separated by commas, before the sign `end`."""
        found: list[StructField] = []
        while True:
            name, is_word = self._next()
            if not is_word:
                raise ValueError(f"expected the name of a column, not {name or 'the end'!r}")
            if end:
                self._has(":")
            if any(field.name.lower() == name.lower() for field in found):
                raise ValueError(f"the column {name!r} is there twice")
            found.append(StructField(name, self._type()))
            if not self._has(","):
                return StructType(found)

    def _type(self) -> DataType:
        name, is_word = self._next()
        kind = name.upper() if is_word else ""
        if kind in _SIMPLE:
            return _SIMPLE[kind]
        self._depth += 1
        if self._depth > _DEPTH:
            raise ValueError("types are nested too deeply")
        found: DataType
        if kind == "DECIMAL":
            return self._decimal()
        if kind == "ARRAY":
            self.expect("<")
            found = ArrayType(self._type())
        elif kind == "MAP":
            self.expect("<")
            if not isinstance(key := self._type(), StringType):
                raise ValueError(f"a MAP has keys of type STRING, not {key.simpleString().upper()}")
            self.expect(",")
            found = MapType(key, self._type())
        elif kind == "STRUCT":
            self.expect("<")
            found = self.fields(">")
        else:
            raise ValueError(
                f"there is no type {name or 'the end'!r} here; there are {', '.join(_SIMPLE)}, DECIMAL, "
                "ARRAY, MAP and STRUCT"
            )
        self.expect(">")
        self._depth -= 1
        return found

    def _decimal(self) -> DecimalType:
        self._depth -= 1
        if not self._has("("):
            return DecimalType(10, 0)
        numbers = [self._next()[0]]
        if self._has(","):
            numbers.append(self._next()[0])
        self.expect(")")
        if not all(number.isdecimal() for number in numbers):
            raise ValueError("expected a type such as DECIMAL(10, 2)")
        precision, scale = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0
        if not (1 <= precision <= _PRECISION_MOST and scale <= precision):
            raise ValueError(f"expected a DECIMAL of at most {_PRECISION_MOST} digits")
        return DecimalType(precision, scale)
