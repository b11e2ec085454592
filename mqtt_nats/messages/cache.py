# SPDX-License-Identifier: Apache-2.0
"""Cache of the messages that consumers have lately brought from the stream ``$MQTT_msgs``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mqtt_nats.messages.headers import publish_qos
from mqtt_nats.messages.message import Stored
from mqtt_nats.protocol.durable_sender import packet_id
from mqtt_streams.messages import PREFIX

if TYPE_CHECKING:
    from mqtt_nats.pubsub.routing_table import Table

# Limits of the cache: messages, and bytes of payload; beyond one of them it is emptied.
MOST: Final = 4096
BYTES: Final = 16 * 1024 * 1024


class Recent:
    """Cache of messages of ``$MQTT_msgs``: one object for a message that many consumers of this gateway bring."""

    __slots__ = ("_bytes", "_table", "messages")

    def __init__(self, table: Table) -> None:
        self.messages: dict[int, Stored] = {}
        """Messages by stream sequence."""
        self._bytes = 0
        self._table = table

    def message(self, sequence: int, stamp: bytes, subject: bytes, headers: bytes, payload: bytes) -> Stored:
        """Return the message with this sequence; one without a subject, at QoS 0, where it is not for clients.

        ``stamp`` is the store time in nanoseconds: a stream that was created again counts from 1 again.
        """
        found = self.messages.get(sequence)
        if found is not None and found.stamp == stamp:
            return found
        bare = subject[len(PREFIX) :]
        route = self._table.by_subject.get(bare) or self._table.route_of_subject(bare)
        if route is None:
            return Stored("", b"", b"", 0, 0)
        found = Stored(
            route.subject, route.key, payload, publish_qos(headers), packet_id(sequence), False, stamp, headers
        )
        self._bytes += len(payload)
        if len(self.messages) >= MOST or self._bytes > BYTES:
            self.messages.clear()
            self._bytes = len(payload)
        self.messages[sequence] = found
        return found
