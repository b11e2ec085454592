# SPDX-License-Identifier: Apache-2.0
"""How far a micro-batch goes: `maxMessagesPerTrigger` and `maxBytesPerTrigger`.

Sequences are no measure: topic filters leave some of them, others are gone. On a stream with limits retention a
consumer that delivers headers alone counts what the batch will have. Elsewhere a consumer would do harm. There the
first message is looked up, and the batch has as many sequences from there on as it may have messages: never more
messages, maybe fewer.
"""

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from mqtt_streams import headers
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import get_message, stream_info
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading import pull
from pyspark_mqtt_nats.reading.ranges import Snapshot, reads_directly
from pyspark_mqtt_nats.reading.rows import Bounds, Rows


class Limits(NamedTuple):
    """Messages and bytes (headers and payloads) that a batch may have; None: any number."""

    messages: int | None = None
    bytes: int | None = None


def admit(connection: Connection, options: Options, found: Snapshot, limits: Limits) -> int:
    """The end (exclusive) of the batch that begins with `found.start`, at most `found.end`.

    It has at least one message when there is one.
    """
    if limits.bytes is None and (limits.messages is None or found.end - found.start <= limits.messages):
        return found.end
    state = stream_info(connection, options.stream)["state"]
    if limits.bytes is not None and state["bytes"] <= limits.bytes:
        if limits.messages is None:
            return found.end
        limits = limits._replace(bytes=None)
    if limits.bytes is None and not options.subjects and not state.get("num_deleted"):
        assert limits.messages is not None
        return min(max(found.start, found.first) + limits.messages, found.end)
    if reads_directly(options, found):
        return _by_sequence(connection, options, found, limits, state["bytes"] / max(1, state["messages"]))
    with Connection(options.access) as own:  # what is on its way when we have counted enough ends with it
        return _by_headers(own, options, found, limits)


def _by_sequence(connection: Connection, options: Options, found: Snapshot, limits: Limits, size: float) -> int:
    """`size`: of a stored message, in bytes on average."""
    numbers = [] if limits.messages is None else [limits.messages]
    if limits.bytes is not None:
        numbers.append(max(1, int(limits.bytes / size)))
    firsts = (
        get_message(connection, found.stream, seq=found.start, next_by_subj=subject)
        for subject in options.subjects or (">",)
    )
    first = min((message.seq for message in firsts if message is not None), default=found.end)
    return min(first + min(numbers), found.end)


def _by_headers(connection: Connection, options: Options, found: Snapshot, limits: Limits) -> int:
    messages, size = 0, 0
    bounds = Bounds(rows=min(10_000, limits.messages or 10_000))
    for rows in pull.read(
        connection, found.stream, options.subjects, found.start, found.end, bounds, headers_only=True
    ):
        count = len(rows.sequences)
        keep = count if limits.messages is None else min(count, limits.messages - messages)
        if limits.bytes is not None:
            sums = pc.cumulative_sum(_sizes(rows))
            fitting = pc.sum(pc.less_equal(sums, limits.bytes - size)).as_py() or 0
            if fitting < keep:
                keep = max(fitting, 0 if messages else 1)
            size += sums[-1].as_py()
        if keep < count:
            return int(rows.sequences[keep].as_py())
        messages += count
        if messages == limits.messages:
            return int(rows.sequences[-1].as_py()) + 1
    return found.end


def _sizes(rows: Rows) -> pa.Array:
    """Bytes of the messages of which only the headers came."""
    return pa.array([len(block) + (headers.get_int(block, "Nats-Msg-Size") or 0) for block in rows.headers], pa.int64())
