# SPDX-License-Identifier: Apache-2.0
"""End of a micro-batch by `maxMessagesPerTrigger` and `maxBytesPerTrigger`.

The number of sequences in a range is not the number of messages: topic filters exclude some, others are deleted. On a
stream with limits retention, consumers give the numbers. A consumer knows how many messages it will deliver, so two
consumers give the number of messages between their starts; a consumer that delivers headers only gives the sizes, and
the end of a few messages. With another retention a consumer would do harm. There the first message is looked up, and
the batch has as many sequences from that message on as it may have messages: never more messages than allowed, possibly
fewer.
"""

from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from mqtt_streams import headers
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import get_message, stream_info
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading import pull
from pyspark_mqtt_nats.reading.ranges import Snapshot, reads_directly
from pyspark_mqtt_nats.reading.rows import Bounds, Rows

_ENOUGH: Final = 0.9
"""Share of the allowed messages from which on a batch is full enough: the search for a better end stops."""


_FEW: Final = 1000
"""Most messages of a batch that are counted by reading their headers; to search for the end of more costs less."""


class Limits(NamedTuple):
    """Most messages and most bytes (headers and payloads) of a batch; None: no limit."""

    messages: int | None = None
    bytes: int | None = None


def admit(connection: Connection, options: Options, found: Snapshot, limits: Limits) -> int:
    """Return the end (exclusive sequence) of the batch that begins with `found.start`, at most `found.end`.

    The batch has at least one message if the range has one.
    """
    if limits.bytes is None and (limits.messages is None or found.end - found.start <= limits.messages):
        return found.end
    state = stream_info(connection, options.stream)["state"]
    if limits.bytes is not None and state["bytes"] <= limits.bytes:
        if limits.messages is None:
            return found.end
        limits = limits._replace(bytes=None)
    if limits.bytes is None and not options.asked and not state.get("num_deleted"):
        assert limits.messages is not None
        return min(max(found.start, found.first) + limits.messages, found.end)
    if reads_directly(options, found):
        return _by_sequence(connection, options, found, limits, state["bytes"] / max(1, state["messages"]))
    if limits.messages is not None and limits.messages > _FEW:
        found = found.between(found.start, _by_count(connection, options, found, limits.messages))
        limits = limits._replace(messages=None)
    if limits == Limits():
        return found.end
    with Connection(options.access) as own:  # closing it ends the delivery of messages beyond the limits
        return _by_reading(own, options, found, limits)


def _by_sequence(connection: Connection, options: Options, found: Snapshot, limits: Limits, size: float) -> int:
    """Return the end of a batch, by number of sequences; `size`: average bytes of a stored message."""
    numbers = [] if limits.messages is None else [limits.messages]
    if limits.bytes is not None:
        numbers.append(max(1, int(limits.bytes / size)))
    firsts = (
        get_message(connection, found.stream, seq=found.start, next_by_subj=subject)
        for subject in options.asked or (">",)
    )
    first = min((message.seq for message in firsts if message is not None), default=found.end)
    return min(first + min(numbers), found.end)


def _by_count(connection: Connection, options: Options, found: Snapshot, most: int) -> int:
    """Return the end of a batch of at most `most` messages, and if possible at least `_ENOUGH` of them."""

    def before(sequence: int) -> int:
        # `rest` is counted first: messages published between the two counts raise the result, so it is never too low.
        rest = pull.count(connection, found.stream, options.asked, sequence)
        return pull.count(connection, found.stream, options.asked, found.start) - rest

    low, few = found.start, 0
    high, many = found.end, before(found.end)
    least = max(1, int(most * _ENOUGH))
    aim, by_share = float(most), True
    while many > most and few < least and high - low > 1:
        share = (aim - few) / (many - few) if by_share else 0.5
        aim, by_share = (least + most) / 2, not by_share
        middle = min(max(low + int((high - low) * share), low + 1), high - 1)
        number = before(middle)
        if number <= most:
            low, few = middle, number
        else:
            high, many = middle, number
    return high if many <= most else low


def _by_reading(connection: Connection, options: Options, found: Snapshot, limits: Limits) -> int:
    """Return the end of a batch by the headers of its messages; the first message fits in any case."""
    number = size = 0
    bounds = Bounds() if limits.messages is None else Bounds(rows=limits.messages + 1)
    for rows in pull.read(connection, found.stream, options.asked, found.start, found.end, bounds, True):
        fitting = len(rows.sequences)
        if limits.messages is not None:
            fitting = min(fitting, limits.messages - number)
        if limits.bytes is not None:
            sums = pc.cumulative_sum(_sizes(rows))
            fitting = min(fitting, pc.sum(pc.less_equal(sums, limits.bytes - size)).as_py() or 0)
            size += sums[-1].as_py()
        if not number:
            fitting = max(fitting, 1)
        if fitting < len(rows.sequences):
            return int(rows.sequences[fitting].as_py())
        number += len(rows.sequences)
    return found.end


def _sizes(rows: Rows) -> pa.Array:
    """Sizes in bytes of messages that were delivered with headers only."""
    return pa.array(
        [len(block) + (headers.get_int(block, "Nats-Msg-Size") or 0) for block in rows.headers.to_pylist()], pa.int64()
    )
