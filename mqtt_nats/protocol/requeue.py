# SPDX-License-Identifier: Apache-2.0
"""What is not sent to a client that does not read is given up: its consumers keep it, and bring it again.

Why: docs/internals/rules.md#clients-that-do-not-read.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from mqtt_nats.protocol.inflight import SENT, WAITING, Delivery, SubscriptionState
from mqtt_nats.protocol.ports import NOWHERE, Ports
from mqtt_nats.protocol.unsequenced import UnsequencedQueue

EVER: Final = 1 << 62

PAST: Final = 4096
"""Sequences that are remembered of subscriptions that are no more."""


class Requeue(UnsequencedQueue):
    """The part of a durable session's sender that does so.

    Subscriptions that have ended are left alone: there is little of them, and others may depend on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ports: Ports = NOWHERE
        self.sources: list[SubscriptionState] = []
        self._queued: dict[int, Delivery] = {}
        """What is WAITING, by stream sequence."""
        self._waiting: list[tuple[int, Delivery]] = []
        self._perhaps = 0
        """Up to this sequence an earlier connection may have sent what is delivered for the first time."""
        self._wary = False  # else no message is sent without a thought
        self.on_room: Callable[[], None] | None = None
        """Called when acknowledgements may have made room."""
        self.ended = 0
        """Up to this sequence subscriptions that have ended may have brought messages which others match too."""
        self._past: deque[int] = deque(maxlen=PAST)
        """Sequences that were completed last by subscriptions which are no more."""
        self._unsent: set[int] = set()
        """Sequences that were taken and not sent: when they come again it is for the first time."""
        self.begun = False
        """Something may have been sent on this connection."""
        self._most = EVER
        """What is known to come after all that earlier connections have sent."""
        self._forgotten = 0
        """How far subscriptions had come that are complete."""

    def sent_perhaps(self, last: int) -> None:
        """Up to ``last`` an earlier connection may have sent what is delivered for the first time: it has DUP."""
        self._perhaps = last
        self._wary = True

    def perhaps(self, sequence: int) -> bool:
        """Whether an earlier connection may have sent what is delivered for the first time."""
        return sequence <= self._perhaps

    def not_sent(self, sequences: Iterable[int]) -> None:
        """What an earlier connection had taken, and has not sent: these and no others."""
        self._unsent = set(sequences)

    def begin(self) -> None:
        """A session begins: nothing was ever sent."""
        self.open = self.begun = True
        self._most = 0

    def close(self) -> None:
        """The connection has ended: what comes from now on waits."""
        self.open = False

    def sent_at_most(self, last: int) -> None:
        """Earlier connections have sent nothing after ``last``, however often a consumer may have tried."""
        self._most = last

    @property
    def most(self) -> int:
        """After this sequence nothing was sent, now or before; :data:`EVER` where that is not known."""
        if not self.begun:
            return self._most
        return max(self._forgotten, self.ended, *(source.last for source in self.sources), 0)

    def unsent(self) -> set[int]:
        """Sequences that were taken, wait for a place in the window or to come again, and have never been sent."""
        return self._unsent.union(one.sequence for one in self._queued.values() if not one.dup)

    def taken_before(self, delivery: Delivery, qos: int, mark: bytes) -> None:
        """An earlier connection had taken a message, too, that is on its way: ``mark`` hears of its end as well."""
        if mark not in delivery.replies():
            delivery.others = [*(delivery.others or ()), mark]
        if self._perhaps_sent(delivery):
            delivery.dup, delivery.qos = True, qos

    def _perhaps_sent(self, delivery: Delivery) -> bool:
        """Whether an earlier connection may have sent what waits, and has to have DUP, if it has had it."""
        return delivery.state == WAITING and not delivery.dup and delivery.sequence not in self._unsent

    @property
    def crowd(self) -> int:
        """How many stored messages wait for a place in the window."""
        return len(self._queued)

    def crowd_before(self, sequence: int) -> int:
        """How many of them are no newer than a sequence."""
        return sum(one <= sequence for one in self._queued)

    def on_their_way(self) -> list[Delivery]:
        """What is in flight or waits, retained messages that wait excepted."""
        return [*self.inflight.values(), *self._queued.values()]

    @property
    def places(self) -> int:
        """In how large a window all that an earlier connection may have sent is sent again at once."""
        known = [*self.on_their_way(), *self.others]
        again = [one.sequence for one in known if one.dup]
        last = max(again, default=0)
        return sum(one.sequence <= max(last, 0) for one in known) if again else 0

    @property
    def queued(self) -> list[Delivery]:
        """What waits for a place in the window."""
        return [*self._queued.values(), *self.others] if self._queued or self.others else []

    def recallable(self, identifier: int) -> bool:
        """Whether a consumer would bring a message again that is taken back."""
        delivery = self.inflight.get(identifier)
        return delivery is not None and delivery.state == SENT and delivery.sequence > 0 and not delivery.source.end

    def recall(self, identifier: int) -> bool:
        """Take back a message whose PUBLISH packet has not left the gateway.

        Returns:
            False when the packet has to be sent all the same: no consumer would bring the message again.
        """
        if not self.recallable(identifier):
            return False
        self._give_up(self.inflight.pop(identifier))
        return True

    def stall(self) -> None:
        """Forget what waits, and send nothing more, until everything has come again and :meth:`go_on` is called."""
        self.open = False
        for delivery in list(self._queued.values()):
            if not delivery.source.end:
                del self._queued[delivery.sequence]
                self._give_up(delivery)
        for source in self.sources:
            if not source.end:
                source.backlog.clear()
        self._waiting = [entry for entry in self._waiting if entry[1].source.end]
        heapq.heapify(self._waiting)

    def _give_up(self, delivery: Delivery) -> None:
        if not delivery.dup:
            self._unsent.add(delivery.sequence)
        for source in self.sources:
            # A server that is killed meanwhile may deliver it for the first time again: it is not done.
            source.given_up(delivery.sequence)

    def go_on(self) -> None:
        """Send again: first what had been given up, in order."""
        self._unsent.clear()
        for source in self.sources:
            source.forgotten_from = 0
        self.open = True
        self.pump()

    # -- changes of subscriptions ---------------------------------------------------------------

    def forget(self, source: SubscriptionState) -> None:
        """A subscription that has ended is complete: its consumer is no more."""
        if source in self.sources:
            self.sources.remove(source)
            self._forgotten = max(self._forgotten, source.last)
            self._past.extend(source.done)

    def begin_anew(self) -> None:
        """The stream counts from 1 again."""
        self.ended = self._forgotten = 0
        self._most = EVER
        self._past.clear()
        self._unsent.clear()

    def _had(self, sequence: int) -> bool:
        """Whether the client has had a message whole, by whichever subscription, of those that were lately."""
        return any(sequence in source.done for source in self.sources) or sequence in self._past

    def holds(self, source: SubscriptionState) -> bool:
        """True while a message of ``source`` is on its way, or JetStream has to confirm that it is complete."""
        return (
            self.waits(source)
            or any(delivery.source is source for delivery in self.inflight.values())
            or any(
                release.unconfirmed > 0 and release.delivery is not None and release.delivery.source is source
                for release in self.releases.values()
            )
        )

    def waits(self, source: SubscriptionState) -> bool:
        """True while a message of ``source`` waits for its place, and is not sent."""
        return bool(source.backlog) or any(delivery.source is source for _, delivery in self._waiting)

    def lower(self, source: SubscriptionState, end: int, retained: bool) -> None:
        """QoS 0 takes the place of a subscription: what its consumer brings up to ``end`` is still sent.

        Args:
            retained: the retained messages that wait are sent all the same: nothing else brings them.
        """
        # Others have left what they have brought by now to this one.
        source.end, source.whole = max(end, 1, *(one.last for one in self.sources)), True
        self.others = deque(d for d in self.others if d.source is not source or d.dup or retained)
        self.replayed(source, None)

    def drain(
        self, source: SubscriptionState, keep: Callable[[Delivery], bool] = lambda delivery: False
    ) -> list[Delivery]:
        """A subscription ends: forget what its source has brought and was not sent yet.

        Args:
            keep: whether another subscription wants it, which has left it to this one.

        Returns:
            What is still in flight; the source may go when all of it is complete.
        """
        source.end = max(source.last, 1)
        again: list[tuple[int, Delivery]] = []
        for delivery in [*source.backlog, *(d for _, d in self._waiting if d.source is source)]:
            # An earlier connection may have sent it: it is completed [MQTT-3.10.4-3].
            if delivery.dup or keep(delivery):
                again.append((delivery.sequence, delivery))
                continue
            del self._queued[delivery.sequence]
            source.left.append(delivery.sequence)
            for reply in delivery.replies():
                self.ports.ack(reply)
        source.backlog.clear()
        self._waiting = [(s, d) for s, d in self._waiting if d.source is not source] + again
        heapq.heapify(self._waiting)
        self.others = deque(d for d in self.others if d.source is not source or d.dup)
        self.replayed(source, None)
        self.pump()
        return [d for d in self.inflight.values() if d.source is source] + [d for _, d in again if d.state == WAITING]
