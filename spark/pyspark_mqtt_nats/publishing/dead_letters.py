# SPDX-License-Identifier: Apache-2.0
"""Rows that cannot be published, as messages on the topic of the option `deadLetterTopic`."""

import base64
from typing import Any, Final

import orjson

from pyspark_mqtt_nats.publishing.encoding import Refused

PAYLOAD_MOST: Final = 8192
"""Characters of the row's payload, or bytes where it is no text, that its dead letter has."""

TOPIC_MOST: Final = 1024
"""Characters of the row's topic that its dead letter has."""


def dead_letter(topic: str, row: tuple[Any, ...], error: Refused) -> tuple[Any, ...]:
    """Return the row of a message at QoS 1 that says why a row cannot be published, in the order of the columns.

    Its payload is a JSON object: `error`, `column`, `topic`, and `payload`, or `payload_base64` where it is not UTF-8.
    """
    wanted, payload, *others = row
    found: dict[str, Any] = {
        "error": str(error),
        "column": error.column,
        "topic": None if wanted is None else wanted[:TOPIC_MOST],
    }
    raw = payload.encode() if isinstance(payload, str) else payload
    if raw is None:
        found["payload"] = None
    else:
        try:
            found["payload"] = raw.decode()[:PAYLOAD_MOST]
        except UnicodeDecodeError:
            found["payload_base64"] = base64.b64encode(raw[:PAYLOAD_MOST]).decode()
    return (topic, orjson.dumps(found), 1, False, "application/json", *(None for _ in others[3:]))
