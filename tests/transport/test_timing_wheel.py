# SPDX-License-Identifier: Apache-2.0
"""Items that are due at a time are found without a look at all others."""

from __future__ import annotations

import random

from mqtt_nats.transport.turns import CLOCK_STEP, TimingWheel

DAY = 86400.0


def test_an_item_is_due_once_at_its_time_and_at_most_a_step_early() -> None:
    wheel: TimingWheel[str] = TimingWheel()
    wheel.put("later", 10.2)
    wheel.put("sooner", 7.4)
    assert wheel.due(6.9) == []
    assert wheel.due(10.2) == ["sooner", "later"]
    assert wheel.due(100.0) == []
    assert "later" not in wheel


def test_a_new_time_replaces_the_former() -> None:
    wheel: TimingWheel[str] = TimingWheel()
    wheel.put("moved", 5.0)
    wheel.put("moved", 9.0)
    wheel.put("gone", 5.0)
    wheel.discard("gone")
    wheel.discard("never there")
    assert wheel.due(6.0) == []
    assert wheel.due(9.0) == ["moved"]


def test_a_time_that_has_passed_is_the_next_look() -> None:
    wheel: TimingWheel[str] = TimingWheel()
    assert wheel.due(DAY) == []
    wheel.put("now", DAY)
    wheel.put("long ago", 0.0)
    assert wheel.due(DAY) == [], "else one that is put back would be looked at for ever"
    assert wheel.due(DAY + CLOCK_STEP) == ["now", "long ago"]


def test_no_item_is_lost_or_late_whatever_the_steps_of_the_clock() -> None:
    chance = random.Random(5)
    wheel: TimingWheel[int] = TimingWheel()
    wanted: dict[int, float] = {}
    now = 5 * DAY
    for number in range(2000):
        at = now + chance.expovariate(1 / chance.choice([1, 60, DAY]))
        item = chance.randrange(500)
        if chance.random() < 0.1:
            wheel.discard(item)
            wanted.pop(item, None)
        else:
            wheel.put(item, at)
            wanted[item] = at
        now += chance.choice([0.0, CLOCK_STEP / 3, CLOCK_STEP, 500.0 if number % 97 == 0 else CLOCK_STEP])
        for found in wheel.due(now):
            assert wanted.pop(found) < now + CLOCK_STEP
        assert all(at > now - 2 * CLOCK_STEP for at in wanted.values())
    assert sorted(wheel.due(now + 100 * DAY)) == sorted(wanted)
