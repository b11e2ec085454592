# SPDX-License-Identifier: Apache-2.0
"""What has lately come out of the stream of messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mqtt_nats.messages.headers import publish_qos
from mqtt_nats.messages.message import Stored
from mqtt_nats.protocol.durable_sender import packet_id
from mqtt_streams.messages import PREFIX

if TYPE_CHECKING:
    from mqtt_nats.pubsub.routing_table import Table

# So many are kept (messages, bytes of payload).
MOST: Final = 4096
BYTES: Final = 16 * 1024 * 1024


class Recent:
    """Messages of ``$MQTT_msgs``, each made once however many consumers of this gateway bring it."""

    __slots__ = ("_bytes", "_table", "messages")

    def __init__(self, table: Table) -> None:
        self.messages: dict[int, Stored] = {}
        """By stream sequence."""
        self._bytes = 0
        self._table = table

    def message(self, sequence: int, stamp: bytes, subject: bytes, headers: bytes, payload: bytes) -> Stored:
        """The message with this sequence; at QoS 0, without a subject, where it is none for clients.

        ``stamp`` is its store time: a stream that was made anew counts from 1 again.
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
