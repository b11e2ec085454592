# SPDX-License-Identifier: Apache-2.0
"""Payloads as typed columns, by the topic of each message.

    decode(df, {"site/+/temp": "number", "site/+/state": "text", "site/+/report": "celsius DOUBLE, at TIMESTAMP"})

adds `number`, `text`, `celsius` and `at`. The first filter that matches the topic decides which columns have a value;
all others are null, and so is a value that the payload does not contain. The kinds are

| kind | column | |
|---|---|---|
| `number` | `number DOUBLE` | a decimal number, white space around it |
| `text` | `text STRING` | UTF-8 |
| `json` | `json STRING` | any JSON, unchanged: for `parse_json`, `from_json`, `get_json_object` |
| a schema, as DDL | one for each of its fields | a JSON object, by `from_json` |

Spark ignores text after a JSON document; any other payload that is not JSON gives null.

The option `decoders` of the source adds the columns of the first three kinds itself.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Literal

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructType

from pyspark_mqtt_nats import values
from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.hints import KINDS, NUMBER, OPTION
from pyspark_mqtt_nats.topics import pattern


def decode(
    df: DataFrame,
    decoders: Mapping[str, str],
    *,
    topic: str = "topic",
    payload: str = "payload",
    errors: Literal["null", "fail"] = "null",
) -> DataFrame:
    """Return `df` with the columns that `decoders` (topic filter -> kind) add.

    Args:
        df: with the topic as STRING and the payload as BINARY; batch or streaming.
        decoders: topic filter -> kind, as in the module's documentation.
        topic: name of the column with the topic.
        payload: name of the column with the payload.
        errors: `fail`: a payload that its decoder cannot decode ends the query; the message names topic and decoder.

    Raises:
        OptionError: an unknown kind, an illegal filter or schema, or a column that `df` has already.
    """
    if errors not in ("null", "fail"):
        raise OptionError(f"errors = {errors!r}: expected null or fail", "errors")
    schemas = {item: _schema(item, kind.strip()) for item, kind in decoders.items()}
    types = _columns(schemas, df)
    name, body = F.col(topic), F.col(payload)
    text = F.try_validate_utf8(body.cast("string"))
    matched = {item: name.rlike(pattern(item)) for item in decoders}
    found: dict[str, dict[str, Column]] = {}
    for item, kind in decoders.items():
        values_of = _values(kind.strip(), schemas[item], text)
        if errors == "fail":
            complaint = F.concat(
                F.lit("the payload of topic "),
                name,
                F.lit(f" is no {_named(kind.strip())}: change the decoder of {item!r} (option {OPTION})"),
            )
            right = _is_right(kind.strip(), text)
            values_of = {
                column: F.when(right, value).otherwise(F.raise_error(complaint).cast(types[column]))
                for column, value in values_of.items()
            }
        found[item] = values_of

    def chosen(column: str) -> Column:
        nothing = F.lit(None).cast(types[column])
        # The first filter that matches decides, also when its decoder does not add this column.
        return reduce(
            lambda rest, item: F.when(matched[item], found[item].get(column, nothing)).otherwise(rest),
            reversed(list(decoders)),
            nothing,
        )

    return df.select("*", *(chosen(column).alias(column) for column in types))


def _schema(item: str, kind: str) -> StructType:
    """Return the columns that a decoder adds; raises OptionError for an illegal filter, kind or schema."""
    try:
        values.check_filter(item)
    except ValueError as error:
        raise OptionError(f"{OPTION}: {error}", OPTION) from None
    if kind in KINDS:
        return StructType().add(kind, KINDS[kind])
    expected = f"expected {', '.join(KINDS)}, or a schema such as celsius DOUBLE, at TIMESTAMP"
    try:
        found = StructType.fromDDL(kind)
    except PySparkException:
        found = None
    if not isinstance(found, StructType) or not found.fields:
        raise OptionError(f"{OPTION}: {item!r} has the kind {kind[:80]!r}: {expected}", OPTION)
    return found


def _columns(schemas: Mapping[str, StructType], df: DataFrame) -> dict[str, DataType]:
    """Return all columns that the decoders add, with their types."""
    there = {name.lower() for name in df.columns}
    found: dict[str, DataType] = {}
    for item, schema in schemas.items():
        for field in schema.fields:
            if field.name.lower() in there:
                raise OptionError(f"{OPTION}: {item!r} gives {field.name!r}, which is a column already", OPTION)
            alike = next((name for name in found if name.lower() == field.name.lower()), field.name)
            if alike != field.name or found.setdefault(alike, field.dataType) != field.dataType:
                text = f"{item!r} gives {field.name!r} {field.dataType.simpleString()}, an earlier one {alike!r}"
                raise OptionError(f"{OPTION}: {text} {found[alike].simpleString()}", OPTION)
    return found


def _values(kind: str, schema: StructType, text: Column) -> dict[str, Column]:
    if kind == "number":
        return {kind: F.when(text.rlike(NUMBER), F.trim(text).cast("double"))}
    if kind == "text":
        return {kind: text}
    if kind == "json":
        return {kind: F.when(_is_right(kind, text), text)}
    parsed = F.from_json(text, schema)
    return {field.name: parsed.getField(field.name) for field in schema.fields}


def _is_right(kind: str, text: Column) -> Column:
    """Whether a payload is of the decoder's kind; never null."""
    if kind == "number":
        return F.coalesce(text.rlike(NUMBER), F.lit(False))
    if kind == "text":
        return text.isNotNull()
    parsed = F.try_parse_json(text)
    if kind == "json":
        return parsed.isNotNull()
    return F.coalesce(F.schema_of_variant(parsed).startswith("OBJECT"), F.lit(False))


def _named(kind: str) -> str:
    return {"number": "number", "text": "UTF-8 text", "json": "JSON"}.get(kind, "JSON object")
