# SPDX-License-Identifier: Apache-2.0
"""Owed PUBRELs: they remain of a QoS 2 message that the client has, and leave in the order of their PUBRECs.

Why: docs/internals/rules.md#owed-pubrels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mqtt_nats.protocol.inflight import STORING, Delivery, Release, SubscriptionState
from mqtt_nats.protocol.requeue import EVER, Requeue
from mqtt_nats.protocol.unsequenced import RETAINED_BASE


class OwedPubrels(Requeue):
    """The part of a durable session's sender that deals with them."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version
        self.released = 0
        """How many of those count as in flight: a message of this connection in 5.0."""
        self.on_complete: Callable[[Delivery], None] | None = None
        """Called when a message of a subscription that has ended is complete."""
        self._owed: set[int] = set()
        """Sequences of the session's own messages whose PUBREL was owed when it was resumed: never to be sent again."""
        self._cleared: set[int] = set()

    def owe(self, identifier: int, sequence: int, former: bool = False) -> None:
        """A PUBREL record was found: reserve the identifier; the PUBREL is sent by :meth:`DurableSender.start`.

        Args:
            former: the sequence counts in a stream that was replaced.
        """
        self.releases[identifier] = Release(sequence, former)
        # Else it is of a shared subscription's copy, which may be another one's too, or of a retained message, whose
        # sequence counts elsewhere. Records of nats-server's listener, with any identifier, have no sequence.
        if not former and identifier < RETAINED_BASE:
            self._owed.add(sequence)
        if identifier >= RETAINED_BASE:
            self._recorded[identifier] = sequence

    def keep(self, identifier: int, record: bytes) -> None:
        """An owed PUBREL's identifier is taken until it is freed."""
        release = self.releases.get(identifier)
        if release is not None and not release.stays:
            release.stays = True
            release.records.append(record)
            self._finish(identifier, release)

    def freed(self, identifier: int) -> None:
        """The identifier of a release that stays may be used again."""
        release = self.releases.get(identifier)
        if release is not None and release.stays and release.comp:
            del self.releases[identifier]
            if self._waiting or self.others:
                self.pump()

    def answered(self, identifier: int, sequence: int) -> None:
        """Another message than that of ``sequence`` had the identifier before: the client has answered that PUBREL.

        Else the identifier had not been free. The record is left of a connection that has ended too early to remove it.
        """
        release = self.releases.get(identifier)
        if release is not None and release.sequence != sequence:
            del self.releases[identifier]
            for record in release.records:
                self.ports.ack(record)

    def confirmed(self, identifier: int) -> None:
        """JetStream has confirmed one acknowledgement of a released message."""
        release = self.releases.get(identifier)
        if release is not None:
            release.unconfirmed -= 1
            if release.delivery is not None and not release.unconfirmed:
                self._ended(release.delivery)
            self._finish(identifier, release)

    def pubrel_delivered(self, identifier: int, sequence: int, reply: bytes) -> None:
        """The consumer of PUBREL records has delivered a record."""
        release = self.releases.get(identifier)
        if release is None:
            delivery = self.inflight.get(identifier)
            if delivery is not None and delivery.state == STORING and abs(delivery.sequence) == sequence:
                # The record overtook its own PubAck.
                release = self.releases[identifier] = Release(sequence)
        if release is None or release.sequence != sequence:
            self.ports.ack(reply)  # of a message that is done
            return
        release.records.append(reply)
        self._finish(identifier, release)

    def unrecorded(self) -> dict[int, int]:
        """The sequences, by identifier, of what the client has completed and whose record was not delivered."""
        return {
            identifier: release.sequence
            for identifier, release in self.releases.items()
            if release.comp and not release.records and not release.stays
        }

    def vanished(self, identifier: int, sequence: int) -> None:
        """There is no such record any more: an earlier connection has removed it after it was read here."""
        if self.unrecorded().get(identifier) == sequence:
            self._finish(identifier, self.releases[identifier], gone=True)

    def _completed(self, identifier: int) -> None:
        """PUBCOMP, with whatever reason: the client has let the identifier go."""
        if identifier in self._asked:
            self._asked.discard(identifier)
            self._cleared.add(identifier)
        release = self.releases.get(identifier)
        if release is not None:
            if release.delivery is not None and not release.comp and self.version == 5:
                self.released -= 1
            release.comp = True
            if release.former:
                self._cleared.add(identifier)
            self._finish(identifier, release)

    def replayed(self, source: SubscriptionState, cursor: int | None) -> None:
        """The session record says how far a subscription's retained messages are: what is before it needs no record."""
        if cursor is None or source.end:
            self.cursors.pop(source, None)
        else:
            self.cursors[source] = cursor
        for identifier, release in list(self.releases.items()):
            if identifier >= RETAINED_BASE and self.releases.get(identifier) is release:
                self._finish(identifier, release)

    @property
    def keeps(self) -> bool:
        """Whether records are kept of retained messages that the client has whole."""
        return any(one.comp and self._kept(identifier, one) for identifier, one in self.releases.items())

    def _kept(self, identifier: int, release: Release) -> bool:
        """Whether the next connection would send a retained message again, if there were no record of its PUBREL."""
        if identifier < RETAINED_BASE or not self.cursors:
            return False
        source = release.source
        if source is not None:
            first = self.cursors.get(source, EVER)
        elif release.delivery is None:  # an earlier connection has sent it
            first = min(self.cursors.values())
        else:
            return False  # of a shared subscription
        if first > release.sequence:
            return False
        # Whoever subscribes again meanwhile gets the same once more: that is what would have to be sent again.
        new = self.others[0] if self.others else None
        return new is None or -new.sequence != release.sequence or source not in (None, new.source)

    def _give_way(self, identifier: int) -> bool:
        """Let go of a record that is kept, for the same message that is to be sent anew; False: it is in use."""
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
            records, release.records = release.records, []
            if not release.stays:
                del self.releases[identifier]
            for record in records:
                self.ports.ack(record)
            if self._waiting or self.others:
                self.pump()

    def _ended(self, delivery: Delivery) -> None:
        if delivery.source.end and self.on_complete is not None:
            self.on_complete(delivery)


class ReleaseOrder:
    """What has to be stored before a PUBREL may be sent is stored in streams of their own, which keep no order.

    [MQTT-4.6.0-4] (3.1.1)
    """

    __slots__ = ("_storable", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()
        """Packet identifiers in the order of their PUBRECs."""
        self._storable: dict[int, bytes] = {}
        """Those of them that are stored, behind one that is not."""

    def received(self, identifier: int) -> None:
        """A PUBREC has come."""
        self._waiting.append(identifier)

    def stored(self, identifier: int, mark: bytes) -> list[tuple[int, bytes]]:
        """It is stored, which ``mark`` stands for; returns the PUBRELs that may be sent now, with theirs."""
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
