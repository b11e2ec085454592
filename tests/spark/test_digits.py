# SPDX-License-Identifier: Apache-2.0
"""Digits of numbers: fields of JSON beside Spark's `from_json`, and the formats that have long numbers."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Context, Decimal
from typing import Any, Final

import cbor2
import msgpack
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pyspark_mqtt_nats.decoders.avro import reader_of
from pyspark_mqtt_nats.decoders.conversion import json_of
from pyspark_mqtt_nats.decoders.digits import Digits, DigitsLost, whole
from pyspark_mqtt_nats.decoders.formats import Format, exact_json, reader
from tests.spark.test_avro import encoded
from tests.spark.test_decoders import decode, one
from tests.spark.test_sparkplug import field

TYPES: Final = (
    *("TINYINT", "SMALLINT", "INT", "BIGINT", "DOUBLE", "FLOAT", "STRING"),
    *("DECIMAL(5,0)", "DECIMAL(10,2)", "DECIMAL(20,2)", "DECIMAL(38,0)", "DECIMAL(38,18)", "DECIMAL(38,38)"),
)
LIMITS: Final = [
    sign * (1 << bits) + more
    for bits in (7, 8, 15, 16, 31, 32, 53, 63, 64, 127, 128)
    for sign in (-1, 1)
    for more in (-1, 0, 1)
]
INTEGERS: Final = [
    *("0", "-0", "1", "-1", "10", "100000000", *map(str, LIMITS)),
    *(sign + "9" * digits for digits in (5, 8, 18, 19, 20, 36, 37, 38, 39, 76, 300, 400) for sign in ("", "-")),
    *("89490200001234567890", "12345678901234567890123456789012345678", "1" + "0" * 37, "1" + "0" * 38),
]
FRACTIONS: Final = [
    *("0.0", "-0.0", "0.00", "1.50", "-1.50", "5.0", "5.5", "0.1", "0.10", "1.005", "2.675", "0.30000000000000004"),
    *("0.125", "-0.125", "0.135", "0.145", "0.115", "0.005", "-0.005", "0.0049", "0.995", "0.5", "-0.5", "1.5", "2.5"),
    *("0.124999999999999999999999", "0.125000000000000000000001", "0.49999999999999999999", "0.99999999999999999999"),
    *("123456789012345678.99", "-123456789012345678.99", "123456789012345678.985", "123456789012345678.984999"),
    *("99999.4", "99999.5", "-99999.5", "99999999.994", "99999999.995", "-99999999.995", "999999999999999999.995"),
    *("9007199254740993.0", "9223372036854775807.0", "9223372036854775808.0", "1234567890.0987654321"),
    *("12345678901234567890.123456789012345678", "12345678901234567890.1234567890123456785"),
    *(
        "0." + "0" * 17 + "1",
        "0." + "0" * 17 + "5",
        "0." + "0" * 18 + "5",
        "0." + "0" * 37 + "1",
        "0." + "0" * 40 + "1",
    ),
    *("0." + "9" * 38, "0." + "9" * 39, "0.5" + "0" * 60, "3.14159265358979323846264338327950288419716939937510"),
    *("1.00000017881393432617187499", "16777217.0", "3.4028234663852886", "20.5", "21.25", "-273.15"),
]
EXPONENTS: Final = [
    *("1e0", "1E0", "1e1", "1e3", "1E+3", "1e-3", "-1e-3", "1.5e1", "1.25e-1", "12.5e-2", "5e-1", "5e-3", "4.9e-3"),
    *(
        "1e4",
        "1e5",
        "1e7",
        "1e8",
        "1e18",
        "1e19",
        "1e37",
        "1e38",
        "9.99e37",
        "1e-18",
        "5e-19",
        "1e-38",
        "4e-39",
        "5e-39",
    ),
    *(
        "1e39",
        "-1e39",
        "3.4028235e38",
        "-3.4028235e38",
        "3.4028236e38",
        "1.4e-45",
        "4.9e-324",
        "1e-400",
        "0e400",
        "0e5",
    ),
    *(
        "1.7976931348623157e308",
        "1.7976931348623159e308",
        "1e309",
        "-1e309",
        "1e999",
        "1e9999999999",
        "00",
        "007",
        "-01",
    ),
]
OTHERS: Final = [
    *("null", "true", "false", '"1.5"', '"-1.5"', '"0.125"', '"89490200001234567890"', '"1e3"', '"+5"', '".5"', '"5."'),
    *('""', '"x"', '" 1 "', '"1,5"', '"0x10"', '"NaN"', '"Infinity"', '"1e400"', '"007"', '"-0"', '"true"', '"null"'),
    *("[]", "[1]", "{}", '{"b":1}', '["x",null,true]', "[1.5]", "[1.50]", '{"b":[1e3,123456789012345678901.5]}'),
    *("1.", ".5", "+1", "NaN", "Infinity", "-", "1e", "0x10", "1_000", "--1", "1 2"),
]
VALUES: Final = list(dict.fromkeys([*INTEGERS, *FRACTIONS, *EXPONENTS, *OTHERS]))


BITS: Final = {"TINYINT": 8, "SMALLINT": 16, "INT": 32, "BIGINT": 64}


def number(text: str) -> Decimal | None:
    """The number that a JSON value is; None for another value."""
    try:
        found = json.loads(text, parse_float=Decimal, parse_int=Decimal, parse_constant=lambda _: None)
    except (ValueError, ArithmeticError):
        return None
    return found if isinstance(found, Decimal) else None


def is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def is_whole(kind: str, text: str) -> bool:
    return kind in BITS and not is_integer(text) and number(text) is not None and float(text).is_integer()


def integer(kind: str, text: str) -> int | None:
    """The integer that a number with a point or an exponent is."""
    exact = Decimal(text if abs(float(text)) >= 2**53 else float(text))
    inside = -(1 << BITS[kind] - 1) <= exact < 1 << BITS[kind] - 1
    return int(exact) if inside and exact == int(exact) else None


def beyond(kind: str, text: str) -> bool:
    if number(text) is None:
        return text.strip('"') in ("NaN", "Infinity")
    return abs(float(text)) >= (3.4028236e38 if kind == "FLOAT" else float("inf"))


@dataclass(frozen=True)
class Difference:
    """Where a column differs from `from_json` on purpose: why, of which types and values, and what it has there."""

    reason: str
    holds: Callable[[str, str], bool]
    ours: Callable[[str, str], Any] = lambda *_: None


DIFFERENCES: Final = {
    "a point in an integer": Difference(
        "5.0 and 1e3 are whole numbers; from_json takes neither a point nor an exponent. Below 2**53 the double "
        "counts: 0.99999999999999999999 is 1",
        is_whole,
        integer,
    ),
    "beyond TINYINT": Difference(
        "out of range is an error; from_json makes -128 of 128",
        lambda kind, text: kind == "TINYINT" and is_integer(text) and 128 <= int(text) <= 255,
    ),
    "a number as text": Difference(
        "it has the digits of the payload; from_json writes a double, such as 1.2345678901234568E17 or 1000.0",
        lambda kind, text: kind == "STRING" and number(text) is not None and not is_integer(text),
        lambda _, text: text,
    ),
    "numbers in a list as text": Difference(
        "they have the digits of the payload, too",
        lambda kind, text: kind == "STRING" and text[0] in "[{" and "." in text,
        lambda _, text: text,
    ),
    "no finite number": Difference(
        "a number beyond DOUBLE or FLOAT is an error, and so is a text; from_json makes infinity and NaN of them",
        lambda kind, text: kind in ("DOUBLE", "FLOAT") and beyond(kind, text),
    ),
    "no JSON": Difference(
        "NaN and Infinity are no JSON; from_json makes a text in quotes of them",
        lambda kind, text: kind == "STRING" and text in ("NaN", "Infinity"),
    ),
    "rounded twice": Difference(
        "a FLOAT is rounded from the double; from_json rounds the text, and rarely gets the neighbour",
        lambda kind, text: kind == "FLOAT" and text == "1.00000017881393432617187499",
        lambda *_: 1.000000238418579,
    ),
    "spaces in a text": Difference(
        "a text for DECIMAL may have spaces around it, as in CSV",
        lambda kind, text: kind.startswith("DECIMAL") and text == '" 1 "',
        lambda kind, _: None if kind == "DECIMAL(38,38)" else Decimal(1),
    ),
    "commas in a text": Difference(
        "a text with a comma is no number; from_json leaves the comma out, and makes 15 of 1,5",
        lambda kind, text: kind.startswith("DECIMAL") and text == '"1,5"',
    ),
}


@pytest.fixture(scope="module")
def control(spark: SparkSession) -> dict[str, list[Any]]:
    """What Spark's `from_json` makes of all values, by type."""
    rows = [(place, f'{{"a": {text}}}') for place, text in enumerate(VALUES)]
    df = spark.createDataFrame(rows, "place INT, text STRING").coalesce(1)
    found = df.select("place", *(F.from_json("text", f"a {kind}").getField("a") for kind in TYPES)).collect()
    ordered = sorted(found, key=lambda row: int(row[0]))
    return {kind: [row[column] for row in ordered] for column, kind in enumerate(TYPES, 1)}


def ours(kind: str) -> list[Any]:
    return [row["a"] for row in decode(f"a {kind}", *(b'{"a": %b}' % text.encode() for text in VALUES))]


@pytest.mark.parametrize("kind", TYPES)
def test_a_field_of_json_is_what_from_json_makes_of_it(kind: str, control: dict[str, list[Any]]) -> None:
    wrong = []
    for text, mine, sparks in zip(VALUES, ours(kind), control[kind], strict=True):
        named = [one for one in DIFFERENCES.values() if one.holds(kind, text)]
        assert len(named) <= 1
        expected = named[0].ours(kind, text) if named else sparks
        same = mine == expected if isinstance(expected, Decimal) else repr(mine) == repr(expected)  # -0.0 is not 0.0
        if not same:
            wrong.append((text, mine, expected))
    assert not wrong


def test_each_difference_is_there(control: dict[str, list[Any]]) -> None:
    """A named difference that has gone from Spark, or from here, leaves the list."""
    for name, difference in DIFFERENCES.items():
        assert any(
            difference.holds(kind, text) and repr(difference.ours(kind, text)) != repr(sparks)
            for kind in TYPES
            for text, sparks in zip(VALUES, control[kind], strict=True)
        ), name


# -- documents --------------------------------------------------------------------------------

LONG: Final = "123456789012345678.99"


def test_each_column_of_a_payload_that_is_read_again() -> None:
    typed = (
        "d DECIMAL(20, 2), s STRING, n INT, big BIGINT, x DOUBLE, at TIMESTAMP, ok BOOLEAN, raw BINARY, "
        "list ARRAY<DECIMAL(20, 2)>, map MAP<STRING, STRING>, inner STRUCT<n: BIGINT, s: STRING>"
    )
    text = (
        f'{{"d": {LONG}, "s": 89490200001234567890, "n": 5.0, "big": 9007199254740993.0, "x": {LONG}, '
        f'"at": 1767312000.5, "ok": true, "raw": "/w==", "list": [{LONG}, 1, null], '
        f'"map": {{"k": {LONG}, "t": "1.50"}}, "inner": {{"n": 5, "s": [1.50, 89490200001234567890]}}}}'
    )
    assert one(typed, text.encode()) == {
        "d": Decimal(LONG),
        "s": "89490200001234567890",
        "n": 5,
        "big": 9007199254740993,
        "x": 123456789012345680.0,
        "at": datetime(2026, 1, 2, microsecond=500_000, tzinfo=UTC),
        "ok": True,
        "raw": b"\xff",
        "list": [Decimal(LONG), Decimal("1.00"), None],
        "map": [("k", LONG), ("t", "1.50")],
        "inner": {"n": 5, "s": "[1.50,89490200001234567890]"},
        "decode_error": None,
    }


def test_what_does_not_fit_in_a_payload_that_is_read_again() -> None:
    for kind, text in (
        ("BOOLEAN", "1.5"),
        ("BINARY", "1.5"),
        ("DATE", "1.5"),
        ("TIMESTAMP", "123456789012345678901"),
        ("BIGINT", "-9223372036854775809"),
        ("BIGINT", "9007199254740993.5"),
        ("ARRAY<INT>", "1.5"),
        ("DECIMAL(38,0)", "1e9999999999999999999999"),
    ):
        row = one(f"s STRING, b {kind}", f'{{"s": 1.50, "b": {text}}}'.encode())
        assert row == {"s": "1.50", "b": None, "decode_error": f"json: b: expected {kind}"}


def test_a_number_beyond_double_is_an_error_of_its_field() -> None:
    long = "7" * 5000
    assert one("x DOUBLE, n INT", b'{"x": 1e999, "n": 7}') == {
        "x": None,
        "n": 7,
        "decode_error": "json: x: expected DOUBLE",
    }
    assert one("s STRING", f'{{"s": {long}}}'.encode())["s"] == long
    assert one("s STRING", f'{{"s": [{long}]}}'.encode())["s"] == f"[{long}]"
    assert one("json", f"[{long}, 1e999]".encode()) == {"json": f"[{long}, 1e999]", "decode_error": None}


@pytest.mark.parametrize(
    "payload",
    [
        b'{"x": 1e999, "s": "\\ud800"}',
        b'{"x": 1e999, "\\udfff": 1}',
        b'"\\ud800"',
        b'["\\ud800"]',
        b'{"x": 1e999, "s": "\xff"}',
        b'{"x": 1e999, "s": "\n"}',
        b'{"x": 1e999, "s": NaN}',
        b'{"x": 1e999, "s": 007}',
        b'{"x": 1e999}1',
        b'\xef\xbb\xbf{"x": 1e999}',
        b'{"x": 1e999, "s": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    ],
)
def test_what_is_no_json_beside_a_number_beyond_double(payload: bytes) -> None:
    """The standard library takes some of them."""
    with pytest.raises(orjson.JSONDecodeError) as told:
        orjson.loads(payload)
    for decoder in ("json", "x STRING"):
        row = one(decoder, payload)
        assert row["decode_error"] == f"json: {told.value}"
        assert set(row.values()) == {None, row["decode_error"]}


def test_deep_documents_with_a_number() -> None:
    for depth in (100, 900, 1000, 1020):
        row = one("s STRING, n INT", b'{"n": 1, "s": ' + b"[" * depth + b"1.50" + b"]" * depth + b"}")
        assert row["s"] is not None or row["decode_error"].startswith("json: ")


@pytest.mark.parametrize(
    "typed", ["x DOUBLE, n BIGINT", "x FLOAT, s STRING", "s STRING, l STRING, n DECIMAL(10,2)", "m MAP<STRING, DOUBLE>"]
)
def test_payloads_are_read_once_where_no_column_needs_more_digits(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(payload: bytes) -> Any:
        raise AssertionError("read again")

    monkeypatch.setattr("pyspark_mqtt_nats.decoders.columns.exact_json", never)
    payload = b'{"x": 1.5, "n": 5, "s": "1.5", "l": [1, "x"], "m": {"k": 1.5}, "more": 123456789012345678.99}'
    assert one(typed, payload)["decode_error"] is None


JSON: Final = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def doubles(value: Any) -> Any:
    """A document whose numbers are as orjson has them."""
    if isinstance(value, dict):
        return {key: doubles(item) for key, item in value.items()}
    if isinstance(value, list):
        return [doubles(item) for item in value]
    if isinstance(value, Digits):
        integer = is_integer(value.text) and -(2**63) <= int(value.text) < 2**64
        return int(value.text) if integer else float(value.text)
    return value


@given(JSON)
def test_a_document_that_is_read_again_is_the_same_document(value: Any) -> None:
    payload = json.dumps(value).encode()
    try:
        expected = orjson.loads(payload)
    except orjson.JSONDecodeError:  # half of a character
        return
    assert repr(doubles(exact_json(payload))) == repr(expected)


# -- other formats ----------------------------------------------------------------------------

ROUNDED: Final = "h DECIMAL(10,2), m DECIMAL(10,2), d DECIMAL(10,2)"
"""Columns of 0.125, -0.125 and 0.135."""


def test_doubles_are_rounded_half_up() -> None:
    document = {"h": 0.125, "m": -0.125, "d": 0.135}
    schema = {"type": "record", "name": "R", "fields": [{"name": name, "type": "double"} for name in document]}
    expected = {"h": Decimal("0.13"), "m": Decimal("-0.13"), "d": Decimal("0.14"), "decode_error": None}
    for decoder, payload in (
        ({"format": "json"}, json.dumps(document).encode()),
        ({"format": "csv"}, b"0.125,-0.125,0.135"),
        ({"format": "cbor"}, cbor2.dumps(document)),
        ({"format": "msgpack"}, msgpack.packb(document)),
        ({"format": "avro", "schema": json.dumps(schema)}, encoded(schema, document)),
    ):
        assert one(decoder | {"columns": ROUNDED}, payload) == expected
    metric = b"\x69" + struct.pack("<d", 0.125)  # field 13
    typed = {"format": "sparkplug", "columns": "metrics ARRAY<STRUCT<value: DECIMAL(10,2)>>"}
    assert one(typed, field(2, metric))["metrics"] == [{"value": Decimal("0.13")}]


def test_long_numbers_of_cbor() -> None:
    long, exact = 89490200001234567890123, Decimal("123456789012345678901234567890123456.78")
    document = {"n": long, "m": -long, "d": exact, "s": long, "t": exact, "w": Decimal("7.00"), "l": [long, {long: 1}]}
    typed = "n DECIMAL(38,0), m DECIMAL(38,2), d DECIMAL(38,2), s STRING, t STRING, w INT, l STRING"
    assert one({"format": "cbor", "columns": typed}, cbor2.dumps(document)) == {
        "n": Decimal(long),
        "m": Decimal(-long),
        "d": exact,
        "s": str(long),
        "t": str(exact),
        "w": 7,
        "l": f'[{long},{{"{long}":1}}]',
        "decode_error": None,
    }
    whole = one("cbor", cbor2.dumps({"n": long, "d": exact, "t": (-(2**64), 2**64 - 1)}))
    assert whole == {"json": f'{{"n":{long},"d":"{exact}","t":[{-(2**64)},{2**64 - 1}]}}', "decode_error": None}
    assert "4300 digits" in one("cbor", cbor2.dumps(10**5000))["decode_error"]
    assert one({"format": "cbor", "columns": "n BIGINT"}, cbor2.dumps({"n": 2**63}))["n"] is None


def test_bigfloats_of_cbor() -> None:
    """cbor2 calculates them, with 28 digits unless it is told otherwise."""
    typed = {"format": "cbor", "columns": "a DECIMAL(38,2), b DECIMAL(38,38), s STRING"}
    mantissa = 3 * 10**35 + 1
    document = {"a": cbor2.CBORTag(5, [-1, mantissa]), "b": cbor2.CBORTag(5, [-100, 1]), "s": cbor2.CBORTag(5, [70, 1])}
    assert one(typed, cbor2.dumps(document)) == {
        "a": Decimal(mantissa * 5).scaleb(-1, Context(prec=60)),
        "b": Decimal("0.00000000000000000000000000000078886091"),
        "s": str(2**70),
        "decode_error": None,
    }


@pytest.fixture
def read_cbor() -> Callable[[bytes], Any]:
    """The reader of CBOR."""
    return reader(Format("cbor"))


@pytest.mark.parametrize("tag", ["C5", "D805", "D90005", "DA00000005", "DB0000000000000005"])
def test_bigfloats_of_cbor_in_each_form(tag: str, read_cbor: Callable[[bytes], Any]) -> None:
    mantissa = 3 * 10**35 + 1
    found = read_cbor(bytes.fromhex(tag) + cbor2.dumps([-1, mantissa]))
    assert found == Decimal(mantissa * 5).scaleb(-1, Context(prec=60))
    assert read_cbor(bytes.fromhex(tag) + cbor2.dumps([-1074, 1])) == Decimal.from_float(5e-324)


@pytest.mark.parametrize("exponent", [1400, -1800, 10**6, -(10**6), 10**30, -(10**30), 0.5])
def test_bigfloats_of_cbor_beyond_all_doubles(exponent: float, read_cbor: Callable[[bytes], Any]) -> None:
    """An error, no other number, and no long calculation."""
    with pytest.raises(ValueError, match=r"\S"):
        read_cbor(cbor2.dumps([cbor2.CBORTag(5, [exponent, 3])] * 1000))


def test_decimals_of_cbor_of_too_many_bytes() -> None:
    read = reader(Format("cbor"))
    for tag in (4, 5):
        assert read(cbor2.dumps(cbor2.CBORTag(tag, [0, 10**300]))) == 10**300
        for parts in ([0, 1 << 8 * 1024], [1 << 8 * 1024, 0], [-5 * 10**18, 1], [0, 1.5], [0]):
            with pytest.raises(ValueError, match=r"\S"):
                read(cbor2.dumps(cbor2.CBORTag(tag, parts)))
    assert read(cbor2.dumps({Decimal("-1.50"): [Decimal("1E+500"), Decimal("0E-3")]})) == {
        Decimal("-1.50"): [Decimal("1E+500"), 0]
    }
    assert str(read(cbor2.dumps(Decimal("1.50")))) == "1.50"


def test_long_numbers_of_msgpack_and_sparkplug() -> None:
    most = 2**64 - 1
    typed = {"format": "msgpack", "columns": "n DECIMAL(20,0), s STRING"}
    assert one(typed, msgpack.packb({"n": most, "s": most})) == {"n": most, "s": str(most), "decode_error": None}
    columns = "metrics ARRAY<STRUCT<alias: DECIMAL(20,0), value: STRING>>"
    row = one({"format": "sparkplug", "columns": columns}, field(2, field(2, most) + field(11, most)))
    assert row["metrics"] == [{"alias": Decimal(most), "value": str(most)}]


def bytes_of(digits: str) -> bytes:
    value = int(digits)
    return value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)


@pytest.mark.parametrize(
    ("precision", "scale", "digits", "text"),
    [
        (38, 2, "12345678901234567890123456789012345678", "123456789012345678901234567890123456.78"),
        (38, 18, "0", "0.000000000000000000"),
        (38, 18, "-1", "-0.000000000000000001"),
        (4, 2, "150", "1.50"),
        (4, 2, "12345", "123.45"),  # more digits than the schema says: fastavro would round to 123.4
        (60, 1, "9" * 60, "9" * 59 + ".9"),
    ],
)
def test_decimals_of_avro(precision: int, scale: int, digits: str, text: str) -> None:
    logical = {"logicalType": "decimal", "precision": precision, "scale": scale}
    data = bytes_of(digits)
    for kind, size in (({"type": "bytes"}, 0), ({"type": "fixed", "name": "F", "size": 32}, 32)):
        record = {"type": "record", "name": "R", "fields": [{"name": "d", "type": kind | logical}]}
        bare = {"type": "record", "name": "R", "fields": [{"name": "d", "type": kind}]}
        value = int(digits).to_bytes(size, "big", signed=True) if size else data
        payload = encoded(bare, {"d": value})
        chosen = {"format": "avro", "schema": json.dumps(record)}
        assert one(chosen | {"columns": "d STRING"}, payload)["d"] == text
        assert one(chosen, payload)["json"] == f'{{"d":"{text}"}}'
        if len(digits) < 39:
            assert one(chosen | {"columns": f"d DECIMAL(38,{scale})"}, payload)["d"] == Decimal(text)


def test_half_of_a_character_is_no_json() -> None:
    with pytest.raises(ValueError, match="no JSON can hold it"):
        json_of("\ud800")
    assert json_of('"') == r'"\""'


FIXED: Final = {"type": "fixed", "name": "F", "size": 4, "logicalType": "decimal", "precision": 9, "scale": 2}


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31), 0, -1])
def test_each_fixed_decimal_of_avro_has_all_its_digits(value: int) -> None:
    """Four bytes hold some numbers of ten digits, and the precision of such a type is at most nine."""
    data = value.to_bytes(4, "big", signed=True)
    expected = Decimal(value).scaleb(-2)
    pair = [{"name": "a", "type": FIXED}, {"name": "b", "type": "F"}]
    assert reader_of(json.dumps(FIXED))(data) == expected
    assert reader_of(json.dumps(["null", FIXED]))(b"\x02" + data) == expected
    assert reader_of(json.dumps({"type": "array", "items": FIXED}))(b"\x02" + data + b"\0") == [expected]
    assert reader_of(json.dumps({"type": "record", "name": "R", "fields": pair}))(data + data) == {
        "a": expected,
        "b": expected,
    }
    node = [*pair, {"name": "next", "type": ["null", "N"]}]  # read by the reader in Python
    read = reader_of(json.dumps({"type": "record", "name": "N", "fields": node}))
    assert read(data + data + b"\0") == {"a": expected, "b": expected, "next": None}


@pytest.mark.parametrize("inside", [False, True])
def test_decimals_of_avro_of_too_many_bytes(inside: bool) -> None:
    logical = {"logicalType": "decimal", "precision": 4}
    for kind in ({"type": "bytes"}, {"type": "fixed", "name": "F", "size": 1025}):
        read = reader_of(json.dumps(["null", kind | logical] if inside else kind | logical))
        payload = encoded(kind, b"\x01" * 1025)
        with pytest.raises(ValueError, match="a decimal has 1025 bytes, and may have 1024"):
            read(b"\x02" + payload if inside else payload)
    most = reader_of(json.dumps({"type": "bytes"} | logical))(encoded("bytes", b"\x01" * 1024))
    assert most == int.from_bytes(b"\x01" * 1024, "big")


@pytest.mark.parametrize("kind", [{"type": "int"}, {"type": "string"}])
def test_a_logical_type_that_avro_ignores(kind: dict[str, str]) -> None:
    schema = kind | {"logicalType": "decimal", "precision": 3}
    assert one({"format": "avro", "schema": json.dumps(schema)}, b"\x02a" if kind["type"] == "string" else b"\x02")


def test_decimals_as_integers() -> None:
    for value in (Decimal("5.5"), Decimal("1e30"), Decimal("NaN"), Decimal("Infinity"), True, "5", None):
        with pytest.raises(ValueError, match="not a whole number"):
            whole(value)
    assert (whole(Decimal("5.0")), whole(Decimal("9007199254740993")), whole(2.0**60)) == (5, 9007199254740993, 2**60)
    assert (whole(Decimal("0E+999")), whole(Decimal("-0E-999"))) == (0, 0)
    with pytest.raises(DigitsLost):
        whole(2.0**53, from_json=True)
