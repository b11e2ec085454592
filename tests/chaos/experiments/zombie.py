# SPDX-License-Identifier: Apache-2.0
"""R10: a gateway is stopped for longer than its lease, and goes on when its sessions have moved."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

from mqtt_nats.codec import Will
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.looking import Look, looking
from tests.chaos.rival import Device, Rival
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBREC, PUBREL, RawClient
from tests.harness.waiting import aeventually

STOPS = (4.0,)
"""Seconds for which the gateway is stopped, in each round."""
STOPS_LONG = (30.0, 45.0, 60.0)
LEASE = 4
LEASE_LONG = 20

SESSIONS = 4
SESSIONS_LONG = 24
REGULAR = 2

BUSY = 1.0
"""Seconds of traffic before each stop."""
WAIT = 60.0
GHOSTS = 20
"""Publishes of each connection whose session has moved."""

FORGETFUL = 'ping_interval: "2s"\nping_max: 1\n'
"""nats-server gives a gateway up that does not answer within a few seconds."""


class Session:
    """A durable client: what it knows, the connection that it has, and the one that it has left behind."""

    def __init__(self, name: str, version: int) -> None:
        self.name = name
        self.version = version
        self.device = Device(f"{name}/made")
        self.rival: Rival | None = None
        self.ghost: Rival | None = None
        self.fed = 0
        self.idle = False
        """It does not answer for now."""

    async def connect(self, gateway: Gateway, *, first: bool = False) -> float:
        """Connect, and go on with what was begun; seconds until CONNACK."""
        begun = time.monotonic()
        rival = Rival(gateway.port, self.name, self.version, f"{self.name}/own")
        await rival.connect(clean=first and self.version == 5)
        if not await rival.entered(WAIT):
            raise AssertionError(f"{self.name}: not accepted ({rival.reason})")
        if rival.present == first:
            raise AssertionError(f"{self.name}: its session is not continued")
        if first:
            await rival.subscribe(f"{self.name}/fed", 2)
        self.rival = rival
        self.device.resume(rival)
        return time.monotonic() - begun

    def work(self) -> None:
        """Answer what has come."""
        if self.rival is not None and not self.idle:
            self.device.work(self.rival, 1000)


class Zombie:
    """One nats-server, the gateway that is stopped, and another one or two."""

    def __init__(self, name: str, setting: Setting, server: NatsServer, sessions: int, module: str) -> None:
        lease = LEASE_LONG if setting.long else LEASE
        self.name = name
        self.server = server
        self.random = random.Random(f"{setting.seed}{name}")
        arguments = ("--gateway-lease", str(lease), "--log-level", "warning")
        self.gateways = [
            setting.gateway(server.url, *arguments, module=module) for _ in range(3 if setting.long else 2)
        ]
        self.sessions = [Session(f"{name}-{at}", 4 + at % 2) for at in range(sessions)]
        self.result = Result()
        self.ghosts: list[Rival] = []
        self.regular: list[Rival] = []
        self.resumed: list[float] = []
        self.stopped = 0.0
        self._feeding = True
        self._feeds = asyncio.Event()
        """Cleared while nothing is to come to the sessions."""
        self._feeds.set()

    async def run(self, stops: tuple[float, ...]) -> None:
        """The rounds."""
        zombie, *others = self.gateways
        async with looking(self.server.url) as look:
            for one in self.sessions:
                await one.connect(zombie, first=True)
            feeding = asyncio.create_task(self._feed(others[0].port))
            working = asyncio.create_task(self._work())
            try:
                for number, seconds in enumerate(stops):
                    await self._round(number, seconds, look)
            finally:
                self._feeding = False
                self._feeds.set()
                await feeding
            await self._finish(look)
            working.cancel()
            for one in self.sessions:
                if one.rival is not None:
                    await one.rival.drop()

    async def _feed(self, port: int) -> None:
        client = await RawClient.connect(port, f"{self.name}-feed")
        try:
            while self._feeding:
                await self._feeds.wait()
                for one in self.sessions:
                    await client.deliver(f"{one.name}/fed", b"%d" % one.fed, 1 + one.fed % 2)
                    one.fed += 1
                await asyncio.sleep(0.05)
        finally:
            client.drop()

    async def _work(self) -> None:
        while True:
            for one in self.sessions:
                one.work()
            await asyncio.sleep(0.005)

    async def _round(self, number: int, seconds: float, look: Look) -> None:
        zombie, *others = self.gateways
        regular = await self._regular(number, zombie)
        for one in self.sessions:
            assert one.rival is not None
            if one.rival.port != zombie.port:
                await one.rival.drop()
                await one.connect(zombie)
        until = time.monotonic() + BUSY
        while time.monotonic() < until:
            for one in self.sessions:
                assert one.rival is not None
                if one.device.unfinished < 20:
                    one.device.publish(one.rival)
            await asyncio.sleep(0.05)
        for one in self.sessions:
            one.idle = True  # so that something is unacknowledged
        await asyncio.sleep(0.2)
        if number % 2 == 0:  # then the former connection of a session is what the gateway reads first when it goes on
            self._feeds.clear()
            await asyncio.sleep(0.2)
        os.kill(zombie.pid, signal.SIGSTOP)
        begun = time.monotonic()
        try:
            await aeventually(lambda: _stands(zombie.pid))
            moved = self.random.sample(self.sessions, len(self.sessions) // 2)
            await asyncio.gather(
                *(self._move(one, self.random.choice(others), early=at % 2 == 0) for at, one in enumerate(moved))
            )
            for one in self.sessions:
                one.idle = one not in moved or one is moved[0]
            await self._reaped(number, look)
            for client in regular:
                self._haunt(client)
            await asyncio.sleep(max(0.0, begun + seconds - time.monotonic()))
        finally:
            os.kill(zombie.pid, signal.SIGCONT)
        self.stopped += time.monotonic() - begun
        await self._afterwards(number, moved, regular, look)

    async def _regular(self, number: int, zombie: Gateway) -> list[Rival]:
        """Clients with a clean session and a will."""
        found = []
        for at in range(REGULAR):
            topic = f"{self.name}/will/{number}/{at}"
            client = Rival(
                zombie.port, f"{self.name}-regular-{number}-{at}", 4 + at % 2, f"{self.name}/ghost/r{number}.{at}"
            )
            await client.connect(clean=True, expiry=0, will=Will(topic, b"x", 1 + at % 2, False))
            assert await client.entered(WAIT)
            found.append(client)
        self.regular += found
        return found

    async def _move(self, one: Session, gateway: Gateway, *, early: bool) -> None:
        """Continue a session elsewhere, and speak on its former connection: after that, or before it if ``early``."""
        assert one.rival is not None
        one.ghost = one.rival
        one.ghost.topic = f"{self.name}/ghost/{one.name}"
        if early:
            self._haunt(one.ghost)
            self._feeds.set()
        self.resumed.append(await one.connect(gateway))
        if not early:
            self._haunt(one.ghost)

    def _haunt(self, ghost: Rival) -> None:
        """Have a connection that lost its session publish, and acknowledge all that it can."""
        ghost.sent.clear()
        ghost.acked.clear()
        for _ in range(GHOSTS):
            ghost.publish_own()
        for identifier in range(900, 900 + GHOSTS):
            ghost.publish(2, identifier, ghost.topic, b"held")
            ghost.ack(PUBREL, identifier)
        while ghost.inbox:
            packet = ghost.inbox.popleft()
            if hasattr(packet, "qos"):
                ghost.ack(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id)
        self.ghosts.append(ghost)

    async def _reaped(self, number: int, look: Look) -> None:
        """Wait until the clients of the stopped gateway have been dealt with."""

        async def published() -> bool:
            return await look.count("$MQTT_msgs", f"$MQTT.msgs.{self.name}.will.{number}.>") >= REGULAR

        await aeventually(published, WAIT, what="the wills of the stopped gateway")

    async def _afterwards(self, number: int, moved: list[Session], regular: list[Rival], look: Look) -> None:
        for ghost in [*(one.ghost for one in moved if one.ghost is not None), *regular]:
            try:
                await aeventually(partial(getattr, ghost, "closed"), WAIT)
            except AssertionError:
                self.result.violations.append(f"{ghost.client_id}: still connected to the gateway that was stopped")
            if ghost.acked:
                self.result.violations.append(f"{ghost.client_id}: {len(ghost.acked)} publishes were acknowledged")
            await ghost.drop()
        for one in self.sessions:
            one.idle = False
            assert one.rival is not None
            if one not in moved and not one.rival.closed:
                # Its gateway either finds it was taken for dead, or serves it.
                await one.rival.answers(WAIT)
            await one.rival.drop()
            await one.connect(self.random.choice(self.gateways))
        stored = await look.count("$MQTT_msgs", f"$MQTT.msgs.{self.name}.will.{number}.>")
        if stored != REGULAR:
            self.result.violations.append(f"round {number}: {stored} wills, not {REGULAR}")

    def _complete(self) -> bool:
        return not any(one.device.unfinished or len(set(one.device.given)) < one.fed for one in self.sessions)

    async def _finish(self, look: Look) -> None:
        """Wait until everything has come, then compare."""
        with contextlib.suppress(AssertionError):
            await aeventually(self._complete, WAIT)
        result = self.result
        lost = twice = undeclared = mislaid = doubled = 0
        for one in self.sessions:
            given = Counter(one.device.given)
            lost += one.fed - len(given)
            twice += sum(count > 1 for payload, count in given.items() if int(payload) % 2)
            undeclared += len(one.device.undeclared)
            made = Counter(
                copy.payload for copy in await look.messages(f"$MQTT.msgs.{one.device.topic.replace('/', '.')}")
            )
            mislaid += one.device.made - len(made)
            doubled += sum(count > 1 for count in made.values())
        # A publish that a gateway has held too late is removed some seconds after a resume.
        held = await look.left("$MQTT_qos2in", WAIT)
        ghosts = await look.count("$MQTT_msgs", f"$MQTT.msgs.{self.name}.ghost.>")
        for count, what in (
            (lost, "messages to sessions were lost"),
            (twice, "QoS 2 messages to sessions came twice"),
            (undeclared, "messages came again without DUP"),
            (mislaid, "QoS 2 messages of sessions were lost"),
            (doubled, "QoS 2 messages of sessions were stored twice"),
            (ghosts, "publishes of connections whose session had moved or ended were stored"),
            (held, "QoS 2 publishes are held that nobody will release"),
        ):
            if count:
                result.violations.append(f"{self.name}: {count} {what}")
        result.figures = {
            "stopped, s": round(self.stopped),
            "sessions moved": len(self.resumed),
            "longest CONNECT, ms": round(max(self.resumed, default=0.0) * 1000),
            "to sessions": sum(one.fed for one in self.sessions),
            "by sessions, QoS 2": sum(one.device.made for one in self.sessions),
            "lost": lost + mislaid,
            "QoS 2 twice": twice + doubled,
            "packets of zombies": len(self.ghosts) * GHOSTS * 3,
            "of them stored": ghosts,
        }


def _stands(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"


async def run(setting: Setting, module: str = "") -> Result:
    """Run it, with a nats-server that keeps the stopped gateway's connection and one that gives it up.

    ``module``: what ``python -m`` runs in place of the gateway.
    """
    sessions = SESSIONS_LONG if setting.long else SESSIONS
    both = [
        Zombie("kept", setting, setting.nats(), sessions, module),
        Zombie("given-up", setting, setting.nats(config=FORGETFUL), sessions, module),
    ]
    await asyncio.gather(*(one.run(STOPS_LONG if setting.long else STOPS) for one in both))
    result = Result()
    for one in both:
        result.violations += one.result.violations
        for name, value in one.result.figures.items():
            known = result.figures.get(name, 0)
            assert isinstance(known, int)
            assert isinstance(value, int)
            result.figures[name] = max(known, value) if name.startswith("longest") else known + value
    result.remarks.append("nats-server keeps the connection of the stopped gateway, or gives it up: half of it each")
    return result


EXPERIMENTS = [
    Experiment(
        "R10",
        "SIGSTOP of a gateway for 30 to 60 s; its sessions move, its leases lapse; SIGCONT",
        "its connections end; nothing of theirs is stored or acknowledged; nothing lost, no QoS 2 message twice",
        run,
    )
]
