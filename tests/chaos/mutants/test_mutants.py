# SPDX-License-Identifier: Apache-2.0
"""The checker notices each broken gateway; the scripts that are not experiments leave the sound one alone."""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtt_nats.transport.turns import STANDSTILL
from tests.chaos.checker import Promises, Verdict, check
from tests.chaos.client import ChaosClient
from tests.chaos.experiment import Setting, running
from tests.chaos.history import History, read
from tests.chaos.killing import kill_in_turn
from tests.chaos.workload import Workload

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SOUND = ""

HANDOVER = STANDSTILL + 0.5
"""Seconds for which a gateway may not yet know that a session has moved: for longer it never stands still unnoticed."""

LONGEST = 60.0
"""Seconds in which a kill has met messages in flight."""


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    with running(tmp_path) as setting:
        yield setting


async def under_kills(setting: Setting, module: str, qos: int) -> Verdict:
    """Two gateways, killed in turn at least four times while messages flow, twice with messages in flight."""
    server = await asyncio.to_thread(setting.nats)
    gateways = [await asyncio.to_thread(setting.gateway, server.url, module=module) for _ in range(2)]
    workload = Workload(
        setting.directory / "histories",
        [gateway.port for gateway in gateways],
        publishers=2,
        subscribers=1,
        qos=qos,
        rate=100,
        ack_after=0.05,
        group=0,
        restless=0.0,
    )
    await workload.start()
    (subscriber,) = workload.subscribers
    deadline = time.monotonic() + LONGEST

    def ended() -> bool:
        return workload.acked > 100 and (subscriber.interrupted > 1 or time.monotonic() > deadline)

    await kill_in_turn(gateways, workload.nemesis, random.Random(1), kills=4, pause=(0.3, 0.6), ended=ended)
    return await workload.finish(30 if module == SOUND else 5)


@pytest.mark.parametrize(
    ("mutant", "qos", "kinds"),
    [
        ("ack_before_store", 1, {"lost"}),
        ("ids_restarted", 1, {"not sent again", "DUP missing"}),
        ("ids_restarted", 2, {"duplicated", "packet id in use", "lost", "not sent again"}),
    ],
)
async def test_a_broken_gateway_is_noticed_under_kills(
    setting: Setting, mutant: str, qos: int, kinds: set[str]
) -> None:
    verdict = await under_kills(setting, f"tests.chaos.mutants.{mutant}", qos)
    assert verdict.kinds & kinds, verdict


@pytest.mark.parametrize("qos", [1, pytest.param(2, marks=pytest.mark.soak)])
async def test_the_sound_gateway_is_not_suspected_under_kills(setting: Setting, qos: int) -> None:
    verdict = await under_kills(setting, SOUND, qos)
    assert verdict.lines() == []
    assert verdict.figures["kills"] >= 4
    assert verdict.figures["acked"] > 100


async def both_go_on(setting: Setting, module: str) -> Verdict:
    """Two connections with one client id, at two gateways; the first goes on after the second was accepted."""
    server = await asyncio.to_thread(setting.nats)
    gateways = [await asyncio.to_thread(setting.gateway, server.url, module=module) for _ in range(2)]
    histories = [History(setting.directory / f"{number}.jsonl", "one") for number in range(2)]
    first, second = (
        ChaosClient("one", [gateway.port], history, max_inflight=100, stay=False)
        for gateway, history in zip(gateways, histories, strict=True)
    )
    await first.connect()
    await first.publish("a", 1, 1)
    assert await first.settled(30)
    await second.connect()

    accepted = time.monotonic()
    number = 1
    while first.link is not None and time.monotonic() < accepted + 2 * HANDOVER:
        number += 1
        await first.publish("a", number, 1)
        await first.settled(0.1)
        await asyncio.sleep(0.02)
    await first.close()
    await second.close()
    return check(read(history.path for history in histories), Promises(handover=HANDOVER))


async def test_a_second_owner_is_noticed(setting: Setting) -> None:
    assert "two owners" in (await both_go_on(setting, "tests.chaos.mutants.no_epoch_check")).kinds


async def test_one_owner_is_not_suspected(setting: Setting) -> None:
    verdict = await both_go_on(setting, SOUND)
    assert verdict.lines() == []
    assert verdict.figures["acked"] >= 1
