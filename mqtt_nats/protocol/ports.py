# SPDX-License-Identifier: Apache-2.0
"""Ports: the operations by which the state machine of a durable session acts on the client and on JetStream."""

from __future__ import annotations

from typing import Final, Protocol

from mqtt_nats.protocol.inflight import Delivery, SubscriptionState


class Ports(Protocol):
    """The operations that the state machine of a durable session calls."""

    def send(self, data: bytes) -> None:
        """Send bytes to the client."""

    def publish(self, delivery: Delivery, dup: bool) -> bool:
        """Send the PUBLISH packet of a delivery; False when the client must not get it (any more)."""

    def ack(self, reply: bytes, identifier: int = 0) -> None:
        """Acknowledge a message: remove it from the position, or do what else its token or subject stands for.

        Args:
            identifier: packet identifier with which :meth:`DurableSender.confirmed` is called then; 0 = no call.
        """

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        """Store a PUBREL record and report it with :meth:`DurableSender.pubrel_stored`."""

    def allocate(self, sequence: int, identifier: int) -> None:
        """Store that a message has another packet identifier than its own, in use; report `allocation_stored`."""

    def end_allocation(self, sequence: int, identifier: int) -> None:
        """Remove what :meth:`allocate` has stored, and report with :meth:`DurableSender.allocation_removed`."""

    def report_no_identifier(self) -> None:
        """Report that a message waits since its packet identifier is in use and no other one may be allocated."""

    def report_waiting(self) -> None:
        """Report that a message waits in the state machine."""

    def report_sent(self, source: SubscriptionState) -> None:
        """Report that a stored message of ``source`` that has waited was sent."""

    def seek(self) -> None:
        """Look for the records of :meth:`DurableSender.unrecorded` and report with :meth:`DurableSender.vanished`."""


class Nowhere:
    """The ports of a state machine whose connection has ended: all work is left to the next connection."""

    def send(self, data: bytes) -> None:
        """Drop bytes."""

    def publish(self, delivery: Delivery, dup: bool) -> bool:
        """Drop a message."""
        return True

    def ack(self, reply: bytes, identifier: int = 0) -> None:
        """Leave a message to the next connection."""

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        """Leave a message to the next connection."""

    def allocate(self, sequence: int, identifier: int) -> None:
        """Leave the message to the next connection."""

    def end_allocation(self, sequence: int, identifier: int) -> None:
        """Leave the removal to the next connection."""

    def report_no_identifier(self) -> None:
        """Drop the report: nothing is sent any more."""

    def report_waiting(self) -> None:
        """Drop the report: nobody looks after the messages."""

    def report_sent(self, source: SubscriptionState) -> None:
        """Drop the report: nothing waits for it."""

    def seek(self) -> None:
        """Leave the records to the next connection."""


NOWHERE: Final = Nowhere()
