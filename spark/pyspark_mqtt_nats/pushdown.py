# SPDX-License-Identifier: Apache-2.0
"""Filters of a query as topic filters and as a range of the stream.

The read returns at least all rows that the filters match, and Spark applies the filters to them again, so the
conversion need not be exact. One exception: a NATS client may publish on subjects such as `a/b`; their topic, `ab`,
maps to another subject, so a pushed filter on the topic does not find their messages.

Spark (4.3) keeps the last plan with the DataFrame, and uses it again for every other query of the DataFrame, with other
filters or none. So pushdown is off by default, and a warning is logged when it is used.
"""

import dataclasses
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, Self

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from pyspark_mqtt_nats import values
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading.ranges import Snapshot, sequence_at
from pyspark_mqtt_nats.topics import intersections

TOPICS_MOST: Final = 64
"""Most topics of an IN list that are converted to topic filters; Spark alone evaluates longer lists."""

WARNING: Final = (
    "pushdown: Spark would use the filters of this query in all others of the DataFrame too; load() another"
)

_NEVER_NULL: Final = ("sequence", "timestamp", "topic", "topic_levels", "subject", "payload")

_MARGIN_NS: Final = 10_000_000_000
"""Nanoseconds read beyond each time bound: store times go back when a server with another clock becomes leader."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_COMPARED: Final = (EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)


@dataclasses.dataclass
class Wanted:
    """Conditions of the filters: topic filters, one of each tuple must match, and bounds of sequence and time."""

    left: list[Filter] = dataclasses.field(default_factory=list)
    """Filters that Spark has to evaluate."""
    topics: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    first: int | None = None
    last: int | None = None
    since: int | None = None
    until: int | None = None
    """`since` and `until` are inclusive bounds of the store time, in nanoseconds since 1970; None: no bound."""

    @classmethod
    def of(cls, filters: Iterable[Filter]) -> Self:
        """Return the conditions of filters that all must hold."""
        found = cls()
        for item in filters:
            attribute: tuple[str, ...] = getattr(item, "attribute", ())
            column = attribute[0] if len(attribute) == 1 else ""
            if isinstance(item, IsNotNull) and column in _NEVER_NULL:
                continue
            found.left.append(item)
            if column == "topic":
                found._take_topic(item)
            elif column in ("sequence", "timestamp"):
                found._take_bound(column, item)
        return found

    def _take_topic(self, item: Filter) -> None:
        if isinstance(item, (EqualTo, EqualNullSafe)):
            topics = [item.value]
        elif isinstance(item, In):
            topics = [topic for topic in item.value if topic is not None]
        elif isinstance(item, StringStartsWith) and "/" in item.value:
            topics = [item.value.rpartition("/")[0] + "/#"]
        else:
            return
        if len(topics) <= TOPICS_MOST and all(map(_is_filter, topics)):
            self.topics.append(tuple(topics))

    def _take_bound(self, column: str, item: Filter) -> None:
        given = item.value if isinstance(item, In) else [item.value] if isinstance(item, _COMPARED) else []
        number_of = _nanoseconds if column == "timestamp" else _whole
        known = [value for value in given if value is not None]
        numbers = [number for value in known if (number := number_of(value)) is not None]
        if not numbers or len(numbers) < len(known):
            return
        least, most = min(numbers), max(numbers)
        above = not isinstance(item, (LessThan, LessThanOrEqual))
        below = not isinstance(item, (GreaterThan, GreaterThanOrEqual))
        if column == "sequence":
            if above:
                self.first = least if self.first is None else max(least, self.first)
            if below:
                self.last = most if self.last is None else min(most, self.last)
        else:
            if above:
                self.since = least if self.since is None else max(least, self.since)
            if below:
                self.until = most if self.until is None else min(most, self.until)

    def filters(self, filters: Iterable[str]) -> tuple[str, ...]:
        """Return the intersection of topic filters with `topics`; () when nothing matches both."""
        found = tuple(filters)
        for topics in self.topics:
            found = intersections(found, topics)
        return found

    def narrow(self, options: Options, snapshot: Snapshot) -> tuple[Options, Snapshot]:
        """Return options and snapshot, narrowed to these conditions."""
        filters = self.filters(options.filters)
        start, end = snapshot.start, snapshot.end if filters else snapshot.start
        if self.first is not None:
            start = max(start, self.first)
        if self.last is not None:
            end = min(end, self.last + 1)
        if start < end and not (self.since is None and self.until is None):
            with Connection(options.access) as connection:
                if self.since is not None:
                    start = max(start, sequence_at(connection, snapshot, self.since - _MARGIN_NS))
                if self.until is not None:
                    end = min(end, sequence_at(connection, snapshot, self.until + _MARGIN_NS))
        start = min(start, snapshot.end)
        narrowed = dataclasses.replace(snapshot, start=start, end=max(start, end))
        return (dataclasses.replace(options, filters=filters) if filters else options), narrowed


def _is_filter(text: str) -> bool:
    """Whether the text is a topic, or a topic followed by `/#`, that a topic filter can express."""
    if "+" in text or "#" in text.removesuffix("/#"):
        return False
    try:
        values.check_filter(text)
    except ValueError:
        return False
    return True


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _nanoseconds(moment: object) -> int | None:
    """Return nanoseconds since 1970; None for a value that is not a datetime."""
    if not isinstance(moment, datetime):
        return None
    since = moment.astimezone(UTC) - _EPOCH
    return (since.days * 86_400_000_000 + since.seconds * 1_000_000 + since.microseconds) * 1000
