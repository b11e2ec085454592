# SPDX-License-Identifier: Apache-2.0
"""A gateway dies, or stands still, at one point after the other; another one goes on.

Nothing is lost, at QoS 2 nothing comes twice.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chaos.points import scenes
from tests.chaos.points.fleet import Fleet
from tests.chaos.points.late import SOME_LATE, SOME_LATE_MOVES, SOME_LATE_RECORDS, run_late
from tests.chaos.points.machine import Tally, explore
from tests.chaos.points.moves import MIXED, MOVING, SOME_MOVES
from tests.chaos.points.records import SOME_RECORDS
from tests.chaos.points.scenes import Point, run_point
from tests.chaos.points.table import POINTS, SOME
from tests.conftest import NatsFactory
from tests.harness.nats import NatsServer, make_server

LEASE = 4  # seconds: what a dead gateway has left is dealt with soon

_TURNS = itertools.count()


@pytest.fixture(scope="module")
async def fleet(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Three gateways; while one is started again after its end, the others are there."""
    arguments = ("--gateway-lease", str(LEASE), "--session-positions", "consumers")
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), nats_server, 3, arguments=arguments)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.close()


@pytest.fixture(scope="module")
async def records_fleet(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """The same with sessions without consumers."""
    arguments = ("--gateway-lease", str(LEASE), "--session-positions", "records")
    fleet = Fleet(tmp_path_factory.mktemp("records"), nats_server, 3, arguments=arguments)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.close()


@pytest.fixture(scope="module")
async def moves_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """The same with sessions that move, on a nats-server without consumers of other tests."""
    directory = tmp_path_factory.mktemp("moves")
    server = make_server("process", directory / "nats")
    await asyncio.to_thread(server.start)
    fleet = Fleet(directory, server, 3, arguments=("--gateway-lease", str(LEASE), *MOVING))
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.close()
        server.discard()


@pytest.mark.parametrize("point", SOME, ids=str)
async def test_the_gateway_dies_there(fleet: Fleet, point: Point) -> None:
    await run_point(fleet, point, *await fleet.trio(next(_TURNS)))


@pytest.mark.parametrize("point", SOME_LATE, ids=str)
async def test_the_gateway_is_held_up_there(fleet: Fleet, point: Point) -> None:
    turn = next(_TURNS)
    await run_late(fleet, point, *await fleet.trio(turn), dropped=bool(turn % 2))


@pytest.mark.parametrize("point", SOME_RECORDS, ids=str)
async def test_the_gateway_dies_there_with_sessions_without_consumers(records_fleet: Fleet, point: Point) -> None:
    await run_point(records_fleet, point, *await records_fleet.trio(next(_TURNS)))


@pytest.mark.parametrize("point", SOME_LATE_RECORDS, ids=str)
async def test_the_gateway_is_held_up_there_with_sessions_without_consumers(records_fleet: Fleet, point: Point) -> None:
    turn = next(_TURNS)
    await run_late(records_fleet, point, *await records_fleet.trio(turn), dropped=bool(turn % 2))


@pytest.mark.processes
@pytest.mark.parametrize("point", SOME_MOVES, ids=str)
async def test_the_gateway_dies_there_while_a_session_moves(moves_fleet: Fleet, point: Point) -> None:
    await run_point(moves_fleet, point, *await moves_fleet.trio(next(_TURNS)))


@pytest.mark.processes
@pytest.mark.parametrize("point", SOME_LATE_MOVES, ids=str)
async def test_the_gateway_is_held_up_there_while_a_session_moves(moves_fleet: Fleet, point: Point) -> None:
    turn = next(_TURNS)
    await run_late(moves_fleet, point, *await moves_fleet.trio(turn), dropped=bool(turn % 2))


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["consumers", "records", "auto"])
async def test_gateways_die_anywhere(nats_factory: NatsFactory, tmp_path: Path, positions: str) -> None:
    """Kills at random frames and packets while clients publish, subscribe and move; with "auto" sessions move, too."""
    tally = Tally()
    arguments = ("--gateway-lease", str(LEASE), "--session-positions", positions)
    own = MIXED if positions == "auto" else ()
    fleet = Fleet(tmp_path, nats_factory(), 3, tally.passes, tally.killed, arguments, own=own)
    try:
        await fleet.start()
        for number in range(1, 6):  # on a slow machine the first runs may end before a gateway is killed
            await explore(fleet, tally, runs=40, steps=15, number=number, seconds=15)
            if tally.situations or tally.failures:
                break
    finally:
        await fleet.close()
    print(f"{tally.runs} runs, {len(tally.interleavings)} interleavings, {len(tally.situations)} situations of a kill")
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.runs
    assert tally.situations, "no gateway was killed"


async def test_a_gateway_that_acknowledges_too_early_is_noticed(
    nats_factory: NatsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was acknowledged and not stored is lost, when the gateway dies in between."""
    monkeypatch.setattr(scenes, "DELIVERY", 5.0)
    (point,) = [one for one in POINTS if str(one) == "publish at QoS 1: kill before up $MQTT.msgs.{bare} #2"]
    fleet = Fleet(tmp_path, nats_factory(), 3, module="tests.chaos.mutants.ack_before_store")
    try:
        await fleet.start()
        with pytest.raises(AssertionError, match="everything delivered"):
            await run_point(fleet, point, *await fleet.trio(0))
    finally:
        await fleet.close()
