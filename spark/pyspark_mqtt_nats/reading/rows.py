# SPDX-License-Identifier: Apache-2.0
"""What both ways of reading hand over, and the bounds that both keep."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_mqtt_nats.errors import SourceError
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import get_message


class Rows(NamedTuple):
    """Messages in the order of their sequences.

    `sequences` and `times` are int64, times in ns since 1970. The others are binary.
    """

    sequences: pa.Array
    times: pa.Array
    subjects: pa.Array
    headers: pa.Array
    payloads: pa.Array

    @property
    def size(self) -> int:
        """Bytes of headers and payloads."""
        return sum(pc.sum(pc.binary_length(part)).as_py() or 0 for part in (self.headers, self.payloads))


@dataclass(frozen=True, slots=True)
class Bounds:
    """`rows` and about `bytes` of one batch; as many may be on their way from the server twice."""

    rows: int = 10_000
    bytes: int = 4 << 20


SILENCE: Final = 5.0
"""Seconds after which a request for messages ends at the server, and seconds more for that word to reach us."""


class Interrupted(SourceError):
    """Reading stopped before the end for a reason that may pass: a new connection and the rest of the range."""


def anything_between(connection: Connection, stream: str, subjects: tuple[str, ...], start: int, end: int) -> bool:
    """Whether the leader of the stream has a message there: only that proves that a read which got no more is done."""
    for subject in subjects or (">",):
        message = get_message(connection, stream, seq=start, next_by_subj=subject)
        if message is not None and message.seq < end:
            return True
    return False
