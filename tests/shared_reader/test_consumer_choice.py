# SPDX-License-Identifier: Apache-2.0
"""The choice between consumers and records, by settings and the number of consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from mqtt_nats.shared_reader.consumer_choice import ConsumerChoice
from tests.shared_reader.fakes import FakeReaderSettings

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings


def choice(session_positions: str = "auto", *, bound: int | None = None) -> ConsumerChoice:
    settings = FakeReaderSettings(session_positions)
    settings.session_consumers = bound
    return ConsumerChoice(cast("Settings", settings))


@pytest.mark.parametrize(
    ("in_records", "own", "consumers", "wanted"),
    [
        (False, 0, 0, False),
        (False, 0, 99, False),
        (False, 0, 100, True),
        (False, 1, 100, False),
        (False, 1, 125, False),
        (False, 1, 126, True),
        (True, 1, 200, True),
        (True, 1, 75, True),
        (True, 1, 74, False),
        (True, 50, 26, True),  # it would bring the number of consumers above the bound again, or near it
        (True, 50, 25, False),
        (True, 0, 75, False),
        (True, 0, 76, True),
        (True, 200, 0, True),
    ],
)
def test_by_the_number_of_consumers(in_records: bool, own: int, consumers: int, wanted: bool) -> None:
    """A bound of 100: new sessions up to it, present ones change a quarter beyond it."""
    assert choice(bound=100).wants_records(in_records, own, consumers, 1) is wanted


@pytest.mark.parametrize("in_records", [True, False])
def test_a_session_that_the_listener_has_served(in_records: bool) -> None:
    """It has consumers, which it may need there again; unless the settings say otherwise."""
    assert not choice(bound=100).wants_records(in_records, 1, 1000, 1, listener=True)
    assert choice("records").wants_records(in_records, 1, 1000, 1, listener=True)


@pytest.mark.parametrize("own", [1, 20, 74, 100, 1000])
def test_no_session_changes_back_and_forth(own: int) -> None:
    """One that was given consumers does not lose them because of its own."""
    tested = choice(bound=100)
    for others in range(300):
        if not tested.wants_records(True, own, others, 1):
            assert not tested.wants_records(False, own, others + own, 1)
        if tested.wants_records(False, own, others + own, 1):
            assert tested.wants_records(True, own, others, 1)


@pytest.mark.parametrize(("replicas", "bound"), [(1, 1000), (3, 200), (5, 200)])
def test_default_of_the_bound(replicas: int, bound: int) -> None:
    tested = choice()
    assert not tested.wants_records(False, 0, bound - 1, replicas)
    assert tested.wants_records(False, 0, bound, replicas)


@pytest.mark.parametrize(("replicas", "bound"), [(1, 7), (3, 7)])
def test_a_bound_of_the_settings(replicas: int, bound: int) -> None:
    tested = choice(bound=bound)
    assert [tested.wants_records(False, 0, number, replicas) for number in (6, 7)] == [False, True]


@pytest.mark.parametrize(
    ("session_positions", "many", "few"),
    [("consumers", False, False), ("records", True, True), ("auto", True, False)],
)
@pytest.mark.parametrize("in_records", [True, False])
def test_settings(session_positions: str, many: bool, few: bool, in_records: bool) -> None:
    """Far beyond the bound, and far below it."""
    tested = choice(session_positions)
    assert tested.wants_records(in_records, 1, 10_000, 1) is many
    assert tested.wants_records(in_records, 1, 0, 1) is few
