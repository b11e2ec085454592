# SPDX-License-Identifier: Apache-2.0
"""State of a subscription, of a message and of an owed PUBREL in :mod:`mqtt_nats.protocol.durable_sender`."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

WAITING: Final = 0
SENT: Final = 1
STORING: Final = 2


class SubscriptionState:
    """The delivery state of one subscription of a durable session, or of the messages of its stored position."""

    REPLAYING: Final = 1
    BEHIND: Final = 1 << 20
    RETURNING: Final = 1 << 40

    SETTLED_MOST: Final = 64
    """Acknowledgement subjects of a shared subscription that are remembered between two calls of :meth:`trust`."""

    __slots__ = (
        "backlog",
        "end",
        "ended",
        "held",
        "identifier",
        "kept",
        "last",
        "no_local",
        "qos",
        "settled",
        "settled_before",
        "start",
        "until",
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
    """Stream sequence up to which the subscription has been given every message."""
    held: int
    """Why new messages are kept back in ``backlog``: `REPLAYING` for each replay whose retained messages are not
    sent yet, `BEHIND` for each ended subscription or queue of QoS 0 whose older messages are not sent yet, `RETURNING`
    until the session is known to be this gateway's (still); 0 = they are not kept back."""
    backlog: deque[Delivery]
    settled: deque[bytes] | None
    """Acknowledgement subjects of a shared subscription's QoS 1 messages that were acknowledged last; None = there are
    none. See :meth:`doubtful`."""
    settled_before: deque[bytes] | None
    """The same from before the last :meth:`trust`; None = there are none."""

    def __init__(
        self,
        qos: int,
        start: int,
        *,
        end: int | None = None,
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
        self.last = self.held = 0
        self.backlog = deque()
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

    # -- readers --------------------------------------------------------------------------------

    @property
    def is_served(self) -> bool:
        """Whether readers bring messages: it has not ended, except by being lowered to QoS 0."""
        return self.whole or not self.ended

    def deliver_to(self, sequence: int) -> None:
        """Note that the subscription has been given every message up to a stream sequence."""
        self.last = sequence

    def begin_after(self, since: int) -> None:
        """Take only messages after stream sequence ``since`` from readers, or after a later one that was reached."""
        self.deliver_to(max(self.last, since))

    # -- shared subscriptions -------------------------------------------------------------------

    def settle(self, reply: bytes) -> None:
        """Note that a shared subscription's QoS 1 message is being acknowledged."""
        if self.settled is None:
            self.settled = deque(maxlen=self.SETTLED_MOST)
        self.settled.append(reply)

    def trust(self) -> None:
        """Note that the leader of the group's consumer has had everything from before the last call, and keeps it."""
        self.settled, self.settled_before = None, self.settled

    def doubtful(self) -> list[bytes]:
        """Return the acknowledgement subjects of QoS 1 messages whose acknowledgement a loss may concern, in order."""
        return [*(self.settled_before or ()), *(self.settled or ())]


class Delivery:
    """A message on its way to the client, with its packet identifier and state."""

    __slots__ = ("body", "dup", "id", "qos", "reply", "sequence", "source", "state")

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

    def regrant(self, qos: int) -> None:
        """Send the message at another QoS."""
        self.qos = qos


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
        """Number of acknowledgements of the message that have yet to be confirmed."""
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
        """Count one more acknowledgement of the message that has yet to be confirmed."""
        self.unconfirmed += 1

    def confirm_one(self) -> None:
        """Count one acknowledgement of the message that is confirmed."""
        self.unconfirmed -= 1

    def receive(self, delivery: Delivery) -> None:
        """Note which message the client has received; its acknowledgement, if it has one, has to be confirmed."""
        self.delivery = delivery
        if delivery.reply:
            self.await_one_more()
        else:
            self.source = delivery.source

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
