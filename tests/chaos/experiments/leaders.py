# SPDX-License-Identifier: Apache-2.0
"""R3 and R4: nats-servers of a cluster are killed while messages flow at QoS 1 and 2."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from tests.chaos.checker import Promises
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.history import Event
from tests.chaos.workload import Workload
from tests.harness.cluster import Cluster
from tests.harness.gateway import Gateway
from tests.harness.waiting import aeventually

STREAM = "$MQTT_msgs"

RECOVERY = 90.0
"""Seconds in which an election is over and everything that waited for it is done."""

_SUMS = ("messages", "lost", "duplicated", "delivered", "repeated", "reconnects", "wills", "unacknowledged")
_PEAKS = ("longest_pause_ms", "longest_delay_ms", "longest_resume_ms")

PAGE_CACHE = (
    "A killed process leaves what it has written to the kernel: these figures say nothing about a loss of power."
)


class Scene:
    """A cluster, two gateways on it, and traffic at QoS 1 and 2 through both.

    Args:
        restless: as in `Workload`; where sessions are to move, clients drop their connections often.
    """

    def __init__(self, setting: Setting, restless: float) -> None:
        self.setting = setting
        self.moving = bool(setting.positions)
        self.restless = 2.0 if self.moving else restless
        self.chance = random.Random(setting.seed)
        self.kills = 0
        self.gateways: list[Gateway] = []
        self.workloads: list[Workload] = []

    async def begin(self) -> None:
        """Start everything; messages flow."""
        setting = self.setting
        self.cluster: Cluster = await asyncio.to_thread(setting.cluster)
        for _ in range(2):
            gateway = await asyncio.to_thread(setting.gateway, self.cluster.url, "--stream-replicas", "3")
            self.gateways.append(gateway)
        await self.cluster.settled(STREAM)
        self.workloads = [
            Workload(
                setting.directory / f"histories {qos}",
                [gateway.port for gateway in self.gateways],
                publishers=2,
                subscribers=2,
                qos=qos,
                rate=60,
                ack_after=0.01,
                prefix=f"q{qos}",
                restless=self.restless,
                promises=Promises(leaders_change=True),
            )
            for qos in (1, 2)
        ]
        for workload in self.workloads:
            await workload.start()
        await self.flowing()

    async def flowing(self) -> None:
        """Wait until messages go through at both QoS."""
        before = [workload.acked for workload in self.workloads]

        def more() -> bool:
            return all(workload.acked > count + 20 for workload, count in zip(self.workloads, before, strict=True))

        await aeventually(more, RECOVERY, what="messages that are acknowledged")

    def killed(self, *victims: str) -> None:
        """Write down who has just been killed."""
        for victim in victims:
            self.kills += 1
            self.workloads[0].nemesis.note("killed", victim=victim)

    async def pause(self) -> None:
        """Let it run for a while."""
        shortest = 3.0 if self.moving else 0.5
        await asyncio.sleep(self.chance.uniform(1.0, 3.0) if self.setting.long else shortest)

    async def end(self, *, calm: bool = False) -> Result:
        """Wait for what is still to come, and judge. ``calm``: clients have nothing to notice but a pause."""
        await self.setting.moved()
        verdicts = [await workload.finish(RECOVERY) for workload in self.workloads]
        figures: dict[str, int | float | str] = {"messages": 0, "kills": self.kills}
        for verdict in verdicts:
            found = verdict.figures | {"messages": verdict.figures["acked"]}
            for name in _SUMS:
                if name in found:
                    figures[name] = int(figures.get(name, 0)) + found[name]
            for name in _PEAKS:
                if name in found:
                    figures[name] = max(int(figures.get(name, 0)), found[name])
        delays = sorted(delay for workload in self.workloads for delay in _delays(workload.events()))
        if delays:
            figures["ack_p50_ms"] = round(delays[len(delays) // 2], 1)
            figures["ack_p99_ms"] = round(delays[len(delays) * 99 // 100])
            figures["ack_max_ms"] = round(delays[-1])
        result = Result(figures, [line for verdict in verdicts for line in verdict.lines()], [PAGE_CACHE])
        if calm:
            info = await aeventually(lambda: self.cluster.info(STREAM), RECOVERY, what="the state of the stream")
            figures["stored"] = info["state"]["messages"]
            sent = int(figures["messages"]) + int(figures.get("wills", 0))
            unknown = sum(_unanswered(workload.events()) for workload in self.workloads)
            if not sent <= info["state"]["messages"] <= sent + unknown:
                result.violations.append(f"{sent} messages and wills, but {figures['stored']} are stored")
            if figures["reconnects"] and not self.moving:
                result.violations.append(f"{figures['reconnects']} connections were lost")
        return result


def _unanswered(events: Sequence[Event]) -> int:
    """Number of CONNECTs without an answer that the client has seen: nobody knows whether they left a will."""
    return sum((event.what == "connect") - (event.what == "connected") for event in events)


def _delays(events: Sequence[Event]) -> list[float]:
    """Milliseconds from the first PUBLISH of each message to its PUBACK or PUBCOMP."""
    begun: dict[tuple[str, int], int] = {}
    delays = []
    for event in events:
        if event.what == "publish":
            begun.setdefault((event.who, event.n), event.t)
        elif event.what == "acked":
            delays.append((event.t - begun[event.who, event.n]) / 1e6)
    return delays


async def _leader(setting: Setting) -> Result:
    """The leader of the messages dies; when another leads and messages flow, it is started again."""
    scene = Scene(setting, 0.0)  # nobody has a reason to connect again
    await scene.begin()
    for _ in range(12 if setting.long else 1):
        await scene.pause()
        victim = await scene.cluster.leader(STREAM)
        await asyncio.to_thread(victim.kill)
        scene.killed("the leader")
        await scene.flowing()
        await asyncio.to_thread(victim.start)
        await scene.cluster.settled(STREAM)
    return await scene.end(calm=True)


async def _both(setting: Setting) -> Result:
    """A gateway and the leader die at the same moment; then all nats-servers at once."""
    scene = Scene(setting, 6.0)
    await scene.begin()
    cluster = scene.cluster
    for number in range(8 if setting.long else 1):
        await scene.pause()
        victim = await cluster.leader(STREAM)
        gateway = scene.gateways[number % 2]
        await asyncio.gather(asyncio.to_thread(gateway.kill), asyncio.to_thread(victim.kill))
        scene.killed("a gateway", "the leader")
        await asyncio.to_thread(victim.start)
        await asyncio.to_thread(gateway.start)
        await scene.flowing()
        await cluster.settled(STREAM)
    for _ in range(3 if setting.long else 1):
        await scene.pause()
        await asyncio.gather(*(asyncio.to_thread(server.kill) for server in cluster.servers))
        scene.killed(*(f"server {number}" for number in range(len(cluster.servers))))
        if setting.long:
            await asyncio.sleep(scene.chance.choice((0, 10, 40)))
        await asyncio.gather(*(asyncio.to_thread(server.start) for server in cluster.servers))
        await scene.flowing()
    return await scene.end()


EXPERIMENTS = [
    Experiment(
        "R3",
        "three nats-servers, streams with three replicas: the leader of the messages is killed, again and again",
        "nothing acknowledged is lost, nothing is stored or delivered twice, nobody is disconnected",
        _leader,
    ),
    Experiment(
        "R4",
        "a gateway and the leader killed at the same moment; then all three nats-servers",
        "nothing acknowledged is lost, no application gets anything twice at QoS 2",
        _both,
    ),
]
