# SPDX-License-Identifier: Apache-2.0
"""R13, soak: clients of every kind come and go for an hour; at the end nothing is left of them, nothing has grown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from pathlib import Path
from statistics import linear_regression
from typing import Any, NamedTuple

from mqtt_streams.generations import SUBJECT as GENERATION
from tests.chaos.client import ChaosClient
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.history import History
from tests.chaos.looking import STREAMS, Look, looking
from tests.chaos.messages import ClientWill
from tests.chaos.workload import Workload
from tests.harness.gateway import Gateway
from tests.harness.waiting import aeventually

GATEWAYS = 2
VISITORS = 12
VISITORS_LONG = 40
SECONDS = 8.0
SECONDS_LONG = float(os.environ.get("CHAOS_SOAK_SECONDS", "3600"))
"""How long the long version goes on."""

EXPIRY = 3
"""Seconds after which a durable visitor's session ends."""
POOL = 3
"""Client ids that each visitor uses again and again."""
TOPICS = 25
"""Visits after which a visitor's topics come again: a gateway knows up to 100,000 topics, in memory of its own."""
VISIT = 120.0
"""Seconds in which a visit must come to its end, however busy the machine is."""
EMPTY = 60.0
"""Seconds in which everything must be gone at the end."""

GROWTH = 8 * 1024 * 1024
GROWTH_SHARE = 0.08
"""A gateway may have this much more memory, or this share of it, at the end than half-way."""
HANDLES = 4
"""File descriptors and tasks that a gateway may have more than at the beginning."""


class Sample(NamedTuple):
    """One gateway at one moment. `at` in seconds from the beginning, `rss` in bytes."""

    at: float
    rss: int
    descriptors: int
    tasks: int


class Visitor:
    """Comes as one client after the other, until it is told to stop."""

    def __init__(self, number: int, ports: list[int], dice: random.Random, history: History) -> None:
        self.number = number
        self.ports = ports
        self.dice = dice
        self.history = history
        self.visits = 0
        self.published = 0
        self.failed: list[str] = []
        self.unsure: set[str] = set()
        """Topics whose retained message may be there: nobody knows whether its removal has come."""
        self.stopping = False

    async def run(self) -> None:
        """Visit."""
        while not self.stopping:
            self.visits += 1
            try:
                async with asyncio.timeout(VISIT):
                    await self._visit()
            except (TimeoutError, AssertionError) as error:
                self.failed.append(f"visitor {self.number}, visit {self.visits}: {str(error) or 'it takes too long'}")

    async def _visit(self) -> None:
        dice = self.dice
        version = dice.choice((4, 5))
        durable = version == 5 and dice.random() < 0.5
        # Ids that come again find their session, or do not.
        name = f"v{self.number}-{dice.randrange(POOL) if dice.random() < 0.4 else POOL + self.visits}"
        own = f"churn/{self.number}/{self.visits % TOPICS}"

        def client() -> ChaosClient:
            will = ClientWill(f"{own}/will", dice.randrange(3), delay=dice.choice((0, 1)))
            return ChaosClient(
                name,
                dice.sample(self.ports, len(self.ports)),
                self.history,
                version,
                not durable,
                EXPIRY if durable else 0,
                will=will if dice.random() < 0.3 else None,
            )

        clients = [client()]
        try:
            await clients[0].connect(30)
            await self._stay(clients[0], own)
            if dice.random() < 0.2:  # another connection takes the session over
                clients[0].stay = False
                clients.append(client())
                await clients[1].connect(30)
        finally:
            if any(one.unacknowledged for one in clients):
                self.unsure.add(f"{own}/kept")
            for one in clients:
                await (one.close() if dice.random() < 0.5 else one.abandon())

    async def _stay(self, client: ChaosClient, own: str) -> None:
        dice = self.dice
        qos = dice.randrange
        filters = dice.sample((f"{own}/#", "churn/+/+/will", "$share/group/churn/shared", f"{own}/a", "churn/all"), 3)
        for each in filters:
            if dice.random() < 0.7:
                await client.subscribe(each, qos(3))
        for number in range(dice.randrange(12)):
            topic = dice.choice((own, f"{own}/a", "churn/all", "churn/shared", f"{own}/deep/{number}"))
            await client.publish(topic, number, qos(3))
            self.published += 1
        if dice.random() < 0.3:
            await client.publish(f"{own}/kept", 0, 1, retain=True)
            await client.publish(f"{own}/kept", 0, 1, retain=True, payload=b"")
            self.published += 2
        if dice.random() < 0.8:
            assert await client.settled(60), f"{client.unacknowledged} publishes are not acknowledged"
        if dice.random() < 0.3:
            client.drop()
            await client.connect(30)
        if dice.random() < 0.5:
            for each in list(client.filters):
                await client.unsubscribe(each)
        await asyncio.sleep(dice.random() * 0.2)


def sample(gateway: Gateway, begun: float, tasks: int) -> Sample:
    """What a gateway's process has now."""
    status = Path(f"/proc/{gateway.pid}/status").read_text(encoding="ascii")
    rss = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    return Sample(time.monotonic() - begun, rss, len(os.listdir(f"/proc/{gateway.pid}/fd")), tasks)


class Soak:
    """The gateways, looked at again and again."""

    def __init__(self, gateways: list[Gateway], look: Look) -> None:
        self.gateways = gateways
        self.look = look
        self.begun = time.monotonic()
        self.samples: dict[int, list[Sample]] = {one.port: [] for one in gateways}
        self.most_consumers = 0

    async def measure(self) -> None:
        """Look once."""
        found = {one["listen"][0].rpartition(":")[2]: one for one in await self.look.gateways(len(self.gateways))}
        for gateway in self.gateways:
            state = found.get(str(gateway.port))
            if state is not None:
                self.samples[gateway.port].append(sample(gateway, self.begun, state["tasks"]))
        self.most_consumers = max(self.most_consumers, len(await self._consumers()))

    async def _consumers(self) -> list[str]:
        """Those of sessions; gateways' own, which goes on for a while without them, is none."""
        return [name for name in await self.look.consumers("$MQTT_msgs") if "_reader_" not in name]

    async def left(self) -> dict[str, Any]:
        """What must be nothing once all clients are gone, where it is something."""
        found: dict[str, Any] = {
            "consumers of sessions": await self._consumers(),
            "consumers of PUBRELs": await self.look.consumers("$MQTT_out"),
        }
        for stream in (*STREAMS, "$MQTT_shared"):
            if stream != "$MQTT_msgs":
                found[stream] = await self.look.count(stream)
        found["$MQTT_shared"] -= await self.look.count("$MQTT_shared", GENERATION)
        for gateway in await self.look.gateways(len(self.gateways)):
            found[f"connections of {gateway['id']}"] = gateway["connections"]
        return {name: value for name, value in found.items() if value}

    def more(self) -> list[str]:
        """A line for each gateway that has more of something than at the beginning."""
        found = []
        for number, gateway in enumerate(self.gateways):
            first, last = self.samples[gateway.port][0], self.samples[gateway.port][-1]
            for what in ("descriptors", "tasks"):
                before, after = getattr(first, what), getattr(last, what)
                if after > before + HANDLES:
                    found.append(f"gateway {number}: {after} {what} at the end, {before} at the beginning")
        return found

    async def rested(self) -> bool:
        """Look once; whether the gateways have no more than at the beginning: some task may just be under way."""
        await self.measure()
        return not self.more()

    def judge(self, result: Result, long: bool) -> None:
        """Compare the end with the beginning, and the second half with a flat line."""
        result.violations += self.more()
        for number, gateway in enumerate(self.gateways):
            samples = self.samples[gateway.port]
            first, last = samples[0], samples[-1]
            half = [one for one in samples[:-1] if one.at > samples[-2].at / 2]
            if long and len(half) > 2:
                slope = linear_regression([one.at for one in half], [one.rss for one in half]).slope
                growth = slope * (half[-1].at - half[0].at)
                result.figures[f"gateway {number}: MB half-way, growth since"] = (
                    f"{half[0].rss / 1e6:.1f}, {growth / 1e6:+.2f}"
                )
                if growth > max(GROWTH, GROWTH_SHARE * half[0].rss):
                    result.violations.append(f"gateway {number} grows: {growth / 1e6:.1f} MB in the second half")
            result.figures[f"gateway {number}: MB first, last"] = f"{first.rss / 1e6:.1f}, {last.rss / 1e6:.1f}"
            result.figures[f"gateway {number}: descriptors"] = f"{first.descriptors}, {last.descriptors}"
            result.figures[f"gateway {number}: tasks"] = f"{first.tasks}, {last.tasks}"


async def run(setting: Setting) -> Result:
    """Run it."""
    seconds = SECONDS_LONG if setting.long else SECONDS
    dice = random.Random(setting.seed)
    server = setting.nats()
    gateways = [setting.gateway(server.url, "--log-level", "warning") for _ in range(GATEWAYS)]
    ports = [one.port for one in gateways]
    silent = History(Path(os.devnull))
    result = Result()
    async with looking(server.url) as look:
        soak = Soak(gateways, look)
        await soak.measure()
        steady = [
            Workload(setting.directory / f"q{qos}", ports, qos=qos, rate=20, prefix=f"steady{qos}", version=3 + qos)
            for qos in (1, 2)
        ]
        for one in steady:
            await one.start()
        visitors = [
            Visitor(number, ports, random.Random(dice.random()), silent)
            for number in range(VISITORS_LONG if setting.long else VISITORS)
        ]
        visiting = [asyncio.create_task(one.run()) for one in visitors]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(min(seconds / 20, 15))
            await soak.measure()
        for visitor in visitors:
            visitor.stopping = True
        await asyncio.gather(*visiting)
        for visitor in visitors:
            result.violations += visitor.failed
        lost = 0
        for one in steady:
            verdict = await one.finish()
            lost += verdict.figures["lost"]
            result.violations += verdict.lines()
            await _forget(one, ports)
        await _clear(set().union(*(visitor.unsure for visitor in visitors)), ports)

        async def empty() -> bool:
            return not await soak.left()

        with contextlib.suppress(AssertionError):
            await aeventually(empty, EMPTY)
        result.violations += [f"left at the end: {name}: {value}" for name, value in (await soak.left()).items()]
        with contextlib.suppress(AssertionError):
            await aeventually(soak.rested, EMPTY)
        messages = sum(one.published for one in visitors) + sum(one.acked for one in steady)
        result.figures = {
            "messages": messages,
            "lost": lost,
            "visits": sum(one.visits for one in visitors),
            "minutes": round(seconds / 60, 1),
            "consumers, most": soak.most_consumers,
            "consumers, at the end": len(await look.consumers("$MQTT_msgs")),
        }
        soak.judge(result, setting.long)
    silent.close()
    return result


async def _clear(topics: set[str], ports: list[int]) -> None:
    """Remove retained messages."""
    client = ChaosClient("clears", ports, History(Path(os.devnull)), clean=True)
    await client.connect()
    for topic in topics:
        await client.publish(topic, 0, 1, retain=True, payload=b"")
    assert await client.settled(EMPTY)
    await client.close()


async def _forget(workload: Workload, ports: list[int]) -> None:
    """End the sessions of a workload."""
    for client in workload.clients:
        last = ChaosClient(client.client_id, ports, History(Path(os.devnull)), client.version, True, 0)
        await last.connect()
        await last.close()


EXPERIMENTS = [
    Experiment(
        "R13",
        f"clients of every kind come and go through {GATEWAYS} gateways, for an hour (CHAOS_SOAK_SECONDS)",
        "at the end no session, consumer, will or timer is left; memory, descriptors and tasks are what they were",
        run,
    )
]
