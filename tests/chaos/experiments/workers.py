# SPDX-License-Identifier: Apache-2.0
"""``serve --workers``: workers are killed, and now and then their supervisor, while messages flow."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable

import psutil

from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.looking import Look, looking
from tests.chaos.workload import Workload
from tests.harness.gateway import Gateway
from tests.harness.waiting import aeventually

WORKERS = 2
WORKERS_LONG = 3
LEASE = 2  # seconds
KILLS = 2
KILLS_LONG = 40
SUPERVISORS = 1
SUPERVISORS_LONG = 6
AGAIN = 60.0
"""Seconds in which the workers are complete again."""


def workers_of(gateway: Gateway) -> list[int]:
    """The process ids of a supervisor's workers."""
    return [one.pid for one in psutil.Process(gateway.pid).children() if _is_worker(one)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "mqtt_nats.gateway.worker" in process.cmdline()
    except psutil.NoSuchProcess:  # it has just ended
        return False


def _ended(pids: list[int]) -> Callable[[], bool]:
    return lambda: not any(psutil.pid_exists(pid) for pid in pids)


class Killer:
    """Kills, and waits until all is as before."""

    def __init__(self, gateway: Gateway, workers: int, look: Look, dice: random.Random, work: Workload) -> None:
        self.gateway = gateway
        self.workers = workers
        self.look = look
        self.dice = dice
        self.work = work

    async def complete(self) -> None:
        """Wait until every worker serves, and nothing is left of those that do not run."""
        gateway = self.gateway

        async def all_there() -> bool:
            pids = workers_of(gateway)
            found = await self.look.gateways(self.workers, 1.0)
            return len(pids) == self.workers == sum(not one["draining"] for one in found)

        await aeventually(all_there, AGAIN, what="the workers")

    async def worker(self) -> None:
        """Kill a worker, or have it end in good order: it is started again."""
        pid = self.dice.choice(workers_of(self.gateway))
        self.work.nemesis.note("killed", victim=pid)
        os.kill(pid, signal.SIGKILL if self.dice.random() < 0.8 else signal.SIGTERM)
        await aeventually(_ended([pid]), AGAIN, what="the end of a worker")
        await self.complete()
        self.work.nemesis.note("started", victim=pid)

    async def supervisor(self) -> None:
        """Kill the supervisor: its workers end, and another one takes its address."""
        pids = workers_of(self.gateway)
        self.work.nemesis.note("killed", victim=self.gateway.pid)
        await asyncio.to_thread(self.gateway.kill)
        await aeventually(_ended(pids), AGAIN, what="the end of workers without supervisor")
        await asyncio.to_thread(self.gateway.start)
        await self.complete()
        self.work.nemesis.note("started", victim=self.gateway.pid)


async def _registered(look: Look) -> int:
    return await look.count("KV_MQTT_gateways", "$KV.MQTT_gateways.gateway.*")


async def run(setting: Setting) -> Result:
    """Run it."""
    long = setting.long
    workers = WORKERS_LONG if long else WORKERS
    dice = random.Random(setting.seed)
    result = Result()
    server = await asyncio.to_thread(setting.nats)
    arguments = ("--workers", str(workers), "--gateway-lease", str(LEASE), "--log-level", "warning")
    gateway = await asyncio.to_thread(setting.gateway, server.url, *arguments)
    async with looking(server.url) as look:
        works = [
            Workload(
                setting.directory / f"q{qos}",
                [gateway.port],
                publishers=3,
                subscribers=3,
                qos=qos,
                rate=40,
                version=3 + qos,
                prefix=f"q{qos}",
                ack_after=0.005,
            )
            for qos in (1, 2)
        ]
        for one in works:
            await one.start()
        killer = Killer(gateway, workers, look, dice, works[0])
        await killer.complete()
        acts = [killer.worker] * (KILLS_LONG if long else KILLS)
        acts += [killer.supervisor] * (SUPERVISORS_LONG if long else SUPERVISORS)
        dice.shuffle(acts)
        for act in acts:
            await asyncio.sleep(dice.uniform(0.3, 3.0 if long else 0.6))
            await act()
        figures: dict[str, int] = {}
        for one in works:
            verdict = await one.finish(120)
            result.violations += verdict.lines()
            for name, value in verdict.figures.items():
                known = figures.get(name, 0)
                figures[name] = max(known, value) if name.endswith("_ms") else known + value
        try:
            await aeventually(lambda: _only(look, workers), AGAIN)
        except AssertionError:
            result.violations.append(f"gateways that do not run are registered: {await _registered(look)} of {workers}")
        if left := await look.left("$MQTT_wills", AGAIN):
            result.violations.append(f"{left} wills are still stored")
        pids = workers_of(gateway)
        if await asyncio.to_thread(gateway.term):
            result.violations.append("the supervisor did not end in good order")
        if not _ended(pids)():
            result.violations.append("a worker is left behind")
        result.figures = {**figures, "workers": workers, "of the kills, supervisors": acts.count(killer.supervisor)}
    return result


async def _only(look: Look, workers: int) -> bool:
    return await _registered(look) == workers


EXPERIMENTS = [
    Experiment(
        "workers",
        "serve --workers: workers and the supervisor are killed under QoS 1 and 2 traffic on one port",
        "nothing acknowledged is lost, nothing comes twice at QoS 2; the workers are complete again each time",
        run,
    )
]
