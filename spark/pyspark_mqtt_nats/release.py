# SPDX-License-Identifier: Apache-2.0
"""Release of messages that a query has read, in a stream of interest retention.

Such a stream removes a message when every consumer has acknowledged it. The operator makes a durable consumer named
`spark`, which holds messages for Spark and never delivers one. A query moves it forward.
"""

from typing import Final

from mqtt_streams.error_codes import CONSUMER_NOT_FOUND
from pyspark_mqtt_nats.errors import AccessError, ApiError
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import api
from pyspark_mqtt_nats.reading.ranges import Snapshot, log

CONSUMER: Final = "spark"


class Release:
    """Release of one query. A failure is logged once and does not end the query: messages stay in the stream."""

    def __init__(self) -> None:
        self._until = 0
        self._complained = False

    def until(self, connection: Connection, found: Snapshot, sequence: int) -> None:
        """Let the stream remove the messages before this sequence, as far as Spark needs them."""
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
