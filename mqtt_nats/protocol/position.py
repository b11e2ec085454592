# SPDX-License-Identifier: Apache-2.0
"""What a durable session has taken from the shared reader, and what is stored of that.

Theory of operation. A message that was taken is *pending* until it is complete. What is stored is the whole of it, each
time: up to where everything was taken, what of it is pending, and for which packet identifiers PUBREL is owed. What
depends on having been stored is done after that: PUBREL is sent after the write that has its identifier as owed, and
an identifier is used again after the write that has it no more.

Why: docs/internals/rules.md#positions.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Step(Enum):
    """What may be done once it has been written that it will be."""

    RELEASE = 1
    """PUBREL may be sent."""
    CONFIRM = 2
    """A message is complete of which PUBREL was sent by other means."""
    FREE = 3
    """The packet identifier may be used again."""


class Content(NamedTuple):
    """What is to be written."""

    reached: int
    pending: dict[int, int]
    released: dict[int, int]


class SessionPosition:
    """One session's."""

    __slots__ = ("_steps", "_under_way", "dirty", "pending", "reached", "released")

    def __init__(self) -> None:
        self.reached = 0
        """Everything up to this sequence was taken."""
        self.pending: dict[int, int] = {}
        """What was taken and is not complete: QoS by sequence."""
        self.released: dict[int, int] = {}
        """For which packet identifiers PUBREL is owed, with the sequence of the message."""
        self.dirty = False
        """Something has changed since the last write was begun."""
        self._steps: list[tuple[Step, int]] = []
        self._under_way: list[tuple[Step, int]] = []

    def take(self, sequence: int, qos: int) -> None:
        """A message is this session's from now on."""
        self.pending[sequence] = qos
        self.dirty = True

    def done(self, sequence: int) -> None:
        """A message is complete."""
        self.pending.pop(sequence, None)
        self.dirty = True

    def receive(self, identifier: int, sequence: int) -> None:
        """PUBREC has come: PUBREL is owed from now on."""
        self.pending.pop(sequence, None)
        self.released[identifier] = sequence
        self._steps.append((Step.RELEASE, identifier))
        self.dirty = True

    def confirm(self, sequence: int, identifier: int) -> bool:
        """A message is complete whose PUBREL record has been stored elsewhere; False when that is written already."""
        if self.pending.pop(sequence, None) is None:
            return False
        self._steps.append((Step.CONFIRM, identifier))
        self.dirty = True
        return True

    def free(self, identifier: int) -> None:
        """PUBCOMP has come."""
        if self.released.pop(identifier, None) is not None:
            self._steps.append((Step.FREE, identifier))
            self.dirty = True

    @property
    def urgent(self) -> bool:
        """Whether the client waits for a write."""
        return any(step is Step.RELEASE for step, _ in self._steps)

    def begin(self) -> Content:
        """A write begins; there is one at a time."""
        self._under_way += self._steps
        self._steps = []
        self.dirty = False
        return Content(self.reached, dict(self.pending), dict(self.released))

    def stored(self) -> list[tuple[Step, int]]:
        """The write that was begun last is stored: what may be done now, in order."""
        done, self._under_way = self._under_way, []
        return done
