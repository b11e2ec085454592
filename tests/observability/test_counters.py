# SPDX-License-Identifier: Apache-2.0
"""Counters of a gateway, as Prometheus and `$SYS` topics show them."""

from __future__ import annotations

import pytest

from mqtt_nats.observability.counters import Counters, Histogram


@pytest.mark.parametrize(("value", "bucket"), [(0.0, 0), (0.1, 0), (0.11, 1), (1.0, 1), (1.01, 2)])
def test_a_bucket_has_the_values_up_to_its_bound(value: float, bucket: int) -> None:
    """Its bound included, as Prometheus's `le` says."""
    histogram = Histogram((0.1, 1.0))
    histogram.observe(value)
    assert histogram.counts == [int(number == bucket) for number in range(3)]
    assert histogram.state() == {"bounds": [0.1, 1.0], "counts": histogram.counts, "sum": value, "last": value}


def test_every_reason_of_a_drop_has_a_number_before_the_first_drop() -> None:
    """A rate over a counter needs its zero."""
    counters = Counters([0, 0, 0], [0, 0, 0])
    before = counters.drops(0)
    assert set(before.values()) == {0}
    counters.drop("expired", 2)
    counters.pass_over()
    counters.not_retain()
    after = counters.drops(3)
    assert before.keys() == after.keys()
    changed = {reason: count for reason, count in after.items() if count}
    assert changed == {"expired": 2, "backlog": 1, "not retained": 1, "slow client": 3}


def test_nothing_is_counted_before_it_happens() -> None:
    """The names that are known before have their zero, too."""
    counters = Counters([0, 0, 0], [0, 0, 0])
    assert set(counters.filters_refused.values()) == {0}
    assert set(counters.disconnects.values()) == {0}


def test_messages_of_a_fan_out_and_single_ones_are_in_the_same_numbers() -> None:
    sent, sent_bytes = [0, 5, 0], [0, 50, 0]
    counters = Counters(sent, sent_bytes)
    counters.send(1, 7)
    assert (sent, sent_bytes) == ([0, 6, 0], [0, 57, 0])
