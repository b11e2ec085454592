# SPDX-License-Identifier: Apache-2.0
"""R9: servers of a cluster are cut off from each other, and a gateway from NATS, while messages flow."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from tests.chaos.checker import Promises
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.history import Event
from tests.chaos.workload import Workload
from tests.harness.gateway import Gateway
from tests.harness.namespaces import NamespaceCluster, namespace_obstacle
from tests.harness.partition import SplitCluster
from tests.harness.proxy import Proxy
from tests.harness.waiting import aeventually

STREAM = "$MQTT_msgs"

PATIENCE = 90.0
"""Seconds in which elections are over, and all that waited for them is done."""

GRACE = 3.0
"""Seconds after a cut in which an acknowledgement may come that was on its way."""

_SUMS = ("lost", "duplicated", "delivered", "repeated", "reconnects", "unacknowledged")


class Cut(NamedTuple):
    """Nothing may be acknowledged by the gateway on ``port`` from ``start`` to ``end`` (``time.monotonic_ns``)."""

    port: int
    start: int
    end: int


class Scene:
    """Three nats-servers with a gateway each, which knows no other server, and clients at all of them."""

    def __init__(self, setting: Setting, *, proxies: bool) -> None:
        self.setting = setting
        self.chance = random.Random(setting.seed)
        self.gateways: list[Gateway] = []
        self.workloads: list[Workload] = []
        self.cuts: list[Cut] = []
        self.links: list[Proxy] = []
        self.obstacle = namespace_obstacle()
        self.proxies = proxies or bool(self.obstacle)

    async def begin(self) -> None:
        """Start everything; messages flow."""
        setting = self.setting
        directory = setting.directory / "cluster"
        self.cluster: SplitCluster | NamespaceCluster = (
            SplitCluster(directory) if self.proxies else NamespaceCluster(directory)
        )
        setting.on_close(self.cluster.discard)
        await asyncio.to_thread(self.cluster.start)
        for number, server in enumerate(self.cluster.servers):
            if isinstance(self.cluster, NamespaceCluster):
                gateway = setting.gateway(server.url, start=False)
                self.cluster.put(gateway, number)
            else:
                link = Proxy(server.port)
                setting.on_close(link.close)
                self.links.append(link)
                gateway = setting.gateway(link.url, start=False)
            await asyncio.to_thread(gateway.start)
            self.gateways.append(gateway)
        await self.cluster.settled(STREAM)
        self.workloads = [
            Workload(
                setting.directory / f"histories {qos}",
                [gateway.port for gateway in self.gateways],
                publishers=3,
                subscribers=3,
                qos=qos,
                rate=30,
                prefix=f"q{qos}",
                promises=Promises(leaders_change=True),
            )
            for qos in (1, 2)
        ]
        for workload in self.workloads:
            await workload.start()
        await self.flowing()

    async def flowing(self, *without: int) -> None:
        """Wait until messages of all clients go through, but for those that are connected to these gateways."""
        apart = {self.gateways[number].port for number in without}
        before = {client: client.acked for workload in self.workloads for client in workload.publishers}

        def flow() -> bool:
            waiting = [client for client, acked in before.items() if client.acked <= acked + 10]
            stuck = [client for client in waiting if client.link is None or client.link.port not in apart]
            return not stuck and len(waiting) < len(before)

        await aeventually(flow, PATIENCE, what="messages that are acknowledged")

    async def fall_apart(self, number: int, *, silently: bool) -> None:
        """Cut a server off, with its gateway; the others go on. Then put it back."""
        gateway = self.gateways[number]
        warned = gateway.log.count("not ready: ")
        if isinstance(self.cluster, NamespaceCluster):
            await asyncio.to_thread(self.cluster.isolate, number)
        else:
            self.cluster.isolate(number, silently=silently)
        await self.until_over(number, warned)
        await asyncio.to_thread(self.cluster.heal)
        await self.over()
        await self.cluster.settled(STREAM)

    async def cut_off(self, number: int) -> None:
        """Cut a gateway off from its server, and let it come back."""
        warned = self.gateways[number].log.count("not ready: ")
        self.links[number].cut()
        await self.until_over(number, warned)
        self.links[number].restore()
        await self.over()

    async def over(self) -> None:
        """Wait until all gateways serve their clients again: the next cut is to be noticed."""
        await aeventually(
            lambda: all(gateway.ready for gateway in self.gateways), PATIENCE, what="gateways that are ready again"
        )
        await self.flowing()

    async def until_over(self, number: int, warned: int) -> None:
        """Wait until the gateway has noticed, and the others work."""
        gateway = self.gateways[number]
        start = time.monotonic_ns() + int(GRACE * 1e9)
        self.workloads[0].nemesis.note("cut", victim=f"n{number}")
        await aeventually(lambda: gateway.log.count("not ready: ") > warned, PATIENCE, what="a gateway that says so")
        await self.flowing(number)
        await asyncio.sleep(max(0.0, (start - time.monotonic_ns()) / 1e9) + (10.0 if self.setting.long else 1.0))
        self.cuts.append(Cut(gateway.port, start, time.monotonic_ns()))

    async def end(self) -> Result:
        """Wait for what is still to come, and judge."""
        verdicts = [await workload.finish(PATIENCE) for workload in self.workloads]
        events = [workload.events() for workload in self.workloads]
        figures: dict[str, int | float | str] = {
            "messages": sum(verdict.figures["acked"] for verdict in verdicts),
            "cuts": len(self.cuts),
        }
        for name in _SUMS:
            figures[name] = sum(verdict.figures.get(name, 0) for verdict in verdicts)
        wrong = [line for found in events for line in acknowledged_meanwhile(found, self.cuts)]
        figures["acknowledged on the smaller side"] = len(wrong)
        figures["longest_pause_ms"] = max(verdict.figures.get("longest_pause_ms", 0) for verdict in verdicts)
        how = f"Routes through proxies{self.obstacle and f' ({self.obstacle})'}."
        remark = how if self.proxies else "Each server, with its gateway, in a network namespace of its own."
        return Result(figures, [*wrong[:10], *(line for verdict in verdicts for line in verdict.lines())], [remark])


def acknowledged_meanwhile(events: Sequence[Event], cuts: Sequence[Cut]) -> list[str]:
    """A line for each PUBACK or PUBCOMP that came through a gateway that was cut off."""
    ports = {event.conn: event.port for event in events if event.what == "connected"}
    return [
        f"acknowledged while cut off: {event.who} {event.n} on port {cut.port}"
        for cut in cuts
        for event in events
        if event.what == "acked" and cut.start < event.t < cut.end and ports.get(event.conn) == cut.port
    ]


async def _cables(setting: Setting) -> Result:
    """The leader of the messages is cut off, then others."""
    scene = Scene(setting, proxies=False)
    await scene.begin()
    for number in range(8 if setting.long else 1):
        leader = scene.cluster.servers.index(await scene.cluster.leader(STREAM))
        await scene.fall_apart(leader if number % 2 == 0 else scene.chance.randrange(3), silently=True)
    return await scene.end()


async def _connections(setting: Setting) -> Result:
    """Gateways are cut off from NATS; in the long version routes are, too."""
    scene = Scene(setting, proxies=True)
    await scene.begin()
    for number in range(6 if setting.long else 1):
        await scene.cut_off(scene.chance.randrange(3))
        if setting.long:
            leader = scene.cluster.servers.index(await scene.cluster.leader(STREAM))
            await scene.fall_apart(leader, silently=number % 2 == 1)
    return await scene.end()


PASSES = "nothing lost, no QoS 2 message twice; nothing is acknowledged on the smaller side"

EXPERIMENTS = [
    Experiment("R9", "A nats-server, the leader first, and its gateway lose the network; QoS 1 and 2", PASSES, _cables),
    Experiment("R9b", "Gateways lose NATS, and nats-servers their routes; QoS 1 and 2", PASSES, _connections),
]
