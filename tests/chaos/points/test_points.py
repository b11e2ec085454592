# SPDX-License-Identifier: Apache-2.0
"""A gateway dies at one point after the other; another one goes on: nothing is lost, at QoS 2 nothing comes twice."""

import itertools
from collections.abc import AsyncIterator

import pytest

from tests.chaos.points.fleet import Fleet
from tests.chaos.points.scenes import Point, run_point
from tests.chaos.points.table import POINTS
from tests.harness.nats import NatsServer

LEASE = 4  # seconds: what a dead gateway has left is dealt with soon

_TURNS = itertools.count()


@pytest.fixture(scope="module")
async def fleet(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Three gateways; while one is started again after its end, the others are there."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), nats_server, 3, arguments=("--gateway-lease", str(LEASE)))
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.close()


@pytest.mark.parametrize("point", POINTS, ids=str)
async def test_the_gateway_dies_there(fleet: Fleet, point: Point) -> None:
    turn = next(_TURNS)
    victim, other, third = (fleet.slots[(turn + number) % 3] for number in range(3))
    await victim.start()
    await other.start()
    third.begin()
    await run_point(fleet, point, victim, other)
