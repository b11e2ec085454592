# SPDX-License-Identifier: Apache-2.0
"""R14: the power of all nats-servers is cut at once: what was acknowledged is there, as `sync_interval` promises."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.experiment import Experiment, Result, Setting
from tests.harness import raw
from tests.harness.cluster import Cluster
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer, make_server
from tests.harness.power import PowerDisk, power_obstacle
from tests.harness.raw import Raw, publish

TOPIC = "power/x"
QUIET_S = 15.0
"""Seconds without a message after which the rest counts as lost."""
FLUSHED_S = 2.0
"""With `sync_interval: 1s`: what was acknowledged so long before the cut is on the disk."""


@dataclass(frozen=True)
class Round:
    """A round: the disks whose power is cut, and the time of the cut."""

    sync: str
    """`sync_interval` of nats-server."""
    servers: int
    age_s: float
    """From the creation of the streams to the cut; messages flow all the time."""
    kind: str = "ext4"
    """File system of the disks."""


SHORT = (Round("1s", 1, 4.0),)
LONG = (
    *(Round("1s", 1, age) for age in (2.0, 4.0, 15.0, 30.0, 45.0)),
    *(Round("always", 1, age) for age in (4.0, 15.0, 45.0)),
    *(Round("1s", 3, age) for age in (4.0, 45.0)),
    *(Round("always", 3, age) for age in (4.0, 45.0)),
    *(Round(sync, servers, age, "xfs") for servers in (1, 3) for sync in ("1s", "always") for age in (4.0, 45.0)),
)


@dataclass
class Scene:
    """Servers whose disks can lose their power, a gateway, a session that is away, and a publisher."""

    setting: Setting
    round: Round
    disks: list[PowerDisk] = field(default_factory=list)
    servers: Sequence[NatsServer] = ()
    acknowledged: dict[int, float] = field(default_factory=dict)
    """When each message was acknowledged, by its number (monotonic, seconds)."""

    def begin(self) -> Gateway:
        """Start everything; the session is away."""
        config = f'jetstream {{ sync_interval: "{self.round.sync}" }}'
        directory = self.setting.fresh("power")
        if self.round.servers == 1:
            self.servers = [make_server("process", directory / "n0", config=config)]
        else:
            cluster = Cluster(directory, size=self.round.servers, config=config)
            self.servers = cluster.servers
        for server in self.servers:
            place = server.directory / "store"
            place.mkdir()
            disk = PowerDisk(server.directory / "disk.img", place, self.round.kind)
            self.setting.on_close(disk.discard)
            self.setting.on_close(server.discard)
            self.disks.append(disk)
        for server in self.servers:
            server.start()
        gateway = self.setting.gateway(",".join(server.url for server in self.servers))
        with Raw.connected(gateway.port, "away", clean=False) as client:
            assert client.subscribe((TOPIC, 1)) == [1]
        return gateway

    def publish(self, gateway: Gateway) -> float:
        """Publish until the cut; when that was."""
        until = time.monotonic() + self.round.age_s
        number = 0
        with Raw.connected(gateway.port, "publisher") as client:
            while time.monotonic() < until:
                number += 1
                client.send(publish(TOPIC, b"%d" % number, qos=1, id=number % 65_535 + 1))
                client.expect(raw.PUBACK)
                self.acknowledged[number] = time.monotonic()
            for disk in self.disks:
                disk.cut()
        at = time.monotonic()
        gateway.kill()
        for server in self.servers:
            server.kill()
        return at

    def resume(self, gateway: Gateway) -> tuple[bool, set[int]]:
        """Power is back: whether the session is there, and the messages that it gets."""
        for disk in self.disks:
            disk.restore()
        for server in self.servers:
            server.start()
        gateway.start()
        found: set[int] = set()
        with Raw(gateway.port) as client:
            client.send(raw.connect("away", clean=False))
            present = bool(client.expect(raw.CONNACK).body[0])
            if not present:
                return False, found
            while len(found) < len(self.acknowledged):
                try:
                    one = client.receive(QUIET_S)
                except TimeoutError:
                    break
                assert one is not None
                assert one.kind == raw.PUBLISH
                client.send(raw.ack(raw.PUBACK, one.id))
                found.add(int(one.payload))
        return True, found


def run_round(setting: Setting, one: Round, result: Result) -> None:
    """Run the round of one cut, which is a row of its own in the report."""
    scene = Scene(setting, one)
    gateway = scene.begin()
    cut = scene.publish(gateway)
    present, found = scene.resume(gateway)
    lost = [number for number in scene.acknowledged if number not in found]
    oldest = max((cut - scene.acknowledged[number] for number in lost), default=0.0)
    disks = "" if one.kind == "ext4" else f", {one.kind}"
    name = f"`{one.sync}`, {one.servers} server{'s' if one.servers > 1 else ''}, streams {one.age_s:g} s old{disks}"
    figures: dict[str, int | float | str] = {
        "messages": len(scene.acknowledged),
        "kills": one.servers,
        "lost": len(lost),
        "session": "kept" if present else "lost",
    }
    if lost:
        figures["oldest lost"] = f"{oldest:.1f} s before the cut"
    row = result.peers[name] = Result(figures)
    if (lost and (one.sync == "always" or oldest > FLUSHED_S)) or not present:
        row.violations.append(f"lost: {len(lost)} messages, the session {figures['session']}")
        result.violations.append(f"{name}: {row.violations[0]}")


async def run(setting: Setting) -> Result:
    """Cut the power in each round."""
    result = Result()
    rounds = LONG if setting.long else SHORT
    obstacles = {kind: power_obstacle(setting.fresh("obstacle"), kind) for kind in {one.kind for one in rounds}}
    result.remarks += [f"{kind} not run: {obstacle}" for kind, obstacle in obstacles.items() if obstacle]
    rounds = tuple(one for one in rounds if not obstacles[one.kind])
    for one in rounds:
        await asyncio.to_thread(run_round, setting, one, result)
    result.figures["rounds"] = len(rounds)
    if rounds:
        result.remarks.append(f"kills: disks whose power is cut; `1s` promises what was stored {FLUSHED_S:g} s before")
    return result


EXPERIMENTS = [
    Experiment(
        "R14",
        "the power of all nats-servers is cut",
        "nothing is lost with `always`; with `1s` nothing that was acknowledged two seconds before, and no session",
        run,
    )
]
