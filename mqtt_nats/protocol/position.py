# SPDX-License-Identifier: Apache-2.0
"""Position of a durable session in the messages of the shared reader, in memory and as it is stored.

Theory of operation. A message that was taken is *pending* until it is complete. Each write stores the whole position:
the sequence up to which every message was taken, the pending messages, the packet identifiers for which PUBREL is
owed, and those that were allocated to messages. Steps that depend on a write are done after it: PUBREL is sent after
the write that has its identifier as owed, a message after the write that has its allocated identifier, and an
identifier is used again after the write that no longer has it.

Why: docs/internals/delivery.md#positions.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from mqtt_nats.protocol.ack_tokens import TAKEN


class Step(Enum):
    """A step that may be done once the position that names it is stored."""

    RELEASE = 1
    """PUBREL may be sent."""
    CONFIRM = 2
    """The message counts as acknowledged (`confirmed`): its PUBREL is owed by a record, not by the position."""
    FREE = 3
    """The packet identifier may be used again."""
    ALLOCATED = 4
    """The message may be sent under the packet identifier that is allocated to it."""
    REMOVED = 5
    """The packet identifier is not allocated any more."""


class Content(NamedTuple):
    """The content of one write of the position; see `SessionPosition`."""

    reached: int
    pending: dict[int, int]
    released: dict[int, int]
    identifiers: dict[int, int]


class SessionPosition:
    """The position of one durable session.

    Args:
        changed: called with the position at its first change after a write has begun.
    """

    __slots__ = ("_changed", "_steps", "_under_way", "dirty", "identifiers", "pending", "reached", "released")

    def __init__(self, changed: Callable[[SessionPosition], None] = lambda position: None) -> None:
        self._changed = changed
        self.reached = 0
        """Stream sequence up to which every message was taken; 0 = none."""
        self.pending: dict[int, int] = {}
        """QoS of messages that were taken and are not complete, by stream sequence."""
        self.released: dict[int, int] = {}
        """Stream sequences of messages whose PUBREL is owed, by packet identifier."""
        self.identifiers: dict[int, int] = {}
        """Allocated packet identifiers, by stream sequence of their message."""
        self.dirty = False
        """Whether the position has changed since the last write began."""
        self._steps: list[tuple[Step, int]] = []
        """Steps that wait for the next write, each with its packet identifier."""
        self._under_way: list[tuple[Step, int]] = []
        """Steps that wait for the write under way."""

    def restore(
        self, reached: int, pending: dict[int, int], released: dict[int, int], identifiers: dict[int, int]
    ) -> None:
        """Take the content of a position that an earlier connection has stored."""
        self.reached, self.pending, self.released, self.identifiers = reached, pending, released, identifiers

    def reach(self, sequence: int) -> None:
        """Note that every message up to a stream sequence was taken."""
        self.reached = max(self.reached, sequence)

    def change(self) -> None:
        """Note that the position has to be written."""
        if not self.dirty:
            self.dirty = True
            self._changed(self)

    def add_pending(self, sequence: int, qos: int) -> None:
        """Add a message that the session takes: it is pending."""
        self.pending[sequence] = qos
        if not self.dirty:  # as `change` does, without a call
            self.dirty = True
            self._changed(self)

    def complete(self, token: bytes, identifier: int = 0) -> bool:
        """Remove the complete message (`TAKEN`) or PUBREL (`OWED`) for which a token stands.

        Args:
            identifier: packet identifier of a message whose PUBREL is owed by a record; 0 = it is not such a message.

        Returns:
            False when the message of ``identifier`` is not pending (any more): no write confirms it.
        """
        number = int(token[1:])
        if identifier:
            if self.pending.pop(number, None) is None:
                return False
            self._steps.append((Step.CONFIRM, identifier))
            self.change()
        elif token.startswith(TAKEN):
            self.done(number)
        elif self.released.pop(number, None) is not None:
            self._steps.append((Step.FREE, number))
            self.change()
        return True

    def done(self, sequence: int) -> None:
        """Remove a complete message from the pending ones."""
        self.pending.pop(sequence, None)
        self.change()

    def receive(self, identifier: int, sequence: int) -> None:
        """Note a PUBREC: PUBREL is owed from now on."""
        self.pending.pop(sequence, None)
        self.released[identifier] = sequence
        self._steps.append((Step.RELEASE, identifier))
        self.change()

    def allocate(self, sequence: int, identifier: int) -> None:
        """Note that a message gets another packet identifier than its own."""
        self.identifiers[sequence] = identifier
        self._steps.append((Step.ALLOCATED, identifier))
        self.change()

    def end_allocation(self, sequence: int, identifier: int) -> None:
        """Note that a message needs its allocated packet identifier no more."""
        self.identifiers.pop(sequence, None)
        self._steps.append((Step.REMOVED, identifier))
        self.change()

    @property
    def urgent(self) -> bool:
        """Whether a packet to the client waits for the next write: PUBREL, or PUBLISH under an allocated identifier."""
        return any(step in (Step.RELEASE, Step.ALLOCATED) for step, _ in self._steps)

    def begin(self) -> Content:
        """Begin a write and return its content; there is one write at a time."""
        self._under_way += self._steps
        self._steps = []
        self.dirty = False
        return Content(self.reached, dict(self.pending), dict(self.released), dict(self.identifiers))

    def stored(self) -> list[tuple[Step, int]]:
        """Return the steps that may be done, in order, now that the write under way is stored."""
        done, self._under_way = self._under_way, []
        return done
