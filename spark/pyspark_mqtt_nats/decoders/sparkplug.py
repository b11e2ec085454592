# SPDX-License-Identifier: Apache-2.0
"""Sparkplug B payloads: the message `org.eclipse.tahu.protobuf.Payload` of the specification (version 3.0).

The document that a payload gives has the names of the specification. A metric has `name`, `alias`, `timestamp`, `type`
and `value`, which is null where `is_null` is set. A metric of a DATA message has an alias alone where its BIRTH message
has named it, and no `datatype`; nothing here remembers BIRTH messages. An integer without a type is as it is stored:
unsigned, so that a negative Int32 is 2**32 larger.
"""

import struct
from typing import Any, Final

PACKAGE: Final = "org.eclipse.tahu.protobuf"

_SCALARS: Final = (
    ("int_value", "uint32"),
    ("long_value", "uint64"),
    ("float_value", "float"),
    ("double_value", "double"),
    ("boolean_value", "bool"),
    ("string_value", "string"),
)


def _values(first: int) -> tuple[tuple[str, int, str], ...]:
    """Return the fields of a scalar value, whose numbers begin with ``first``."""
    return tuple((name, number, kind) for number, (name, kind) in enumerate(_SCALARS, first))


# label: "" optional, "*" repeated. A type that begins with "." is a message of this file.
_MESSAGES: Final[dict[str, tuple[tuple[str, int, str], ...]]] = {
    "Payload": (
        ("timestamp", 1, "uint64"),
        ("metrics", 2, "*.Metric"),
        ("seq", 3, "uint64"),
        ("uuid", 4, "string"),
        ("body", 5, "bytes"),
    ),
    "Metric": (
        ("name", 1, "string"),
        ("alias", 2, "uint64"),
        ("timestamp", 3, "uint64"),
        ("datatype", 4, "uint32"),
        ("is_historical", 5, "bool"),
        ("is_transient", 6, "bool"),
        ("is_null", 7, "bool"),
        ("metadata", 8, ".MetaData"),
        ("properties", 9, ".PropertySet"),
        *_values(10),
        ("bytes_value", 16, "bytes"),
        ("dataset_value", 17, ".DataSet"),
        ("template_value", 18, ".Template"),
    ),
    "MetaData": (
        ("is_multi_part", 1, "bool"),
        ("content_type", 2, "string"),
        ("size", 3, "uint64"),
        ("seq", 4, "uint64"),
        ("file_name", 5, "string"),
        ("file_type", 6, "string"),
        ("md5", 7, "string"),
        ("description", 8, "string"),
    ),
    "PropertySet": (("keys", 1, "*string"), ("values", 2, "*.PropertyValue")),
    "PropertySetList": (("propertyset", 1, "*.PropertySet"),),
    "PropertyValue": (
        ("type", 1, "uint32"),
        ("is_null", 2, "bool"),
        *_values(3),
        ("propertyset_value", 9, ".PropertySet"),
        ("propertysets_value", 10, ".PropertySetList"),
    ),
    "DataSet": (
        ("num_of_columns", 1, "uint64"),
        ("columns", 2, "*string"),
        ("types", 3, "*uint32"),
        ("rows", 4, "*.Row"),
    ),
    "Row": (("elements", 1, "*.DataSetValue"),),
    "DataSetValue": (*_values(1),),
    "Template": (
        ("version", 1, "string"),
        ("metrics", 2, "*.Metric"),
        ("parameters", 3, "*.Parameter"),
        ("template_ref", 4, "string"),
        ("is_definition", 5, "bool"),
    ),
    "Parameter": (
        ("name", 1, "string"),
        ("type", 2, "uint32"),
        *_values(3),
    ),
}

_TYPES: Final = (
    *("Unknown", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float", "Double"),
    *("Boolean", "String", "DateTime", "Text", "UUID", "DataSet", "Bytes", "File", "Template", "PropertySet"),
    "PropertySetList",
    *("Int8Array", "Int16Array", "Int32Array", "Int64Array", "UInt8Array", "UInt16Array", "UInt32Array", "UInt64Array"),
    *("FloatArray", "DoubleArray", "BooleanArray", "StringArray", "DateTimeArray"),
)
"""Names of the data types, by their numbers."""

_SIGNED: Final = {"Int8": 8, "Int16": 16, "Int32": 32, "Int64": 64}
"""Types whose negative values are stored as unsigned numbers, in two's complement."""

_ARRAYS: Final = {
    "Int8Array": "b",
    "Int16Array": "h",
    "Int32Array": "i",
    "Int64Array": "q",
    "UInt8Array": "B",
    "UInt16Array": "H",
    "UInt32Array": "I",
    "UInt64Array": "Q",
    "FloatArray": "f",
    "DoubleArray": "d",
    "DateTimeArray": "q",
}
"""Types of arrays, as the `struct` module names their elements; they are little-endian."""


def descriptors() -> bytes:
    """Return the FileDescriptorSet of the specification's message, serialised; needs the package protobuf."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

    found = FileDescriptorSet()
    file = found.file.add(name="sparkplug_b.proto", package=PACKAGE, syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            repeated, kind = kind.startswith("*"), kind.removeprefix("*")
            label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, label=label)
            if kind.startswith("."):
                made.type, made.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}{kind}"
            else:
                made.type = getattr(FieldDescriptorProto, f"TYPE_{kind.upper()}")
    data: bytes = found.SerializeToString()
    return data


def document(payload: dict[str, Any]) -> dict[str, Any]:
    """Return a decoded Payload with the values of its metrics in one field, `value`; raises ValueError."""
    found = {key: payload[key] for key in ("timestamp", "seq", "uuid", "body") if key in payload}
    return found | {"metrics": [_metric(metric) for metric in payload.get("metrics", ())]}


def _metric(metric: dict[str, Any]) -> dict[str, Any]:
    name = _type_name(metric.get("datatype", 0))
    found: dict[str, Any] = {key: metric[key] for key in ("name", "alias", "timestamp") if key in metric}
    found["type"] = name
    found["value"] = None if metric.get("is_null") else _value(metric, name)
    for key in ("is_historical", "is_transient", "metadata"):
        if key in metric:
            found[key] = metric[key]
    if "properties" in metric:
        found["properties"] = _properties(metric["properties"])
    return found


def _parameter(parameter: dict[str, Any]) -> dict[str, Any]:
    name = _type_name(parameter.get("type", 0))
    return {"name": parameter.get("name"), "type": name, "value": _value(parameter, name)}


def _value(holder: dict[str, Any], name: str) -> Any:
    """Return the value of a metric, a parameter, a property or an element of a data set."""
    key = next((key for key in holder if key.endswith("_value")), "")
    value: Any = holder.get(key)
    if key == "dataset_value":
        return _rows(value)
    if key == "template_value":
        metrics = [_metric(metric) for metric in value.get("metrics", ())]
        parameters = [_parameter(one) for one in value.get("parameters", ())]
        return value | {"metrics": metrics} | ({"parameters": parameters} if parameters else {})
    if key in ("propertyset_value", "propertysets_value"):
        sets = value.get("propertyset", ()) if key == "propertysets_value" else [value]
        properties = [_properties(one) for one in sets]
        return properties if key == "propertysets_value" else properties[0]
    if name in _SIGNED and isinstance(value, int):
        bits = _SIGNED[name]
        value &= (1 << bits) - 1
        return value - (1 << bits) if value >> bits - 1 else value
    return _array(value, name) if key == "bytes_value" and name.endswith("Array") else value


def _array(value: bytes, name: str) -> list[Any]:
    if name == "StringArray":
        return [text.decode() for text in value.split(b"\0")[:-1]]
    if name == "BooleanArray":
        count = int.from_bytes(value[:4], "little")
        if len(value) != 4 + (count + 7) // 8:
            raise ValueError("a BooleanArray has another length than it says")
        return [bool(value[4 + place // 8] >> (7 - place % 8) & 1) for place in range(count)]
    element = struct.Struct(f"<{_ARRAYS[name]}")
    if len(value) % element.size:
        raise ValueError(f"{len(value)} bytes are no {name}")
    return [number for (number,) in element.iter_unpack(value)]


def _rows(value: dict[str, Any]) -> list[dict[str, Any]]:
    columns, types = value.get("columns", []), value.get("types", [])
    names = [_type_name(number) for number in types]
    if len(names) != len(columns):
        raise ValueError("a data set has another number of types than of columns")
    return [
        {column: _value(element, name) for column, name, element in zip(columns, names, row["elements"], strict=True)}
        for row in value.get("rows", ())
    ]


def _properties(value: dict[str, Any]) -> dict[str, Any]:
    found = value.get("values", [])
    return {
        key: None if one.get("is_null") else _value(one, _type_name(one.get("type", 0)))
        for key, one in zip(value.get("keys", []), found, strict=True)
    }


def _type_name(number: int) -> str:
    return _TYPES[number] if number < len(_TYPES) else f"type {number}"
