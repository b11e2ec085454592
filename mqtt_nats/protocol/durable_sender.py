# SPDX-License-Identifier: Apache-2.0
"""QoS 1 and 2 messages of a durable session: from its readers to the client and back.

Theory of operation. One reader at a time brings the messages of all subscriptions of a session, each once and in
stream order: the gateway's shared reader, or the session's own catch-up reader while the session is behind. A message
has a stream sequence, and the packet identifier follows from it. So any gateway, after any crash, sends the message
under the identifier that the client knows. A message passes through these states:

    ========== ============================================ ===============================
    state      waits for                                    then
    ========== ============================================ ===============================
    WAITING    a free identifier and a place in the window  SENT
    SENT       PUBACK (QoS 1)                               not pending any more, done
    SENT       PUBREC (QoS 2)                               STORING: PUBREL is noted as owed
    STORING    the position, in which PUBREL is owed        released: PUBREL is sent
    released   PUBCOMP, and a position in which PUBREL is   done, identifier free
               not owed
    ========== ============================================ ===============================

Persistent is the session's *position* (`position`): the sequence up to which a reader has brought everything
(``reached``), the messages up to it that are not complete (``pending``), and owed PUBRELs (``released``). It is written
now and then, and at once where a packet has to wait for it. All else is in memory: the states, the window, the order.
After a kill the next connection is given the stored position. PUBRELs that are owed there leave first. Then all that
is pending comes, as a repetition (attempt 2), before :meth:`DurableSender.start`. A reader goes on after ``reached``.
If the gateway was killed after it has

- sent PUBLISH, a reader brings the message again, or it is pending: it has DUP, and the same identifier;
- got PUBACK, the message may still be pending: it is sent again with DUP;
- got PUBREC, the message is pending, and PUBLISH asks for PUBREC again; or PUBREL is owed already, and is sent;
- sent PUBREL or got PUBCOMP, PUBREL is still owed, and is sent again. Until it is not, no message gets the identifier.

A client that does not read makes the session give messages up: these stay pending, and come again before `go_on`.
Messages of shared subscriptions have an assignment instead of a position, and their PUBRELs have records in the stream
``$MQTT_out``; retained messages have a cursor and such records. Then ``released`` also waits until JetStream confirms
the end of the assignment, and delivers the record. :class:`Release` is a PUBREL that is owed. A released message has
no place in the window any more, but in 5.0 it counts as in flight until PUBCOMP.

Why: docs/internals/protocol.md#redelivery, #packet-identifiers, #suspect-identifiers, and
docs/internals/delivery.md#owed-pubrels.
The state machine acts only through its :class:`Ports`; it uses neither a socket nor a clock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import Any, Final

from mqtt_nats.codec import ProtocolError, ack_bytes
from mqtt_nats.codec.wire import PUBACK, PUBREC, PUBREL
from mqtt_nats.protocol.allocated_identifiers import AllocatedIdentifiers
from mqtt_nats.protocol.inflight import SENT, STORING, WAITING, Delivery, Release, SubscriptionState
from mqtt_nats.protocol.ports import NOWHERE, Ports
from mqtt_nats.protocol.suspect_identifiers import SuspectIdentifiers
from mqtt_nats.protocol.transient_sender import unknown_pubrel

ID_SPACE: Final = 49151
"""Identifiers 1-49151 follow from sequences of ``$MQTT_msgs``; higher ones are for retained and shared messages."""

RETAINED_BASE: Final = 49152
"""Least identifier of retained and shared messages."""

RETAINED_SPACE: Final = 16384
"""Number of identifiers of retained and shared messages."""

SEQUENCE_EVER: Final = 1 << 62
"""A stream sequence that is higher than all."""

LATE_AFTER_MESSAGES: Final = 24576
"""Number of newer messages after which an acknowledgement is late: the identifier is needed again before long."""


def packet_id(sequence: int) -> int:
    """Return the packet identifier of a stream sequence."""
    return sequence % ID_SPACE + 1


def retained_id(sequence: int) -> int:
    """Return the packet identifier under which a retained message is replayed."""
    return RETAINED_BASE + sequence % RETAINED_SPACE


class DurableSender:
    """The state machine of a durable session's sender.

    Args:
        limit: messages in flight to the client at a time. In 5.0 a message is in flight until PUBCOMP: section 4.9.
        ports: the operations on the client and on JetStream.
        version: protocol version of the client, 4 or 5.
        on_drained_message: called when a message of an ended subscription is complete.
    """

    identifiers: AllocatedIdentifiers
    """Packet identifiers that do not follow from a sequence, and those of complete messages that are in use still."""
    _suspects: SuspectIdentifiers
    """Packet identifiers that the client may know from messages that are gone."""
    sources: list[SubscriptionState]
    """Subscriptions, and the source of the messages that were pending."""
    open: bool
    """Whether messages may be sent; False until all pending messages have come again, and while stalled."""
    begun: bool
    """Whether this connection may have sent a message."""
    on_room: Callable[[], None] | None
    """Called when acknowledgements may have made room in the window."""
    on_drained_message: Callable[[Delivery], None] | None
    """Called when a message of an ended subscription is complete."""
    resent: int
    """Number of messages that this connection has sent with DUP."""
    reached: int
    """Stream sequence up to which every message has come; 0 = none has."""

    # Messages on their way
    inflight: dict[int, Delivery]
    _queued: dict[int, Delivery]
    """Messages in state WAITING, by stream sequence; messages that their source keeps back included."""
    _waiting: list[tuple[int, Delivery]]
    """Heap, by stream sequence, of the messages in state WAITING whose source does not keep them back."""

    # Retained and shared messages
    others: deque[Delivery]
    """Retained and shared messages that wait for a place in the window, in the order in which they came."""
    reserved: set[int]
    """Packet identifiers of shared subscriptions' messages that are not sent yet."""
    cursors: dict[SubscriptionState, int]
    """Retained sequence from which the next connection would go on, by subscription with an unfinished replay."""
    _last_allocated: int
    _recorded: dict[int, int]
    """Sequences of the PUBRELs that were owed at the resume, by identifier, if `allocate_packet_id` made it."""

    # Owed PUBRELs
    releases: dict[int, Release]
    released: int
    """Number of owed PUBRELs that count as in flight: in 5.0, PUBRELs of messages that this connection has sent."""
    _owed: set[int]
    """Stream sequences whose PUBREL was owed at the resume: these messages are never sent again."""

    _late: dict[tuple[int, int], list[bytes]]
    """Acknowledgement subjects of records that an earlier connection has stored after the resume had read the records,
    by identifier and sequence: their messages are pending, and are sent again."""

    # What earlier connections have done
    _careful: int
    """Stream sequence up to which `sent_at_once` is off: each message needs the full checks."""
    _perhaps: int
    """Stream sequence up to which an earlier connection may have sent messages that a reader brings; 0 = none."""
    _most: int
    """Stream sequence after which earlier connections have sent no message; `SEQUENCE_EVER` = not known."""
    _unsent: set[int]
    """Stream sequences that were taken and never sent: they have no DUP when they come again."""

    def __init__(
        self, limit: int, ports: Ports, version: int = 4, on_drained_message: Callable[[Delivery], None] | None = None
    ) -> None:
        self.limit, self.ports, self.version = limit, ports, version
        self.on_drained_message, self.on_room = on_drained_message, None
        self.inflight, self.releases = {}, {}
        self._suspects = SuspectIdentifiers(ID_SPACE)
        self.identifiers = AllocatedIdentifiers(self.inflight, self.releases, self._suspects.asked)
        self.sources = []
        self.open = self.begun = False
        self.resent = self.reached = self.released = 0
        self._queued, self._waiting = {}, []
        self.others, self.reserved, self.cursors = deque(), set(), {}
        self._last_allocated, self._recorded = 0, {}
        self._owed, self._unsent, self._late = set(), set(), {}
        self._careful = self._perhaps = 0
        self._most = SEQUENCE_EVER

    # -- stored messages ----------------------------------------------------------------------------

    def arrived(
        self, source: SubscriptionState, sequence: int, attempt: int, reply: bytes, body: Any, qos: int
    ) -> None:
        """Handle a stored message that this session takes through ``source`` at ``qos``.

        Args:
            attempt: 1: a reader has brought it. 2: it is pending in the position, and this connection has not taken it
                before, or has given it up.
            reply: its token, `TAKEN` with the sequence.
        """
        if sequence > source.last:
            source.deliver_to(sequence)
        self.read_to(sequence)
        if self._find(sequence) is not None:
            return
        identifier = self.identifier_of(sequence)
        release = self.releases.get(identifier)
        if release is not None and release.sequence == sequence and not release.former:
            release.await_one_more()  # the client has the message; it was not noted in time
            self.ports.ack(reply, identifier)
            return
        if sequence in self._owed:
            self.ports.ack(reply)
            return
        perhaps = self._perhaps if attempt == 1 else max(self._perhaps, self._most)
        dup = sequence <= perhaps and sequence not in self._unsent
        delivery = Delivery(source, sequence, identifier, qos, body, reply, dup)
        if source.held:
            self._queue(delivery)
            source.backlog.append(delivery)
        elif self._goes_at_once(delivery):
            self._send(delivery)
        else:
            self._queue(delivery)
            heapq.heappush(self._waiting, (sequence, delivery))
            if self.open:
                self.pump()

    def _goes_at_once(self, delivery: Delivery) -> bool:
        """Whether a message that has come may be sent before anything else is looked at."""
        return (
            self.open
            and not self._waiting
            and not self._suspects.ranges
            and len(self.inflight) + self.released < self.limit
            and not self.identifiers.in_use(delivery.id)
        )

    def _queue(self, delivery: Delivery) -> None:
        self._queued[delivery.sequence] = delivery
        self.ports.report_waiting()

    def sent_at_once(self, source: SubscriptionState, sequence: int, qos: int, reply: bytes) -> bool:
        """Take a message of a reader that needs no further checks: it is new, and may be sent now.

        Returns:
            True when the caller has to send the PUBLISH packet; False when :meth:`arrived` has to decide.
        """
        identifier = sequence % ID_SPACE + 1
        inflight = self.inflight
        used = self.identifiers.used
        if (
            sequence <= self.reached
            or sequence <= self._careful
            or not self.open
            or self._queued
            or source.held
            or source.ended
            or identifier in inflight
            or (self.releases and identifier in self.releases)
            or (used and identifier in used)
            or len(inflight) + self.released >= self.limit
        ):
            return False
        source.deliver_to(sequence)
        self.reached = sequence
        inflight[identifier] = Delivery(source, sequence, identifier, qos, None, reply, False, SENT)
        return True

    def _find(self, sequence: int) -> Delivery | None:
        """Return the message of a stream sequence that is in flight or waits; None = there is none."""
        found = self.inflight.get(self.identifier_of(sequence))
        if found is not None and found.sequence == sequence:
            return found
        return self._queued.get(sequence)

    def identifier_of(self, sequence: int) -> int:
        """Return the packet identifier of a message: the allocated one, or the one that follows from its sequence."""
        return self.identifiers.allocated.get(sequence) or sequence % ID_SPACE + 1

    def retained_identifier(self, sequence: int) -> int:
        """Return the packet identifier of a retained message: as :meth:`identifier_of`."""
        return self.identifiers.allocated.get(-sequence) or retained_id(sequence)

    def read_to(self, sequence: int) -> None:
        """Note that every message up to a stream sequence has come."""
        self.reached = max(self.reached, sequence)

    def past_all(self, sequence: int) -> bool:
        """Whether every message up to a stream sequence has come."""
        return self.open and self.reached >= sequence

    # -- sending ----------------------------------------------------------------------------------

    def limit_window(self, limit: int) -> None:
        """Bound the messages in flight to the client."""
        self.limit = limit

    def begin(self) -> None:
        """Open the state machine for a new session: no message was ever sent."""
        self.open = self.begun = True
        self._most = 0

    def close(self) -> None:
        """Stop sending, as the connection has ended: messages that come from now on wait."""
        self.open = False

    def pump(self) -> None:
        """Send the messages that may be sent now: retained and shared ones first, then others in stream order."""
        if not self.open:
            return
        while self.others and len(self.inflight) + self.released < self.limit:
            first = self.others[0]
            if first.id in self.releases and self._give_way(first.id):
                continue
            if not self._other_identified(first):
                break
            self._send(self.others.popleft())
        waiting = self._waiting
        while waiting and len(self.inflight) + self.released < self.limit:
            sequence, delivery = waiting[0]
            if not self._identified(delivery):
                return
            if delivery.qos == 2 and self._suspects.ranges and self._suspicious(delivery):
                return
            heapq.heappop(waiting)
            del self._queued[sequence]
            self._send(delivery)
            self.ports.report_sent(delivery.source)

    def _send(self, delivery: Delivery) -> None:
        delivery.send()
        self.inflight[delivery.id] = delivery
        if self.reserved:
            self.reserved.discard(delivery.id)
        self._unsent.discard(delivery.sequence)
        if delivery.dup:
            self.resent += 1
        if not self.ports.publish(delivery, delivery.dup):  # [MQTT-3.3.1-1] (3.1.1, 5.0)
            # Expired, or too large for the client: treated as acknowledged [MQTT-3.1.2-25] (5.0).
            self._leave_window(delivery)
            self._drop(delivery)
        delivery.forget_body()

    @property
    def room(self) -> int:
        """Number of further messages that could be sent now."""
        waiting = len(self._waiting) + len(self.others) + len(self.reserved)
        return max(self.limit - len(self.inflight) - self.released - waiting, 0) if self.open else 0

    @property
    def places(self) -> int:
        """Size of a window in which all messages with DUP can be sent again at once."""
        known = [*self.on_their_way(), *self.others]
        again = [one.sequence for one in known if one.dup]
        last = max(again, default=0)
        return sum(one.sequence <= max(last, 0) for one in known) if again else 0

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
    def queued(self) -> list[Delivery]:
        """Messages that wait for a place in the window."""
        return [*self._queued.values(), *self.others] if self._queued or self.others else []

    def drop_hold(self, source: SubscriptionState, reason: int = SubscriptionState.REPLAYING) -> None:
        """Remove one reason for which new messages of a subscription wait; after the last one let them go."""
        source.drop_reason(reason)
        while source.backlog and not source.held:
            delivery = source.backlog.popleft()
            heapq.heappush(self._waiting, (delivery.sequence, delivery))
        self.pump()

    def call_on_room(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called when acknowledgements may have made room in the window; None = no more."""
        self.on_room = callback

    # -- retained and shared messages -------------------------------------------------------------

    def replay(self, source: SubscriptionState, sequence: int, qos: int, body: Any, dup: bool) -> None:
        """Send a retained message at QoS 1 or 2, once there is a place in the window."""
        identifier = self.retained_identifier(sequence)
        release = self.releases.get(identifier)
        if release is not None and release.sequence == sequence and dup and release.source in (None, source):
            release.replay_for(source)  # a copy for another subscription would be another message
            return  # the client has the message: its PUBREL is owed, or was until now
        self.others.append(Delivery(source, -sequence, identifier, qos, body, b"", dup))
        self.ports.report_waiting()
        self.pump()

    def allocate_packet_id(self, sequence: int, others: Set[int] = frozenset()) -> int:
        """Allocate an identifier for a group's copy of the message of a sequence; it is reserved until :meth:`share`.

        A PUBREL owed for another copy of the message has another identifier: their records could not be told apart.

        Args:
            others: identifiers that must not be allocated either.
        """
        for _ in range(RETAINED_SPACE):
            self._last_allocated = (self._last_allocated + 1) % RETAINED_SPACE
            identifier = RETAINED_BASE + self._last_allocated
            taken = self.identifiers.in_use(identifier) or identifier in self._suspects.asked
            free = not (taken or identifier in self.reserved or identifier in others)
            if free and self._recorded.get(identifier) != sequence:
                self.reserved.add(identifier)
                return identifier
        raise ProtocolError("no packet identifier is free")

    def share(
        self,
        source: SubscriptionState,
        sequence: int,
        identifier: int,
        qos: int,
        body: Any,
        reply: bytes,
        dup: bool = False,
    ) -> None:
        """Send a message of a shared subscription, by an identifier of :meth:`allocate_packet_id` or its former one."""
        self.reserved.add(identifier)
        self.others.append(Delivery(source, -sequence, identifier, qos, body, reply, dup))
        self.ports.report_waiting()
        if self.open:
            self.pump()

    def shared(self, source: SubscriptionState) -> list[bytes]:
        """Return the acknowledgement subjects of a shared subscription's unacknowledged messages at QoS 1."""
        known = [*self.inflight.values(), *self.others]
        return [one.reply for one in known if one.source is source and one.qos == 1 and one.reply]

    def unacknowledged(self, source: SubscriptionState) -> list[tuple[int, int]]:
        """Return packet identifier and stream sequence of a shared subscription's unacknowledged messages at QoS 1."""
        known = [*self.inflight.values(), *self.others]
        return [(one.id, -one.sequence) for one in known if one.source is source and one.qos == 1]

    def unshare(self, source: SubscriptionState, *, all_: bool) -> list[bytes]:
        """End a shared subscription: give up its QoS 1 messages that other members may have.

        Args:
            all_: whether the connection has ended, so that messages in flight are given up, too.

        Returns:
            The acknowledgement subjects of unsent messages, with ``all_`` also of unacknowledged ones.
        """
        waiting = [one for one in self.others if one.source is source and one.qos == 1]
        self.others = deque(one for one in self.others if one.source is not source or one.qos != 1)
        self.reserved.difference_update(one.id for one in waiting)
        if all_:
            waiting += [one for one in self.inflight.values() if one.source is source and one.qos == 1]
        return [one.reply for one in waiting if one.reply]

    def oldest_replayed(self, source: SubscriptionState) -> int | None:
        """Return the lowest retained sequence of a source that waits or is not acknowledged; None = there is none."""
        sequences = [-one.sequence for one in self.inflight.values() if one.sequence < 0 and one.source is source]
        sequences += [-one.sequence for one in self.others if one.source is source]
        return min(sequences, default=None)

    def replayed(self, source: SubscriptionState, cursor: int | None) -> None:
        """Note how far the record has a subscription's replay; PUBREL records before ``cursor`` may be removed."""
        if cursor is None or source.ended:
            self.cursors.pop(source, None)
        else:
            self.cursors[source] = cursor
        for identifier, release in list(self.releases.items()):
            if identifier >= RETAINED_BASE and self.releases.get(identifier) is release:
                self._finish(identifier, release)

    # -- what the client acknowledges -------------------------------------------------------------

    def acknowledged(self, kind: int, ids: list[int], failed: bool = False) -> None:
        """Handle PUBACK, PUBREC or PUBCOMP for each packet identifier; unknown ones are ignored.

        PUBACK completes a message at QoS 1; a message at QoS 2 waits for :meth:`pubrel_stored`.

        Args:
            kind: packet type: `PUBACK`, `PUBREC` or `PUBCOMP`.
            ids: packet identifiers.
            failed: whether the packet has a reason code of 0x80 or more.

        Raises:
            ProtocolError: the packet does not belong to the message's QoS.
        """
        inflight = self.inflight
        if kind == PUBACK:
            ack = self.ports.ack
            for identifier in ids:
                delivery = inflight.get(identifier)
                if delivery is None:
                    continue
                if delivery.qos != 1:
                    raise ProtocolError(f"PUBACK for packet identifier {identifier}, which is at QoS 2")
                if delivery.reply:
                    sequence = delivery.sequence
                    if sequence > 0 and (
                        delivery.dup
                        or sequence + LATE_AFTER_MESSAGES < self.reached
                        or sequence in self.identifiers.allocated
                    ):
                        self._leave_window(delivery)
                        self._confirm(delivery)
                        continue
                    ack(delivery.reply)
                self._leave_window(delivery)
        elif kind == PUBREC:
            for identifier in ids:
                self._on_pubrec(identifier, inflight.get(identifier), failed)
        else:
            for identifier in ids:
                self._on_pubcomp(identifier)
        if self._waiting or self.others:
            self.pump()
        if self.on_room is not None:
            self.on_room()

    def _on_pubrec(self, identifier: int, delivery: Delivery | None, failed: bool) -> None:
        """Handle a PUBREC; ``delivery``: the message that is in flight under the identifier."""
        if delivery is None:
            if not failed and identifier in self.releases:
                self.ports.send(ack_bytes(PUBREL, identifier))
            elif not failed:
                self.ports.send(unknown_pubrel(identifier, self.version))
            return
        if delivery.qos != 2:
            raise ProtocolError(f"PUBREC for packet identifier {identifier}, which is at QoS 1")
        if delivery.state != SENT:
            return  # PUBREL is sent once its record is stored
        if failed:  # a reason code of 0x80 or more completes the message
            self._leave_window(delivery)
            if delivery.sequence > 0:
                self._confirm(delivery)
            else:
                self._drop(delivery)
        else:
            delivery.store_pubrel()
            self.ports.store_pubrel(identifier, abs(delivery.sequence))

    def pubrel_stored(self, identifier: int) -> None:
        """Send PUBREL, which is stored as owed now; the message at QoS 2 is not pending any more."""
        delivery = self.inflight.get(identifier)
        if delivery is None or delivery.state != STORING:
            return
        release = self.releases.setdefault(identifier, Release(abs(delivery.sequence)))
        release.records.extend(self._late.pop((identifier, release.sequence), ()))
        release.receive(delivery)
        if self.version == 5:
            self.released += 1
        self.ports.send(ack_bytes(PUBREL, identifier))
        if delivery.reply:
            self.ports.ack(delivery.reply, identifier)
        self._leave_window(delivery)
        if self._waiting or self.others:
            self.pump()

    def _on_pubcomp(self, identifier: int) -> None:
        """Handle a PUBCOMP, with any reason code: the client has given the identifier up."""
        self._suspects.answered(identifier)
        release = self.releases.get(identifier)
        if release is not None:
            if release.delivery is not None and not release.comp and self.version == 5:
                self.released -= 1
            release.complete()
            if release.former:
                self._suspects.clear(identifier)
            self._finish(identifier, release)

    def _leave_window(self, delivery: Delivery) -> None:
        """Remove a message that needs no place in the window any more: after PUBACK, or when its PUBREL is stored."""
        del self.inflight[delivery.id]
        if delivery.sequence < 0 and delivery.qos == 1:
            if delivery.reply:
                delivery.source.settle(delivery.reply)
            elif delivery.sequence in self.identifiers.allocated:
                self._end_use(delivery.id)
        self._report_drained(delivery)

    def _drop(self, delivery: Delivery) -> None:
        """Acknowledge a message that waits and that the client does not get."""
        if delivery.reply:
            self.ports.ack(delivery.reply)
        if delivery.sequence in self.identifiers.allocated:
            self._end_use(delivery.id)

    def _report_drained(self, delivery: Delivery) -> None:
        """Report a complete message of an ended subscription."""
        if delivery.source.ended and self.on_drained_message is not None:
            self.on_drained_message(delivery)

    # -- owed PUBRELs -----------------------------------------------------------------------------

    def owe(self, identifier: int, sequence: int, former: bool = False, epoch: int = 0) -> None:
        """Add the PUBREL of a record that was found; :meth:`DurableSender.start` sends it.

        Args:
            former: whether the sequence counts in a stream that was replaced.
            epoch: epoch of the connection that has stored the record; 0 = not known.
        """
        self.releases[identifier] = Release(sequence, former, epoch)
        # Other identifiers stand for a copy of a shared subscription, while a subscription of the session may have the
        # same message to deliver, or for a retained message, whose sequence counts in another stream.
        # Records of nats-server's listener, with any identifier, have no sequence.
        if not former and identifier < RETAINED_BASE:
            self._owed.add(sequence)
            self._careful = max(self._careful, sequence)
        if identifier >= RETAINED_BASE:
            self._recorded[identifier] = sequence

    def resend_pubrels(self) -> None:
        """Send the owed PUBRELs again, in the order in which their messages were received [MQTT-4.6.0-4] (3.1.1)."""
        for identifier in self.releases:
            self.ports.send(ack_bytes(PUBREL, identifier))

    def keep_identifier(self, identifier: int, record: bytes) -> None:
        """Keep the identifier of an owed PUBREL taken until :meth:`free_packet_id` is called."""
        release = self.releases.get(identifier)
        if release is not None and not release.stays:
            release.keep_identifier(record)
            self._finish(identifier, release)

    def free_packet_id(self, identifier: int) -> None:
        """Free the packet identifier of a PUBREL that the client has answered: a position without it is stored."""
        release = self.releases.get(identifier)
        if release is not None and release.stays and release.comp:
            self._end_release(identifier)
            if self._waiting or self.others:
                self.pump()

    def answered(self, identifier: int, sequence: int) -> None:
        """Drop an owed PUBREL whose identifier the message of ``sequence`` has by now: the client has answered it.

        Otherwise the identifier would not have been free. A connection that ended too early has left the record.
        """
        release = self.releases.get(identifier)
        if release is not None and release.sequence != sequence:
            self._end_release(identifier)
            for record in release.records:
                self.ports.ack(record)

    def confirmed(self, identifier: int) -> None:
        """Note that a message is known to be complete that was acknowledged with this identifier: see `Ports.ack`."""
        release = self.releases.get(identifier)
        if release is not None:
            release.confirm_one()
            if release.delivery is not None and not release.unconfirmed:
                self._report_drained(release.delivery)
            self._finish(identifier, release)
        elif self.identifiers.confirm(identifier):
            self._end_use(identifier)
            self.pump()

    def pubrel_delivered(self, identifier: int, sequence: int, reply: bytes) -> None:
        """Handle a record that the consumer of PUBREL records has delivered."""
        release = self.releases.get(identifier)
        if release is None:
            delivery = self.inflight.get(identifier)
            if delivery is not None and delivery.state == STORING and abs(delivery.sequence) == sequence:
                # JetStream delivered the record before its PubAck came.
                release = self.releases[identifier] = Release(sequence)
        if release is not None and release.sequence == sequence:
            release.records.append(reply)
            self._finish(identifier, release)
        elif not self.begun or self._pending(identifier, sequence) or self._may_be_replayed(identifier, sequence):
            self._late.setdefault((identifier, sequence), []).append(reply)
        else:
            self.ports.ack(reply)  # the message is complete

    def _pending(self, identifier: int, sequence: int) -> bool:
        """Whether the message of a PUBREL record is in flight, or waits to be sent."""
        delivery = self.inflight.get(identifier)
        if delivery is not None and abs(delivery.sequence) == sequence:
            return True
        if identifier < RETAINED_BASE:
            return sequence in self._queued
        return any(one.id == identifier and abs(one.sequence) == sequence for one in self.others)

    def _may_be_replayed(self, identifier: int, sequence: int) -> bool:
        """Whether a replay of retained messages that goes on may bring the message of a PUBREL record."""
        return identifier >= RETAINED_BASE and min(self.cursors.values(), default=SEQUENCE_EVER) <= sequence

    def _owe_late_records(self) -> None:
        """Owe the PUBRELs of late records whose message does not come: the connection before has acknowledged it."""
        for (identifier, sequence), replies in list(self._late.items()):
            if identifier in self.releases or self._pending(identifier, sequence):
                continue
            del self._late[identifier, sequence]
            if any(one.id == identifier and one.dup for one in (*self._queued.values(), *self.others)):
                for reply in replies:  # the client has answered, or another message would not have had the identifier
                    self.ports.ack(reply)
                continue
            former = identifier < RETAINED_BASE and self._suspects.is_after_replacement(sequence)
            self.owe(identifier, sequence, former)
            self.releases[identifier].records.extend(replies)

    def unrecorded(self) -> dict[int, int]:
        """Return the sequences, by identifier, of answered PUBRELs whose record JetStream has not delivered."""
        return {
            identifier: release.sequence
            for identifier, release in self.releases.items()
            if release.comp and not release.records and not release.stays
        }

    def vanished(self, identifier: int, sequence: int) -> None:
        """Complete a PUBREL whose record is gone: an earlier connection removed it after it was read here."""
        if self.unrecorded().get(identifier) == sequence:
            self._finish(identifier, self.releases[identifier], gone=True)

    @property
    def keeps(self) -> bool:
        """Whether PUBREL records of retained messages are kept although the client has completed the messages."""
        return any(one.comp and self._kept(identifier, one) for identifier, one in self.releases.items())

    def _kept(self, identifier: int, release: Release) -> bool:
        """Whether the next connection would send a retained message again without the record of its PUBREL."""
        if identifier < RETAINED_BASE or not self.cursors:
            return False
        source = release.source
        if source is not None:
            first = self.cursors.get(source, SEQUENCE_EVER)
        elif release.delivery is None:  # an earlier connection has sent it
            first = min(self.cursors.values())
        else:
            return False  # of a shared subscription
        if first > release.sequence:
            return False
        # If the client subscribes again meanwhile, it gets the same message once more: the record must not prevent it.
        new = self.others[0] if self.others else None
        return new is None or -new.sequence != release.sequence or source not in (None, new.source)

    def _give_way(self, identifier: int) -> bool:
        """Remove a kept record whose message is to be sent anew; False while the identifier is in use."""
        self._finish(identifier, self.releases[identifier])
        return identifier not in self.releases

    def _finish(self, identifier: int, release: Release, gone: bool = False) -> None:
        if not release.comp:
            return
        if not release.records and not release.stays and not gone:
            self.ports.seek()
        elif self._kept(identifier, release) and not gone:
            return
        elif release.unconfirmed <= 0 and (release.records or gone):
            records = release.take_records()
            if not release.stays:
                self._end_release(identifier)
            for record in records:
                self.ports.ack(record)
            if self._waiting or self.others:
                self.pump()

    def _end_release(self, identifier: int) -> None:
        del self.releases[identifier]
        if identifier in self.identifiers.used:
            self._end_use(identifier)

    # -- identifiers in place of those in use -----------------------------------------------------

    def restore_identifiers(self, identifiers: dict[int, int]) -> None:
        """Take the allocations that an earlier connection has stored: packet identifiers by stream sequence."""
        self.identifiers.restore(identifiers)

    def _identified(self, delivery: Delivery) -> bool:
        """Whether a message may be sent as far as its identifier is concerned; allocate another one if that is in use.

        A message whose identifier is allocated waits until that is stored.
        """
        identifiers = self.identifiers
        sequence = delivery.sequence
        if sequence in identifiers.allocated:
            free = delivery.id not in self.inflight and delivery.id not in self.releases
            return free and sequence in identifiers.stored
        if not identifiers.in_use(delivery.id):
            return True
        return self._allocate(delivery, range(1, ID_SPACE + 1))

    def _other_identified(self, delivery: Delivery) -> bool:
        """As :meth:`_identified`, for a retained or shared message.

        The identifier of a shared message is its own. A further copy of a retained message waits for the first one: an
        allocation has its sequence alone.
        """
        identifiers, sequence, identifier = self.identifiers, delivery.sequence, delivery.id
        if delivery.qos == 2 and identifier in self._suspects.asked:
            return False
        present, release = self.inflight.get(identifier), self.releases.get(identifier)
        if sequence in identifiers.allocated:
            return present is None and release is None and sequence in identifiers.stored
        if not identifiers.in_use(identifier):
            return True
        same = present is not None and present.sequence == sequence
        same = same or (release is not None and release.sequence == -sequence)
        space = range(RETAINED_BASE, RETAINED_BASE + RETAINED_SPACE)
        return not same and identifier not in self.reserved and self._allocate(delivery, space)

    def _allocate(self, delivery: Delivery, space: range) -> bool:
        """Allocate an identifier to a message; whether the message may be sent."""
        sequence = delivery.sequence
        # The client may know a message that waits to be sent again by its identifier.
        known = {one.id for one in (*self._queued.values(), *self.others) if one.dup and one is not delivery}
        identifier = self.identifiers.allocate(sequence, space, self.reserved | known)
        if identifier:
            delivery.identify(identifier)
            self.ports.allocate(sequence, identifier)
            return sequence in self.identifiers.stored
        if self.identifiers.report_once(sequence):
            self.ports.report_no_identifier()
        return False

    def allocation_stored(self, identifier: int) -> None:
        """Send a message whose allocation is stored."""
        if self.identifiers.allocation_stored(identifier):
            self.pump()

    def allocation_removed(self, identifier: int) -> None:
        """Free an identifier: a position without its allocation is stored."""
        if self.identifiers.allocation_removed(identifier):
            self.pump()

    def _confirm(self, delivery: Delivery) -> None:
        """Acknowledge a complete message; its identifier is free when no later connection can get the message."""
        self.identifiers.await_confirmation(delivery.id, delivery.sequence)
        self.ports.ack(delivery.reply, delivery.id)

    def _end_use(self, identifier: int) -> None:
        """End the use of an identifier by a message that is complete, or that was given up before it was sent."""
        sequence = self.identifiers.end_use(identifier)
        if sequence:
            self.ports.end_allocation(sequence, identifier)

    def forget_absent(self) -> list[tuple[int, int]]:
        """End the allocations of messages that do not come again; return their sequences and packet identifiers.

        Called when all pending messages have come again, and then now and then: a replay of retained messages passes
        those that were removed.
        """
        found: list[tuple[int, int]] = []
        if not self.identifiers.allocated:
            return found
        others = {one.sequence for one in self.others}
        for sequence, identifier in list(self.identifiers.allocated.items()):
            if sequence < 0 and (sequence in others or min(self.cursors.values(), default=SEQUENCE_EVER) <= -sequence):
                continue  # a retained message that waits, or that a replay may bring again
            delivery = self.inflight.get(identifier) or self._queued.get(sequence)
            release = self.releases.get(identifier)
            here = (delivery is not None and delivery.sequence == sequence) or (
                release is not None and release.sequence == abs(sequence)
            )
            if not here and identifier not in self.identifiers.unconfirmed:
                self._end_use(identifier)
                found.append((sequence, identifier))
        return found

    # -- after a crash, or on another gateway -----------------------------------------------------

    def sent_perhaps(self, last: int) -> None:
        """Set DUP for messages of readers up to sequence ``last``: an earlier connection may have sent them."""
        self._perhaps = last
        self._careful = max(self._careful, last)

    @property
    def perhaps_sent(self) -> int:
        """Last sequence that an earlier connection may have sent of the messages that readers bring."""
        return self._perhaps

    def not_sent(self, sequences: Iterable[int]) -> None:
        """Set the sequences that an earlier connection had taken and not sent; they replace former ones."""
        self._unsent = set(sequences)

    def sent_at_most(self, last: int) -> None:
        """Note that earlier connections have sent no message after ``last``, also where one is pending."""
        self._most = last

    @property
    def most(self) -> int:
        """Stream sequence after which no message was sent, by any connection; :data:`SEQUENCE_EVER` = not known."""
        return self.reached if self.begun else self._most

    def unsent(self) -> set[int]:
        """Return the sequences that were taken and never sent: they wait for the window, or have to come again."""
        return self._unsent.union(one.sequence for one in self._queued.values() if not one.dup)

    def suspect(self, low: int, high: int) -> None:
        """Note that messages of the sequences ``low`` to ``high`` may have been sent and are gone.

        The client may still use one of their identifiers: before such an identifier is used at QoS 2
        again, PUBREL asks the client to give it up.
        """
        if low <= high:
            self._suspects.add(low, high)
            self._careful = SEQUENCE_EVER

    def replaced(self, floor: int) -> None:
        """Note that the stream was replaced by one that has other messages after sequence ``floor``.

        The client may know any identifier from the former stream: before a message after ``floor`` uses it at QoS 2,
        the client has to give it up.
        """
        self._suspects.replaced(floor)
        self._careful = SEQUENCE_EVER

    def _suspicious(self, delivery: Delivery) -> bool:
        """Whether the client has to give an identifier up before a message at QoS 2 uses it; it is asked."""
        if not self._suspects.has(delivery, delivery.sequence in self.identifiers.allocated):
            return False
        self.ask(delivery.id)
        return True

    def ask(self, identifier: int) -> None:
        """Send PUBREL, once, so that the client gives an identifier up."""
        if self._suspects.ask(identifier):
            self.ports.send(ack_bytes(PUBREL, identifier))

    def start(self) -> None:
        """Send owed PUBRELs, then messages that were in flight, then all others.

        Each in its own order [MQTT-4.4.0-1] [MQTT-4.6.0-1] [MQTT-4.6.0-4] (3.1.1).
        [MQTT-4.3.2-3] [MQTT-4.3.3-3] [MQTT-4.3.3-5] [MQTT-4.3.3-6] [MQTT-4.4.0-1] (5.0)
        """
        self._owe_late_records()
        self.resend_pubrels()
        for sequence, identifier in self.forget_absent():
            latest = self._suspects.latest(sequence, identifier)
            self.suspect(latest, latest)  # the client may know the message that is gone
        self.open = self.begun = True
        self.pump()

    def disconnect(self) -> None:
        """Cut the state machine off from its ports: all work is left to the next connection."""
        self.ports = NOWHERE
        self.on_drained_message = self.on_room = None

    # -- clients that do not read -----------------------------------------------------------------

    def recallable(self, identifier: int) -> bool:
        """Whether a message in flight can be taken back, since it is pending and comes again.

        That holds for messages of ended subscriptions, too. Not so for one that was lowered to QoS 0: its later
        messages, at QoS 0, wait until those before are sent, and would overtake what was given up.
        """
        delivery = self.inflight.get(identifier)
        return delivery is not None and delivery.state == SENT and delivery.sequence > 0 and not delivery.source.whole

    def recall(self, identifier: int) -> bool:
        """Take back a message whose PUBLISH packet has not left the gateway.

        Returns:
            False when the packet has to be sent all the same: see :meth:`recallable`.
        """
        if not self.recallable(identifier):
            return False
        self._give_up(self.inflight.pop(identifier))
        return True

    def stop_sending(self) -> None:
        """Forget waiting messages and stop sending, until the messages have come again and :meth:`go_on` is called."""
        self.open = False
        for delivery in list(self._queued.values()):
            if not delivery.source.whole:
                del self._queued[delivery.sequence]
                self._give_up(delivery)
        for source in self.sources:
            if not source.whole:
                source.backlog.clear()
        self._waiting = [entry for entry in self._waiting if entry[1].source.whole]
        heapq.heapify(self._waiting)

    def _give_up(self, delivery: Delivery) -> None:
        if not delivery.dup:
            self._unsent.add(delivery.sequence)

    def go_on(self) -> None:
        """Send again: first the messages that were given up, in order."""
        self._unsent.clear()
        self.forget_absent()
        self.open = True
        self.pump()

    # -- changes of subscriptions -----------------------------------------------------------------

    def forget(self, source: SubscriptionState) -> None:
        """Remove the source of an ended subscription."""
        if source in self.sources:
            self.sources.remove(source)

    def holds(self, source: SubscriptionState) -> bool:
        """Whether a message of ``source`` is on its way, or its acknowledgement has yet to be confirmed."""
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
        """Lower a subscription to QoS 0: messages that readers bring up to ``end`` are still sent.

        Args:
            retained: whether waiting retained messages are sent all the same: they come in no other way.
        """
        source.end_at(max(end, self.reached), whole=True)
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
            self._drop(delivery)
        source.backlog.clear()
        self._waiting = [(s, d) for s, d in self._waiting if d.source is not source] + again
        heapq.heapify(self._waiting)
        self.others = deque(d for d in self.others if d.source is not source or d.dup)
        self.replayed(source, None)
        self.pump()
        return [d for d in self.inflight.values() if d.source is source] + [d for _, d in again if d.state == WAITING]
