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
        "ended",
        "expected",
        "first",
        "forgotten_from",
        "held",
        "identifier",
        "kept",
        "last",
        "live",
        "no_local",
        "past",
        "place",
        "qos",
        "reach",
        "settled",
        "settled_before",
        "start",
        "until",
        "unwanted",
        "was_qos",
        "whole",
    )

    qos: int
    """Granted QoS."""
    no_local: bool
    """Whether the session's own messages are left out: No Local (5.0)."""
    kept: bool
    """Whether RETAIN stays as it was published: Retain As Published (5.0)."""
    identifier: int | None
    """Subscription identifier (5.0); None = none."""
    end: int
    """Stream sequence up to which an ended subscription completes its messages; 0 = the stream had no message yet."""
    ended: bool
    """Whether the subscription has ended."""
    whole: bool
    """Whether the ended subscription was lowered to QoS 0: all matching messages up to ``end`` are still sent."""
    start: int
    """Stream sequence from which the subscription counts."""
    was_qos: int
    until: int
    """Stream sequence up to which the subscription had the higher QoS ``was_qos``; 0 = none."""
    last: int
    """Highest stream sequence received."""
    first: int
    """Highest stream sequence received as a first delivery: all before it were delivered here."""
    base: int
    """Lowest first delivery since the consumer was attached: all from it to ``first`` came here; 0 = none yet."""
    past: deque[tuple[int, int]]
    """Pairs (``base``, ``first``) of the times before, when this connection of the client had it attached."""
    place: int
    """Consumer sequence of the next (re)delivery; 0 = not known, negative = at most the absolute value."""
    reach: int
    """Consumer sequence of the last delivery when JetStream counted the pending messages."""
    early: list[tuple[int, bool]]
    """Consumer sequences of first deliveries that came before that count is known; whether each is acknowledged."""
    clear: int
    """Stream sequence up to which the consumer has no message left to deliver, even where ``last`` is lower."""
    asked: bool
    """Whether a request to JetStream for ``clear`` is under way."""
    forgotten_from: int
    """Lowest stream sequence that was given up since the client stopped reading; 0 = none."""
    expected: int | None
    """Redeliveries that have to come after the consumer was attached; None = not known yet."""
    again: int
    """Redeliveries that have come since the consumer was attached."""
    held: int
    """Why new messages are kept back in ``backlog``: `REPLAYING` for each replay whose retained messages are not
    sent yet, `BEHIND` for each ended subscription that still brings older messages of this one, `RETURNING` until
    the pending messages have come again; 0 = they are not kept back."""
    backlog: deque[Delivery]
    live: bool
    """Whether the shared reader brings the messages: see :attr:`DurableSender.reached`."""
    done: deque[int]
    """Stream sequences completed last. A redelivery shows that its acknowledgement was lost: that can happen to
    one window of the consumer, and to a few more messages where its next leader lags behind."""
    unwanted: deque[int]
    """Latest stream sequences that are not sent through this source; their redeliveries are acknowledged."""
    settled: deque[bytes] | None
    """Acknowledgement subjects of a shared subscription's QoS 1 messages that were acknowledged last; None = there are
    none. See :meth:`doubtful`."""
    settled_before: deque[bytes] | None
    """The same from before the last :meth:`trust`; None = there are none."""

    def __init__(
        self,
        qos: int,
        start: int,
        window: int,
        end: int | None = None,
        *,
        whole: bool = False,
        was: tuple[int, int] = (0, 0),
    ) -> None:
        """Begin a subscription, or an ended one with its ``end``.

        Args:
            was: the higher QoS that it had, and the stream sequence up to which it had it.
        """
        self.qos = qos
        self.no_local = self.kept = False
        self.identifier = None
        self.start, self.end, self.ended, self.whole = start, end or 0, end is not None, whole
        self.was_qos, self.until = was
        self.last = self.first = self.base = self.forgotten_from = 0
        self.past = deque(maxlen=16)
        self.place = self.reach = self.again = self.held = 0
        self.early = []
        self.clear = start - 1
        self.asked = self.live = False
        self.expected = None
        self.backlog = deque()
        self.done = deque(maxlen=max(window, self.KNOWN_LEAST))
        self.unwanted = deque(maxlen=max(window, self.KNOWN_LEAST))
        self.settled = self.settled_before = None

    # -- what was granted -----------------------------------------------------------------------

    def take_options(self, *, no_local: bool, kept: bool, identifier: int | None) -> None:
        """Take the options of a SUBSCRIBE for the same filter."""
        self.no_local, self.kept, self.identifier = no_local, kept, identifier

    def grant(self, qos: int) -> None:
        """Grant another QoS to all messages."""
        self.qos = qos

    def regrant(self, qos: int, until: int) -> None:
        """Grant another QoS; messages up to the stream sequence ``until`` keep the QoS that was granted before."""
        self.was_qos, self.until, self.qos = self.qos, until, qos

    def end_at(self, sequence: int, *, whole: bool = False) -> None:
        """End the subscription, or move its end: messages up to a stream sequence are still completed.

        Args:
            whole: whether the subscription is lowered to QoS 0, so that all messages up to its end are still sent.
        """
        self.ended, self.end = True, max(self.end, sequence)
        self.whole = self.whole or whole

    def raised(self, qos: int) -> None:
        """Note that messages so far may have been sent at ``qos``; they are sent again at no lower QoS."""
        self.was_qos = max(qos, self.was_qos if self.until else 0)
        self.until = max(self.until, self.last)

    def granted(self, sequence: int) -> int:
        """Return the QoS that is granted to the message when it is sent first."""
        return self.was_qos if sequence <= self.until else self.qos

    # -- what keeps messages back ---------------------------------------------------------------

    def hold(self, reason: int, times: int = 1) -> None:
        """Keep back new messages for a reason; `RETURNING` is one reason however often it is given."""
        if reason == self.RETURNING:
            self.held |= reason
        else:
            self.held += reason * times

    def drop_reason(self, reason: int) -> None:
        """Remove one reason for which new messages are kept back; :meth:`DurableSender.drop_hold` sends them."""
        if reason == self.RETURNING:
            self.held &= ~reason
        else:
            self.held -= reason

    @property
    def replaying(self) -> bool:
        """Whether new messages are kept back until the retained messages of the subscription are sent."""
        return self.held % self.BEHIND > 0

    # -- the shared reader ----------------------------------------------------------------------

    def become_live(self, since: int) -> None:
        """Take the messages after stream sequence ``since`` from the shared reader, once no reason keeps them back."""
        self.live = True
        self.hold(self.RETURNING)
        self.deliver_to(max(self.last, since))

    def become_plain(self, reached: int) -> None:
        """Take the messages after stream sequence ``reached`` from the consumer, which was set to begin there."""
        self.live = False
        self.deliver_to(reached)
        self.place = self.expected = self.again = 0

    @property
    def by_reader(self) -> bool:
        """Whether readers bring messages: it is live, and has not ended except by being lowered to QoS 0."""
        return self.live and (self.whole or not self.ended)

    def stand_for_position(self, clear: int) -> None:
        """Stand for the messages of a stored position, without a consumer: none is left up to sequence ``clear``."""
        self.live = True
        self.clear = clear
        self.expected = 0

    # -- deliveries of the consumer -------------------------------------------------------------

    def receive_up_to(self, sequence: int) -> None:
        """Note the last stream sequence that the consumer has delivered."""
        self.last = max(self.last, sequence)

    def deliver_to(self, sequence: int, following: int = 0) -> None:
        """Note that all messages up to a stream sequence were delivered.

        Args:
            following: consumer sequence of the delivery that has to come next; 0 = it stays as it is.
        """
        self.first = self.last = sequence
        if following:
            self.place = following

    def settle(self, reply: bytes) -> None:
        """Note that a shared subscription's QoS 1 message is being acknowledged."""
        if self.settled is None:
            self.settled = deque(maxlen=self.KNOWN_LEAST)
        self.settled.append(reply)

    def trust(self) -> None:
        """Note that the consumer's leader has had everything from before the last call, and keeps it."""
        self.settled, self.settled_before = None, self.settled

    def doubtful(self) -> list[bytes]:
        """Return the acknowledgement subjects of QoS 1 messages whose acknowledgement a loss may concern, in order."""
        return [*(self.settled_before or ()), *(self.settled or ())]

    def seen(self, sequence: int, attempt: int) -> None:
        """Note a delivery: the ``attempt``-th one of a message, from 1."""
        if sequence > self.last:
            self.last = sequence
        if attempt > 1:
            self.again += 1
        elif sequence > self.first:
            self.first = sequence
            self.base = self.base or sequence

    def await_delivery(self, number: int) -> None:
        """Note the consumer sequence of the delivery that has to come next; 0 = not known."""
        self.place = number

    def created(self) -> None:
        """Note that the consumer is a new one: nothing is pending, and the loss of its first delivery is noticed."""
        self.expected, self.place = 0, 1

    def begin_request(self) -> None:
        """Note that JetStream is asked up to where the consumer has no message left."""
        self.asked = True

    def end_request(self, clear: int = 0) -> None:
        """Note that the request has ended; the consumer has no message left up to stream sequence ``clear``."""
        self.asked = False
        self.clear = max(self.clear, clear)

    def recover(self) -> None:
        """Note that the messages that were given up have come again."""
        self.forgotten_from = 0

    def begin_anew(self) -> None:
        """Reset the sequences: the stream counts from 1 again."""
        self.start = 1
        self.last = self.first = self.base = self.clear = self.forgotten_from = 0
        self.was_qos = self.until = 0
        self.done.clear()
        self.unwanted.clear()
        self.past.clear()

    def attaching(self) -> None:
        """Prepare for a new deliver subject: the consumer is about to send its pending messages again."""
        self.expected, self.again = None, 0
        self.early.clear()
        self._end_range()

    def idle(self, last: int, clear: int) -> None:
        """Note the state of a detached consumer: delivered up to ``last``, no message left up to ``clear``."""
        self.receive_up_to(last)
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
        """Note how many messages JetStream has pending; it may count first deliveries after the attachment.

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


class Delivery:
    """A message on its way to the client, with its packet identifier and state."""

    __slots__ = ("body", "dup", "id", "others", "qos", "reply", "sequence", "source", "state")

    def __init__(
        self,
        source: SubscriptionState,
        sequence: int,
        identifier: int,
        qos: int,
        body: Any,
        reply: bytes,
        dup: bool,
        state: int = WAITING,
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
        self.state = state

    def identify(self, identifier: int) -> None:
        """Give the message, which is not sent yet, another packet identifier."""
        self.id = identifier

    def send(self) -> None:
        """Note that the message is being sent to the client."""
        self.state = SENT

    def forget_body(self) -> None:
        """Forget the message itself: this connection never sends it again."""
        self.body = None

    def store_pubrel(self) -> None:
        """Note that the client has received the message, and that the record of its PUBREL is being stored."""
        self.state = STORING

    def repeat(self, source: SubscriptionState, reply: bytes) -> None:
        """Take the acknowledgement subject of a redelivery, through the same consumer or another one."""
        if self.source is source:
            self.reply = reply
        else:
            self.add_reply(reply)

    def add_reply(self, reply: bytes) -> None:
        """Add an acknowledgement subject, or a token, of the same message."""
        self.others = [*(self.others or ()), reply]

    def acknowledge_by(self, token: bytes, others: list[bytes] | None) -> None:
        """Replace the acknowledgement subjects by a token, and those ``others`` that remain."""
        self.reply, self.others = token, others

    def regrant(self, qos: int) -> None:
        """Send the message at another QoS."""
        self.qos = qos

    def mark_duplicate(self, qos: int) -> None:
        """Send the message with DUP, at the QoS at which an earlier connection may have sent it."""
        self.dup, self.qos = True, qos

    def replies(self) -> list[bytes]:
        """Return every acknowledgement subject of the message."""
        return [self.reply, *(self.others or ())] if self.reply else []


class Release:
    """An owed PUBREL of a QoS 2 message that the client has."""

    __slots__ = ("comp", "delivery", "epoch", "former", "records", "sequence", "source", "stays", "unconfirmed")

    def __init__(self, sequence: int, former: bool = False, epoch: int = 0) -> None:
        self.sequence = sequence
        self.epoch = epoch
        """Epoch of the connection that has stored the record; 0 = not known, or this connection."""
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
        """Whether the identifier stays taken after the exchange, until :meth:`DurableSender.free_packet_id`."""
        self.records: list[bytes] = []
        """Acknowledgement subjects of the PUBREL record, once it was delivered; several when the record was stored
        again after a reconnect."""

    def await_one_more(self) -> None:
        """Count one more acknowledgement of the message that JetStream has yet to confirm."""
        self.unconfirmed += 1

    def confirm_one(self) -> None:
        """Count one acknowledgement of the message that JetStream has confirmed."""
        self.unconfirmed -= 1

    def receive(self, delivery: Delivery) -> list[bytes]:
        """Note which message the client has received; return its acknowledgement subjects, to be confirmed."""
        replies = delivery.replies()
        self.unconfirmed += len(replies)
        self.delivery = delivery
        if delivery.sequence < 0 and not replies:
            self.source = delivery.source
        return replies

    def replay_for(self, source: SubscriptionState) -> None:
        """Note the subscription for which the retained message would have been sent again."""
        self.source = source

    def keep_identifier(self, record: bytes) -> None:
        """Keep the identifier taken until :meth:`DurableSender.free_packet_id`; ``record`` is acknowledged then."""
        self.stays = True
        self.records.append(record)

    def complete(self) -> None:
        """Note PUBCOMP."""
        self.comp = True

    def take_records(self) -> list[bytes]:
        """Return the acknowledgement subjects of the PUBREL record, which are acknowledged now."""
        records, self.records = self.records, []
        return records
