# SPDX-License-Identifier: Apache-2.0
"""R1 and R2: gateways are killed while messages flow at QoS 1, or 2."""

from __future__ import annotations

import asyncio
import random
from functools import partial

from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.killing import kill_in_turn
from tests.chaos.workload import Workload


async def _kills(setting: Setting, qos: int) -> Result:
    """Two gateways on one nats-server, killed in turn."""
    server = await asyncio.to_thread(setting.nats)
    gateways = [await asyncio.to_thread(setting.gateway, server.url) for _ in range(2)]
    long = setting.long
    workload = Workload(
        setting.directory / "histories",
        [gateway.port for gateway in gateways],
        publishers=4,
        subscribers=2,
        qos=qos,
        messages=26_000 if long else 200,
        rate=120 if long else 50,
        version=4 if setting.seed % 2 else 5,
        ack_after=0.01,
    )
    await workload.start()
    await kill_in_turn(
        gateways,
        workload.nemesis,
        random.Random(setting.seed),
        kills=30 if long else 2,
        pause=(3.0, 6.0) if long else (0.5, 1.0),
        ended=lambda: workload.published,
    )
    verdict = await workload.finish(120 if long else 60)
    return Result(figures=dict(verdict.figures), violations=verdict.lines())


EXPERIMENTS = [
    Experiment(
        "R1",
        "gateways are killed in turn under QoS 1 traffic; clients go to another one",
        "nothing acknowledged is lost; what comes twice has DUP, or was sent twice by its publisher",
        partial(_kills, qos=1),
    ),
    Experiment(
        "R2",
        "the same at QoS 2 from end to end",
        "nothing acknowledged is lost; no application gets anything twice",
        partial(_kills, qos=2),
    ),
]
