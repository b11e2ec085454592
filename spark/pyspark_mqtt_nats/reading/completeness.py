# SPDX-License-Identifier: Apache-2.0
"""Whether all that was in the range when the read was planned has been read.

Gaps inside a range are normal: messages expire and are deleted one by one. What tells a loss from a gap is the stream's
first sequence: where it has passed a place that had not been read, what was there is gone. It only grows, and is looked
at before the first message, now and then, and after the last. Whatever was read before a look is accounted for when the
first sequence is then still below what had been read at the look before; otherwise only what came is.
"""

from datetime import timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from mqtt_streams.stored import time_ns
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import stream_info
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading.ranges import Range, Snapshot, bounds, loss

AGE_SLACK: Final = int(timedelta(minutes=1) / timedelta(microseconds=1)) * 1000
"""Nanoseconds: the oldest message left may be this much younger than the stream's age limit."""

_FULL: Final = 0.9


class Watch:
    """Follows one read of a range; `lost` and `aged` count the messages that are missing, at most."""

    def __init__(self, options: Options, snapshot: Snapshot, part: Range) -> None:
        self.lost = 0
        self.aged = 0
        self.received = 0
        self._options = options
        self._snapshot = snapshot
        self._part = part
        self._covered = part.start - 1
        self._last = part.start - 1
        self._short = False
        self._since: list[pa.Array] = []

    def rows(self, sequences: pa.Array) -> None:
        """These have been read."""
        self._since.append(sequences)
        self._last = sequences[-1].as_py()
        self.received += len(sequences)

    def look(self, connection: Connection, *, done: bool = False) -> bool:
        """Compare with the stream; `done`: the range has been read to its end. False: there is no point in going on.

        Raises DataLossError, unless failOnDataLoss is off.
        """
        info = stream_info(connection, self._snapshot.stream)
        end = min(self._part.end, self._snapshot.end)
        if info["created"] != self._snapshot.created:
            self.lost += max(0, end - 1 - self._last)
            loss(self._options, f"stream {self._snapshot.stream} was deleted and made anew", self.lost)
            return False
        first, last = bounds(info)
        self._front(info, first, end)
        self._back(last, end)
        if done:
            self._last = self._part.end - 1
        self._covered = max(self._last, min(first, end) - 1)
        self._since.clear()
        return True

    def _front(self, info: dict[str, Any], first: int, end: int) -> None:
        """Count what was taken away at the front of the stream before it was read."""
        until = min(first, end)
        if until <= self._covered + 1 or self._snapshot.replacing:
            return
        came = sum(pc.sum(pc.less(part, until)).as_py() for part in self._since)
        missing = until - 1 - self._covered - came
        if not missing:
            return
        if self._snapshot.floating and _by_itself(info):
            self.aged += missing
            return
        self.lost += missing
        where = f"messages {self._covered + 1} to {until - 1} of stream {self._snapshot.stream}"
        loss(self._options, f"{where} were removed before they could be read", missing)

    def _back(self, last: int, end: int) -> None:
        """Count what the stream had at its end and has no more: it was restored, or lost what was not on the disk."""
        missing = end - 1 - max(self._last, last, self._part.start - 1)
        if missing <= 0 or self._short:
            return
        self._short = True
        self.lost += missing
        loss(self._options, f"stream {self._snapshot.stream} ends with {last} and had {end - 1} before", missing)


def _by_itself(info: dict[str, Any]) -> bool:
    """Whether the stream itself explains that its oldest messages have gone.

    It is full, or as old as may be. Or each message may have a time of its own to go, or goes when it is consumed:
    nothing that is left tells which of them have.
    """
    config, state = info["config"], info["state"]
    if config.get("allow_msg_ttl") or config["retention"] != "limits":
        return True
    if not state["last_seq"]:
        return False
    age = config.get("max_age", 0)
    oldest = state["first_ts" if state["messages"] else "last_ts"]
    if age > 0 and time_ns(oldest) - AGE_SLACK <= time_ns(info["ts"]) - age:
        return True
    return any(
        0 < config.get(limit, -1) * _FULL <= state[has]
        for limit, has in (("max_msgs", "messages"), ("max_bytes", "bytes"))
    )
