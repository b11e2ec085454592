# SPDX-License-Identifier: Apache-2.0
"""What the machine of a durable session asks of the world."""

from __future__ import annotations

from typing import Final, Protocol

from mqtt_nats.protocol.inflight import Delivery, SubscriptionState


class Ports(Protocol):
    """What the machine asks of the world."""

    def send(self, data: bytes) -> None:
        """Send bytes to the client."""

    def publish(self, delivery: Delivery, dup: bool) -> bool:
        """Send the PUBLISH packet of a delivery; False when the client must not get it (any more)."""

    def ack(self, reply: bytes) -> None:
        """Acknowledge a message to JetStream."""

    def ack_confirmed(self, reply: bytes, identifier: int) -> None:
        """Acknowledge a message to JetStream and report it with :meth:`DurableSender.confirmed`."""

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        """Store a PUBREL record and report it with :meth:`DurableSender.pubrel_stored`."""

    def look(self, source: SubscriptionState, sequence: int) -> None:
        """Ask JetStream for the state of a consumer and report it with :meth:`DurableSender.looked`."""

    def written(self, source: SubscriptionState) -> None:
        """A message that had waited is sent, of a subscription of which QoS 0 has taken the place, or that is live."""

    def seek(self) -> None:
        """Look for the records of :meth:`Releasing.unrecorded` and report with :meth:`Releasing.vanished`."""


class Nowhere:
    """The ports of a machine whose connection has ended: what is not done is done by the next one."""

    def send(self, data: bytes) -> None:
        """Drop bytes."""

    def publish(self, delivery: Delivery, dup: bool) -> bool:
        """Drop a message."""
        return True

    def ack(self, reply: bytes) -> None:
        """Leave a message to be delivered again."""

    def ack_confirmed(self, reply: bytes, identifier: int) -> None:
        """Leave a message to be delivered again."""

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        """Leave a message to be delivered again."""

    def look(self, source: SubscriptionState, sequence: int) -> None:
        """Ask nothing."""

    def written(self, source: SubscriptionState) -> None:
        """Nobody waits for it."""

    def seek(self) -> None:
        """Look for nothing."""


NOWHERE: Final = Nowhere()
