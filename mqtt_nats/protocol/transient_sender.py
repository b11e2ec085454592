# SPDX-License-Identifier: Apache-2.0
"""QoS 1 and 2 messages to a client whose session ends with its connection.

Theory of operation. Every packet identifier in use is in one of three states:

    ========== ===================== ==========================
    state      waits for             then
    ========== ===================== ==========================
    PUBLISHED1 PUBACK                free
    PUBLISHED2 PUBREC                RELEASED, PUBREL is sent
    RELEASED   PUBCOMP               free
    ========== ===================== ==========================

No message is ever sent again: the end of the connection ends the session. At most ``limit`` identifiers are
in use; further messages wait, bounded by count and bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from mqtt_nats.codec import Ack, ProtocolError, QuotaExceeded, ReasonCode, ack_bytes, encode
from mqtt_nats.codec.wire import PUBREL

PUBLISHED1: Final = 1
PUBLISHED2: Final = 2
RELEASED: Final = 3

ENTRY_BYTES: Final = 128
"""Estimated bytes of a waiting message without its packet."""

Late = Callable[[int], bytes]
"""Return a PUBLISH packet for a packet identifier at the moment of sending; empty = it must not be sent any more."""


class TransientSender:
    """The state machine of a regular session's sender.

    Args:
        limit: messages in flight at a time (the client's Receive Maximum, bounded by the gateway's).
        max_queued: most messages that wait beyond that.
        write: sends bytes to the client.
        max_bytes: most bytes of the waiting messages.
        version: protocol version of the client, 4 or 5.
        hold: counts the bytes of waiting messages, negative when they leave.
    """

    __slots__ = (
        "_hold",
        "_last",
        "_queue",
        "_tokens",
        "inflight",
        "limit",
        "max_bytes",
        "max_queued",
        "on_room",
        "settled",
        "version",
        "waiting_bytes",
        "write",
    )

    def __init__(
        self,
        limit: int,
        max_queued: int,
        write: Callable[[bytes], None],
        max_bytes: int = 16 * 1024 * 1024,
        version: int = 4,
        hold: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.version = version
        self.limit = limit
        self.max_queued = max_queued
        self.max_bytes = max_bytes
        self.waiting_bytes = 0
        """Estimated bytes of the messages that are not sent yet."""
        self._hold = hold
        self.write = write
        self.inflight: dict[int, int] = {}
        self._queue: deque[tuple[int, int, bytes, bytes, Late | None, bytes]] | None = None
        self._tokens: dict[int, bytes] | None = None
        """Tokens by packet identifier, of messages that other members get if this client does not acknowledge them."""
        self.settled: Callable[[bytes], None] | None = None
        """Called with the token of a message that is complete."""
        self.on_room: Callable[[], None] | None = None
        """Called once when at most half a window of messages waits; then it is None again."""
        self._last = 0

    def call_on_room(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once when at most half a window of messages waits."""
        self.on_room = callback

    def call_on_settled(self, callback: Callable[[bytes], None]) -> None:
        """Have ``callback`` called with the token of each message that is complete."""
        self.settled = callback

    def publish(
        self, qos: int, head: bytes, payload: bytes, late: Late | None = None, token: bytes = b"", size: int = 0
    ) -> None:
        """Send a message, or queue it; ``head`` is the packet up to its packet identifier, ``payload`` the rest.

        Args:
            late: makes the whole packet when it is sent, in place of ``head`` and ``payload``.
            token: given to ``settled`` when the message is complete; empty = none.
            size: bytes of what ``late`` keeps.

        Raises:
            QuotaExceeded: the queue is full; the session has to end, since a QoS 1 or 2 message would be lost.
        """
        # Nothing but PUBLISH waits [MQTT-3.3.4-10] [MQTT-4.9.0-2] [MQTT-4.9.0-3] (5.0)
        queue = self._queue
        if queue is not None or len(self.inflight) >= self.limit:
            if self.waiting >= self.max_queued:
                raise QuotaExceeded(f"{self.max_queued} messages wait for a client that does not acknowledge")
            size += ENTRY_BYTES + len(head) + len(payload)
            if self.waiting_bytes + size > self.max_bytes:
                raise QuotaExceeded(f"{self.max_bytes} bytes wait for a client that does not acknowledge")
            if queue is None:
                queue = self._queue = deque()
            queue.append((size, qos, head, payload, late, token))
            self.waiting_bytes += size
            self._hold(size)
            return
        self._send(qos, head, payload, late, token)

    def _send(self, qos: int, head: bytes, payload: bytes, late: Late | None, token: bytes) -> None:
        inflight = self.inflight
        packet_id = self._last % 65535 + 1
        # In use until acknowledged [MQTT-2.3.1-4] (3.1.1), [MQTT-2.2.1-4] [MQTT-4.3.2-1] [MQTT-4.3.3-1] (5.0)
        while packet_id in inflight:
            packet_id = packet_id % 65535 + 1
        if late is None:
            data = b"%b%c%c%b" % (head, packet_id >> 8, packet_id & 0xFF, payload)
        else:
            data = late(packet_id)
            if not data:
                if token and self.settled is not None:
                    self.settled(token)
                return
        self._last = packet_id
        inflight[packet_id] = qos
        if token:
            if self._tokens is None:
                self._tokens = {}
            self._tokens[packet_id] = token
        self.write(data)

    def acknowledged(self, kind: int, ids: list[int], failed: bool = False) -> None:
        """Handle PUBACK, PUBREC or PUBCOMP for each packet identifier; unknown ones are ignored.

        Args:
            failed: the packet carries a reason code of 0x80 or more, which completes the message.

        Raises:
            ProtocolError: the packet does not belong to the message's QoS.
        """
        inflight = self.inflight
        for packet_id in ids:
            state = inflight.get(packet_id)
            match kind, state:
                case (4, 1) | (7, 3):
                    del inflight[packet_id]
                    if self._tokens:
                        self._settle(packet_id)
                case 5, 2:
                    if failed:  # the message is complete [MQTT-4.4.0-2] (5.0)
                        del inflight[packet_id]
                        self._settle(packet_id)
                    else:
                        inflight[packet_id] = RELEASED
                        self.write(ack_bytes(PUBREL, packet_id))
                case 5, 3:
                    if not failed:  # a repeated PUBREC is answered again [MQTT-4.3.3-1] (3.1.1), [MQTT-4.3.3-4] (5.0)
                        self.write(ack_bytes(PUBREL, packet_id))
                case 5, None:
                    if not failed:
                        self.write(unknown_pubrel(packet_id, self.version))
                case ((4 | 7), None):
                    pass
                case _:
                    raise ProtocolError(f"packet identifier {packet_id} is in use at another QoS")
        queue = self._queue
        if queue is not None:
            while queue and len(inflight) < self.limit:
                size, qos, head, payload, late, token = queue.popleft()
                self.waiting_bytes -= size
                self._hold(-size)
                self._send(qos, head, payload, late, token)
            if not queue:
                self._queue = None
        if self.on_room is not None and self.waiting <= self.limit // 2:
            tell, self.on_room = self.on_room, None
            tell()

    def _settle(self, packet_id: int) -> None:
        token = self._tokens.pop(packet_id, b"") if self._tokens else b""
        if token and self.settled is not None:
            self.settled(token)

    def has_room_for(self, size: int) -> bool:
        """Whether a message of ``size`` bytes may wait: less than one window waits, in less than half of the bytes.

        Waiting messages can be sent as soon as acknowledgements come.
        """
        most = min(self.limit, self.max_queued // 2)
        return self.waiting < most and self.waiting_bytes + size <= self.max_bytes // 2

    def close(self) -> None:
        """Forget the waiting messages: the session has ended."""
        self._hold(-self.waiting_bytes)
        self.waiting_bytes = 0
        self._queue = None

    @property
    def waiting(self) -> int:
        """Number of messages that are not sent yet."""
        return 0 if self._queue is None else len(self._queue)

    @property
    def room(self) -> int:
        """Number of further messages that could be sent now."""
        return max(self.limit - len(self.inflight) - self.waiting, 0)


def unknown_pubrel(packet_id: int, version: int) -> bytes:
    """Return a PUBREL for a message that is not known (any more), so that the receiver gives the identifier up.

    It has no reason string and no user properties [MQTT-3.6.2-2] [MQTT-3.6.2-3] (5.0).
    """
    if version != 5:
        return ack_bytes(PUBREL, packet_id)
    return encode(Ack(PUBREL, packet_id, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND), 5)
