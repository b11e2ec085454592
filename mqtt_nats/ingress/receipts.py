# SPDX-License-Identifier: Apache-2.0
"""Acknowledgements to a client (PUBACK, PUBREC, PUBCOMP), sent in the order of its packets, and their stores.

Each connection has one first-in-first-out queue of :class:`Acknowledgement`; an acknowledgement that is due early
waits for the acknowledgements before it [MQTT-4.6.0-2].
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import CountedStore, PendingStore, sequence
from mqtt_nats.base.logs import log_failure, once
from mqtt_nats.codec import Ack, ReasonCode, ack_bytes, encode
from mqtt_streams.api import ApiError

if TYPE_CHECKING:
    from mqtt_nats.ingress.publisher import Publisher
    from mqtt_nats.ingress.qos2 import HeldPublish, Removals

log = logging.getLogger("mqtt_nats.broker")

RECEIPTS_MAX: Final = 1024
"""Publishes of a client that wait for JetStream; beyond this nothing is read from the client."""
RECEIPTS_LOW: Final = 512

MSG_NOT_FOUND: Final = frozenset((10037, 10057, 10043))
"""JetStream's error codes for the deletion of a message that does not exist."""

TOO_MANY_PER_SUBJECT: Final = "maximum messages per subject exceeded"
"""JetStream's text of the error; its code, 10077, also stands for every other limit of a stream."""


class Acknowledgement(CountedStore):
    """A PUBACK, PUBREC or PUBCOMP to come, due when ``left`` stores are acknowledged."""

    __slots__ = ("client", "id", "kind", "reason", "text")

    def __init__(self, client: Publisher, kind: int, identifier: int, left: int, reason: int = 0) -> None:
        super().__init__(left)
        self.client = client
        self.kind = kind
        self.id = identifier
        self.reason = reason
        self.text = ""

    def refuse(self, reason: int, text: str) -> None:
        """Make the acknowledgement due with a reason code; stores are not waited for any more (5.0)."""
        self.left = 0
        self.reason = reason
        self.text = text

    def stored(self, ack: bytes) -> None:
        """Count a finished store; after the last one the acknowledgement is due."""
        if self.reason:
            return
        self.left -= 1
        if not self.left:
            receipts = self.client.receipts
            if receipts and receipts[0] is self:
                self.client.settle()

    def explains(self) -> bool:
        """Whether the acknowledgement can have a reason code (5.0)."""
        return self.client.version == 5

    def waits(self) -> bool:
        """Return whether the client cannot be told that there is no room (3.1.1)."""
        return not self.explains()

    def publisher(self) -> Publisher:
        """Return the client, whose messages on a topic keep their order [MQTT-4.6.0-5] (3.1.1)."""
        return self.client

    def failed(self, error: ApiError) -> None:
        """Report JetStream's refusal to the client: by a reason code, or by the end of the connection."""
        client = self.client
        if client.version != 5 or self.kind == 7:
            client.refused(error)
        elif not self.reason:
            text = "%s: a message was not stored: %s"
            log_failure(log, logging.WARNING, "store", text, client, error, extra=once(str(error)))
            self.refuse(ReasonCode.QUOTA_EXCEEDED, str(error))
            if client.receipts and client.receipts[0] is self:
                client.settle()

    def packet(self) -> bytes:
        """Return the packet, without user properties [MQTT-3.4.2-3] [MQTT-3.5.2-3] [MQTT-3.7.2-3] (5.0)."""
        if not self.reason:
            return ack_bytes(self.kind, self.id)
        terms = self.client.terms
        if self.text and terms.problem_information:  # [MQTT-3.1.2-29] (5.0)
            data = encode(Ack(self.kind, self.id, self.reason, {"reason_string": self.text[:1000]}), 5)
            if len(data) <= terms.maximum_packet_size:  # [MQTT-3.4.2-2] [MQTT-3.5.2-2] [MQTT-3.7.2-2] (5.0)
                return data
        return encode(Ack(self.kind, self.id, self.reason), 5)


class UnheldPubrec(Acknowledgement):
    """The PUBREC of a QoS 2 publish that is not held."""

    __slots__ = ("_held",)

    def __init__(self, client: Publisher, held: HeldPublish) -> None:
        super().__init__(client, 5, held.id, 0)
        self._held = held

    def failed(self, error: ApiError) -> None:
        """Free the packet identifier: JetStream refuses the message."""
        self.client.inbound.deleted(self._held)
        super().failed(error)

    def stored(self, ack: bytes) -> None:
        """Count a finished store; after the last one PUBREC is due and the client may send PUBREL."""
        if self.left == 1 and not self.reason:
            self.client.inbound.machine.stored(self.id)
        super().stored(ack)


class StoreHeld(Acknowledgement):
    """The store of a held publish; the acknowledgement is its PUBREC."""

    __slots__ = ("held",)

    def __init__(self, client: Publisher, held: HeldPublish) -> None:
        super().__init__(client, 5, held.id, 1)
        self.held = held

    def stored(self, ack: bytes) -> None:
        """Note the sequence of the held publish; PUBREC is due."""
        self.client.inbound.held(self.client, self.held, sequence(ack))
        super().stored(ack)

    def failed(self, error: ApiError) -> None:
        """Replace an unknown record under this packet identifier, or report JetStream's refusal."""
        if error.description == TOO_MANY_PER_SUBJECT:
            self.client.inbound.stray(self.client, self)
        else:
            self.client.inbound.deleted(self.held)
            super().failed(error)


class PublishHeld(CountedStore):
    """The stores of a released QoS 2 publish; then the held record is deleted."""

    __slots__ = ("client", "held", "receipt")

    def __init__(self, client: Publisher, held: HeldPublish, receipt: Acknowledgement, left: int) -> None:
        super().__init__(left)
        self.client = client
        self.held = held
        self.receipt = receipt

    def stored(self, ack: bytes) -> None:
        """Count a finished store; after the last one the held record is removed."""
        self.left -= 1
        if not self.left:
            self.client.inbound.stored(self.client, self.held, self.receipt)

    def waits(self) -> bool:
        """Return True: PUBCOMP has no reason code for it."""
        return True

    def failed(self, error: ApiError) -> None:
        """End the connection: the record stays, and the client sends PUBREL again after it has reconnected."""
        self.client.refused(error)


class DeleteHeld(PendingStore):
    """The removal of held records, then their PUBCOMP packets."""

    __slots__ = ("client", "done", "removals")

    def __init__(self, client: Publisher, removals: Removals, done: list[tuple[HeldPublish, Acknowledgement]]) -> None:
        self.client = client
        self.removals = removals
        self.done = done

    def stored(self, ack: bytes) -> None:
        """Free the packet identifiers and send PUBCOMP: the records are removed."""
        inbound = self.client.inbound
        for held, receipt in self.done:
            inbound.deleted(held)
            receipt.stored(ack)
        self.removals.answered(self.client)
        self.client.proceed()

    def failed(self, error: ApiError) -> None:
        """Treat records that do not exist as removed; any other error ends the connection."""
        if error.code == 404 or error.err_code in MSG_NOT_FOUND:
            self.stored(b"")
        else:
            self.client.refused(error)
            self.removals.answered(self.client)
