# SPDX-License-Identifier: Apache-2.0
"""The option `decoders`: topic filter -> how payloads are read, as JSON.

A decoder is the name of a format, a list of columns for JSON objects, or an object:

    {"site/+/temp": "number",
     "site/+/report": "celsius DOUBLE, at TIMESTAMP",
     "spBv1.0/#": "sparkplug",
     "plant/#": {"format": "protobuf", "descriptors": "plant.desc", "message": "plant.Report", "columns": "rpm INT"}}

Files are read where the option is parsed, on the driver.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from pyspark.sql.types import DataType, DoubleType, StringType, StructType

from pyspark_mqtt_nats.decoders.formats import Format, missing_package, reader
from pyspark_mqtt_nats.decoders.types import columns_of

SCALARS: Final[Mapping[str, DataType]] = {"number": DoubleType(), "text": StringType()}
"""Formats of a single value -> type of its column, which has the name of the format."""

DOCUMENTS: Final = ("json", "cbor", "msgpack", "avro", "protobuf", "sparkplug", "csv")
"""Formats of documents: the column `json` has the document as JSON, unless `columns` names the fields to take."""

DOCUMENT: Final = "json"
ERROR: Final = "decode_error"
"""Column that says why a payload could not be decoded; null where it could, and where no decoder is for the topic."""

_ARGUMENTS: Final = {
    "avro": ("schema", "registry"),
    "protobuf": ("descriptors", "message"),
    "csv": ("delimiter",),
}
"""Keys of a decoder that only this format has."""

_NEEDED: Final = {"avro": ("schema",), "protobuf": ("descriptors", "message")}
_FILE_MOST: Final = 4 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Decoder:
    """How the payloads of topics that match `filter` are read.

    `format`: a name in SCALARS, or a Format of documents. `columns`: the fields to take; None for the whole document.
    """

    filter: str
    format: str | Format
    columns: StructType | None = None

    @property
    def name(self) -> str:
        """Name of the format."""
        return self.format if isinstance(self.format, str) else self.format.name

    @property
    def fields(self) -> StructType:
        """The columns that it adds."""
        if isinstance(self.format, str):
            return StructType().add(self.format, SCALARS[self.format])
        return StructType().add(DOCUMENT, StringType()) if self.columns is None else self.columns


def parse_decoders(found: Any) -> tuple[Decoder, ...]:
    """Return the decoders of a JSON value, in order; raises ValueError."""
    if not isinstance(found, dict):
        raise ValueError('expected a JSON object, such as {"site/+/temp": "number", "site/+/state": "json"}')
    made = tuple(_decoder(item, kind) for item, kind in found.items())
    columns(made)
    return made


def columns(decoders: tuple[Decoder, ...]) -> StructType:
    """Return all columns that decoders add; raises ValueError when two disagree about a column."""
    found: dict[str, tuple[str, DataType]] = {}
    for decoder in decoders:
        for field in decoder.fields.fields:
            name, kind = found.setdefault(field.name.lower(), (field.name, field.dataType))
            if (name, kind) != (field.name, field.dataType):
                text = (
                    f"{decoder.filter!r} gives {field.name!r} {field.dataType.simpleString()}, an earlier one {name!r}"
                )
                raise ValueError(f"{text} {kind.simpleString()}")
    made = StructType()
    for name, kind in found.values():
        made.add(name, kind)
    if ERROR in found:
        raise ValueError(f"the column {ERROR!r} says what is wrong with a payload: choose another name")
    return made.add(ERROR, StringType()) if decoders else made


def _decoder(item: str, kind: Any) -> Decoder:
    if isinstance(kind, str):
        text = kind.strip()
        if text in SCALARS or text in DOCUMENTS:
            kind = {"format": text}
        elif " " in text:
            kind = {"format": "json", "columns": text}
        else:
            raise ValueError(f"{item!r} has the format {text[:80]!r}: {_expected()}")
    if not isinstance(kind, dict) or not all(isinstance(value, str) for value in kind.values()):
        raise ValueError(f"{item!r}: {_expected()}")
    given: dict[str, str] = dict(kind)
    if "format" not in given:
        raise ValueError(f"{item!r}: the object has no 'format': {_expected()}")
    name = given.pop("format")
    if name not in SCALARS and name not in DOCUMENTS:
        raise ValueError(f"{item!r} has the format {name[:80]!r}: {_expected()}")
    try:
        return _made(item, name, given)
    except ValueError as error:
        raise ValueError(f"{item!r}: {error}") from None


def _expected() -> str:
    return f"expected {', '.join((*SCALARS, *DOCUMENTS))}, columns such as 'celsius DOUBLE, at TIMESTAMP', or an object"


def _made(item: str, name: str, given: dict[str, str]) -> Decoder:
    allowed = _ARGUMENTS.get(name, ()) if name in SCALARS else (*_ARGUMENTS.get(name, ()), "columns")
    for key in given:
        if key not in allowed:
            raise ValueError(f"the format {name} has no {key[:40]!r}; it has {', '.join(allowed) or 'nothing to set'}")
    if name in SCALARS:
        return Decoder(item, name)
    for key in _NEEDED.get(name, ()):
        if key not in given and not (key == "schema" and "registry" in given):
            raise ValueError(f"the format {name} needs {key!r}" + (" or 'registry'" if key == "schema" else ""))
    if problem := missing_package(name):
        raise ValueError(problem)
    taken = columns_of(given["columns"]) if "columns" in given else None
    chosen = Format(
        name,
        _schema(given["schema"]) if "schema" in given else "",
        _registry(given["registry"]) if "registry" in given else "",
        _file(given["descriptors"]) if "descriptors" in given else b"",
        given.get("message", ""),
        _delimiter(given.get("delimiter", ",")),
    )
    if chosen.schema and chosen.registry:
        raise ValueError("'schema' and 'registry' exclude each other")
    reader(chosen)
    return Decoder(item, chosen, taken)


def _schema(value: str) -> str:
    """Return an Avro schema as JSON: the text itself, or a file with it."""
    text = value if value.lstrip().startswith(("{", "[", '"')) else _file(value).decode(errors="replace")
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        raise ValueError("the schema is not JSON") from None
    return text


def _registry(value: str) -> str:
    if urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).hostname:
        raise ValueError("expected the URL of a schema registry, such as http://127.0.0.1:8081")
    return value


def _delimiter(value: str) -> str:
    if len(value) != 1 or value in '\r\n"':
        raise ValueError("expected a delimiter of one character")
    return value


def _file(name: str) -> bytes:
    try:
        with Path(name).expanduser().open("rb") as file:
            data = file.read(_FILE_MOST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"the file {name[:200]!r} cannot be read: {reason}") from None
    if len(data) > _FILE_MOST:
        raise ValueError(f"the file {name[:200]!r} is larger than 4 MiB")
    return data
