# SPDX-License-Identifier: Apache-2.0
"""Formats of documents: bytes of a payload to plain Python values.

`reader` returns a function for a format. The function raises ValueError, and nothing else, for a payload that is not of
the format: the bytes are a stranger's.
"""

import csv
import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact, InvalidOperation, Overflow, Underflow
from functools import cache, lru_cache
from typing import Any, Final

import orjson

from pyspark_mqtt_nats.decoders.conversion import json_of
from pyspark_mqtt_nats.decoders.digits import ALL_DIGITS, DECIMAL_BYTES_MOST, read_digits

Read = Callable[[bytes], Any]

PACKAGES: Final = {
    "avro": ("fastavro", "fastavro"),
    "cbor": ("cbor2", "cbor2"),
    "msgpack": ("msgpack", "msgpack"),
    "protobuf": ("google.protobuf", "protobuf"),
    "sparkplug": ("google.protobuf", "protobuf"),
}
"""Format -> module and package that it needs."""

EXTRAS: Final = {"sparkplug": "protobuf"}
"""Format -> extra of mqtt-nats that installs the package, where the extra has another name."""

_REGISTRY_TIMEOUT: Final = 10.0  # seconds
_SCHEMA_MOST: Final = 1 << 20  # bytes of an answer of the registry
_SCHEMAS_MOST: Final = 1 << 10
"""Schemas of a registry that a task keeps."""

_MAGIC: Final = 5
"""Bytes before the data of a registry's message: a zero, and the schema's id in four bytes."""

_BIGFLOATS: Final = Context(prec=1200, Emin=-1200, Emax=400, traps=[InvalidOperation, Inexact, Overflow, Underflow])
"""Context for a mantissa and an exponent of two. It holds each double: 2**-1074 has 751 digits.

What it cannot hold is an error, and no other number.
"""

_REASON_MOST: Final = 160  # characters


class RegistryError(Exception):
    """The schema registry gives no schema; unlike a corrupt payload this ends the query."""


@dataclass(frozen=True, slots=True)
class Format:
    """How documents are encoded: `name`, and what the format needs beside it.

    `schema`: Avro's, as JSON. `registry`: URL of a schema registry. `descriptors`: a FileDescriptorSet. `message`: full
    name of a Protobuf message. `delimiter`: of CSV.
    """

    name: str
    schema: str = ""
    registry: str = ""
    descriptors: bytes = b""
    message: str = ""
    delimiter: str = ","

    def __repr__(self) -> str:
        return f"Format({self.name!r})"  # the URL of a registry may have a password


def missing_package(name: str) -> str:
    """Return what to install for a format; "" when everything is there."""
    module, package = PACKAGES.get(name, ("", ""))
    try:
        if not module or importlib.util.find_spec(module) is not None:
            return ""
    except ModuleNotFoundError:  # of the package `google`
        pass
    return f"the format {name} needs the package {package}: pip install 'mqtt-nats[{EXTRAS.get(name, name)}]'"


@cache
def reader(chosen: Format) -> Read:
    """Return the function that reads payloads of a format; raises ValueError for a schema that is none."""
    if problem := missing_package(chosen.name):
        raise ValueError(problem)
    makers: dict[str, Callable[[Format], Read]] = {
        "avro": _avro,
        "cbor": _cbor,
        "csv": _csv,
        "json": lambda _: _json,
        "msgpack": _msgpack,
        "protobuf": _protobuf,
        "sparkplug": _sparkplug,
    }
    return _guarded(makers[chosen.name](chosen))


def _guarded(read: Read) -> Read:
    def guarded(payload: bytes) -> Any:
        try:
            return read(payload)
        except (RegistryError, MemoryError):
            raise
        except Exception as error:  # whatever a library raises for a stranger's bytes
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(reason[:_REASON_MOST]) from None

    return guarded


def _json(payload: bytes) -> Any:
    """Return a document whose doubles may have lost digits.

    orjson refuses numbers beyond DOUBLE. A document that has one is read with Digits, and refused for any other fault.
    """
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        try:
            found = read_digits(payload)
            json_of(found)  # the standard library takes halves of characters, which are no text
        except (ValueError, RecursionError):
            raise error from None
        return found


exact_json: Final = _guarded(read_digits)
"""Reads a JSON document as `read_digits` does."""


def _cbor(chosen: Format) -> Read:
    import cbor2

    tags = {4: _decimal_of, 5: _bigfloat_of}

    def read(payload: bytes) -> Any:
        rest = io.BytesIO(payload)
        value = cbor2.load(rest, semantic_decoders=tags)
        if rest.read(1):
            raise ValueError("bytes follow the document")
        return value

    return read


def _decimal_of(parts: Any, _: bool = False) -> Decimal:
    exponent, mantissa = _short_integers(parts)
    return Decimal(mantissa).scaleb(exponent, ALL_DIGITS)


def _bigfloat_of(parts: Any, _: bool = False) -> Decimal:
    exponent, mantissa = _short_integers(parts)
    return _BIGFLOATS.multiply(Decimal(mantissa), _BIGFLOATS.power(2, exponent))


def _short_integers(parts: Any) -> tuple[int, int]:
    """Return an exponent and a mantissa; raises ValueError for other values, and for one of too many bytes."""
    exponent, mantissa = parts
    if type(exponent) is not int or type(mantissa) is not int:
        raise ValueError("an exponent or a mantissa is no integer")
    if max(exponent.bit_length(), mantissa.bit_length()) > 8 * DECIMAL_BYTES_MOST:
        raise ValueError(f"a decimal has more than {DECIMAL_BYTES_MOST} bytes")
    return exponent, mantissa


def _msgpack(chosen: Format) -> Read:
    import msgpack

    return lambda payload: msgpack.unpackb(payload, raw=False, strict_map_key=False, timestamp=3)


def _csv(chosen: Format) -> Read:
    def read(payload: bytes) -> list[str]:
        rows = list(csv.reader(io.StringIO(payload.decode(), newline=""), delimiter=chosen.delimiter, strict=True))
        if len(rows) != 1:
            raise ValueError(f"expected one line, not {len(rows)}")
        return rows[0]

    return read


def _avro(chosen: Format) -> Read:
    from pyspark_mqtt_nats.decoders.avro import reader_of

    if not chosen.registry:
        return reader_of(chosen.schema)

    @lru_cache(_SCHEMAS_MOST)
    def registered(number: int) -> Read:
        return reader_of(_registered(chosen.registry, number))

    def read(payload: bytes) -> Any:
        if len(payload) < _MAGIC or payload[0]:
            raise ValueError("it does not begin with a zero and the id of a schema")
        return registered(int.from_bytes(payload[1:_MAGIC], "big"))(payload[_MAGIC:])

    return read


def _registered(url: str, number: int) -> str:
    """Return the schema with this id.

    Raises ValueError when the registry has none, and RegistryError when the registry does not answer as one.
    """
    # Few reads need them, and each Python worker would take the time to load them.
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{url.rstrip('/')}/schemas/ids/{number}")
    try:
        with urllib.request.urlopen(request, timeout=_REGISTRY_TIMEOUT) as answer:
            schema = orjson.loads(answer.read(_SCHEMA_MOST))["schema"]
            return str(schema)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise ValueError(f"the registry has no schema {number}") from None
        raise RegistryError(f"the schema registry answers {error.code} for schema {number}; change decoders") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise RegistryError(f"the schema registry gives no schema {number}: {reason}; change decoders") from None


def _protobuf(chosen: Format) -> Read:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    try:
        for file in descriptor_pb2.FileDescriptorSet.FromString(chosen.descriptors).file:
            pool.Add(file)
        kind = message_factory.GetMessageClass(pool.FindMessageTypeByName(chosen.message))
    except KeyError:
        raise ValueError(f"the descriptors have no message {chosen.message!r}") from None
    except Exception as error:  # DecodeError, and TypeError for files that depend on missing ones
        raise ValueError(f"not a FileDescriptorSet with all imports: {' '.join(str(error).split())}") from None
    return lambda payload: _plain(kind.FromString(payload))


def _plain(message: Any) -> Any:
    """Return a Protobuf message as a dict by field name; a field that is not set and knows it is left out."""
    if message.DESCRIPTOR.full_name == "google.protobuf.Timestamp":
        from datetime import UTC

        return message.ToDatetime(tzinfo=UTC)
    found = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        found[field.name] = _field(field, getattr(message, field.name))
    return found


def _field(field: Any, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        item = field.message_type.fields_by_name["value"]
        return {key: _single(item, value[key]) for key in value}
    if field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED:
        return [_single(field, one) for one in value]
    return _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return _plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value


def _sparkplug(chosen: Format) -> Read:
    from pyspark_mqtt_nats.decoders import sparkplug

    read = _protobuf(Format("protobuf", descriptors=sparkplug.descriptors(), message=f"{sparkplug.PACKAGE}.Payload"))
    return lambda payload: sparkplug.document(read(payload))
