# SPDX-License-Identifier: Apache-2.0
"""Batches of held QoS 2 publishes of a client that can be removed together, up to a sequence of their stream.

Removing all of a client's held records up to a sequence costs nats-server little more than removing a single record.
The sequence of a publish may be that limit when every publish that the client has sent before is released too: they
are stored in the order in which they are sent, unless one is sent again. Why: docs/internals/ingress.md#held-publishes.
"""

from __future__ import annotations


class Clearance:
    """The publishes of one connection that are held or being stored, in the order in which they were sent."""

    __slots__ = ("_done", "_newest", "_ordered", "_sequences", "_waiting")

    def __init__(self) -> None:
        self._sequences: dict[int, int] = {}
        """Sequence of the held record by packet identifier; 0 = not known yet."""
        self._waiting: dict[int, int] = {}
        """Packet identifiers of publishes whose sequence is not known, each with the `attempt` of its first store."""
        self._done: set[int] = set()
        """Packet identifiers of released publishes, whose records may be removed."""
        self._newest = 0
        """Highest sequence of a held record; 0 = none."""
        self._ordered = True
        """Whether the sequences have come in the order in which the publishes were sent."""

    def restore(self, packet_id: int, sequence: int) -> None:
        """Add a publish that an earlier connection has held; called in the order of the sequences."""
        self._sequences[packet_id] = sequence
        self._newest = sequence

    def send(self, packet_id: int, attempt: int) -> None:
        """Add a publish whose store is sent now.

        Args:
            attempt: a number that grows whenever stores may have been sent again.
        """
        self._sequences[packet_id] = 0
        self._waiting[packet_id] = attempt

    def held(self, packet_id: int, sequence: int) -> None:
        """Note the sequence under which a publish is held."""
        if packet_id not in self._waiting:
            return
        if sequence <= self._newest or next(iter(self._waiting)) != packet_id:
            self._ordered = False
        del self._waiting[packet_id]
        self._sequences[packet_id] = self._newest = sequence

    def astray(self) -> None:
        """Note that a publish is stored again, behind later ones: batches are off until all records are gone."""
        self._ordered = False

    def done(self, packet_id: int) -> None:
        """Note that a publish is released: its record may be removed."""
        self._done.add(packet_id)

    def gone(self, packet_id: int) -> None:
        """Forget a publish whose record is removed."""
        self._done.discard(packet_id)
        self._waiting.pop(packet_id, None)
        self._sequences.pop(packet_id, None)
        if not self._sequences:
            self._ordered = True
            self._newest = 0

    def bound(self, attempt: int) -> int:
        """Return the sequence up to which all records may be removed at once; 0 = each record goes by itself.

        Args:
            attempt: the present value of the number in :meth:`send`.
        """
        if not self._ordered or next(iter(self._waiting.values()), attempt) != attempt:
            return 0
        bound = 0
        for packet_id, sequence in self._sequences.items():
            if packet_id not in self._done:
                break
            bound = sequence
        return bound
