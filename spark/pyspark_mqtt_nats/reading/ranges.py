# SPDX-License-Identifier: Apache-2.0
"""Ranges of a read: the state of the stream when the read is planned, and its sequences in parts."""

import logging
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

from mqtt_streams.stored import time_ns
from pyspark_mqtt_nats.errors import DataLossError, OptionError
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import get_message, stream_info
from pyspark_mqtt_nats.options import Options

log: Final = logging.getLogger("pyspark_mqtt_nats")

SWITCH: Final = "failOnDataLoss"


class Range(NamedTuple):
    """Stream sequences, `end` exclusive."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A stream when the read was planned. All sequences; `end` is exclusive.

    `first`, `last`: what the stream had, `first` = `last` + 1 when it was empty. `start`, `end`: what is to be read.
    `created`: tells the stream from a later one of the same name. `retention`: `limits`, `interest` or `workqueue`.
    `subjects`: of the stream. `direct`: direct get is allowed. `floating`: the start is whatever was the oldest, not a
    message that was asked for, so what the stream's own limits remove meanwhile is not missed. `replacing`: the stream
    keeps a number of messages per subject, so each new one may remove one anywhere. `now`: the server's time, in ns
    since 1970. `size`: bytes of a stored message on average.
    """

    stream: str
    created: str
    first: int
    last: int
    start: int
    end: int
    retention: str
    subjects: tuple[str, ...]
    direct: bool = False
    floating: bool = False
    replacing: bool = False
    now: int = 0
    size: int = 0

    def between(self, start: int, end: int) -> Self:
        """The same stream with another range, every message of which is expected to be there."""
        return replace(self, start=start, end=max(start, end), floating=False)


def bounds(info: dict[str, Any]) -> tuple[int, int]:
    """First and last sequence in an answer of STREAM.INFO; the first is one more than the last when it is empty."""
    state = info["state"]
    last = int(state["last_seq"])
    first = int(state["first_seq"]) if state["messages"] else last + 1
    return max(first, 1), last


def snapshot(options: Options, connection: Connection) -> Snapshot:
    """Look at the stream and work out the start and the end that the options mean.

    Raises DataLossError for a start or an end by sequence that is not there (only a warning without failOnDataLoss),
    OptionError for a readMode that the stream does not allow, ApiError when there is no such stream.
    """
    info = stream_info(connection, options.stream)
    config = info["config"]
    first, last = bounds(info)
    found = Snapshot(
        options.stream,
        info["created"],
        first,
        last,
        first,
        last + 1,
        config["retention"],
        tuple(config.get("subjects") or ()),
        bool(config.get("allow_direct")),
        False,
        config.get("max_msgs_per_subject", -1) > 0,
        time_ns(info["ts"]),
        info["state"]["bytes"] // max(1, info["state"]["messages"]),
    )
    reads_directly(options, found)
    start = _start(options, connection, found)
    end = _end(options, connection, found)
    floating = options.starting_sequence is None
    return replace(found, start=start, end=max(start, end), floating=floating)


def reads_directly(options: Options, found: Snapshot) -> bool:
    """Whether the stream is read by direct gets, not by pull consumers; raises OptionError where that cannot be.

    A consumer on a stream with another retention than limits would count as interest in its messages.
    """
    limits = found.retention == "limits"
    direct = options.read_mode == "direct" or (options.read_mode == "auto" and not limits)
    if not direct and not limits:
        raise OptionError(
            f"readMode = 'pull' needs a stream with limits retention, {found.stream} has {found.retention}: "
            "set readMode to auto or direct",
            "readMode",
        )
    if direct and not found.direct:
        otherwise = (
            "or set readMode to pull" if limits else f"with {found.retention} retention readMode has no other way"
        )
        raise OptionError(
            f"stream {found.stream} does not allow direct get: `nats stream edit --allow-direct`, {otherwise}",
            "readMode",
        )
    return direct


def _start(options: Options, connection: Connection, found: Snapshot) -> int:
    if options.starting_timestamp is not None:
        return sequence_at(connection, found, options.starting_timestamp)
    if options.starting_offsets == "latest":
        return found.last + 1
    wanted = options.starting_sequence
    if wanted is None:
        return found.first
    if wanted < found.first:
        loss(
            options,
            f"startingSequence {wanted} is gone from stream {found.stream}, which begins with {found.first}",
            found.first - wanted,
        )
        return found.first
    return wanted


def _end(options: Options, connection: Connection, found: Snapshot) -> int:
    if options.ending_timestamp is not None:
        return sequence_at(connection, found, options.ending_timestamp)
    wanted = options.ending_sequence
    if wanted is not None and wanted > found.last:
        loss(
            options,
            f"endingSequence {wanted} is not in stream {found.stream}, which ends with {found.last}",
            wanted - found.last,
        )
        wanted = found.last
    return found.last + 1 if wanted is None else wanted + 1


def sequence_at(connection: Connection, found: Snapshot, time: int) -> int:
    """Where the messages stored at `time` (nanoseconds since 1970) or later begin, `last` + 1 at most."""
    high = past = found.last + 1  # from `high` on nothing is too old; from `past` on there is nothing
    low = found.first
    while low < high:
        middle = (low + high) // 2
        message = get_message(connection, found.stream, seq=middle, next_by_subj=">")
        if message is None or message.seq > found.last:
            high = past = middle
        elif message.time_ns >= time:
            high = middle
        else:
            low = message.seq + 1
    return low if low < past else found.last + 1


def split(found: Snapshot, parts: int) -> list[Range]:
    """The range in at most `parts` parts of about the same number of sequences; none when it is empty."""
    size = found.end - found.start
    parts = min(parts, size)
    edges = [found.start + size * index // parts for index in range(parts + 1)] if parts > 0 else []
    return [Range(start, end) for start, end in pairwise(edges)]


def loss(options: Options, what: str, count: int, otherwise: str = "") -> None:
    """Messages that should be there are gone: an error, or a warning when failOnDataLoss is off.

    `otherwise`: what else than that option helps, with "or" at its end.
    """
    if options.fail_on_data_loss:
        raise DataLossError(f"{what}; {otherwise}set {SWITCH} to false to go on without", SWITCH)
    log.warning("%s: up to %d messages are missing (%s is false)", what, count, SWITCH)
