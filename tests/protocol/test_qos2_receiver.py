# SPDX-License-Identifier: Apache-2.0
"""Every (state, packet) pair of the receiver's side of QoS 2."""

from __future__ import annotations

import pytest

from mqtt_nats.codec import ProtocolError
from mqtt_nats.protocol.qos2_receiver import ON_PUBLISH, ON_PUBREL, Action, InboundQos2, State

# (state, packet, action or None for a violation, state afterwards)
CASES: list[tuple[State | None, str, Action | None, State | None]] = [
    (None, "PUBLISH", Action.HOLD, State.HOLDING),
    (None, "PUBREL", Action.FINISHED, None),
    (State.HOLDING, "PUBLISH", Action.IGNORE_DUPLICATE, State.HOLDING),
    (State.HOLDING, "PUBREL", None, State.HOLDING),
    (State.HELD, "PUBLISH", Action.ANSWER_DUPLICATE, State.HELD),
    (State.HELD, "PUBREL", Action.RELEASE, State.RELEASING),
    (State.RELEASING, "PUBLISH", None, State.RELEASING),
    (State.RELEASING, "PUBREL", Action.IGNORE_DUPLICATE, State.RELEASING),
]


def test_the_table_has_every_state() -> None:
    states = {None, *State}
    assert {state for state, packet, _, _ in CASES if packet == "PUBLISH"} == states == set(ON_PUBLISH)
    assert {state for state, packet, _, _ in CASES if packet == "PUBREL"} == states == set(ON_PUBREL)


@pytest.mark.parametrize(("state", "packet", "action", "after"), CASES)
def test_packet(state: State | None, packet: str, action: Action | None, after: State | None) -> None:
    machine = InboundQos2()
    if state is not None:
        machine.states[7] = state
    machine.states[8] = State.HELD
    step = machine.publish if packet == "PUBLISH" else machine.pubrel
    if action is None:
        with pytest.raises(ProtocolError):
            step(7)
    else:
        assert step(7) is action
    assert machine.states.get(7) is after
    assert machine.states[8] is State.HELD, "another identifier is touched"


@pytest.mark.parametrize("state", [None, *State])
def test_what_jetstream_reports(state: State | None) -> None:
    machine = InboundQos2()
    if state is not None:
        machine.states[7] = state
    machine.stored(7)
    assert machine.states == {7: State.HELD}
    machine.released(7)
    machine.released(7)
    assert machine.states == {}


def test_one_exchange() -> None:
    machine = InboundQos2()
    assert machine.publish(1) is Action.HOLD
    machine.stored(1)
    assert machine.publish(1) is Action.ANSWER_DUPLICATE, "its PUBREC was lost"
    assert machine.pubrel(1) is Action.RELEASE
    assert machine.pubrel(1) is Action.IGNORE_DUPLICATE
    machine.released(1)
    assert machine.pubrel(1) is Action.FINISHED, "its PUBCOMP was lost"
    assert machine.publish(1) is Action.HOLD, "the identifier is free"
