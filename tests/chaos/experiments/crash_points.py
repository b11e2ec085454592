# SPDX-License-Identifier: Apache-2.0
"""R6: a gateway dies, or is held up, at named points, one after the other, and dies at random ones."""

from __future__ import annotations

from tests.chaos.checker import check
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.points.fleet import Fleet
from tests.chaos.points.late import (
    LATE,
    LATE_MOVES,
    LATE_RECORDS,
    SOME_LATE,
    SOME_LATE_MOVES,
    SOME_LATE_RECORDS,
    run_late,
)
from tests.chaos.points.machine import Tally, explore
from tests.chaos.points.moves import MOVES_POINTS, MOVING, SOME_MOVES
from tests.chaos.points.records import RECORDS_POINTS, SOME_RECORDS
from tests.chaos.points.scenes import run_point
from tests.chaos.points.table import POINTS, SOME

LEASE = 4  # seconds
CONSUMERS = ("--session-positions", "consumers")
RECORDS = ("--session-positions", "records")
FLEETS = (
    (CONSUMERS, POINTS, SOME, LATE, SOME_LATE),
    (RECORDS, RECORDS_POINTS, SOME_RECORDS, LATE_RECORDS, SOME_LATE_RECORDS),
    (MOVING, MOVES_POINTS, SOME_MOVES, LATE_MOVES, SOME_LATE_MOVES),
)
"""Flags of gateways, points, those that tests take, points at which a gateway is held up, those that tests take."""
FEW = 6
"""Every so manieth of the tests' points is taken in the short version."""
RUNS, STEPS, SECONDS = 5, 15, 4.0
"""Of the random ones in the short version, each time: runs, steps, seconds after which none is begun."""
RUNS_LONG, STEPS_LONG, SECONDS_LONG = 2000, 25, 600.0


async def points(setting: Setting) -> Result:
    """Single points, then random ones: with sessions that have consumers, and with sessions that have none.

    The long version also has the single points of sessions that move between consumers and records.
    """
    result = Result()
    tally = Tally()
    named = kills = stood_still = 0
    for flags, everything, some, late, some_late in FLEETS if setting.long else FLEETS[:2]:
        arguments = ("--gateway-lease", str(LEASE), *flags)
        fleet = Fleet(setting.fresh("fleet"), setting.nats(), 3, tally.passes, tally.killed, arguments)
        chosen = everything if setting.long else some[setting.seed % FEW :: FEW]
        before = tally.runs
        try:
            await fleet.start()
            for turn, point in enumerate(chosen):
                try:
                    tally.add(check(await run_point(fleet, point, *await fleet.trio(turn))).figures)
                except AssertionError as error:
                    result.violations.append(f"{point}: {error} {error.__cause__ or ''}")
            named += tally.runs - before
            held = [(point, dropped) for point in late for dropped in (False, True)]
            if not setting.long:
                held = [(point, bool(setting.seed % 2)) for point in some_late[setting.seed % FEW :: FEW]]
            before = tally.runs
            for turn, (point, dropped) in enumerate(held):
                try:
                    tally.add(check(await run_late(fleet, point, *await fleet.trio(turn), dropped=dropped)).figures)
                except AssertionError as error:
                    result.violations.append(f"{point}: {error} {error.__cause__ or ''}")
            stood_still += tally.runs - before
            runs, steps, seconds = (RUNS_LONG, STEPS_LONG, SECONDS_LONG) if setting.long else (RUNS, STEPS, SECONDS)
            if flags != MOVING:  # R26 moves sessions while gateways die at any point
                await explore(fleet, tally, runs=runs, steps=steps, number=setting.seed, seconds=seconds)
        finally:
            await fleet.close()
        kills += sum(slot.kills for slot in fleet.slots)
    result.violations += tally.failures
    result.figures = {
        **{name: tally.figures.get(name, 0) for name in ("sent", "acked", "delivered")},
        "kills": kills,
        **{name: tally.figures.get(name, 0) for name in ("lost", "duplicated", "reordered")},
        "named_points": named,
        "held_up_points": stood_still,
        "random_runs": tally.runs - named - stood_still,
        "interleavings": len(tally.interleavings),
        "situations_of_a_kill": len(tally.situations),
    }
    result.remarks.append(
        "an interleaving is the order in which one run's frames between gateways and nats-server passed, with the kills"
    )
    return result


EXPERIMENTS = [
    Experiment(
        "R6",
        "a gateway is killed at named frames and packets, and at random ones, while clients publish, receive and move",
        "0 lost, 0 duplicated at QoS 2, every will once, nothing left in JetStream",
        points,
    )
]
