# SPDX-License-Identifier: Apache-2.0
"""Records of Avro without a header. Their bytes are a stranger's, so a few of them must not take a process down.

fastavro's compiled reader calls itself for each level of a record and does not count the levels: some thousand bytes of
a type that contains itself overflow the stack. For such schemas the reader in Python is used, which counts. An array
whose items take no bytes has as many items as its first bytes say: such schemas are refused.
"""

import io
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

import orjson

from pyspark_mqtt_nats.decoders.digits import ALL_DIGITS, DECIMAL_BYTES_MOST

_EMPTY: Final = "null"
"""The primitive type whose values take no bytes."""

_EXACT: Final = "exact-decimal"
"""Logical type that decimals get: fastavro's own reader rounds to the precision that the schema says."""


def reader_of(schema: str) -> Callable[[bytes], Any]:
    """Return a function that reads one record; raises ValueError for a text that is no schema, or a refused one."""
    parsed = _parsed(schema)
    types = _Types()
    types.may_be_empty(parsed)
    _register()
    if types.recursive:
        from fastavro._read_py import schemaless_reader
    else:
        from fastavro import schemaless_reader

    def read(payload: bytes) -> Any:
        rest = io.BytesIO(payload)
        value = schemaless_reader(rest, parsed, None)
        if rest.read(1):
            raise ValueError("bytes follow the record")
        return value

    return read


def _parsed(schema: str) -> Any:
    """Return a schema as fastavro has it; raises ValueError."""
    import fastavro

    try:
        return _unrounded(fastavro.parse_schema(orjson.loads(schema)))
    except KeyError as error:
        raise ValueError(f"the schema is not one of Avro: a type has no {error}") from None
    except Exception as error:  # fastavro raises TypeError and errors of its own
        raise ValueError(f"the schema is not one of Avro: {' '.join(str(error).split())}") from None


def _unrounded(schema: Any) -> Any:
    """Return a parsed schema with which fastavro keeps all digits of a decimal."""
    if isinstance(schema, list):
        return [_unrounded(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _unrounded(value) for key, value in schema.items()}
    if found.get("logicalType") == "decimal" and found.get("type") in ("bytes", "fixed"):
        found["logicalType"] = _EXACT
    return found


def _register() -> None:
    from fastavro.read import LOGICAL_READERS

    for kind in ("bytes", "fixed"):
        LOGICAL_READERS[f"{kind}-{_EXACT}"] = _exact


def _exact(data: bytes, schema: Any, _: Any = None) -> Decimal:
    """Return a decimal with all its digits; raises ValueError for one of too many bytes."""
    if len(data) > DECIMAL_BYTES_MOST:
        raise ValueError(f"a decimal has {len(data)} bytes, and may have {DECIMAL_BYTES_MOST}")
    return Decimal(int.from_bytes(data, "big", signed=True)).scaleb(-schema.get("scale", 0), ALL_DIGITS)


class _Types:
    """The types of a parsed schema: whether one contains itself, and whether an array can have items without bytes."""

    def __init__(self) -> None:
        self.recursive = False
        self._named: dict[str, bool | None] = {}  # name -> whether its values may take no bytes; None: being looked at

    def may_be_empty(self, schema: Any) -> bool:
        """Whether a value of the type may take no bytes; raises ValueError for an array of such values."""
        if isinstance(schema, str):
            if schema in self._named and self._named[schema] is None:
                self.recursive = True
            # A value of a type that contains itself ends by a union, an array or a map, which take a byte.
            return bool(self._named.get(schema, schema == _EMPTY))
        if isinstance(schema, list):  # of a union
            for branch in schema:
                self.may_be_empty(branch)
            return False
        kind = schema["type"]
        if kind == "array" and self.may_be_empty(schema["items"]):
            raise ValueError("the schema has an array whose items take no bytes, so that it could have any length")
        if kind == "map":
            self.may_be_empty(schema["values"])
        if kind in ("array", "map", "enum"):
            return False
        if kind == "fixed":
            self._named[schema["name"]] = not schema["size"]
            return not schema["size"]
        if kind in ("record", "error"):
            self._named[schema["name"]] = None
            found = [self.may_be_empty(field["type"]) for field in schema["fields"]]  # also behind one that takes bytes
            empty = all(found)
            self._named[schema["name"]] = empty
            return empty
        return self.may_be_empty(kind)
