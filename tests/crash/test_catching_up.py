# SPDX-License-Identifier: Apache-2.0
"""Gateways die while a session reads what it has missed: nothing is lost, and at QoS 2 nothing comes twice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.points.fleet import Fleet
from tests.chaos.points.scenes import Scene
from tests.conftest import NatsFactory
from tests.harness.waiting import aeventually

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NOWHERE = 1
"""A port on which nobody listens."""

AT_A_TIME = 500


@pytest.mark.parametrize(
    ("kills", "version", "positions"),
    [
        (3, 4, "consumers"),
        (3, 5, "consumers"),
        (3, 4, "records"),
        (3, 5, "records"),
        pytest.param(40, 4, "consumers", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
        pytest.param(40, 5, "consumers", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
        pytest.param(40, 4, "records", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
        pytest.param(40, 5, "records", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
async def test_gateways_die_while_a_session_catches_up(
    nats_factory: NatsFactory, tmp_path: Path, kills: int, version: int, positions: str
) -> None:
    chance = random.Random(kills)
    arguments = ("--gateway-lease", "4", "--session-positions", positions)
    fleet = Fleet(tmp_path, nats_factory(), 3, arguments=arguments)
    try:
        await fleet.start()
        slots = fleet.slots
        scene = Scene(fleet, slots[0], slots[1], lambda scene: None)
        subscriber = await scene.subscriber("first", *slots[:2], version=version)
        await scene.live(subscriber)
        publisher = scene.peer("publisher", slots[2])
        number = 0

        async def publish(count: int) -> None:
            nonlocal number
            for start in range(0, count, AT_A_TIME):
                for _ in range(min(AT_A_TIME, count - start)):
                    number += 1
                    publisher.publish(scene.topic, number, chance.choice((1, 2)))
                await scene.settled(publisher)

        subscriber.ports = [NOWHERE]
        subscriber.drop()
        await publish(2000 + 600 * kills)
        subscriber.withheld = {"PUBLISH"}
        subscriber.ports = [slot.port for slot in slots[:2]]
        for _ in range(kills):
            await scene.settled(subscriber)
            await aeventually(lambda: subscriber.unanswered, 60, what="something comes")
            await scene.live(subscriber)  # with all of it still to be read
            before = len(subscriber.delivered)
            subscriber.answer()
            await scene.has(subscriber, before + chance.randrange(1, 500))
            (slot,) = [one for one in slots if one.port == subscriber.port]
            subscriber.withheld = {"PUBLISH"}
            slot.crash()
            await slot.start()
            await publish(chance.randrange(50))
        await scene.settled(subscriber)
        subscriber.answer()
        await scene.has(subscriber, number)
        await scene.settled()
        await aeventually(lambda: not scene.missing(), 60, what="all has been delivered")
        await scene.at_rest()
        assert not scene.wrong()
        await scene.close()
    finally:
        await fleet.close()
