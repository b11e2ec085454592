# SPDX-License-Identifier: Apache-2.0
"""What :mod:`mqtt_nats.protocol.durable_sender` keeps about a consumer, a message and an owed PUBREL."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

WAITING: Final = 0
SENT: Final = 1
STORING: Final = 2


class SubscriptionState:
    """One durable consumer of the session, attached to this connection."""

    REPLAYING: Final = 1
    BEHIND: Final = 1 << 20
    RETURNING: Final = 1 << 40

    KNOWN_LEAST: Final = 64
    """Sequences that are remembered when the client takes few messages at a time."""

    __slots__ = (
        "again",
        "asked",
        "backlog",
        "base",
        "clear",
        "done",
        "early",
        "end",
        "expected",
        "first",
        "forgotten_from",
        "held",
        "identifier",
        "kept",
        "last",
        "left",
        "live",
        "no_local",
        "past",
        "place",
        "qos",
        "reach",
        "start",
        "until",
        "was_qos",
        "whole",
    )

    def __init__(self, qos: int, start: int, window: int, end: int = 0) -> None:
        self.qos = qos
        """Granted QoS."""
        self.no_local = False
        """The session's own messages are left out (5.0)."""
        self.kept = False
        """RETAIN stays as it was published (5.0)."""
        self.identifier: int | None = None
        """Subscription identifier (5.0)."""
        self.end = end
        """Not 0: the subscription has ended; only what was in flight up to this sequence is completed."""
        self.whole = False
        """Then: all that it matches up to that sequence is still sent, since QoS 0 has only taken its place."""
        self.start = start
        """Stream sequence from which the subscription counts."""
        self.was_qos = 0
        self.until = 0
        """Up to this sequence the subscription had the QoS ``was_qos``."""
        self.last = 0
        """Highest stream sequence received."""
        self.first = 0
        """Highest stream sequence received as a first delivery: everything before it has been here."""
        self.base = 0
        """The lowest one since the consumer was attached last: all from there to ``first`` came here; 0 = none yet."""
        self.past: deque[tuple[int, int]] = deque(maxlen=16)
        """The same two of the last times before that it was attached, by this connection of the client."""
        self.place = 0
        """The consumer's own number of the next delivery, redeliveries included; 0 = not known, negative = not
        more than that."""
        self.reach = 0
        """That number of the last delivery before JetStream has told how many are pending."""
        self.early: list[tuple[int, bool]] = []
        """Those of first deliveries that have come before the gateway was told, and whether they are acknowledged."""
        self.clear = start - 1
        """The consumer has nothing left to deliver before this sequence, for all that ``last`` says."""
        self.asked = False
        """JetStream has been asked for that."""
        self.forgotten_from = 0
        """The lowest sequence that was given up since the client has read last; 0 = none."""
        self.expected: int | None = None
        """Redeliveries to come after the consumer was attached; None = not known yet."""
        self.again = 0
        """Redeliveries that have come."""
        self.held = 0
        """New messages are kept back: `REPLAYING` for each replay of which retained messages are yet to be written,
        `BEHIND` for each ended subscription that still brings older messages which are now this one's, `RETURNING`
        until what was pending has come again."""
        self.backlog: deque[Delivery] = deque()
        self.live = False
        """Its messages come through the shared reader: see :attr:`DurableSender.reached`."""
        self.done: deque[int] = deque(maxlen=max(window, self.KNOWN_LEAST))
        """Sequences completed last. The acknowledgements that can be lost are those of the consumer's window; and of a
        few more where its next leader lags behind."""
        self.left: deque[int] = deque(maxlen=max(window, self.KNOWN_LEAST))
        """Sequences left to another subscription, or let go, last; this consumer need not bring them again."""

    def begin_anew(self) -> None:
        """The stream counts from 1 again."""
        self.start = 1
        self.last = self.first = self.base = self.clear = self.forgotten_from = 0
        self.was_qos = self.until = 0
        self.done.clear()
        self.left.clear()
        self.past.clear()

    def attaching(self) -> None:
        """The consumer is about to deliver to a new subject, and to send again what is pending."""
        self.expected, self.again = None, 0
        self.early.clear()
        self._end_range()

    def idle(self, last: int, clear: int) -> None:
        """The consumer is not attached yet: it has delivered up to ``last``, and has nothing up to ``clear``."""
        self.last = max(self.last, last)
        self.clear = max(self.clear, clear)
        self.expected = 0

    def _end_range(self) -> None:
        if 0 < self.base <= self.first:
            self.past.append((self.base, self.first))
        self.base = 0

    def been(self, sequence: int) -> bool:
        """Whether a message has come to this connection of the client: it is done, unless it is on its way."""
        return 0 < self.base <= sequence <= self.first or any(low <= sequence <= high for low, high in self.past)

    def given_up(self, sequence: int) -> None:
        """A message was forgotten, to come again: it is not done, for all that has been here."""
        if 0 < self.forgotten_from <= sequence and sequence > self.first:
            return  # every range ends before it: thousands are given up at once
        self.forgotten_from = min(self.forgotten_from or sequence, sequence)
        self.first = min(self.first, sequence - 1)
        self._end_range()
        for place, (low, high) in enumerate(self.past):
            self.past[place] = (low, min(high, sequence - 1))

    def attached(self, pending: int, reach: int, late: bool) -> None:
        """JetStream has told how many are pending; some may have been delivered, for the first time, by then.

        Args:
            pending: not acknowledged.
            reach: number of the last delivery.
            late: it was asked only after the change: what came before that and was acknowledged is not in ``pending``.
        """
        self.expected = pending - sum(number <= reach and not (late and done) for number, done in self.early)
        self.reach = reach
        self.place = self.place or -(reach + 1)
        self.early.clear()

    def began(self, number: int, done: bool) -> None:
        """A first delivery has come, and is acknowledged when it is ``done``: it is not one to come again."""
        if self.expected is None:
            self.early.append((number, done))
        elif number <= self.reach:
            self.expected -= 1

    def follows(self, number: int) -> bool:
        """Whether no delivery is missing before the one with this number, as far as that is known."""
        return number == self.place if self.place > 0 else not self.place or number <= -self.place

    @property
    def collected(self) -> bool:
        """True when everything that was in flight has been delivered again."""
        return self.expected is not None and self.again >= self.expected

    @property
    def missing(self) -> int:
        """How many messages that were in flight have not been delivered again."""
        return max((self.expected or 0) - self.again, 0)

    def raised(self, qos: int) -> None:
        """What was sent so far may have been sent at ``qos``, and is sent again at no lower one."""
        self.was_qos = max(qos, self.was_qos if self.until else 0)
        self.until = max(self.until, self.last)

    def granted(self, sequence: int) -> int:
        """The QoS that was granted when the message was, or will be, sent first."""
        return self.was_qos if sequence <= self.until else self.qos


class Delivery:
    """One message on its way to the client."""

    __slots__ = ("body", "dup", "id", "others", "qos", "reply", "sequence", "source", "state")

    def __init__(
        self, source: SubscriptionState, sequence: int, identifier: int, qos: int, body: Any, reply: bytes, dup: bool
    ) -> None:
        self.source = source
        self.sequence = sequence
        """Stream sequence; negative for a retained message, whose sequence counts in another stream."""
        self.id = identifier
        self.qos = qos
        self.body = body
        """What :meth:`Ports.publish` needs; opaque here."""
        self.reply = reply
        """The acknowledgement subject; empty for a retained message."""
        self.others: list[bytes] | None = None
        """Those of the same message from further consumers."""
        self.dup = dup
        self.state = WAITING

    def replies(self) -> list[bytes]:
        """Every acknowledgement subject."""
        return [self.reply, *(self.others or ())] if self.reply else []


class Release:
    """An owed PUBREL."""

    __slots__ = ("comp", "delivery", "former", "records", "sequence", "source", "stays", "unconfirmed")

    def __init__(self, sequence: int, former: bool = False) -> None:
        self.sequence = sequence
        self.former = former
        """The sequence counts in a stream that was replaced: the message of that sequence is another one now."""
        self.unconfirmed = 0
        """Acknowledgements of the message that JetStream has yet to confirm."""
        self.delivery: Delivery | None = None
        """The message, when this connection has sent it."""
        self.source: SubscriptionState | None = None
        """Of a retained message: the subscription that it was sent for, where that is known."""
        self.comp = False
        self.stays = False
        """Its identifier is taken until :meth:`DurableSender.freed`, also when all is complete."""
        self.records: list[bytes] = []
        """The acknowledgement subject of the PUBREL record, once it has been delivered; several when it was
        stored again after a reconnect."""

    def await_one_more(self) -> None:
        """One more acknowledgement of the message is yet to be confirmed."""
        self.unconfirmed += 1
