# SPDX-License-Identifier: Apache-2.0
"""Which held QoS 2 publishes of a client may go together: all that it has, up to a sequence of their stream.

To remove what a client holds up to a sequence costs nats-server little more than to remove a single record. The
sequence of a publish will do when every one that the client has sent before is done too: they are stored in the order
in which they are sent, unless one is sent again. Why: docs/internals/rules.md#held-publishes.
"""

from __future__ import annotations


class Clearance:
    """The publishes of one connection that are held or on their way to it, in the order in which they were sent."""

    __slots__ = ("_done", "_newest", "_ordered", "_sequences", "_waiting")

    def __init__(self) -> None:
        self._sequences: dict[int, int] = {}
        """By packet identifier; 0 = not known yet."""
        self._waiting: dict[int, int] = {}
        """Those whose sequence is not known, each with the attempt at which it was sent first."""
        self._done: set[int] = set()
        self._newest = 0
        self._ordered = True

    def restore(self, packet_id: int, sequence: int) -> None:
        """An earlier connection has held it; called in the order of the sequences."""
        self._sequences[packet_id] = sequence
        self._newest = sequence

    def send(self, packet_id: int, attempt: int) -> None:
        """It is sent to be held.

        Args:
            attempt: grows whenever stores may have been sent again.
        """
        self._sequences[packet_id] = 0
        self._waiting[packet_id] = attempt

    def held(self, packet_id: int, sequence: int) -> None:
        """It is held, under a sequence."""
        if packet_id not in self._waiting:
            return
        if sequence <= self._newest or next(iter(self._waiting)) != packet_id:
            self._ordered = False
        del self._waiting[packet_id]
        self._sequences[packet_id] = self._newest = sequence

    def astray(self) -> None:
        """One is sent again, behind those that were sent after it: there is no order until all are gone."""
        self._ordered = False

    def done(self, packet_id: int) -> None:
        """It is released: its record may go."""
        self._done.add(packet_id)

    def gone(self, packet_id: int) -> None:
        """There is no record of it any more."""
        self._done.discard(packet_id)
        self._waiting.pop(packet_id, None)
        self._sequences.pop(packet_id, None)
        if not self._sequences:
            self._ordered = True
            self._newest = 0

    def bound(self, attempt: int) -> int:
        """The sequence up to which everything may go; 0 = each by itself.

        Args:
            attempt: as in :meth:`send`, now.
        """
        if not self._ordered or next(iter(self._waiting.values()), attempt) != attempt:
            return 0
        bound = 0
        for packet_id, sequence in self._sequences.items():
            if packet_id not in self._done:
                break
            bound = sequence
        return bound
