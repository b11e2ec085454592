# SPDX-License-Identifier: Apache-2.0
"""Messages that a client does not read are given up: its consumers keep them pending and deliver them again.

Why: docs/internals/delivery.md#clients-that-do-not-read.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import Final

from mqtt_nats.protocol.allocated_identifiers import AllocatedIdentifiers
from mqtt_nats.protocol.inflight import SENT, WAITING, Delivery, SubscriptionState

SEQUENCE_EVER: Final = 1 << 62

PAST_COMPLETED_MOST: Final = 4096
"""Completed sequences that are remembered of subscriptions that have ended."""


class Requeue(AllocatedIdentifiers):
    """The part of a durable session's sender that gives up messages, and that ends subscriptions.

    Messages of ended subscriptions are not given up: they are few, and other subscriptions may wait for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[SubscriptionState] = []
        self._queued: dict[int, Delivery] = {}
        """Messages in state WAITING, by stream sequence; messages that their source keeps back included."""
        self._waiting: list[tuple[int, Delivery]] = []
        """Heap, by stream sequence, of the messages in state WAITING whose source does not keep them back."""
        self._perhaps = 0
        """Stream sequence up to which an earlier connection may have sent messages that come as first deliveries;
        0 = none."""
        self._wary = False
        """Whether `DurableSender.sent_at_once` is off: each message needs the full checks."""
        self.on_room: Callable[[], None] | None = None
        """Called when acknowledgements may have made room in the window."""
        self.ended = 0
        """Stream sequence up to which ended subscriptions may have brought messages that others match too."""
        self._past: deque[int] = deque(maxlen=PAST_COMPLETED_MOST)
        """Stream sequences completed last by subscriptions that have ended and are forgotten."""
        self._unsent: set[int] = set()
        """Stream sequences that were taken and never sent: they have no DUP when they come again."""
        self.begun = False
        """Whether this connection may have sent a message."""
        self._most = SEQUENCE_EVER
        """Stream sequence after which earlier connections have sent no message; `SEQUENCE_EVER` = not known."""
        self._forgotten = 0
        """Highest stream sequence that forgotten subscriptions had received."""

    def sent_perhaps(self, last: int) -> None:
        """Set DUP for first deliveries up to sequence ``last``: an earlier connection may have sent them."""
        self._perhaps = last
        self._wary = True

    def perhaps(self, sequence: int) -> bool:
        """Whether an earlier connection may have sent a message that comes as a first delivery."""
        return sequence <= self._perhaps

    def not_sent(self, sequences: Iterable[int]) -> None:
        """Set the sequences that an earlier connection had taken and not sent; they replace former ones."""
        self._unsent = set(sequences)

    def begin(self) -> None:
        """Open the state machine for a new session: no message was ever sent."""
        self.open = self.begun = True
        self._most = 0

    def close(self) -> None:
        """Stop sending, as the connection has ended: messages that come from now on wait."""
        self.open = False

    def sent_at_most(self, last: int) -> None:
        """Note that earlier connections have sent no message after ``last``, also where one comes as a redelivery."""
        self._most = last

    @property
    def most(self) -> int:
        """Stream sequence after which no message was sent, by any connection; :data:`SEQUENCE_EVER` = not known."""
        if not self.begun:
            return self._most
        return max(self._forgotten, self.ended, *(source.last for source in self.sources), 0)

    def unsent(self) -> set[int]:
        """Return the sequences that were taken and never sent: they wait for the window, or have to come again."""
        return self._unsent.union(one.sequence for one in self._queued.values() if not one.dup)

    def taken_before(self, delivery: Delivery, qos: int, mark: bytes) -> None:
        """Note that an earlier connection had taken a message that is on its way; ``mark`` is acknowledged with it."""
        if mark not in delivery.replies():
            delivery.add_reply(mark)
        if self._perhaps_sent(delivery):
            delivery.mark_duplicate(qos)

    def _perhaps_sent(self, delivery: Delivery) -> bool:
        """Whether a message has no DUP yet and may need one: it waits, and was not known as unsent."""
        return delivery.state == WAITING and not delivery.dup and delivery.sequence not in self._unsent

    @property
    def crowd(self) -> int:
        """Number of stored messages that wait for a place in the window."""
        return len(self._queued)

    def crowd_before(self, sequence: int) -> int:
        """Return how many waiting stored messages have at most this sequence."""
        return sum(one <= sequence for one in self._queued)

    def on_their_way(self) -> list[Delivery]:
        """Return the messages in flight, and those that wait, except for waiting retained and shared messages."""
        return [*self.inflight.values(), *self._queued.values()]

    @property
    def places(self) -> int:
        """Size of a window in which all messages with DUP can be sent again at once."""
        known = [*self.on_their_way(), *self.others]
        again = [one.sequence for one in known if one.dup]
        last = max(again, default=0)
        return sum(one.sequence <= max(last, 0) for one in known) if again else 0

    @property
    def queued(self) -> list[Delivery]:
        """Messages that wait for a place in the window."""
        return [*self._queued.values(), *self.others] if self._queued or self.others else []

    def recallable(self, identifier: int) -> bool:
        """Whether a message in flight can be taken back, since a consumer will deliver it again."""
        delivery = self.inflight.get(identifier)
        return delivery is not None and delivery.state == SENT and delivery.sequence > 0 and not delivery.source.ended

    def recall(self, identifier: int) -> bool:
        """Take back a message whose PUBLISH packet has not left the gateway.

        Returns:
            False when the packet has to be sent all the same: no consumer would deliver the message again.
        """
        if not self.recallable(identifier):
            return False
        self._give_up(self.inflight.pop(identifier))
        return True

    def call_on_room(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called when acknowledgements may have made room in the window; None = no more."""
        self.on_room = callback

    def stop_sending(self) -> None:
        """Forget waiting messages and stop sending, until the messages have come again and :meth:`go_on` is called."""
        self.open = False
        for delivery in list(self._queued.values()):
            if not delivery.source.ended:
                del self._queued[delivery.sequence]
                self._give_up(delivery)
        for source in self.sources:
            if not source.ended:
                source.backlog.clear()
        self._waiting = [entry for entry in self._waiting if entry[1].source.ended]
        heapq.heapify(self._waiting)

    def _give_up(self, delivery: Delivery) -> None:
        if not delivery.dup:
            self._unsent.add(delivery.sequence)
        for source in self.sources:
            # A nats-server that is killed meanwhile may deliver it as a first delivery again: it is not complete.
            source.given_up(delivery.sequence)

    def go_on(self) -> None:
        """Send again: first the messages that were given up, in order."""
        self._unsent.clear()
        for source in self.sources:
            source.recover()
        self.forget_absent()
        self.open = True
        self.pump()

    # -- changes of subscriptions ---------------------------------------------------------------

    def end_up_to(self, sequence: int) -> None:
        """Note the stream sequence up to which an ended subscription may have brought messages that others match."""
        self.ended = max(self.ended, sequence)

    def forget(self, source: SubscriptionState) -> None:
        """Remove the source of an ended subscription that is complete: its consumer is deleted."""
        if source in self.sources:
            self.sources.remove(source)
            self._forgotten = max(self._forgotten, source.last)
            self._past.extend(source.done)

    def begin_anew(self) -> None:
        """Reset the sequences: the stream counts from 1 again."""
        self.ended = self._forgotten = 0
        self._most = SEQUENCE_EVER
        self._past.clear()
        self._unsent.clear()
        for identifier in list(self.allocated.values()):
            self._end_use(identifier)

    def forget_absent(self) -> list[tuple[int, int]]:
        """End the allocations of messages that do not come again; return their sequences and packet identifiers.

        Called when all pending messages have come again, and now and then: a nats-server that was killed may have
        forgotten that it delivered a message, and deliver it later.
        """
        found = []
        for sequence, identifier in list(self.allocated.items()):
            delivery = self.inflight.get(identifier) or self._queued.get(sequence)
            release = self.releases.get(identifier)
            here = sequence in (delivery and delivery.sequence, release and release.sequence)
            if not here and identifier not in self._unconfirmed and self._beyond(sequence):
                self._end_use(identifier)
                found.append((sequence, identifier))
        return found

    def _beyond(self, sequence: int) -> bool:
        """Whether every consumer, or reader, has delivered all of its messages up to a sequence."""
        return all(max(one.last, one.clear) >= sequence or one.live for one in self.sources)

    def _had(self, sequence: int) -> bool:
        """Whether the client has completed a message lately, through any subscription."""
        return any(sequence in source.done for source in self.sources) or sequence in self._past

    def holds(self, source: SubscriptionState) -> bool:
        """Whether a message of ``source`` is on its way, or JetStream has yet to confirm its acknowledgement."""
        return (
            self.waits(source)
            or any(delivery.source is source for delivery in self.inflight.values())
            or any(
                release.unconfirmed > 0 and release.delivery is not None and release.delivery.source is source
                for release in self.releases.values()
            )
        )

    def waits(self, source: SubscriptionState) -> bool:
        """Whether a message of ``source`` waits and is not sent."""
        return bool(source.backlog) or any(delivery.source is source for _, delivery in self._waiting)

    def lower(self, source: SubscriptionState, end: int, retained: bool) -> None:
        """Lower a subscription to QoS 0: messages that its consumer brings up to ``end`` are still sent.

        Args:
            retained: whether waiting retained messages are sent all the same: they come in no other way.
        """
        # Up to what the other subscriptions have received: they may have left those messages to this one.
        source.end_at(max(end, *(one.last for one in self.sources)), whole=True)
        self.others = deque(d for d in self.others if d.source is not source or d.dup or retained)
        self.replayed(source, None)

    def pass_over_backlog(self, source: SubscriptionState, sequences: Set[int]) -> None:
        """Acknowledge messages that a source keeps back: the client does not get them from it."""
        backlog = list(source.backlog)
        source.backlog.clear()
        for delivery in backlog:
            if delivery.sequence not in sequences:
                source.backlog.append(delivery)
                continue
            del self._queued[delivery.sequence]
            source.unwanted.append(delivery.sequence)
            self._drop(delivery)

    def drain(
        self, source: SubscriptionState, keep: Callable[[Delivery], bool] = lambda delivery: False
    ) -> list[Delivery]:
        """End a subscription: forget the messages that its source has brought and that were not sent yet.

        Args:
            keep: whether another subscription wants a message that it has left to this one.

        Returns:
            The messages still in flight; the source may go when all of them are complete.
        """
        source.end_at(source.last)
        again: list[tuple[int, Delivery]] = []
        for delivery in [*source.backlog, *(d for _, d in self._waiting if d.source is source)]:
            # An earlier connection may have sent the message: it is completed [MQTT-3.10.4-3].
            if delivery.dup or keep(delivery):
                again.append((delivery.sequence, delivery))
                continue
            del self._queued[delivery.sequence]
            source.unwanted.append(delivery.sequence)
            self._drop(delivery)
        source.backlog.clear()
        self._waiting = [(s, d) for s, d in self._waiting if d.source is not source] + again
        heapq.heapify(self._waiting)
        self.others = deque(d for d in self.others if d.source is not source or d.dup)
        self.replayed(source, None)
        self.pump()
        return [d for d in self.inflight.values() if d.source is source] + [d for _, d in again if d.state == WAITING]
