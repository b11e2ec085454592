# SPDX-License-Identifier: Apache-2.0
"""Templates: text with the names of columns in braces, such as ``alerts/{topic}``; ``{{`` and ``}}`` are braces."""

import re
from collections.abc import Iterator

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pyspark_mqtt_nats.jobs import JobError

_PART = re.compile(r"(\{\{|\}\})|\{([^{}]+)\}|([^{}]+)|([{}])")


def parse(text: str) -> list[tuple[str, str]]:
    """Return (text, "") and ("", column) in their order; raises ValueError for a brace that stands alone."""
    return list(_parts(text))


def _parts(text: str) -> Iterator[tuple[str, str]]:
    for brace, column, plain, single in _PART.findall(text):
        if single:
            raise ValueError(f"{text[:80]!r} has a single {single}: columns are in braces, {{{{ and }}}} are braces")
        yield (brace[:1] + plain, column)


def check(text: str) -> str:
    """Return a template as it is; raises ValueError."""
    parse(text)
    return text


def expand(frame: DataFrame, text: str, key: str) -> Column:
    """Return a column with the values of a template, null where one of its columns is null or no UTF-8.

    Raises JobError, which begins with `key`, for a column that the frame does not have.
    """
    found = []
    for plain, column in parse(text):
        if not column:
            found.append(F.lit(plain))
        elif column in frame.columns:
            found.append(F.try_validate_utf8(F.col(f"`{column.replace('`', '``')}`").cast("string")))
        else:
            raise JobError(f"{key}: the query has no column {column}; it has {', '.join(frame.columns)}")
    return F.concat(*found) if found else F.lit("")
