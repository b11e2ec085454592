# SPDX-License-Identifier: Apache-2.0
"""Values of a decoded document as values of a Spark type.

Conversion is strict: a value of another type raises ValueError and is not guessed. None stays None for every type.
"""

import base64
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from typing import Any, Final

import orjson
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
    StructType,
    TimestampType,
)

from pyspark_mqtt_nats.decoders.digits import Digits, DigitsLost, has_double, text_of_decimal, whole

Convert = Callable[[Any], Any]

_BITS: Final[dict[type[DataType], int]] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}
_SECONDS_BELOW: Final = 1e11
"""A number below is a time in seconds since 1970; another one is in milliseconds."""

_MILLISECONDS_BELOW: Final = 1e14
_DIGITS: Final = Context(prec=38)
"""As many digits as a DECIMAL of Spark has at most."""

_LONG_LEAST: Final = -(1 << 63)
_LONG_MOST: Final = (1 << 64) - 1
"""Integers beyond these are none of orjson's."""

_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_UTC_Z

_NUMBER: Final = re.compile(r"\s*[+-]?(\d+(?:\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
"""Texts that are numbers; Python's own functions also take `1_000` and digits of other scripts."""

_FLOAT_MOST: Final = math.nextafter(2.0**128 - 2.0**103, 0.0)
"""Largest number that is rounded to one of FLOAT, and not to infinity."""


def converter(kind: DataType, from_text: bool = False, from_json: bool = False) -> Convert:
    """Return a function that converts a value to this type.

    `from_text`: numbers and flags are texts, as in CSV. `from_json`: the function raises DigitsLost for a value whose
    digits a double has lost, if the type needs them.
    """
    inner = _of_type(kind, from_text, from_json)

    def convert(value: Any) -> Any:
        if value is None or (from_text and value == "" and _empty_is_null(kind)):
            return None
        try:
            return inner(value)
        except (ValueError, TypeError, OverflowError, InvalidOperation):
            raise ValueError(f"expected {kind.simpleString().upper()}") from None

    return convert


def _empty_is_null(kind: DataType) -> bool:
    return kind.typeName() not in ("string", "binary")


def _of_type(kind: DataType, from_text: bool, from_json: bool) -> Convert:
    if type(kind) in _BITS:
        most = 1 << _BITS[type(kind)] - 1
        return lambda value: _whole(int(_numeric(value)) if from_text else value, most, from_json)
    if isinstance(kind, (DoubleType, FloatType)):
        most_real = _FLOAT_MOST if isinstance(kind, FloatType) else math.inf
        return lambda value: _real(float(_numeric(value)) if from_text else value, most_real)
    if isinstance(kind, DecimalType):
        return lambda value: _decimal(value, kind, from_json)
    if isinstance(kind, (ArrayType, MapType, StructType)):
        return _nested(kind, from_text, from_json)
    if isinstance(kind, BooleanType):
        return _flag_of_text if from_text else _flag
    simple: dict[type[DataType], Convert] = {BinaryType: _binary, DateType: _date, TimestampType: _timestamp}
    return simple.get(type(kind), _text_of_json if from_json else text_of)


def _nested(kind: ArrayType | MapType | StructType, from_text: bool, from_json: bool) -> Convert:
    if isinstance(kind, ArrayType):
        element = converter(kind.elementType, from_text, from_json)
        return lambda value: [element(one) for one in _instance(value, (list, tuple))]
    if isinstance(kind, MapType):
        item = converter(kind.valueType, from_text, from_json)
        return lambda value: [(key_of(key), item(one)) for key, one in _instance(value, (dict,)).items()]
    fields = {field.name: converter(field.dataType, from_text, from_json) for field in kind.fields}
    return lambda value: {name: convert(_instance(value, (dict,)).get(name)) for name, convert in fields.items()}


def _instance(value: Any, kinds: tuple[type, ...]) -> Any:
    if not isinstance(value, kinds):
        raise ValueError("another type")
    return value


def _numeric(text: str) -> str:
    if _NUMBER.fullmatch(text) is None:
        raise ValueError("not a number")
    return text


def _whole(value: Any, most: int, from_json: bool) -> int:
    found: int = value if type(value) is int else whole(value, from_json)
    if not -most <= found < most:
        raise ValueError("not in range")
    return found


def _real(value: Any, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal, Digits)):
        raise ValueError("not a number")
    found = float(value)
    if not math.isfinite(found) or abs(found) > most:
        raise ValueError("not finite")
    return found


def _decimal(value: Any, kind: DecimalType, from_json: bool = False) -> Decimal:
    if from_json and isinstance(value, float):
        raise DigitsLost
    number = _number(value)
    before = kind.precision - kind.scale
    if not number.is_finite() or (number and number.adjusted() >= before):
        raise ValueError("too many digits")
    found = number.quantize(Decimal(1).scaleb(-kind.scale), ROUND_HALF_UP, _DIGITS)  # Spark rounds so
    if found and found.adjusted() >= before:  # rounding has added a digit
        raise ValueError("too many digits")
    return found


def _number(value: Any) -> Decimal:
    if isinstance(value, Decimal):
        return value
    if isinstance(value, Digits):
        return Decimal(value.text)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("not a number")
    return Decimal(_numeric(value) if isinstance(value, str) else str(value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def _flag_of_text(value: str) -> bool:
    text = value.strip().lower()
    return _flag({"true": True, "false": False}.get(text, text))


def _binary(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    return base64.b64decode(_instance(value, (str,)), validate=True)


def _date(value: Any) -> date:
    if isinstance(value, datetime):
        return value.date()
    return value if isinstance(value, date) else date.fromisoformat(_instance(value, (str,)))


def _timestamp(value: Any) -> datetime:
    if isinstance(value, Digits):
        value = float(value)
    if isinstance(value, str):
        value = datetime.fromisoformat(value.strip())
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MILLISECONDS_BELOW:
        seconds = value if abs(value) < _SECONDS_BELOW else value / 1000
        value = datetime.fromtimestamp(seconds, UTC)
    found: datetime = _instance(value, (datetime,))
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def key_of(value: Any) -> str:
    """Return the key of a map as text, as JSON has it."""
    return value if isinstance(value, str) else text_of(value)


def text_of(value: Any) -> str:
    """Return a value as text: a text as it is, a number by all its digits, anything else as JSON.

    Bytes are in base64, and NaN and infinity are null. Raises ValueError for what JSON cannot hold.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Decimal):
        return text_of_decimal(value)
    try:
        try:
            return orjson.dumps(value, _plain, _OPTIONS).decode()
        except orjson.JSONEncodeError:  # perhaps of an integer of more than 64 bits
            return orjson.dumps(_with_long_integers(value), _plain, _OPTIONS).decode()
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise ValueError(f"no JSON can hold it: {error}") from None


def _text_of_json(value: Any) -> str:
    if isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)  # it has at most 64 bits: longer ones are doubles or Digits
    if has_double(value):
        raise DigitsLost
    return text_of(value)


def _with_long_integers(value: Any) -> Any:
    """Return a value for orjson, which takes integers of more than 64 bits as text of JSON only."""
    if isinstance(value, int) and not _LONG_LEAST <= value <= _LONG_MOST:
        return orjson.Fragment(str(value))
    if isinstance(value, Mapping):
        return {_long_key(key): _with_long_integers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_with_long_integers(one) for one in value]
    return value


def _long_key(key: Any) -> Any:
    return str(key) if isinstance(key, int) and not _LONG_LEAST <= key <= _LONG_MOST else key


def json_of(value: Any) -> str:
    """Return a document as JSON text, a text in quotes; raises ValueError."""
    if not isinstance(value, str):
        return text_of(value)
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:  # of half of a character
        raise ValueError(f"no JSON can hold it: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return text_of_decimal(value)
    if isinstance(value, Digits):
        return orjson.Fragment(value.text)
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if hasattr(value, "items"):
        return dict(value.items())
    return str(value)
