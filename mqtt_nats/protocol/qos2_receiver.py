# SPDX-License-Identifier: Apache-2.0
"""The receiver of QoS 2 publishes: states of the packet identifiers, and the actions on PUBLISH and PUBREL.

    ========== ============================================ ============================================
    state      PUBLISH                                      PUBREL
    ========== ============================================ ============================================
    (none)     HOLD, then HOLDING                           FINISHED: PUBCOMP [MQTT-4.3.3-2]
    HOLDING    IGNORE_DUPLICATE: its PUBREC is to come      VIOLATION: there was no PUBREC
    HELD       ANSWER_DUPLICATE: PUBREC again               RELEASE, then RELEASING
    RELEASING  VIOLATION: the id is not free                IGNORE_DUPLICATE: its PUBCOMP is to come
    ========== ============================================ ============================================

[MQTT-4.3.3-8] [MQTT-4.3.3-10] [MQTT-4.3.3-11] [MQTT-4.3.3-12] (5.0)

``stored`` moves HOLDING to HELD, ``released`` frees the identifier.

The records of released publishes are removed from their stream. To remove all of a client's records up to a sequence
costs nats-server little more than to remove a single record. The sequence of a publish may be that limit when every
publish that the client has sent before is released too: they are stored in the order in which they are sent, unless
one is sent again. Why: docs/internals/ingress.md#held-publishes.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from mqtt_nats.codec import ProtocolError


class State(Enum):
    """The state of a packet identifier of an unfinished QoS 2 publish."""

    HOLDING = auto()
    HELD = auto()
    RELEASING = auto()


class Action(Enum):
    """The action on a PUBLISH or PUBREL packet; see the table of the module."""

    HOLD = auto()
    """Store the new publish."""
    IGNORE_DUPLICATE = auto()
    """Do nothing: the answer to the packet before is still to come, and answers the duplicate, too."""
    ANSWER_DUPLICATE = auto()
    """Send PUBREC again; the publish is held already."""
    RELEASE = auto()
    """Publish the held message."""
    FINISHED = auto()
    """Send PUBCOMP: no publish is held under the identifier."""


VIOLATION: Final = None

ON_PUBLISH: Final[dict[State | None, tuple[Action, State] | None]] = {
    None: (Action.HOLD, State.HOLDING),
    State.HOLDING: (Action.IGNORE_DUPLICATE, State.HOLDING),
    State.HELD: (Action.ANSWER_DUPLICATE, State.HELD),
    State.RELEASING: VIOLATION,
}

ON_PUBREL: Final[dict[State | None, tuple[Action, State | None] | None]] = {
    None: (Action.FINISHED, None),
    State.HOLDING: VIOLATION,
    State.HELD: (Action.RELEASE, State.RELEASING),
    State.RELEASING: (Action.IGNORE_DUPLICATE, State.RELEASING),
}


class InboundQos2:
    """The identifiers of one session's unfinished QoS 2 publishes, and the sequences of their held records."""

    __slots__ = ("_newest", "_ordered", "_removable", "_sequences", "_waiting", "states")

    def __init__(self) -> None:
        self.states: dict[int, State] = {}
        self._sequences: dict[int, int] = {}
        """Sequence of the held record by packet identifier, in the order of the publishes; 0 = not known yet."""
        self._waiting: dict[int, int] = {}
        """Packet identifiers of publishes whose sequence is not known, each with the `attempt` of its first store."""
        self._removable: set[int] = set()
        """Packet identifiers of released publishes, whose records may be removed."""
        self._newest = 0
        """Highest sequence of a held record; 0 = none."""
        self._ordered = True
        """Whether the sequences have come in the order in which the publishes were sent."""

    def publish(self, packet_id: int) -> Action:
        """Handle a PUBLISH at QoS 2; return the action.

        Raises:
            ProtocolError: the identifier is still being released.
        """
        step = ON_PUBLISH[self.states.get(packet_id)]
        if step is None:
            raise ProtocolError(f"packet identifier {packet_id} is used again before its PUBCOMP")
        action, self.states[packet_id] = step
        return action

    def releasing(self, packet_id: int) -> bool:
        """Whether a PUBLISH with this identifier has to wait for the PUBCOMP of the publish before it."""
        return self.states.get(packet_id) is State.RELEASING

    def pubrel(self, packet_id: int) -> Action:
        """Handle a PUBREL; return the action.

        Raises:
            ProtocolError: PUBREC has not been sent for the publish yet.
        """
        step = ON_PUBREL[self.states.get(packet_id)]
        if step is None:
            raise ProtocolError(f"PUBREL for packet identifier {packet_id} before its PUBREC")
        action, state = step
        if state is not None:
            self.states[packet_id] = state
        return action

    def restore(self, packet_id: int, sequence: int) -> None:
        """Add a publish that an earlier connection has held; called in the order of the sequences."""
        self.states[packet_id] = State.HELD
        self._sequences[packet_id] = self._newest = sequence

    def sent(self, packet_id: int, attempt: int) -> None:
        """Add a publish whose record is sent to the stream now.

        Args:
            attempt: a number that grows whenever stores may have been sent again.
        """
        self._sequences[packet_id] = 0
        self._waiting[packet_id] = attempt

    def stored(self, packet_id: int, sequence: int = 0) -> None:
        """Note that PUBREC is due: the publish is held under ``sequence``; 0 = without a record."""
        self.states[packet_id] = State.HELD
        if packet_id not in self._waiting:
            return
        if sequence <= self._newest or next(iter(self._waiting)) != packet_id:
            self._ordered = False
        del self._waiting[packet_id]
        self._sequences[packet_id] = self._newest = sequence

    def astray(self) -> None:
        """Note that a record is stored again, behind later ones: batches are off until all records are gone."""
        self._ordered = False

    def removable(self, packet_id: int) -> None:
        """Note that the publish has gone to its subscribers: its record may be removed."""
        self._removable.add(packet_id)

    def released(self, packet_id: int) -> None:
        """Free the identifier: the publish has gone to its subscribers, and the held record is removed."""
        self.states.pop(packet_id, None)
        self._removable.discard(packet_id)
        self._waiting.pop(packet_id, None)
        self._sequences.pop(packet_id, None)
        if not self._sequences:
            self._ordered = True
            self._newest = 0

    def bound(self, attempt: int) -> int:
        """Return the sequence up to which all records may be removed at once; 0 = each record goes by itself.

        Args:
            attempt: the present value of the number in :meth:`sent`.
        """
        if not self._ordered or next(iter(self._waiting.values()), attempt) != attempt:
            return 0
        bound = 0
        for packet_id, sequence in self._sequences.items():
            if packet_id not in self._removable:
                break
            bound = sequence
        return bound
