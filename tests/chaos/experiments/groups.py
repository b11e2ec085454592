# SPDX-License-Identifier: Apache-2.0
"""R21: two shared subscriptions at each QoS, while gateways, or their only nats-server, are killed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from tests.chaos.checker import Promises
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.killing import Victim, kill_in_turn
from tests.chaos.workload import Workload
from tests.harness.gateway import Gateway

MEMBERS = 4
GROUPS = 2
"""Each gets every message."""
MESSAGES_LONG = 10_000
"""Of each of two publishers, at each QoS."""
PATIENCE = 60.0
PATIENCE_LONG = 240.0
"""Seconds in which what a killed gateway had for a member has come to another one."""


async def _script(
    setting: Setting,
    name: str,
    victims: Sequence[Victim],
    gateways: Sequence[Gateway],
    promises: Promises,
    kills: int,
    pause: tuple[float, float],
) -> Result:
    """Two groups of two members at each QoS, which drop their own connections now and then.

    ``kills`` and ``pause`` are those of the long version: how many, and how many seconds lie between two of them.
    """
    long = setting.long
    loads = [
        Workload(
            setting.directory / f"histories {name} {qos}",
            [gateway.port for gateway in gateways],
            publishers=2,
            subscribers=0,
            qos=qos,
            messages=MESSAGES_LONG if long else 100,
            rate=25.0,
            group=MEMBERS,
            groups=GROUPS,
            restless=6.0,
            ack_after=0.01,
            prefix=f"{name}{qos}",
            promises=promises,
        )
        for qos in (1, 2)
    ]
    await asyncio.gather(*(load.start() for load in loads))
    done = await kill_in_turn(
        victims,
        loads[0].nemesis,
        random.Random(setting.seed),
        kills=kills if long else 2,
        pause=pause if long else (0.5, 1.0),
        ended=lambda: all(load.published for load in loads),
    )
    verdicts = await asyncio.gather(*(load.finish(PATIENCE_LONG if long else PATIENCE) for load in loads))
    result = Result()
    for verdict in verdicts:
        result.violations += verdict.lines()
    figures = [verdict.figures for verdict in verdicts]
    result.figures = {
        "messages": sum(one["acked"] for one in figures),
        "kills": done,
        "lost": sum(one["lost"] for one in figures),
        "duplicated": sum(one["duplicated"] for one in figures),
        "longest_pause_ms": max(one["longest_pause_ms"] for one in figures),
        "shared": sum(one["shared"] for one in figures),
        "shared_qos_2": figures[1]["shared"],
        "wills": sum(one["wills"] for one in figures),
        "reconnects": sum(one["reconnects"] for one in figures),
        "longest_delay_ms": max(one["longest_delay_ms"] for one in figures),
    }
    return result


async def _groups(setting: Setting) -> Result:
    """Two gateways on one nats-server: the gateways are killed in turn; then the nats-server."""
    long = setting.long
    server = await asyncio.to_thread(setting.nats)
    gateways = [await asyncio.to_thread(setting.gateway, server.url) for _ in range(2)]
    promises = Promises(shared=long)
    result = await _script(setting, "gateways", gateways, gateways, promises, 60, (1.5, 4.0))
    # A nats-server that is killed forgets what its consumers have delivered last: nobody knows that it comes again.
    promises = Promises(shared=long, marked=False)
    alone = await _script(setting, "server", [server], gateways, promises, 20, (10.0, 20.0))
    result.peers["the nats-server killed"] = alone
    result.violations += [f"{line} (nats-server killed)" for line in alone.violations]
    return result


EXPERIMENTS = [
    Experiment(
        "R21",
        "two shared subscriptions at each QoS; gateways killed in turn, then their only nats-server",
        "nothing acknowledged is lost; at QoS 2 no group gets a message twice",
        _groups,
    ),
]
