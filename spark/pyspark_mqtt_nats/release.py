# SPDX-License-Identifier: Apache-2.0
"""Telling a stream of interest retention what Spark has read.

Such a stream removes a message when every consumer is done with it. A durable consumer named `spark`, made by whoever
keeps the stream, holds messages for Spark without ever delivering one; it is moved forward instead.
"""

from typing import Final

from pyspark_mqtt_nats.errors import AccessError, ApiError
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import CONSUMER_NOT_FOUND, api
from pyspark_mqtt_nats.reading.ranges import Snapshot, log

CONSUMER: Final = "spark"


class Release:
    """What one query has released. That it could not is said once, and the query is none the worse: what it has read
    stays in the stream."""

    def __init__(self) -> None:
        self._until = 0
        self._complained = False

    def until(self, connection: Connection, found: Snapshot, sequence: int) -> None:
        """Let the stream remove what is before this sequence, as far as Spark goes."""
        if found.retention != "interest" or sequence == self._until:
            return
        try:
            _move(connection, found, sequence)
        except (ApiError, AccessError) as error:
            if not self._complained:
                log.warning("consumer %s of stream %s cannot be moved: %s", CONSUMER, found.stream, error)
            self._complained = True
        self._until = sequence


def _move(connection: Connection, found: Snapshot, sequence: int) -> None:
    """Move the consumer forward: never back, which would claim messages again, nor beyond the end of the stream, which
    would skip messages to come."""
    try:
        info = api(connection, f"CONSUMER.INFO.{found.stream}.{CONSUMER}")
    except ApiError as error:
        if error.err_code == CONSUMER_NOT_FOUND:
            return
        raise
    if info["ack_floor"]["stream_seq"] + 1 < sequence <= found.last + 1:
        api(connection, f"CONSUMER.RESET.{found.stream}.{CONSUMER}", {"seq": sequence})
