# SPDX-License-Identifier: Apache-2.0
"""QoS 1 and 2 messages of a durable session: from its consumers to the client and back.

Theory of operation. A *source* is one durable consumer. Each message is identified by its stream sequence,
and the packet identifier is derived from that sequence, so any gateway, after any crash, sends a message
under the identifier that the client knows. A message passes through these states:

    ========== ============================================ ===============================
    state      waits for                                    then
    ========== ============================================ ===============================
    WAITING    a free identifier and a place in the window  SENT
    SENT       PUBACK (QoS 1)                               acknowledged to JetStream, done
    SENT       PUBREC (QoS 2)                               STORING: PUBREL record is stored
    STORING    the record's PubAck                          released: PUBREL is sent
    released   PUBCOMP, JetStream's confirmation of the     done, identifier free
               message's acknowledgement, and the record's
               own delivery
    ========== ============================================ ===============================

A message in state ``released`` has no place in the window any more, but in 5.0 it counts as in flight until PUBCOMP.
:class:`Release` is its owed PUBREL.

Why: docs/internals/protocol.md#redelivery, #packet-identifiers, #suspect-identifiers, and
docs/internals/delivery.md#owed-pubrels.
The state machine acts only through its :class:`Ports`; it uses neither a socket nor a clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Final

from mqtt_nats.codec import ProtocolError, ack_bytes
from mqtt_nats.codec.wire import PUBACK, PUBREC, PUBREL
from mqtt_nats.protocol.ack_tokens import TAKEN
from mqtt_nats.protocol.inflight import SENT, STORING, Delivery, Release, SubscriptionState
from mqtt_nats.protocol.owed_pubrels import OwedPubrels
from mqtt_nats.protocol.ports import Ports
from mqtt_nats.protocol.transient_sender import unknown_pubrel

ID_SPACE: Final = 49151
"""Identifiers 1-49151 follow from sequences of ``$MQTT_msgs``; higher ones are for retained and shared messages."""


LATE_AFTER_MESSAGES: Final = 24576
"""Number of newer messages after which an acknowledgement is late: the identifier is needed again before long."""


def packet_id(sequence: int) -> int:
    """Return the packet identifier of a stream sequence."""
    return sequence % ID_SPACE + 1


class DurableSender(OwedPubrels):
    """The state machine of a durable session's sender.

    Args:
        limit: messages in flight to the client at a time. In 5.0 a message is in flight until PUBCOMP: section 4.9.
        ports: the operations on the client and on JetStream.
        version: protocol version of the client, 4 or 5.
        on_drained_message: called when a message of an ended subscription is complete.
    """

    def __init__(
        self, limit: int, ports: Ports, version: int = 4, on_drained_message: Callable[[Delivery], None] | None = None
    ) -> None:
        super().__init__(version, on_drained_message)
        self.limit = limit
        self.ports = ports
        self.resent = 0
        """Number of messages that this connection has sent with DUP."""
        self.reached = 0
        """Stream sequence up to which the shared reader has brought all messages; 0 = none."""
        self._suspect: list[tuple[int, int]] = []
        """Ranges of stream sequences whose packet identifiers the client may know as received; see `suspect`."""
        self._floor = -1
        """Stream sequence after which a stream that was replaced has other messages; -1 = it was not replaced."""

    # -- what JetStream delivers --------------------------------------------------------------

    def arrived(
        self, source: SubscriptionState, sequence: int, attempt: int, reply: bytes, body: Any, qos: int
    ) -> None:
        """Handle a message that a consumer has delivered and that this session takes through ``source`` at ``qos``."""
        forgotten = attempt == 1 and sequence <= source.first  # JetStream has forgotten an earlier delivery of it
        passed = sequence <= max(source.last, self.ended)
        again = forgotten or attempt > 1 or passed or sequence in self._owed
        source.seen(sequence, attempt)
        identifier = self.identifier_of(sequence)
        known = self._find(sequence)
        if known is not None:
            self._repeated(known, source, attempt, reply, qos)
            return
        release = self.releases.get(identifier)
        if release is not None and release.sequence == sequence and not release.former:
            release.await_one_more()  # the client has the message; only the acknowledgement was lost
            self.ports.ack(reply, identifier)
            return
        if again and (
            forgotten
            or (attempt > 1 and source.been(sequence))
            or sequence in self._owed
            or sequence in source.unwanted
            or self._had(sequence)
        ):
            self.ports.ack(reply)
            return
        before = attempt > 1 and (sequence <= self._most or (self.begun and passed))
        dup = (before or sequence <= self._perhaps) and sequence not in self._unsent
        if self._wary and not self._suspect:
            self._wary = any(max(one.last, one.clear) < self._perhaps for one in self.sources)
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
            and not self._suspect
            and len(self.inflight) + self.released < self.limit
            and not self._in_use(delivery.id)
            and delivery.sequence not in self.allocated
            and (len(self.sources) == 1 or self._passed(delivery.sequence))
        )

    def _queue(self, delivery: Delivery) -> None:
        self._queued[delivery.sequence] = delivery
        self.ports.report_waiting()

    def sent_at_once(
        self, source: SubscriptionState, sequence: int, qos: int, reply: bytes, following: int = 0
    ) -> bool:
        """Take a message that needs no further checks: a first delivery, in order, that may be sent now.

        Args:
            following: consumer sequence of the next delivery; 0 = the shared reader has brought the message.

        Returns:
            True when the caller has to send the PUBLISH packet; False when :meth:`arrived` has to decide.
        """
        identifier = sequence % ID_SPACE + 1
        inflight = self.inflight
        if (
            sequence <= source.last
            or not self.open
            or self._queued
            or source.held
            or source.ended
            or not source.base
            or self._wary
            or sequence <= self.ended
            or sequence in self._owed
            or identifier in inflight
            or (self.releases and identifier in self.releases)
            or (self.used and (identifier in self.used or sequence in self.allocated))
            or len(inflight) + self.released >= self.limit
            or (len(self.sources) > 1 and not self._passed(sequence))
        ):
            return False
        source.deliver_to(sequence, following)
        if self._unsent:
            self._unsent.discard(sequence)
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
        return self.allocated.get(sequence) or sequence % ID_SPACE + 1

    def begun_with(self, sequence: int) -> bool:
        """Whether this connection has taken a message for the client, and the message is not complete."""
        release = self.releases.get(self.identifier_of(sequence))
        return self._find(sequence) is not None or (release is not None and release.sequence == sequence)

    def _repeated(self, known: Delivery, source: SubscriptionState, attempt: int, reply: bytes, qos: int) -> None:
        """Handle a message on its way that has come again, through the same consumer or another one."""
        known.repeat(source, reply)
        before = attempt > 1 and known.sequence <= self._most
        if before and self._perhaps_sent(known) and not source.been(known.sequence):
            known.mark_duplicate(qos)

    def passed_over(self, source: SubscriptionState, sequence: int, attempt: int, reply: bytes) -> None:
        """Acknowledge a message that the client does not get through this source."""
        source.seen(sequence, attempt)
        source.unwanted.append(sequence)
        self.ports.ack(reply)
        if self._waiting:  # a message may wait until this consumer has passed an older sequence
            self.pump()

    def _passed(self, sequence: int) -> bool:
        """Whether no consumer can still deliver an older message with the same packet identifier."""
        oldest = sequence - ID_SPACE
        return all(
            source.last >= oldest or source.clear >= oldest or (source.live and self.reached >= oldest)
            for source in self.sources
        )

    def past_all(self, sequence: int) -> bool:
        """Whether every consumer has delivered all of its messages up to a sequence."""
        return self.open and all(max(source.last, source.clear) >= sequence for source in self.sources)

    def _look(self, sequence: int) -> None:
        """Ask for the state of consumers that deliver no messages, about once in ``ID_SPACE`` messages."""
        oldest = sequence - ID_SPACE
        for source in list(self.sources):
            if source.last < oldest and source.clear < oldest and not source.asked and not source.live:
                source.begin_request()
                self.ports.request_state(source, sequence)

    def looked(self, source: SubscriptionState, sequence: int, last: int, pending: int, unacknowledged: int) -> bool:
        """Note a consumer's state after ``sequence`` was stored; see :meth:`exhausted`.

        Returns:
            False when a message may still come: the caller calls :meth:`look_again` later.
        """
        nothing = self.exhausted(source, last, pending, unacknowledged)
        if nothing:
            source.end_request(sequence)
            self.pump()
        return nothing

    def exhausted(self, source: SubscriptionState, last: int, pending: int, unacknowledged: int) -> bool:
        """Whether no message of a consumer comes for the first time any more, of those stored so far.

        Args:
            last: stream sequence up to which the consumer has delivered, or passed over, messages.
            pending: number of messages that it has not delivered.
            unacknowledged: number of messages that it has delivered and that are not acknowledged.
        """
        # A consumer that has delivered nothing reports the sequence before its first message, until its leader passes
        # over messages of other topics. Then `last` is beyond all that has come here although nothing is on its way.
        return not pending and (last <= max(source.last, source.clear) or unacknowledged <= self.taken(source))

    def taken(self, source: SubscriptionState) -> int:
        """Return how many messages that a consumer has delivered wait or are in flight to the client."""
        known = [one.reply for one in (*self.inflight.values(), *self.queued) if one.source is source]
        # A retained message has no reply; the shared reader's messages are not pending at the consumer.
        return sum(bool(reply) and not reply.startswith(TAKEN) for reply in known)

    def look_again(self, source: SubscriptionState) -> None:
        """Ask for the state of a consumer once more, if messages still wait for that."""
        source.end_request()
        self.pump()

    # -- sending --------------------------------------------------------------------------------

    def limit_window(self, limit: int) -> None:
        """Bound the messages in flight to the client."""
        self.limit = limit

    def read_to(self, sequence: int) -> None:
        """Note that the shared reader has brought all messages up to a stream sequence."""
        self.reached = sequence

    def pump(self) -> None:
        """Send the messages that may be sent now: retained and shared ones first, then others in stream order."""
        if not self.open:
            return
        while self.others and len(self.inflight) + self.released < self.limit:
            first = self.others[0]
            if first.id in self.releases and self._give_way(first.id):
                continue
            if first.id in self.inflight or first.id in self.releases or (first.qos == 2 and first.id in self._asked):
                break
            self._send(self.others.popleft())
        waiting = self._waiting
        while waiting and len(self.inflight) + self.released < self.limit:
            sequence, delivery = waiting[0]
            if not self._identified(delivery, ID_SPACE):
                return
            if sequence not in self.allocated and not self._passed(sequence):
                self._look(sequence)
                return
            if delivery.qos == 2 and self._suspect and self._suspicious(delivery):
                return
            heapq.heappop(waiting)
            del self._queued[sequence]
            self._send(delivery)
            if delivery.source.whole or delivery.source.live:
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

    def drop_hold(self, source: SubscriptionState, reason: int = SubscriptionState.REPLAYING) -> None:
        """Remove one reason for which new messages of a subscription wait; after the last one let them go."""
        source.drop_reason(reason)
        while source.backlog and not source.held:
            delivery = source.backlog.popleft()
            heapq.heappush(self._waiting, (delivery.sequence, delivery))
        self.pump()

    # -- after a crash --------------------------------------------------------------------------

    def suspect(self, low: int, high: int) -> None:
        """Note that messages of the sequences ``low`` to ``high`` may have been sent and are gone.

        The client may still use one of their identifiers: before such an identifier is used at QoS 2
        again, PUBREL asks the client to give it up.
        """
        if low <= high:
            self._suspect.append((low, high))
            self._wary = True

    def replaced(self, floor: int) -> None:
        """Note that the stream was replaced by one that has other messages after sequence ``floor``.

        The client may know any identifier from the former stream: before a message after ``floor`` uses it at QoS 2,
        the client has to give it up.
        """
        self._floor = floor
        self._suspect.append((1, 0))  # an empty range, which has every message checked
        self._wary = True

    def _suspicious(self, delivery: Delivery) -> bool:
        identifier = delivery.id
        if identifier in self._cleared:
            return False
        if -1 < self._floor < delivery.sequence and not delivery.dup:
            self.ask(identifier)
            return True
        # A message with DUP owns its identifier: the client may know the message by it, and must not give it up.
        if delivery.dup and delivery.sequence in self.allocated:
            return False
        latest = self._latest(delivery.sequence, identifier)
        latest -= ID_SPACE if delivery.dup else 0
        for low, high in self._suspect:
            if low <= (latest if latest <= high else high - (high - latest) % ID_SPACE):
                self.ask(identifier)
                return True
        return False

    def _latest(self, sequence: int, identifier: int) -> int:
        """Return the latest sequence, at most ``sequence``, whose own identifier is ``identifier``."""
        return sequence - (sequence + 1 - identifier) % ID_SPACE

    def ask(self, identifier: int) -> None:
        """Send PUBREL, once, so that the client gives an identifier up."""
        if identifier not in self._asked:
            self._asked.add(identifier)
            self.ports.send(ack_bytes(PUBREL, identifier))

    @property
    def collected(self) -> bool:
        """Whether every consumer has delivered its pending messages again."""
        return all(source.collected for source in self.sources)

    def start(self) -> None:
        """Send owed PUBRELs, then messages that were in flight, then all others.

        Each in its own order [MQTT-4.4.0-1] [MQTT-4.6.0-1] [MQTT-4.6.0-4] (3.1.1).
        [MQTT-4.3.2-3] [MQTT-4.3.3-3] [MQTT-4.3.3-5] [MQTT-4.3.3-6] [MQTT-4.4.0-1] (5.0)
        """
        self.resend_pubrels()
        for sequence, identifier in self.forget_absent():
            latest = self._latest(sequence, identifier)
            self.suspect(latest, latest)  # the client may know the message that is gone
        self.open = self.begun = True
        self.pump()

    # -- what the client acknowledges -----------------------------------------------------------

    def acknowledged(self, kind: int, ids: list[int], failed: bool = False) -> None:
        """Handle PUBACK, PUBREC or PUBCOMP for each packet identifier; unknown ones are ignored.

        PUBACK acknowledges a message at QoS 1 to JetStream; a message at QoS 2 waits for :meth:`pubrel_stored`.

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
                        or sequence + LATE_AFTER_MESSAGES < delivery.source.last
                        or sequence in self.allocated
                    ):
                        self._leave_window(delivery)
                        self._confirm(delivery)
                        continue
                    ack(delivery.reply)
                    if delivery.others is not None:
                        for reply in delivery.others:
                            ack(reply)
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
                for reply in delivery.replies():
                    self.ports.ack(reply)
        else:
            delivery.store_pubrel()
            self.ports.store_pubrel(identifier, abs(delivery.sequence))

    def pubrel_stored(self, identifier: int) -> None:
        """Send PUBREL, whose record is stored now, then acknowledge the message at QoS 2 to JetStream."""
        delivery = self.inflight.get(identifier)
        if delivery is None or delivery.state != STORING:
            return
        release = self.releases.setdefault(identifier, Release(abs(delivery.sequence)))
        replies = release.receive(delivery)
        if self.version == 5:
            self.released += 1
        self.ports.send(ack_bytes(PUBREL, identifier))
        for reply in replies:
            self.ports.ack(reply, identifier)
        self._leave_window(delivery)
        if self._waiting or self.others:
            self.pump()

    def _leave_window(self, delivery: Delivery) -> None:
        """Remove a message that needs no place in the window any more: after PUBACK, or when its PUBREL is stored."""
        del self.inflight[delivery.id]
        sequence = delivery.sequence
        if sequence > 0:
            delivery.source.done.append(sequence)
        elif delivery.reply and delivery.qos == 1:
            delivery.source.settle(delivery.reply)
        self._report_drained(delivery)
