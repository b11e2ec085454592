# SPDX-License-Identifier: Apache-2.0
"""State of a consumer, of a message and of an owed PUBREL in :mod:`mqtt_nats.protocol.durable_sender`."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

WAITING: Final = 0
SENT: Final = 1
STORING: Final = 2


class SubscriptionState:
    """The delivery state of one subscription of a durable session, and of its consumer."""

    REPLAYING: Final = 1
    BEHIND: Final = 1 << 20
    RETURNING: Final = 1 << 40

    KNOWN_LEAST: Final = 64
    """Least number of completed sequences that are remembered, also with a smaller window."""

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
        """Whether the session's own messages are left out: No Local (5.0)."""
        self.kept = False
        """Whether RETAIN stays as it was published: Retain As Published (5.0)."""
        self.identifier: int | None = None
        """Subscription identifier (5.0); None = none."""
        self.end = end
        """Stream sequence up to which an ended subscription completes its messages; 0 = it has not ended."""
        self.whole = False
        """Whether the ended subscription was lowered to QoS 0: all matching messages up to ``end`` are still sent."""
        self.start = start
        """Stream sequence from which the subscription counts."""
        self.was_qos = 0
        self.until = 0
        """Stream sequence up to which the subscription had the higher QoS ``was_qos``; 0 = none."""
        self.last = 0
        """Highest stream sequence received."""
        self.first = 0
        """Highest stream sequence received as a first delivery: all before it were delivered here."""
        self.base = 0
        """Lowest first delivery since the consumer was attached: all from it to ``first`` came here; 0 = none yet."""
        self.past: deque[tuple[int, int]] = deque(maxlen=16)
        """Pairs (``base``, ``first``) of the times before, when this connection of the client had it attached."""
        self.place = 0
        """Consumer sequence of the next (re)delivery; 0 = not known, negative = at most the absolute value."""
        self.reach = 0
        """Consumer sequence of the last delivery when JetStream counted the pending messages."""
        self.early: list[tuple[int, bool]] = []
        """Consumer sequences of first deliveries that came before that count is known; whether each is acknowledged."""
        self.clear = start - 1
        """Stream sequence up to which the consumer has no message left to deliver, even where ``last`` is lower."""
        self.asked = False
        """Whether a request to JetStream for ``clear`` is under way."""
        self.forgotten_from = 0
        """Lowest stream sequence that was given up since the client stopped reading; 0 = none."""
        self.expected: int | None = None
        """Redeliveries that have to come after the consumer was attached; None = not known yet."""
        self.again = 0
        """Redeliveries that have come since the consumer was attached."""
        self.held = 0
        """Why new messages are kept back in ``backlog``: `REPLAYING` for each replay whose retained messages are not
        sent yet, `BEHIND` for each ended subscription that still brings older messages of this one, `RETURNING` until
        the pending messages have come again; 0 = they are not kept back."""
        self.backlog: deque[Delivery] = deque()
        self.live = False
        """Whether the shared reader brings the messages: see :attr:`DurableSender.reached`."""
        self.done: deque[int] = deque(maxlen=max(window, self.KNOWN_LEAST))
        """Stream sequences completed last. A redelivery shows that its acknowledgement was lost: that can happen to
        one window of the consumer, and to a few more messages where its next leader lags behind."""
        self.left: deque[int] = deque(maxlen=max(window, self.KNOWN_LEAST))
        """Latest stream sequences left to another subscription, or let go; their redeliveries are acknowledged."""

    def begin_anew(self) -> None:
        """Reset the sequences: the stream counts from 1 again."""
        self.start = 1
        self.last = self.first = self.base = self.clear = self.forgotten_from = 0
        self.was_qos = self.until = 0
        self.done.clear()
        self.left.clear()
        self.past.clear()

    def attaching(self) -> None:
        """Prepare for a new deliver subject: the consumer is about to send its pending messages again."""
        self.expected, self.again = None, 0
        self.early.clear()
        self._end_range()

    def idle(self, last: int, clear: int) -> None:
        """Note the state of a detached consumer: delivered up to ``last``, no message left up to ``clear``."""
        self.last = max(self.last, last)
        self.clear = max(self.clear, clear)
        self.expected = 0

    def _end_range(self) -> None:
        if 0 < self.base <= self.first:
            self.past.append((self.base, self.first))
        self.base = 0

    def been(self, sequence: int) -> bool:
        """Whether a message has come to this connection of the client: it is complete, unless it is on its way."""
        return 0 < self.base <= sequence <= self.first or any(low <= sequence <= high for low, high in self.past)

    def given_up(self, sequence: int) -> None:
        """Note that a message was forgotten and has to come again: it is not complete although it was delivered."""
        if 0 < self.forgotten_from <= sequence and sequence > self.first:
            return  # every range ends before it already; quick, since thousands are given up at once
        self.forgotten_from = min(self.forgotten_from or sequence, sequence)
        self.first = min(self.first, sequence - 1)
        self._end_range()
        for place, (low, high) in enumerate(self.past):
            self.past[place] = (low, min(high, sequence - 1))

    def attached(self, pending: int, reach: int, late: bool) -> None:
        """Note how many messages JetStream has pending; it may count first deliveries made since the attachment.

        Args:
            pending: number of pending messages.
            reach: consumer sequence of the last delivery.
            late: the state was requested after the change: early deliveries that were acknowledged are not in
                ``pending``.
        """
        self.expected = pending - sum(number <= reach and not (late and done) for number, done in self.early)
        self.reach = reach
        self.place = self.place or -(reach + 1)
        self.early.clear()

    def began(self, number: int, done: bool) -> None:
        """Note a first delivery, acknowledged when it is ``done``: it is not one of the redeliveries expected."""
        if self.expected is None:
            self.early.append((number, done))
        elif number <= self.reach:
            self.expected -= 1

    def follows(self, number: int) -> bool:
        """Whether no delivery is missing before consumer sequence ``number``, as far as that is known."""
        return number == self.place if self.place > 0 else not self.place or number <= -self.place

    @property
    def collected(self) -> bool:
        """Whether all messages that were pending have been delivered again."""
        return self.expected is not None and self.again >= self.expected

    @property
    def missing(self) -> int:
        """Number of messages that were pending and have not been delivered again."""
        return max((self.expected or 0) - self.again, 0)

    def raised(self, qos: int) -> None:
        """Note that messages so far may have been sent at ``qos``; they are sent again at no lower QoS."""
        self.was_qos = max(qos, self.was_qos if self.until else 0)
        self.until = max(self.until, self.last)

    def granted(self, sequence: int) -> int:
        """Return the QoS that is granted to the message when it is sent first."""
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
        """The message for :meth:`Ports.publish`; opaque to this package. None once it was sent."""
        self.reply = reply
        """Acknowledgement subject, or a token of `ack_tokens`; empty for a retained message."""
        self.others: list[bytes] | None = None
        """Acknowledgement subjects of the same message from other consumers; None = none."""
        self.dup = dup
        """Whether the client may have been sent the message before: it is sent with DUP."""
        self.state = WAITING

    def replies(self) -> list[bytes]:
        """Return every acknowledgement subject of the message."""
        return [self.reply, *(self.others or ())] if self.reply else []


class Release:
    """An owed PUBREL of a QoS 2 message that the client has."""

    __slots__ = ("comp", "delivery", "former", "records", "sequence", "source", "stays", "unconfirmed")

    def __init__(self, sequence: int, former: bool = False) -> None:
        self.sequence = sequence
        self.former = former
        """Whether the sequence counts in a stream that was replaced: another message has that sequence now."""
        self.unconfirmed = 0
        """Number of acknowledgements of the message that JetStream has yet to confirm."""
        self.delivery: Delivery | None = None
        """The message; None = an earlier connection has sent it."""
        self.source: SubscriptionState | None = None
        """The subscription for which a retained message was sent; None = not known, or not a retained message."""
        self.comp = False
        """Whether the client has sent PUBCOMP."""
        self.stays = False
        """Whether the identifier is taken until :meth:`DurableSender.freed`, also after the exchange is complete."""
        self.records: list[bytes] = []
        """Acknowledgement subjects of the PUBREL record, once it was delivered; several when the record was stored
        again after a reconnect."""

    def await_one_more(self) -> None:
        """Count one more acknowledgement of the message that JetStream has yet to confirm."""
        self.unconfirmed += 1
