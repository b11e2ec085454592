# SPDX-License-Identifier: Apache-2.0
"""R1, R2 and R18: servers are killed while messages flow at QoS 1, or 2, or both."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tests.chaos.brokers import others, started, whole
from tests.chaos.checker import EVERYTHING, Promises, Verdict
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.killing import Victim, kill_in_turn
from tests.chaos.workload import Workload

_LONGEST = 3
"""A broker that is too slow for the rate is given this many times as long, and then no more messages."""

_MEMBERS = 5
"""Members of the group in the long version. Receive Maximum 1 to 5 and 10 ms for each message let them take 1,500
messages a second; two members would take 300, less than is published."""

_DETAILS = ("delivered", "repeated", "reconnects", "longest_delay_ms", "longest_resume_ms", "unacknowledged", "wills")


def _result(verdict: Verdict) -> Result:
    figures = verdict.figures
    shown: dict[str, int | float | str] = {
        "messages": figures["acked"],
        "kills": figures["kills"],
        "lost": figures["lost"],
        "duplicated": figures["duplicated"],
        "longest_pause_ms": figures["longest_pause_ms"],
    }
    shown |= {name: figures[name] for name in _DETAILS if name in figures}
    return Result(shown, verdict.lines())


async def _script(
    setting: Setting,
    name: str,
    victims: Sequence[Victim],
    ports: Sequence[int],
    qos: int,
    promises: Promises = EVERYTHING,
    group: bool = True,
) -> Result:
    """Four publishers and two subscribers whose sessions outlive their connections; ``victims`` are killed in turn.

    A subscriber's application takes 10 ms for a message, so that a kill always finds some unacknowledged.
    """
    long, moving = setting.long, bool(setting.positions)
    messages = 26_000 if long else 600 if moving else 200
    workload = Workload(
        setting.directory / f"histories {name}",
        ports,
        publishers=4,
        subscribers=2,
        qos=qos,
        messages=messages,
        rate=120 if long else 50,
        ack_after=0.01,
        promises=replace(promises, shared=long),
        group=(_MEMBERS if long else 2) if group else 0,
        restless=(2.0 if moving else 8.0) if group else 0.0,
    )
    await workload.start()
    enough = time.monotonic() + _LONGEST * messages / (120 if long else 50)
    await kill_in_turn(
        victims,
        workload.nemesis,
        random.Random(setting.seed),
        kills=30 if long else 2,
        pause=(3.0, 6.0) if long else (0.5, 1.0),
        ended=lambda: workload.published or time.monotonic() > enough,
    )
    await setting.moved()
    workload.stop()
    return _result(await workload.finish(180 if long else 60))


async def _kills(setting: Setting, qos: int) -> Result:
    """Two gateways on one nats-server; then a gateway together with its nats-server; then other brokers."""
    server = await asyncio.to_thread(setting.nats)
    gateways = [await asyncio.to_thread(setting.gateway, server.url) for _ in range(2)]
    result = await _script(setting, "gateways", gateways, [gateway.port for gateway in gateways], qos)
    broker = await asyncio.to_thread(whole, setting)
    # A nats-server that is killed forgets what its consumers have delivered last: nobody knows that it comes again.
    both = await _script(setting, "whole", [broker], broker.ports, qos, Promises(marked=False))
    result.peers["a gateway and its nats-server killed together"] = both
    result.violations += [f"{line} (killed together)" for line in both.violations]
    if setting.long and not setting.positions:
        for name, start in others().items():
            other = await started(start, setting)
            result.peers[name] = await _script(setting, name, [other], other.ports, qos, group=False)
    return result


async def _order(setting: Setting) -> Result:
    """Clients are cut off, and gateways killed, with many messages in flight on few topics, at both QoS at once."""
    server = await asyncio.to_thread(setting.nats)
    gateways = [await asyncio.to_thread(setting.gateway, server.url) for _ in range(2)]
    ports = [gateway.port for gateway in gateways]
    long = setting.long
    chance = random.Random(setting.seed)
    workloads = [
        Workload(
            setting.directory / f"histories {qos} {version}",
            ports,
            publishers=2,
            subscribers=1,
            qos=qos,
            messages=20_000 if long else 300,
            rate=150 if long else 60,
            topics=2,
            max_inflight=100,
            ack_after=0.005,
            version=version,
            prefix=f"o{qos}{version}",
        )
        for qos in (1, 2)
        for version in (4, 5)
    ]
    for workload in workloads:
        await workload.start()

    def published() -> bool:
        return all(workload.published for workload in workloads)

    cuts = 0

    async def cut() -> None:
        nonlocal cuts
        while not published():
            await asyncio.sleep(chance.uniform(0.2, 1.0))
            workload = chance.choice(workloads)
            chance.choice([*workload.publishers, *workload.subscribers]).drop()
            cuts += 1

    cutting = asyncio.create_task(cut())
    await kill_in_turn(
        gateways,
        workloads[0].nemesis,
        chance,
        kills=20 if long else 2,
        pause=(2.0, 6.0) if long else (0.5, 1.5),
        ended=published,
    )
    await cutting
    results = [_result(await workload.finish(180 if long else 60)) for workload in workloads]
    total = results[0]
    for one in results[1:]:
        total.violations += one.violations
        for name, value in one.figures.items():
            both = (int(total.figures[name]), int(value))
            total.figures[name] = max(both) if name.endswith("_ms") else sum(both)
    total.figures["cut"] = cuts
    return total


EXPERIMENTS = [
    Experiment(
        "R1",
        "gateways killed in turn under QoS 1 traffic, clients go to the other",
        "nothing acknowledged is lost; what comes twice has DUP, or was sent twice by its publisher",
        partial(_kills, qos=1),
    ),
    Experiment(
        "R2",
        "the same at QoS 2 from end to end",
        "nothing acknowledged is lost; no application gets anything twice",
        partial(_kills, qos=2),
    ),
    Experiment(
        "R18",
        "clients cut off and gateways killed with up to 100 messages in flight, both QoS, both versions",
        "each publisher's messages on a topic arrive in its order, at every subscriber",
        _order,
    ),
]
