# SPDX-License-Identifier: Apache-2.0
"""R30: somebody purges and removes streams, and pauses consumers, by hand, beside gateways that run.

Before each of these acts some durable clients are absent, and a message waits for each. Afterwards they return: a
session that is present has everything that nobody has removed, and one that does not know that is not present.
Clients that are connected stay so, and get all messages that are published afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson

from mqtt_nats.codec import Publish
from tests.chaos.checker import Promises
from tests.chaos.client import ChaosClient
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.looking import Look, looking
from tests.chaos.workload import Workload
from tests.harness.rawclient import RawClient, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

MESSAGES: Final = "$MQTT_msgs"
SESSIONS: Final = "$MQTT_sess"
POSITIONS: Final = "$MQTT_pos"
SHARED: Final = "$MQTT_shared"

ROUNDS: Final = 1
ROUNDS_LONG: Final = 3

RATES: Final = {1: 8.0, 2: 2.0}
"""Messages per second of each publisher, by QoS."""

RECOVERY: Final = 120.0
"""Seconds in which the log says what was done, and everything that waited has come."""

KEPT: Final = 3600
"""Session expiry interval, in seconds."""

LEASE: Final = 8
"""Seconds of `gateway_lease`: gateways look at the streams four times as often.

A living gateway that waits for a processor does not pass for dead.
"""

LOOKED: Final = 4.0
"""Seconds in which gateways have looked at the streams, and what connections have left behind is stored."""

FOREVER: Final = b'{"pause_until":"2099-01-01T00:00:00Z"}'

UNDISTURBED: Final = ("Traceback", "was replaced", "considered dead")
"""What is in no log."""


@dataclass(frozen=True)
class Hand:
    """Something that an operator does.

    Attributes:
        act: does it.
        logged: what the log of at least one gateway says afterwards.
        quiet: nothing is published meanwhile, since that would be removed.
        present: whether absent sessions are present when their clients return.
        waiting: whether the message that waits for an absent session comes when the session is present.
        again: connected clients connect anew, with new sessions, since their records are gone.
    """

    act: Callable[[Look], Awaitable[Any]]
    logged: str = ""
    quiet: bool = False
    present: bool = True
    waiting: bool = True
    again: bool = False


async def _purge(look: Look, stream: str) -> None:
    await look.js.purge_stream(stream)


async def _remove(look: Look, stream: str) -> None:
    await look.js.delete_stream(stream)


async def _pause(look: Look) -> None:
    """Pause all consumers of sessions, of groups and of timers."""
    for stream in (MESSAGES, "$MQTT_out", "$MQTT_timers"):
        for name in await look.consumers(stream):
            answer = await look.nats.request(f"$JS.API.CONSUMER.PAUSE.{stream}.{name}", FOREVER, timeout=30)
            found = orjson.loads(answer.data)
            if "error" in found and found["error"]["err_code"] != 10014:  # a consumer that has gone meanwhile
                raise AssertionError(f"{name} cannot be paused: {found}")


def _on(stream: str, act: Callable[[Look, str], Awaitable[None]]) -> Callable[[Look], Awaitable[None]]:
    return lambda look: act(look, stream)


HANDS: Final = {
    "purge of $MQTT_msgs": Hand(
        _on(MESSAGES, _purge), "messages were removed before their time: somebody has purged it", True, waiting=False
    ),
    "purge of $MQTT_sess": Hand(
        _on(SESSIONS, _purge),
        "durable sessions are connected here: somebody has purged it",
        True,
        present=False,
        again=True,
    ),
    "removal of $MQTT_shared": Hand(_on(SHARED, _remove), quiet=True),
    "purge of $MQTT_shared": Hand(_on(SHARED, _purge), quiet=True),
    "removal of $MQTT_pos": Hand(_on(POSITIONS, _remove), present=False),
    "purge of $MQTT_pos": Hand(_on(POSITIONS, _purge), present=False),
    "pause of all consumers": Hand(_pause, "was paused, and is resumed"),
}
GONE: Final = "its position is gone from stream $MQTT_pos"


class Scene:
    """Gateways that use one regime of positions, traffic through all of them, and clients that are absent."""

    def __init__(self, setting: Setting, name: str, url: str, replicas: int, records: bool) -> None:
        self.setting = setting
        self.records = records
        self.name = name
        self.url = url
        self.chance = random.Random(f"{setting.seed}{name}")
        positions = ("--session-positions", "records" if records else "consumers")
        arguments = ("--gateway-lease", f"{LEASE}", "--stream-replicas", f"{replicas}", *positions)
        self.gateways = [setting.gateway(url, *arguments) for _ in range(2)]
        self.loads = [
            Workload(
                setting.directory / f"histories {name} {qos}",
                [gateway.port for gateway in self.gateways],
                qos=qos,
                rate=RATES[qos],
                version=version,
                prefix=f"{name}-q{qos}",
                restless=0.0,
                promises=Promises(leaders_change=replicas > 1, shared=True, sessions=False),
            )
            for qos, version in ((1, 4), (2, 5))
        ]
        self.violations: list[str] = []
        self.acts = self.absent = self.dropped = 0

    async def run(self) -> Result:
        """All acts in an order of chance, again and again."""
        hands = [what for what in HANDS if self.records or POSITIONS not in what]  # consumers have no positions
        async with looking(self.url) as look:
            for load in self.loads:
                await load.start()
            await self._flowing()
            for _ in range(ROUNDS_LONG if self.setting.long else ROUNDS):
                for what in self.chance.sample(hands, len(hands)):
                    await self._act(f"{self.acts} {what}", HANDS[what], look)
            return await self._end()

    async def _flowing(self) -> None:
        """Wait until messages of all publishers go through, to everybody."""
        before = [(load, load.acked) for load in self.loads]
        had = [(one, len(one.delivered)) for load in self.loads for one in load.subscribers]

        def flow() -> bool:
            return all(load.acked > count + 5 for load, count in before) and all(
                len(one.delivered) > count + 5 for one, count in had
            )

        await aeventually(flow, RECOVERY, what="messages that are acknowledged and delivered")

    async def _act(self, what: str, hand: Hand, look: Look) -> None:
        """Do one thing, and see what the gateways make of it."""
        before = [gateway.log.count(hand.logged) for gateway in self.gateways]
        absent = [Absent(self, f"{self.name}-{self.acts}-{version}{qos}", version, qos) for version, qos in ABSENT]
        for one in absent:
            await one.leave()
        if hand.quiet:
            await self._still()
        await asyncio.sleep(LOOKED)  # the gateways have looked at the streams
        count = len(await look.js.streams_info())
        await hand.act(look)
        for load in self.loads:
            load.nemesis.note("cut", victim=what)
        self.acts += 1
        await aeventually(partial(_has_streams, look, count), RECOVERY, what="streams that are made again")
        if hand.logged:
            await self._logged(what, hand.logged, before)
        if hand.again:
            await self._begin_anew()
        for load in self.loads:
            load.go_on()
        await self._flowing()
        for one in absent:
            await one.return_(what, hand)

    async def _logged(self, what: str, text: str, before: list[int]) -> None:
        def more() -> bool:
            return any(gateway.log.count(text) > count for gateway, count in zip(self.gateways, before, strict=True))

        try:
            await aeventually(more, RECOVERY)
        except AssertionError:
            self.violations.append(f"not logged: {what}")

    async def _still(self) -> None:
        """Publish no more until :meth:`Workload.go_on`, and wait until everything has come and is acknowledged."""
        await asyncio.gather(*(load.still(RECOVERY) for load in self.loads))

    async def _begin_anew(self) -> None:
        """Have all clients connect anew: nobody may find the session again whose record is gone."""
        for load in self.loads:
            counts = [(client, client.connections) for client in load.clients]
            self.dropped += len(counts)
            for client, _ in counts:
                client.drop()
            await aeventually(partial(_connected_again, counts), RECOVERY, what="clients that are connected again")
            self.violations += [
                f"not honest: {one.client_id} has session present, and its record was removed"
                for one, _ in counts
                if one.present
            ]

    async def _end(self) -> Result:
        verdicts = [await load.finish(RECOVERY) for load in self.loads]
        reconnects = sum(verdict.figures["reconnects"] for verdict in verdicts)
        figures: dict[str, int | float | str] = {
            "messages": sum(verdict.figures["acked"] for verdict in verdicts),
            "lost": sum(verdict.figures["lost"] for verdict in verdicts),
            "duplicated": sum(verdict.figures["duplicated"] for verdict in verdicts),
            "longest_pause_ms": max(verdict.figures["longest_pause_ms"] for verdict in verdicts),
            "acts": self.acts,
            "sessions of absent clients": self.absent,
            "disconnected": reconnects - self.dropped,
        }
        result = Result(figures, [*self.violations, *(line for one in verdicts for line in one.lines())])
        if reconnects > self.dropped:
            result.violations.append(f"disconnected: {reconnects - self.dropped} connections were lost")
        result.violations += [
            f"log: {text}" for text in UNDISTURBED for gateway in self.gateways if text in gateway.log
        ]
        return result


async def _has_streams(look: Look, count: int) -> bool:
    """Whether the gateways have made the streams again; who resumes a session before that is sent away, till later."""
    return len(await look.js.streams_info()) == count


def _connected_again(counts: list[tuple[ChaosClient, int]]) -> bool:
    """Whether clients have more connections than these, and have subscribed again."""
    return all(client.connections > count and client.answered for client, count in counts)


ABSENT: Final = ((4, 1), (4, 2), (5, 1), (5, 2))
"""Version and QoS of the clients that are absent during an act."""


class Absent:
    """A durable client that is away while something is done, with a message that waits for it."""

    def __init__(self, scene: Scene, name: str, version: int, qos: int) -> None:
        self.scene, self.name, self.version, self.qos = scene, name, version, qos
        self.topic = f"absent/{name}"

    def _port(self) -> int:
        return self.scene.chance.choice(self.scene.gateways).port

    async def _connect(self) -> RawClient:
        if self.version == 4:
            return await RawClient.connect(self._port(), self.name, clean=False)
        return await RawClient5.connect5(self._port(), self.name, clean=False, session_expiry_interval=KEPT)

    async def _publish(self, payload: bytes) -> None:
        async with await RawClient.connect(self._port(), f"{self.name}-publisher") as publisher:
            await publisher.deliver(self.topic, payload, self.qos)

    async def leave(self) -> None:
        """Subscribe, go, and have a message wait."""
        async with await self._connect() as client:
            await client.subscribe(self.topic, qos=self.qos)
            await client.disconnect()
        await self._publish(b"waits")
        self.scene.absent += 1

    async def return_(self, what: str, hand: Hand) -> None:
        """See that the session is honest: present with what waits for it, or not present."""
        violations, who = self.scene.violations, f"{self.name} after {what}"
        async with await self._connect() as client:
            present = client.session_present
            if present is not hand.present:
                violations.append(f"not honest: session present {present:d} for {who}")
            if not present:
                await self._subscribe(client)
            await self._publish(b"new")
            got = await self._until(client, b"new")
            expected = [b"waits"] * (present and hand.waiting) + [b"new"]
            if got != expected:
                violations.append(f"lost or too much: {got}, not {expected}, to {who}")
            await client.disconnect()
        if not present and not hand.again and not any(GONE in gateway.log for gateway in self.scene.gateways):
            violations.append(f"not logged: the position of {who} is gone")

    async def _subscribe(self, client: RawClient) -> None:
        with contextlib.suppress(AssertionError):
            await client.subscribe(self.topic, qos=self.qos)

    async def _until(self, client: RawClient, last: bytes) -> list[bytes]:
        """Payloads that come, up to ``last``."""
        found: list[bytes] = []
        while not found or found[-1] != last:
            try:
                packet = await client.expect(Publish, RECOVERY)
            except AssertionError:
                break
            if topic_of(packet) == self.topic:
                found.append(packet.payload)
            await client.complete(packet)
        return found


async def _one(setting: Setting, records: bool) -> Result:
    server = await asyncio.to_thread(setting.nats)
    name = f"one-{'records' if records else 'consumers'}"
    return await (await asyncio.to_thread(Scene, setting, name, server.url, 1, records)).run()


async def _three(setting: Setting, records: bool) -> Result:
    cluster = await asyncio.to_thread(setting.cluster)
    name = f"three-{'records' if records else 'consumers'}"
    scene = await asyncio.to_thread(Scene, setting, name, cluster.url, 3, records)
    await cluster.settled(MESSAGES)
    return await scene.run()


async def _run(setting: Setting) -> Result:
    """With sessions that have no consumers, and with consumers; in the long version also with three servers."""
    result, consumers = await asyncio.gather(_one(setting, True), _one(setting, False))
    rows = {"sessions with consumers": consumers}
    if setting.long:
        rows["three nats-servers"] = await _three(setting, True)
        rows["three nats-servers, sessions with consumers"] = await _three(setting, False)
    result.peers |= rows
    for name, one in rows.items():
        result.violations += [f"{line} ({name})" for line in one.violations]
    return result


EXPERIMENTS = [
    Experiment(
        "R30",
        "somebody purges `$MQTT_msgs`, `$MQTT_sess`, removes or purges `$MQTT_shared`, `$MQTT_pos`, pauses consumers",
        "that is logged; a session is present with all that nobody has removed, or not present; nobody is disconnected",
        _run,
    ),
]
