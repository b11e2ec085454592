# SPDX-License-Identifier: Apache-2.0
"""Telling a stream of interest retention what Spark has read.

Such a stream removes a message when every consumer is done with it. A durable consumer named `spark`, made by whoever
keeps the stream, holds messages for Spark without ever delivering one; it is moved forward instead.
"""

import logging
from typing import Final

from pyspark_mqtt_nats.errors import ApiError
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import CONSUMER_NOT_FOUND, api
from pyspark_mqtt_nats.reading.ranges import Snapshot

CONSUMER: Final = "spark"

log: Final = logging.getLogger("pyspark_mqtt_nats")


def release(connection: Connection, found: Snapshot, upto: int) -> bool:
    """Let the stream remove what is before the sequence `upto`, as far as Spark goes; whether there was anything.

    The consumer is never moved back, which would claim messages again, nor beyond the end of the stream, which would
    skip messages to come.
    """
    if found.retention != "interest":
        return False
    try:
        info = api(connection, f"CONSUMER.INFO.{found.stream}.{CONSUMER}")
    except ApiError as error:
        if error.err_code == CONSUMER_NOT_FOUND:
            return False
        raise
    if not info["ack_floor"]["stream_seq"] + 1 < upto <= found.last + 1:
        return False
    try:
        api(connection, f"CONSUMER.RESET.{found.stream}.{CONSUMER}", {"seq": upto})
    except ApiError as error:
        # What was read stays in the stream; the query is none the worse.
        log.warning("consumer %s of stream %s cannot be moved to %d: %s", CONSUMER, found.stream, upto, error)
        return False
    return True
