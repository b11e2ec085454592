# SPDX-License-Identifier: Apache-2.0
"""Values of columns of type DECIMAL, and texts that are numbers."""

from __future__ import annotations

import re
import time

import pytest
from pyspark.sql.types import DataType, DecimalType, DoubleType, IntegerType

from pyspark_mqtt_nats.decoders import conversion
from pyspark_mqtt_nats.decoders.columns import NUMBER


@pytest.mark.parametrize(
    ("value", "precision", "scale", "expected"),
    [
        ("9" * 38, 38, 0, "9" * 38),
        ("12345678901234567890.1", 38, 10, "12345678901234567890.1000000000"),
        ("9.94", 3, 1, "9.9"),
        (0, 3, 3, "0.000"),
        ("99.99", 3, 1, None),
        ("100", 3, 1, None),
        ("1e400", 38, 0, None),
    ],
)
def test_a_decimal_has_as_many_digits_as_its_type(
    value: object, precision: int, scale: int, expected: str | None
) -> None:
    """Also after it is rounded; one that has more is an error of its message, and not of the query."""
    if expected is None:
        with pytest.raises(ValueError, match="too many digits"):
            conversion._decimal(value, DecimalType(precision, scale))
    else:
        assert str(conversion._decimal(value, DecimalType(precision, scale))) == expected


@pytest.mark.parametrize("kind", [IntegerType(), DoubleType(), DecimalType(6, 2)])
@pytest.mark.parametrize("text", ["1_000", "\u0661", "nan", "0x1", "--1", "1 0"])
def test_what_is_no_number_in_a_csv(kind: DataType, text: str) -> None:
    """Python's own functions take the first two for numbers."""
    with pytest.raises(ValueError, match="expected "):
        conversion.converter(kind, from_text=True)(text)
    assert conversion.converter(kind, from_text=True)(" +12 ") == 12


def test_many_digits_that_are_no_number_are_refused_at_once() -> None:
    """A search that tries each way to divide the digits takes hours."""
    text = "1" * 1_000_000 + "x"
    started = time.process_time()
    with pytest.raises(ValueError, match="expected DECIMAL"):
        conversion.converter(DecimalType(6, 2), from_text=True)(text)
    assert re.match(NUMBER.replace(r"\z", r"\Z"), text) is None  # Java searches as Python does
    assert time.process_time() - started < 5
