# SPDX-License-Identifier: Apache-2.0
"""The table of the states of durable delivery: each transition is taken, or refused with a clear error."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.delivery.states import (
    FROM_READER,
    TABLE,
    DeliveryEvent,
    DeliveryState,
    Feed,
    ForbiddenTransition,
    StatefulDelivery,
)
from tests.delivery.fakes import Side

S, E = DeliveryState, DeliveryEvent

POSSIBLE = {
    (S.OPENING, E.OPENED): S.LIVE,
    (S.LIVE, E.FAR_BEHIND): S.CATCHING_UP,
    (S.LIVE, E.STOPS_READING): S.NOT_READING,
    (S.CATCHING_UP, E.CATCH_UP_ENDED): S.LIVE,
    (S.NOT_READING, E.READS_AGAIN): S.LIVE,
    **{(state, E.ENDED): S.ENDED for state in DeliveryState},
}
"""Each possible transition; all others are refused."""

CELLS = [(state, event) for state in DeliveryState for event in DeliveryEvent]
NAMES = [f"{state.value}, {event.value}" for state, event in CELLS]


def delivery() -> StatefulDelivery:
    return Side(state=DeliveryState.OPENING)


def paths() -> dict[DeliveryState, list[DeliveryEvent]]:
    """The shortest way to each state from a session that is opened."""
    found: dict[DeliveryState, list[DeliveryEvent]] = {DeliveryState.OPENING: []}
    waiting = deque(found)
    while waiting:
        state = waiting.popleft()
        for event, following in TABLE[state].following.items():
            if following not in found:
                found[following] = [*found[state], event]
                waiting.append(following)
    return found


PATHS = paths()


def take(side: StatefulDelivery, event: DeliveryEvent) -> None:
    """Take an event, and compare with the transitions above."""
    before = side.state
    following = POSSIBLE.get((before, event))
    if following is None:
        with pytest.raises(ForbiddenTransition) as refused:
            side.change(event)
        assert str(refused.value) == f"durable delivery is {before.value}: not possible is {event.value!r}"
        following = before
    else:
        side.change(event)
    assert side.state is following
    assert side.live == (following in (DeliveryState.LIVE, DeliveryState.CATCHING_UP))
    assert side.stalled == (following is DeliveryState.NOT_READING)


@pytest.mark.parametrize(("state", "event"), CELLS, ids=NAMES)
def test_each_cell_is_taken_or_refused(state: DeliveryState, event: DeliveryEvent) -> None:
    side = delivery()
    for step in PATHS[state]:
        take(side, step)
    assert side.state is state
    take(side, event)


@given(st.lists(st.sampled_from(DeliveryEvent), max_size=40))
def test_events_in_any_order_follow_the_table(events: list[DeliveryEvent]) -> None:
    side = delivery()
    for event in events:
        take(side, event)


@given(st.data())
def test_from_each_state_a_client_that_stays_comes_back_to_the_reader(data: st.DataObject) -> None:
    """However often it stalls or falls behind, a session is never caught in a state without a way to `LIVE`."""
    side = delivery()
    for _ in range(20):
        possible = [event for event in TABLE[side.state].following if event is not DeliveryEvent.ENDED]
        take(side, data.draw(st.sampled_from(possible)))
    seen, waiting = {side.state}, deque([side.state])
    while waiting:
        following = {one for one in TABLE[waiting.popleft()].following.values() if one is not DeliveryState.ENDED}
        waiting += following - seen
        seen |= following
    assert DeliveryState.LIVE in seen


def test_questions_follow_from_the_table() -> None:
    assert TABLE.keys() == set(DeliveryState)
    assert PATHS.keys() == set(DeliveryState)
    assert {DeliveryState.LIVE, DeliveryState.CATCHING_UP} == FROM_READER
    assert {state: row.feed for state, row in TABLE.items() if row.feed is not Feed.NONE} == {
        DeliveryState.LIVE: Feed.READER,
        DeliveryState.CATCHING_UP: Feed.CATCH_UP,
    }


@pytest.mark.parametrize("resumed", [True, False])
def test_an_opened_delivery_sends(resumed: bool) -> None:
    side = delivery()
    assert not side.machine.open
    (side.start if resumed else side.begin)()
    assert (side.state, side.live, side.machine.open) == (DeliveryState.LIVE, True, True)
    with pytest.raises(ForbiddenTransition):
        (side.start if resumed else side.begin)()
