# SPDX-License-Identifier: Apache-2.0
"""Numbers with all their digits.

orjson makes a double of each JSON number that is no integer of 64 bits. Most columns need no more. Where one does, its
converter raises `DigitsLost`, and the payload is read again by the standard library, more slowly, as `Digits`.
"""

import json
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, Inexact, InvalidOperation, Overflow
from typing import Any, Final

DECIMAL_BYTES_MOST: Final = 1024
"""Bytes of a binary decimal: to make a Decimal of more takes a time that grows with their square."""

ALL_DIGITS: Final = Context(prec=MAX_PREC, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[InvalidOperation, Inexact, Overflow])
"""In it no decimal is rounded."""

_EXACT_BELOW: Final = float(1 << 53)
"""Each whole number below is a double."""

_INT_DIGITS: Final = 18
"""An integer of so many characters has at most 64 bits."""

_PLAIN_SCALE: Final = 38
"""Most decimals of a number that is written without an exponent: as many as a DECIMAL of Spark has."""


class DigitsLost(Exception):
    """A value is a double, or has one in it, and its column needs the digits of the payload."""


class Digits:
    """A number of a JSON document, as it is written there."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __float__(self) -> float:
        return float(self.text)


def read_digits(payload: bytes) -> Any:
    """Return a JSON document whose numbers are Digits, short integers apart; raises ValueError, RecursionError."""
    return _DECODER.decode(payload.decode())


def has_double(value: Any) -> bool:
    """Whether a value of a JSON document is a double, or has one in it."""
    rest = [value]  # no recursion: a stranger's document may be deep
    for one in rest:
        kind = type(one)
        if kind is float:
            return True
        if kind is list:
            rest += one
        elif kind is dict:
            rest += one.values()
    return False


def whole(value: Any, from_json: bool = False) -> int:
    """Return a number without fraction as an int.

    Raises ValueError for another value, and with `from_json` DigitsLost for a double that stands for several integers.
    """
    if isinstance(value, float) and value.is_integer():
        if from_json and not -_EXACT_BELOW < value < _EXACT_BELOW:
            raise DigitsLost
        return int(value)
    if isinstance(value, Digits):
        short = float(value)
        return whole(short if abs(short) < _EXACT_BELOW else Decimal(value.text))
    if isinstance(value, Decimal) and value.is_finite() and (not value or value.adjusted() < 20):
        found = int(value)
        if value == found:
            return found
    raise ValueError("not a whole number")


def text_of_decimal(value: Decimal) -> str:
    """Return all digits of a decimal; without an exponent unless there would be zeros without end."""
    exponent = value.as_tuple().exponent
    plain = isinstance(exponent, int) and -_PLAIN_SCALE <= exponent <= 0
    return format(value, "f") if plain else str(value)


def _integer(text: str) -> int | Digits:
    return int(text) if len(text) <= _INT_DIGITS else Digits(text)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_float=Digits, parse_int=_integer, parse_constant=_refuse)
