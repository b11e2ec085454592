# SPDX-License-Identifier: Apache-2.0
"""What SQL does not say: rows that depend on earlier ones of their key, kept by Spark's `transformWithState`."""

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any, Final

from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import BooleanType, StringType, StructField, StructType

from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.rules.definitions import Hysteresis, Rule, Silence

STATE_STORE: Final = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    )
}
"""Setting that `transformWithState` needs."""


class HysteresisProcessor(StatefulProcessor):
    """Yields a row for each change between above `high` and below `low`, and for the first of them.

    Args:
        names: the columns of the rows: the key, `state`, `value`, `order`.
        value: the column that is compared.
        order: the column by which the rows of a key are in order.
    """

    def __init__(self, names: Sequence[str], value: str, order: str, high: float, low: float) -> None:
        self._row = Row(*names)
        self._columns = value, order
        self._bounds = high, low

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Name the state: "high", "low", or none before the first of them."""
        self._state = handle.getValueState("state", "state STRING")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        """Compare the rows of one key."""
        value, order = self._columns
        high, low = self._bounds
        state = self._state.get() if self._state.exists() else None
        before = found = None if state is None else state[0]
        for row in _ordered(rows, order):
            number = row[value]
            if number is None:
                continue
            now = "high" if number > high else "low" if number < low else found
            if now != found:
                found = now
                yield self._row(*key, now, number, row[order])
        if found != before:
            self._state.update((found,))


class SilenceProcessor(StatefulProcessor):
    """Yields a row when nothing has come of a key for `after` milliseconds, and one when something comes again.

    Args:
        names: the columns of the rows: the key, `silent`, `last`.
        order: the column with the time of a row.
    """

    def __init__(self, names: Sequence[str], order: str, after: int) -> None:
        self._row = Row(*names)
        self._order = order
        self._after = after

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Name the state: time of the last row, the deadline in milliseconds since 1970, and whether it has passed."""
        self._handle = handle
        self._state = handle.getValueState("last", "last TIMESTAMP, deadline BIGINT, silent BOOLEAN")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        """Move the deadline of one key."""
        last = max((row[self._order] for row in rows if row[self._order] is not None), default=None)
        if last is None:
            return
        deadline = timerValues.getCurrentProcessingTimeInMs() + self._after
        state = self._state.get() if self._state.exists() else None
        silent = state is not None and state[2]
        self._state.update((last, deadline, False))
        if state is None or silent:
            self._handle.registerTimer(deadline)
        if silent:
            yield self._row(*key, False, last)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        """Report a key, or wait on where rows have moved its deadline since the timer was set."""
        state = self._state.get()
        if state is None:
            return
        last, deadline, _ = state
        if deadline > expiredTimerInfo.getExpiryTimeInMs():
            self._handle.registerTimer(deadline)
            return
        self._state.update((last, deadline, True))
        yield self._row(*key, True, last)


def _ordered(rows: Iterator[Row], order: str) -> Sequence[Row]:
    return sorted((row for row in rows if row[order] is not None), key=lambda row: row[order])


def apply(frame: DataFrame, rule: Rule, key: str) -> DataFrame:
    """Return what a rule makes of its query's result; raises JobError, which begins with `key`."""
    if rule.hysteresis is not None:
        return _hysteresis(frame, rule.hysteresis, f"{key}.hysteresis")
    if rule.silence is not None:
        return _silence(frame, rule.silence, f"{key}.silence")
    return frame if rule.function is None else _called(frame, rule.function, f"{key}.function")


def _hysteresis(frame: DataFrame, given: Hysteresis, key: str) -> DataFrame:
    fields = _fields(frame, {"key": given.key, "value": (given.value,), "order": (given.order,)}, key)
    *keys, value, order = fields
    schema = StructType([*keys, StructField("state", StringType()), value, order])
    processor = HysteresisProcessor(schema.names, given.value, given.order, given.high, given.low)
    return frame.groupBy(*given.key).transformWithState(processor, schema, "Append", "None")


def _silence(frame: DataFrame, given: Silence, key: str) -> DataFrame:
    *keys, order = _fields(frame, {"key": given.key, "order": (given.order,)}, key)
    if order.dataType.simpleString() != "timestamp":
        raise JobError(f"{key}.order: {given.order} is {order.dataType.simpleString().upper()}, not TIMESTAMP")
    schema = StructType([*keys, StructField("silent", BooleanType()), StructField("last", order.dataType)])
    processor = SilenceProcessor(schema.names, given.order, given.after * 1000)
    return frame.groupBy(*given.key).transformWithState(processor, schema, "Append", "ProcessingTime")


def _fields(frame: DataFrame, wanted: dict[str, tuple[str, ...]], key: str) -> list[StructField]:
    """Return the fields of columns; raises JobError for a missing one, and without the package of Spark's states."""
    if importlib.util.find_spec("google") is None or importlib.util.find_spec("google.protobuf") is None:
        raise JobError(f"{key}: Spark's states need the package protobuf: pip install 'mqtt-nats[protobuf]'")
    found = []
    for name, columns in wanted.items():
        for column in columns:
            if column not in frame.columns:
                has = ", ".join(frame.columns)
                raise JobError(f"{key}.{name}: the query has no column {column}; it has {has}")
            found.append(frame.schema[column])
    return found


def _called(frame: DataFrame, name: str, key: str) -> DataFrame:
    """Return what a function of the user's makes of a DataFrame."""
    module, _, function = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)(frame)
    except Exception as error:
        raise JobError(f"{key}: {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(made, DataFrame):
        raise JobError(f"{key}: {name} returns no DataFrame")
    return made
