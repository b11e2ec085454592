# SPDX-License-Identifier: Apache-2.0
"""Payloads of any DataFrame as typed columns, by the topic of each row.

    decode(df, {"site/+/temp": "number", "site/+/report": "celsius DOUBLE, at TIMESTAMP"})

adds `number`, `celsius`, `at` and `decode_error`, as the option `decoders` of the source does: see `decoders.option`.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Literal

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import arrow_udf

from pyspark_mqtt_nats import values
from pyspark_mqtt_nats.decoders.columns import Columns
from pyspark_mqtt_nats.decoders.option import ERROR, Decoder, columns, parse_decoders
from pyspark_mqtt_nats.errors import OptionError

_OPTION: Final = "decoders"
_DECODED: Final = "__decoded"
_TOPIC_MOST: Final = 200  # characters of a topic in a message


def decode(
    df: DataFrame,
    decoders: Mapping[str, Any] | str,
    *,
    topic: str = "topic",
    payload: str = "payload",
    errors: Literal["null", "fail"] = "null",
) -> DataFrame:
    """Return `df` with the columns that `decoders` (topic filter -> how payloads are read) add.

    Args:
        df: with the topic as STRING and the payload as BINARY; batch or streaming.
        decoders: topic filter -> format, columns or an object; or the text of the option `decoders`.
        topic: name of the column with the topic.
        payload: name of the column with the payload.
        errors: `fail`: a payload that its decoder cannot decode ends the query; the message names topic and reason.

    Raises:
        OptionError: an unknown format, an illegal filter or type, or a column that `df` has already.
    """
    if errors not in ("null", "fail"):
        raise OptionError(f"errors = {errors!r}: expected null or fail", "errors")
    try:
        if isinstance(decoders, str):
            made = values.decoders(decoders)
        else:
            for item in decoders:
                values.check_filter(item)
            made = parse_decoders(dict(decoders))
    except ValueError as error:
        raise OptionError(f"{_OPTION}: {error}", _OPTION) from None
    added = columns(made)
    there = {name.lower() for name in df.columns}
    for field in added.fields:
        if field.name.lower() in there:
            raise OptionError(f"{_OPTION}: {field.name!r} is a column already: choose another name", _OPTION)
    if not added.fields:
        return df

    def decoded(topics: pa.Array, payloads: pa.Array) -> pa.Array:
        found = _columns(made).decode(topics, payloads)
        if errors == "fail":
            _fail(topics, found[ERROR])
        return pa.StructArray.from_arrays(list(found.values()), names=list(found))

    made_by = arrow_udf(decoded, added)  # type: ignore[call-overload]  # functionType has a default
    whole = df.withColumn(_DECODED, made_by(F.col(topic), F.col(payload)))
    return whole.select("*", *(F.col(f"{_DECODED}.`{name}`").alias(name) for name in added.names)).drop(_DECODED)


@lru_cache(8)
def _columns(decoders: tuple[Decoder, ...]) -> Columns:
    return Columns(decoders, columns(decoders).names)


def _fail(topics: pa.Array, errors: pa.Array) -> None:
    """Raise ValueError for the first payload that could not be decoded."""
    for name, error in zip(topics, errors, strict=True):
        if error.is_valid:
            text = f"the payload of topic {str(name)[:_TOPIC_MOST]} cannot be decoded, {error}"
            raise ValueError(f"{text}: change the decoder (option {_OPTION})")
