# SPDX-License-Identifier: Apache-2.0
"""Sessions with durable delivery, and the services that durable delivery needs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from mqtt_nats.ingress.publish import Publisher
from mqtt_nats.sessions.consumer_binding import SessionConsumers
from mqtt_nats.transport.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.position_handover import PositionHandover
    from mqtt_nats.delivery.position_writer import PositionWriters
    from mqtt_nats.ingress.publish import Ingress
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding
    from mqtt_nats.sessions.services import Registry, Services


CLAIMED_AT_ONCE: Final = 128
"""Sessions that are claimed at the same time: with more, all other work of the gateway would wait for thousands."""

RESUMED_AT_ONCE: Final = 128
"""Sessions that are resumed at the same time: with more, CONNACKs of other clients would wait for their requests."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SharedFeed:
    """The shared reader, as the delivery uses it; this class does nothing: see `SharedReaderSessions`."""

    def reached(self, side: DurableDelivery) -> int:
        """Return the stream sequence up to which a session has been given every message."""
        return 0

    def remove(self, client: Receiver) -> None:
        """Take no more messages for a session."""

    def refresh(self, client: Receiver) -> None:
        """Update the filters of a session whose subscriptions have ended."""

    def forget(self, client: Receiver) -> None:
        """Forget a session whose connection has ended."""

    def without_consumers(self, client: Receiver) -> bool:
        """Return whether the new subscriptions of a session are to have no consumers."""
        return False

    async def subscribe(
        self, client: Receiver, place: int, put: Callable[[], list[ConsumerBinding]]
    ) -> list[ConsumerBinding]:
        """Begin new subscriptions, and store the session's position, then its record; return the new ones.

        Args:
            client: the session.
            place: stream sequence after which the session begins, if no subscription of it is served yet.
            put: puts the subscriptions into the session and its record; returns them.
        """
        return []

    def go_on(self, client: Receiver, side: DurableDelivery) -> None:
        """Serve a session from its position on."""

    def settle_consumers(self, client: Receiver, side: DurableDelivery) -> None:
        """Have the dormant consumers of a resumed session checked, created or removed."""

    def end_catching(self, side: DurableDelivery) -> None:
        """End the catch-up reader of a session, if it has one."""

    def elected(self, consumer: str) -> None:
        """Note that a consumer of the stream of messages, or with an empty name the stream, has a new leader."""


class DeliveryServices:
    """Services of one account for durable delivery."""

    __slots__ = (
        "claimed",
        "claims",
        "feed",
        "handover",
        "registry",
        "resets",
        "resumes",
        "services",
        "waiting",
        "writers",
    )

    def __init__(
        self,
        services: Services,
        registry: Registry[Receiver],
        handover: PositionHandover,
        writers: PositionWriters,
        feed: SharedFeed,
        resets: bool,
    ) -> None:
        self.services = services
        self.registry = registry
        self.handover = handover
        self.writers = writers
        """Writers of sessions' positions."""
        self.waiting: set[DurableDelivery] = set()
        """Senders with waiting messages, and stalled ones; `slow_clients` removes the other ones."""
        self.feed = feed
        """The shared reader."""
        self.resets = resets
        """Whether nats-server can set the position of a consumer."""
        self.claims = asyncio.Semaphore(CLAIMED_AT_ONCE)
        """Places of sessions that are claimed."""
        self.claimed = 0.0
        """Loop time in seconds at which a client has got its session last."""
        self.resumes = asyncio.Semaphore(RESUMED_AT_ONCE)
        """Places of sessions that are resumed."""

    def note_claim(self) -> None:
        """Note that a client has got its session: those that wait for a place have not waited in vain."""
        self.claimed = asyncio.get_running_loop().time()


class Receiver(Publisher):
    """A session and the durable delivery to its client; abstract: `Client` handles the packets."""

    __slots__ = ("delivery", "durable_side")

    def __init__(self, connection: Connection, ingress: Ingress, delivery: DeliveryServices) -> None:
        super().__init__(connection, ingress)
        self.delivery = delivery
        self.durable_side: DurableDelivery | None = None
        """The sender's side of a durable session; None = the session is regular, or not claimed yet."""

    @property
    def consumers(self) -> SessionConsumers | None:
        """The sender's side of a durable session; None = the session is regular, or not claimed yet."""
        return self.durable_side

    def end_delivery(self) -> None:
        """Forget the sender of a durable session: it has nothing left to do."""
        self.durable_side = None
