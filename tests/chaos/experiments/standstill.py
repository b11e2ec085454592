# SPDX-License-Identifier: Apache-2.0
"""R31: nats-server stands still, shorter and longer than the time-outs of gateways, and goes on (SIGSTOP, SIGCONT)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from tests.chaos.checker import Promises
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.looking import looking
from tests.chaos.workload import Workload
from tests.harness.nats import NatsServer
from tests.harness.waiting import aeventually

STREAM = "$MQTT_msgs"

STANDS = (8.0,)
"""Seconds of each standstill. A gateway waits five seconds for an answer, and thirty before it connects anew."""
STANDS_LONG = (4.0, 6.0, 12.0, 12.0, 24.0, 40.0, 60.0)

LEASE = 12.0
"""Longest standstill in seconds during which no lease lapses: 20 seconds, of which a quarter may have passed.

A gateway at a server of three that stands still for longer is considered dead by gateways at the others.
"""

RECOVERY = 90.0
"""Seconds in which messages flow again, and in which everything that waited has come."""

Choice = Callable[[], Awaitable[NatsServer]]
"""Returns the server that stands still next."""


class Standing:
    """Two gateways, and traffic at QoS 1 and 2 through both, while one nats-server stands still again and again."""

    def __init__(
        self, setting: Setting, name: str, url: str, choose: Choice, *arguments: str, calm: float = float("inf")
    ) -> None:
        self._setting = setting
        self._calm = calm
        """Longest standstill in seconds in which no connection may be lost."""
        self._lost = 0
        self._url = url
        self._choose = choose
        self._gateways = [setting.gateway(url, *arguments) for _ in range(2)]
        self._workloads = [
            Workload(
                setting.directory / f"histories {name} {qos}",
                [gateway.port for gateway in self._gateways],
                publishers=2,
                subscribers=2,
                qos=qos,
                rate=60,
                ack_after=0.01,
                prefix=f"{name}-q{qos}",
                restless=0.0,  # nobody has a reason to connect again
                promises=Promises(leaders_change=True),
            )
            for qos in (1, 2)
        ]

    async def run(self) -> Result:
        """All standstills, one after the other."""
        stands = STANDS_LONG if self._setting.long else STANDS
        for workload in self._workloads:
            await workload.start()
        await self._flowing()
        for seconds in stands:
            server = await self._choose()
            before = self._connections()
            begun = time.monotonic()
            await asyncio.to_thread(server.pause)
            self._workloads[0].nemesis.note("paused", seconds=seconds)
            try:
                await asyncio.sleep(seconds)
            finally:
                server.resume()
            stood = time.monotonic() - begun
            await self._flowing()
            if stood <= self._calm:
                self._lost += self._connections() - before
        return await self._end(len(stands))

    def _connections(self) -> int:
        return sum(client.connections for workload in self._workloads for client in workload.clients)

    async def _flowing(self) -> None:
        """Wait until messages go through at both QoS."""
        before = [workload.acked for workload in self._workloads]

        def more() -> bool:
            return all(workload.acked > count + 20 for workload, count in zip(self._workloads, before, strict=True))

        await aeventually(more, RECOVERY, what="messages that are acknowledged")

    async def _end(self, stands: int) -> Result:
        verdicts = [await workload.finish(RECOVERY) for workload in self._workloads]
        figures = {
            "messages": sum(one.figures["acked"] for one in verdicts),
            "standstills": stands,
            "lost": sum(one.figures["lost"] for one in verdicts),
            "duplicated": sum(one.figures["duplicated"] for one in verdicts),
            "longest_pause_ms": max(one.figures["longest_pause_ms"] for one in verdicts),
            "repeated": sum(one.figures["repeated"] for one in verdicts),
            "reconnects": sum(one.figures["reconnects"] for one in verdicts),
        }
        async with looking(self._url) as look:
            figures["stored"] = await look.count(STREAM)
        result = Result({**figures}, [line for one in verdicts for line in one.lines()])
        if self._lost and not self._setting.positions:
            result.violations.append(f"{self._lost} connections were lost")
        elif figures["stored"] != figures["messages"] and not figures["reconnects"]:
            result.violations.append(f"{figures['messages']} messages, but {figures['stored']} are stored")
        return result


async def _one(setting: Setting) -> Result:
    server = await asyncio.to_thread(setting.nats)

    async def choose() -> NatsServer:
        return server

    return await (await asyncio.to_thread(Standing, setting, "one", server.url, choose)).run()


async def _leader(setting: Setting) -> Result:
    cluster = await asyncio.to_thread(setting.cluster)

    async def choose() -> NatsServer:
        await cluster.settled(STREAM)
        return await cluster.leader(STREAM)

    scene = await asyncio.to_thread(
        partial(Standing, setting, "three", cluster.url, choose, "--stream-replicas", "3", calm=LEASE)
    )
    await cluster.settled(STREAM)
    return await scene.run()


async def _run(setting: Setting) -> Result:
    """A nats-server alone, and the leader of three, at the same time."""
    one, three = await asyncio.gather(_one(setting), _leader(setting))
    one.peers["the leader of three"] = three
    three.remarks.append(
        "reconnects: a gateway at that server does not renew its lease of 20 s, and another takes over"
    )
    one.violations += [f"{line} (three servers)" for line in three.violations]
    return one


EXPERIMENTS = [
    Experiment(
        "R31",
        "nats-server stands still for 4 to 60 s (SIGSTOP) and goes on: one server, and the leader of three",
        "nothing is lost, nobody is disconnected in the time of a lease, each message stored once, again with DUP",
        _run,
    ),
]
