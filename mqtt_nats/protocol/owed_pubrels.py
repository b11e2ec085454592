# SPDX-License-Identifier: Apache-2.0
"""Owed PUBRELs: the rest of QoS 2 messages that the client has received; they are sent in the order of the PUBRECs.

Why: docs/internals/delivery.md#owed-pubrels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mqtt_nats.codec import ack_bytes
from mqtt_nats.codec.wire import PUBREL
from mqtt_nats.protocol.inflight import STORING, Delivery, Release, SubscriptionState
from mqtt_nats.protocol.ports import NOWHERE
from mqtt_nats.protocol.requeue import SEQUENCE_EVER, Requeue
from mqtt_nats.protocol.unsequenced import RETAINED_BASE


class OwedPubrels(Requeue):
    """The part of a durable session's sender that deals with owed PUBRELs."""

    def __init__(self, version: int, on_drained_message: Callable[[Delivery], None] | None = None) -> None:
        super().__init__()
        self.version = version
        self.released = 0
        """Number of owed PUBRELs that count as in flight: in 5.0, PUBRELs of messages that this connection has sent."""
        self.on_drained_message = on_drained_message
        """Called when a message of an ended subscription is complete."""
        self._owed: set[int] = set()
        """Stream sequences whose PUBREL was owed at the resume: these messages are never sent again."""
        self._cleared: set[int] = set()
        """Packet identifiers that the client has given up: they are not suspect any more."""

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
        """Note that JetStream has confirmed one acknowledgement of a message whose PUBREL is owed."""
        release = self.releases.get(identifier)
        if release is not None:
            release.confirm_one()
            if release.delivery is not None and not release.unconfirmed:
                self._report_drained(release.delivery)
            self._finish(identifier, release)
        else:
            self._confirmed(identifier)

    def pubrel_delivered(self, identifier: int, sequence: int, reply: bytes) -> None:
        """Handle a record that the consumer of PUBREL records has delivered."""
        release = self.releases.get(identifier)
        if release is None:
            delivery = self.inflight.get(identifier)
            if delivery is not None and delivery.state == STORING and abs(delivery.sequence) == sequence:
                # JetStream delivered the record before its PubAck came.
                release = self.releases[identifier] = Release(sequence)
        if release is None or release.sequence != sequence:
            self.ports.ack(reply)  # the record of a message that is complete
            return
        release.records.append(reply)
        self._finish(identifier, release)

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

    def _on_pubcomp(self, identifier: int) -> None:
        """Handle a PUBCOMP, with any reason code: the client has given the identifier up."""
        if identifier in self._asked:
            self._asked.discard(identifier)
            self._cleared.add(identifier)
        release = self.releases.get(identifier)
        if release is not None:
            if release.delivery is not None and not release.comp and self.version == 5:
                self.released -= 1
            release.complete()
            if release.former:
                self._cleared.add(identifier)
            self._finish(identifier, release)

    def replayed(self, source: SubscriptionState, cursor: int | None) -> None:
        """Note how far the record has a subscription's replay; PUBREL records before ``cursor`` may be removed."""
        if cursor is None or source.ended:
            self.cursors.pop(source, None)
        else:
            self.cursors[source] = cursor
        for identifier, release in list(self.releases.items()):
            if identifier >= RETAINED_BASE and self.releases.get(identifier) is release:
                self._finish(identifier, release)

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
        if identifier in self.used:
            self._end_use(identifier)

    def disconnect(self) -> None:
        """Cut the state machine off from its ports: all work is left to the next connection."""
        self.ports = NOWHERE
        self.on_drained_message = self.on_room = None

    def _report_drained(self, delivery: Delivery) -> None:
        """Report a complete message of an ended subscription."""
        if delivery.source.ended and self.on_drained_message is not None:
            self.on_drained_message(delivery)


class ReleaseOrder:
    """The order of PUBRELs: each waits until those of earlier PUBRECs are stored, too.

    Records and positions are in different streams, which are stored in no common order. [MQTT-4.6.0-4] (3.1.1)
    """

    __slots__ = ("_storable", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()
        """Packet identifiers in the order of their PUBRECs."""
        self._storable: dict[int, bytes] = {}
        """Marks of the identifiers that are stored, behind an identifier that is not."""

    def received(self, identifier: int) -> None:
        """Note that a PUBREC has come."""
        self._waiting.append(identifier)

    def stored(self, identifier: int, mark: bytes) -> list[tuple[int, bytes]]:
        """Note that a PUBREL is stored as ``mark``; return the identifiers that may be sent now, with their marks."""
        waiting, storable = self._waiting, self._storable
        if not storable and waiting and waiting[0] == identifier:
            waiting.popleft()
            return [(identifier, mark)]
        storable[identifier] = mark
        found = []
        while waiting and waiting[0] in storable:
            first = waiting.popleft()
            found.append((first, storable.pop(first)))
        return found
