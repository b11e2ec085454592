# SPDX-License-Identifier: Apache-2.0
"""Delivery hooks: the function between a client and its socket while hooks for sent packets are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, Protocol

from mqtt_nats.hooks.events import Answered, ClientView, Delivered, DropReason, HookedClient
from mqtt_nats.hooks.points import MESSAGE_ACKED, MESSAGE_ANSWERED, MESSAGE_DELIVERED, MESSAGE_DROPPED
from mqtt_nats.transport.write_buffer import WriteBuffer

if TYPE_CHECKING:
    from mqtt_nats.hooks.registry import Hooks
    from mqtt_nats.messages.publish_encoder import Aliases


class DeliverySubscriber(HookedClient, Protocol):
    """The client whose packets are looked at: a session."""

    write_buffer: WriteBuffer
    outgoing: Aliases | None

    def drop(self, topic: str, qos: int, reason: DropReason, message_id: str = "") -> None:
        """Count and announce a message that the client does not get."""


def set_delivery_hooks(client: DeliverySubscriber, hooks: Hooks, identity: Callable[[int], str]) -> None:
    """Insert or remove the `DeliveryHooks` of a client, as the hooks require; ``identity``: see there."""
    write_buffer = client.write_buffer
    looks = bool(hooks.noticing(MESSAGE_DELIVERED) or hooks.noticing(MESSAGE_ACKED) or hooks.noticing(MESSAGE_ANSWERED))
    wanted = looks or hooks.noticing(MESSAGE_DROPPED) is not None
    send = write_buffer.send
    if isinstance(send, DeliveryHooks):
        send.look_by(hooks, looks)
        if not wanted:
            write_buffer.send_by(send.send)
    elif wanted and send is not None:
        write_buffer.send_by(DeliveryHooks(client, hooks, send, looks, identity))


_ANSWERS: Final[dict[int, Literal[4, 5, 7]]] = {4: 4, 5: 5, 7: 7}
"""Types of packets that answer a PUBLISH, or its PUBREL, of the client."""


class DeliveryHooks:
    """Function in place of a socket's ``write`` that reports the PUBLISH packets and answers that are sent.

    Args:
        identity: returns the id of the message with a packet identifier; empty where it does not come from a stream.
    """

    __slots__ = ("_aliases", "_hooks", "_identity", "_view", "client", "looks", "send", "sent")

    def __init__(
        self,
        client: DeliverySubscriber,
        hooks: Hooks,
        send: Callable[[bytes | bytearray], None],
        looks: bool,
        identity: Callable[[int], str],
    ) -> None:
        self.client = client
        self._hooks, self._identity = hooks, identity
        self.send = send
        self.looks = looks
        self.sent: dict[int, Delivered] = {}
        """Unacknowledged messages by packet identifier, for hooks of acknowledgements; empty without such hooks."""
        self._view = ClientView(client)
        self._aliases: dict[int, bytes] = {} if client.outgoing is None else client.outgoing.known()

    def look_by(self, hooks: Hooks, looks: bool) -> None:
        """Report the sent messages to these hooks, or report dropped ones only."""
        self._hooks, self.looks = hooks, looks

    def send_by(self, send: Callable[[bytes | bytearray], None]) -> None:
        """Send bytes by another function."""
        self.send = send

    def __call__(self, data: bytes | bytearray) -> None:
        """Send bytes, then report the sent messages to the hooks."""
        self.send(data)
        if self.looks:
            self._look(bytes(data))

    def _look(self, data: bytes) -> None:
        hooks = self._hooks
        delivered, acked = hooks.noticing(MESSAGE_DELIVERED), hooks.noticing(MESSAGE_ACKED)
        answered = hooks.noticing(MESSAGE_ANSWERED)
        at = 0
        while at < len(data):
            first = data[at]
            body, end = extent(data, at)
            at = end
            kind = first >> 4
            if kind != 3:
                if answered is not None and kind in _ANSWERS:
                    reason = data[body + 2] if end > body + 2 else 0
                    identifier = data[body] << 8 | data[body + 1]
                    answered.emit(Answered(self._view, _ANSWERS[kind], identifier, reason))
                continue
            found = self.parse(first, data, body, end)
            if acked is not None and found.qos:
                self.sent[found.packet_id] = found
            if delivered is not None:
                delivered.emit(found)

    def parse(self, first: int, data: bytes, at: int, end: int) -> Delivered:
        """Parse the PUBLISH packet whose first byte is ``first`` and whose body is ``data`` from ``at`` to ``end``."""
        qos = first >> 1 & 3
        size = data[at] << 8 | data[at + 1]
        at += 2
        topic = data[at : at + size]
        at += size
        identifier = 0
        properties = b""
        if qos:
            identifier = data[at] << 8 | data[at + 1]
            at += 2
        if self.client.version == 5:
            start, stop = extent(data, at - 1)
            alias = _alias(data, start, stop)
            if alias:
                if size:
                    self._aliases[alias] = topic
                else:
                    topic = self._aliases.get(alias, b"")
            properties = data[start:stop]
            at = stop
        retain, dup = bool(first & 1), bool(first & 8)
        identity = self._identity(identifier) if qos else ""
        return Delivered(self._view, topic.decode(), data[at:end], qos, retain, dup, identifier, identity, properties)


def extent(data: bytes, at: int) -> tuple[int, int]:
    """Return beginning and end of the bytes whose length (one to four bytes) follows the byte at ``at``."""
    size = shift = 0
    while True:
        at += 1
        size |= (data[at] & 127) << shift
        shift += 7
        if data[at] < 128:
            return at + 1, at + 1 + size


def _alias(data: bytes, at: int, end: int) -> int:
    """Return the topic alias in properties that the gateway wrote, 0 = none; only an expiry may come before it."""
    if at < end and data[at] == 0x02:
        at += 5
    return data[at + 1] << 8 | data[at + 2] if at + 3 <= end and data[at] == 0x23 else 0


def lost(write_buffer: WriteBuffer, data: bytes) -> None:
    """Report QoS 0 messages to the hooks that are dropped because their client does not read."""
    send = write_buffer.send
    if not isinstance(send, DeliveryHooks):
        return
    at = 0
    while at < len(data):
        first = data[at]
        body, at = extent(data, at)
        if first >> 4 == 3:
            size = data[body] << 8 | data[body + 1]
            send.client.drop(data[body + 2 : body + 2 + size].decode(), first >> 1 & 3, "slow client")
