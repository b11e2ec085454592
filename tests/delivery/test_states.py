# SPDX-License-Identifier: Apache-2.0
"""The table of the states of durable delivery: each transition is taken, or refused with a clear error."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.delivery.states import (
    FROM_READER,
    MAY_JOIN,
    NOT_READING,
    TABLE,
    DeliveryEvent,
    DeliveryState,
    Feed,
    ForbiddenTransition,
    StatefulDelivery,
)
from tests.delivery.fakes import Side

CELLS = [(state, event) for state in DeliveryState for event in DeliveryEvent]
NAMES = [f"{state.value}, {event.value}" for state, event in CELLS]


def delivery() -> StatefulDelivery:
    return Side(state=DeliveryState.RESUMING)


def paths() -> dict[DeliveryState, list[DeliveryEvent]]:
    """The shortest way to each state from a session that is resumed."""
    found: dict[DeliveryState, list[DeliveryEvent]] = {DeliveryState.RESUMING: []}
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
    """Take an event, and compare with the table."""
    before = side.state
    following = TABLE[before].following.get(event)
    if following is None:
        with pytest.raises(ForbiddenTransition) as refused:
            side.change(event)
        assert str(refused.value) == f"durable delivery is {before.value}: not possible is {event.value!r}"
        following = before
    else:
        side.change(event)
    assert side.state is following
    assert side.live == (TABLE[following].feed in (Feed.READER, Feed.CATCH_UP))
    assert side.stalled == (following in NOT_READING)


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
def test_from_each_state_a_client_that_stays_comes_back_to_its_consumers(data: st.DataObject) -> None:
    """However often it stalls or joins, a session is never caught in a state without a way to `PLAIN`."""
    side = delivery()
    for _ in range(20):
        possible = [event for event in TABLE[side.state].following if event is not DeliveryEvent.ENDED]
        take(side, data.draw(st.sampled_from(possible)))
    seen, waiting = {side.state}, deque([side.state])
    while waiting:
        following = {one for one in TABLE[waiting.popleft()].following.values() if one is not DeliveryState.ENDED}
        waiting += following - seen
        seen |= following
    assert DeliveryState.PLAIN in seen


def test_an_ended_delivery_stays_ended() -> None:
    assert set(TABLE[DeliveryState.ENDED].following.values()) == {DeliveryState.ENDED}
    assert all(row.following[DeliveryEvent.ENDED] is DeliveryState.ENDED for row in TABLE.values())


def test_questions_follow_from_the_table() -> None:
    assert TABLE.keys() == set(DeliveryState)
    assert PATHS.keys() == set(DeliveryState)
    assert {DeliveryState.PLAIN, DeliveryState.LIVE} == MAY_JOIN
    assert {DeliveryState.LIVE, DeliveryState.CATCHING_UP} == FROM_READER
    assert not MAY_JOIN & NOT_READING
