# SPDX-License-Identifier: Apache-2.0
"""The receiver's side of QoS 2: states of the packet identifiers, and the actions on PUBLISH and PUBREL.

    ========== ================================= ================================
    state      PUBLISH                           PUBREL
    ========== ================================= ================================
    (none)     HOLD, then HOLDING                FINISHED: PUBCOMP [MQTT-4.3.3-2]
    HOLDING    WAIT: its PUBREC is to come       VIOLATION: there was no PUBREC
    HELD       REPEAT: PUBREC again              RELEASE, then RELEASING
    RELEASING  VIOLATION: the id is not free     WAIT: its PUBCOMP is to come
    ========== ================================= ================================

[MQTT-4.3.3-8] [MQTT-4.3.3-10] [MQTT-4.3.3-11] [MQTT-4.3.3-12] (5.0)

``stored`` moves HOLDING to HELD, ``released`` frees the identifier.
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
    WAIT = auto()
    REPEAT = auto()
    RELEASE = auto()
    FINISHED = auto()


VIOLATION: Final = None

ON_PUBLISH: Final[dict[State | None, tuple[Action, State] | None]] = {
    None: (Action.HOLD, State.HOLDING),
    State.HOLDING: (Action.WAIT, State.HOLDING),
    State.HELD: (Action.REPEAT, State.HELD),
    State.RELEASING: VIOLATION,
}

ON_PUBREL: Final[dict[State | None, tuple[Action, State | None] | None]] = {
    None: (Action.FINISHED, None),
    State.HOLDING: VIOLATION,
    State.HELD: (Action.RELEASE, State.RELEASING),
    State.RELEASING: (Action.WAIT, State.RELEASING),
}


class InboundQos2:
    """The identifiers of one session's unfinished QoS 2 publishes."""

    __slots__ = ("states",)

    def __init__(self) -> None:
        self.states: dict[int, State] = {}

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

    def stored(self, packet_id: int) -> None:
        """Note that the publish is held in the stream."""
        self.states[packet_id] = State.HELD

    def released(self, packet_id: int) -> None:
        """Free the identifier: the publish has gone to its subscribers, and the held record is deleted."""
        self.states.pop(packet_id, None)
