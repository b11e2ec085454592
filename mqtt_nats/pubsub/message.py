# SPDX-License-Identifier: Apache-2.0
"""One application message on its way to subscribers, and its shared encodings."""

from __future__ import annotations

from mqtt_nats.codec import publish_head


class Message:
    """A message as the subscribers of one gateway share it.

    ``key`` is the topic as it stands in a PUBLISH packet, with its two length bytes. The encodings are
    made at most once however many subscribers there are; only the packet identifier is per subscriber.
    The publisher's DUP flag is not in it [MQTT-3.3.1-3].
    """

    __slots__ = ("_heads", "_zero", "key", "payload", "qos", "retain", "sender")

    def __init__(self, key: bytes, payload: bytes, qos: int, sender: str = "", retain: bool = False) -> None:
        self.key = key
        self.payload = payload
        self.qos = qos
        self.sender = sender
        self.retain = retain
        self._zero = b""
        self._heads: list[bytes] = [b"", b"", b""]

    def zero(self) -> bytes:
        """The PUBLISH packet at QoS 0 (3.1.1) [MQTT-2.3.1-5] [MQTT-4.3.1-1]."""
        if not self._zero:
            self._zero = publish_head(0x31 if self.retain else 0x30, self.key, len(self.payload)) + self.payload
        return self._zero

    def head(self, qos: int) -> bytes:
        """What precedes the packet identifier at QoS 1 or 2 (3.1.1), DUP clear [MQTT-4.3.2-1] [MQTT-4.3.3-1]."""
        head = self._heads[qos]
        if not head:
            flags = 0x30 | qos << 1 | (1 if self.retain else 0)
            head = self._heads[qos] = publish_head(flags, self.key, 2 + len(self.payload))
        return head


class Stored:
    """A message of a stream as all sessions share it: its packet identifier follows from its sequence.

    So the whole PUBLISH packet is the same for every subscriber with the same QoS.
    """

    __slots__ = ("identifier", "key", "packets", "payload", "qos", "retain", "stamp", "subject")

    def __init__(
        self,
        subject: str,
        key: bytes,
        payload: bytes,
        qos: int,
        identifier: int,
        retain: bool = False,
        stamp: bytes = b"",
    ) -> None:
        self.subject = subject
        self.key = key
        self.payload = payload
        self.qos = qos
        """0 when it was not published as an MQTT message at QoS 1 or 2."""
        self.identifier = identifier
        self.retain = retain
        self.stamp = stamp
        """Store time as the acknowledgement subject has it."""
        self.packets: list[bytes] = [b"", b"", b""]

    def packet(self, qos: int) -> bytes:
        """The PUBLISH packet at QoS 1 or 2 (3.1.1), DUP clear [MQTT-4.3.2-1] [MQTT-4.3.3-1]."""
        identifier = self.identifier
        flags = 0x30 | qos << 1 | (1 if self.retain else 0)
        head = publish_head(flags, self.key, 2 + len(self.payload))
        data = self.packets[qos] = b"%b%c%c%b" % (head, identifier >> 8, identifier & 0xFF, self.payload)
        return data
