# SPDX-License-Identifier: Apache-2.0
"""R29: two of three nats-servers are killed for a minute, so that JetStream has no majority; then they are back.

Each server has a gateway; those of the killed ones move to the server that is left. Meanwhile clients publish,
subscribe, and die with a will; others connect, some of them as clients that are connected already.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import nats
import nats.errors

from mqtt_nats.pubsub.backfill import BACKFILL_TIMEOUT
from tests.chaos.busy import Busy
from tests.chaos.checker import Promises, Verdict, Violation
from tests.chaos.client import ChaosClient
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.experiments.elections import elections
from tests.chaos.history import Event, History, read
from tests.chaos.looking import looking
from tests.chaos.messages import ClientWill, Message
from tests.chaos.workload import Workload
from tests.harness.cluster import Cluster
from tests.harness.nats import NatsServer
from tests.harness.waiting import aeventually

MESSAGES: Final = "$MQTT_msgs"

OUTAGES: Final = (8.0,)
"""Seconds without a majority, for each round."""
OUTAGES_LONG: Final = (60.0, 100.0)

RATES: Final = {1: 10.0, 2: 3.0}
"""Messages per second of each publisher, by QoS."""

GRACE: Final = 1.0
GRACE_BEFORE: Final = 4.0
"""Seconds after the kills in which an answer may come; the second: to what was sent before them, it was on its way."""

LATE: Final = 2.0
LATE_SHORT: Final = 5.0
"""Seconds after the first answers in which work goes on; more in the short version, which runs beside other tests:
for each process that waits for a processor as much again, and as long as this process has once not run."""

RECOVERY: Final = 120.0
"""Seconds in which leaders are elected, and everything that has waited is done."""

KEEP_ALIVE: Final = 30
"""Seconds; clients ask for an answer twice in this time."""

EXPIRY: Final = 86_400
"""Session expiry interval of durable sessions, in seconds (5.0)."""

HERALDED: Final = 10
"""Messages to a session that has moved."""

_STREAMS: Final = (MESSAGES, "$MQTT_rmsgs", "$MQTT_sess", "$MQTT_out", "$MQTT_shared", "$MQTT_wills", "$MQTT_timers")

ASKED: Final = {
    "$MQTT.msgs.probe": b'"seq"',
    "$MQTT.sess.probe": b'"seq"',
    "$MQTT.qos2.in.probe.1": b'"seq"',
    "$KV.MQTT_gateways.probe": b'"seq"',
    "$JS.API.CONSUMER.DELETE.$MQTT_msgs.probe": b"consumer not found",
    **{f"$JS.API.STREAM.INFO.{stream}": b'"state"' for stream in _STREAMS},
}
"""What is asked whom clients wait for, the leaders of streams and of JetStream's administration: subject, answer."""

_CONFIG: Final = "logtime_utc: true\n"


class Scene:
    """Three nats-servers with a gateway each, and clients of both versions and QoS at all gateways."""

    def __init__(self, setting: Setting, name: str, *arguments: str) -> None:
        self.setting = setting
        self.name = name
        self.arguments = ("--stream-replicas", "3", *arguments)
        self.chance = random.Random(f"{setting.seed}{name}")
        self.late: dict[str, float] = {}
        """Longest time from the first answers until somebody went on, in seconds, by what it did."""
        self.busy = Busy()
        self.violations: list[str] = []
        self.apart: list[History] = []
        """Of clients whose sessions have two connections, and of who publishes to them: not for the checker."""
        self.outages: list[tuple[int, int]] = []
        """When each round's kills were done, and when all leaders answered again (``time.monotonic_ns``)."""
        self.kills = self.meanwhile = self.moved = 0
        self.wills: set[Message] = set()
        """Those of clients that have died."""

    async def begin(self) -> None:
        """Start everything; messages flow."""
        setting = self.setting
        self.cluster: Cluster = await asyncio.to_thread(setting.cluster, config=_CONFIG)
        self.gateways = [
            await asyncio.to_thread(setting.gateway, server.url, *self.arguments) for server in self.cluster.servers
        ]
        self.ports = [gateway.port for gateway in self.gateways]
        await self.cluster.settled(MESSAGES)
        self.loads = [
            Workload(
                setting.directory / f"histories {self.name} {qos}",
                self.ports,
                publishers=3,
                subscribers=3,
                qos=qos,
                rate=RATES[qos],
                version=version,
                keepalive=KEEP_ALIVE,
                prefix=f"{self.name}-q{qos}",
                restless=0.0,  # nobody has a reason to connect again
                promises=Promises(leaders_change=True, shared=True),
            )
            for qos, version in ((1, 4), (2, 5))
        ]
        self.clean = [
            (load, self.client(load, f"clean-{number}", number, 4 + number % 2, clean=True))
            for load in self.loads
            for number in range(3)
        ]
        self.asking = [self.client(self.loads[0], f"asks-{version}", version, version) for version in (4, 5)]
        self.herald = self.client(None, "herald", 0, 4)
        for load, client in self.clean:
            await client.connect(RECOVERY)
            await client.subscribe(load.filter, load.qos, RECOVERY)
        for client in (*self.asking, self.herald):
            await client.connect(RECOVERY)
        for load in self.loads:
            await load.start()
        await self.flowing()

    def client(
        self,
        load: Workload | None,
        name: str,
        at: int,
        version: int,
        *,
        clean: bool = False,
        stay: bool = True,
        will: str = "",
    ) -> ChaosClient:
        """A client at the gateway number ``at``; the checker of a workload reads its history, or nobody's does."""
        name = f"{load.filter[:-2] if load is not None else self.name}-{name}"
        if load is None:
            history = History(self.setting.directory / f"{name}.jsonl")
            self.apart.append(history)
        else:
            history = load.history(name)
        return ChaosClient(
            name,
            [self.ports[at % 3]],
            history,
            version,
            clean,
            expiry=0 if clean else EXPIRY,
            keepalive=KEEP_ALIVE,
            stay=stay,
            will=ClientWill(will, qos=2) if will else None,
        )

    def events(self) -> list[Event]:
        """Everything that was written down by anybody."""
        return [
            *(one for load in self.loads for one in load.events()),
            *read(history.path for history in self.apart),
        ]

    async def flowing(self) -> None:
        """Wait until the messages of every publisher are acknowledged, and everybody gets messages."""
        sent = [(client, client.acked) for load in self.loads for client in load.publishers]
        had = [(client, len(client.delivered)) for load in self.loads for client in load.subscribers]
        had += [(client, len(client.delivered)) for _, client in self.clean]

        def flow() -> bool:
            return all(client.acked > count for client, count in sent) and all(
                len(client.delivered) > count for client, count in had
            )

        await aeventually(flow, RECOVERY, what="messages that are acknowledged and delivered")

    async def round(self, number: int, seconds: float) -> None:
        """Kill two servers, of which one leads the messages in every other round; start them after ``seconds``."""
        leader = await self.cluster.leader(MESSAGES)
        others = [server for server in self.cluster.servers if server is not leader]
        survivor = leader if number % 2 else self.chance.choice(others)
        victims = [server for server in self.cluster.servers if server is not survivor]
        movers = [Mover(self, number, version, clean) for version, clean in ((4, False), (5, False), (5, True))]
        for mover in movers:
            await mover.begin()
        dying = [
            self.client(
                load, f"dies-{number}-{at}", at, 4 + at % 2, clean=True, stay=False, will=f"{load.filter[:-2]}-wills/x"
            )
            for load in self.loads
            for at in range(3)
        ]
        for one in dying:
            await one.connect(RECOVERY)
        begun = time.monotonic_ns()
        await asyncio.gather(*(asyncio.to_thread(server.kill) for server in victims))
        self.loads[0].nemesis.note("killed", victims=len(victims))
        self.kills += len(victims)
        killed = time.monotonic_ns()
        await asyncio.gather(*(one.abandon() for one in dying))
        self.wills.update(*(one.wills_due for one in dying))
        claims = [asyncio.create_task(mover.claim()) for mover in movers]
        asked = [asyncio.create_task(one.subscribe(f"asked/{number}", 1, seconds + RECOVERY)) for one in self.asking]
        await asyncio.sleep(max(0.0, seconds - (time.monotonic_ns() - begun) / 1e9))
        self._judge_outage(killed, time.monotonic_ns())
        await asyncio.gather(*(asyncio.to_thread(server.start) for server in victims))
        answered = await first_answers(survivor)
        self.outages.append((killed, answered))
        await asyncio.gather(self.flowing(), *claims, *asked)
        self._judge_recovery(answered)
        for mover in movers:
            await mover.end()
        await self._settled()

    async def _settled(self) -> None:
        """Wait until every replica is complete, the gateways are ready, and wills have come."""
        for stream in (MESSAGES, "$MQTT_rmsgs", "$MQTT_sess", "$MQTT_qos2in", "$MQTT_shared", "KV_MQTT_gateways"):
            await self.cluster.settled(stream)
        for gateway in self.gateways:
            await aeventually(partial(getattr, gateway, "ready"), RECOVERY, what="a gateway that is ready again")
        with contextlib.suppress(AssertionError):  # the checker says which are missing
            await aeventually(self._willed, RECOVERY)

    def _willed(self) -> bool:
        return self.wills <= set().union(*(load.watcher.delivered for load in self.loads))

    def _judge_outage(self, killed: int, end: int) -> None:
        """See that nothing was acknowledged from the kills to ``end`` (``time.monotonic_ns``).

        An answer to what was sent before the kills may have been on its way.
        """
        events = self.events()
        sent = first_sent(events)

        def since(one: Event) -> int:
            return killed + int((GRACE if sent.get(key_of(one), 0) > killed else GRACE_BEFORE) * 1e9)

        found = [one for one in confirmed(events) if since(one) < one.t < end]
        self.meanwhile += len(found)
        self.violations += [f"acknowledged without a majority: {one.what} of {one.who}" for one in found[:5]]

    def _judge_recovery(self, answered: int) -> None:
        """Note how long after the first answers of all streams (``time.monotonic_ns``) everybody went on."""
        first = {"acknowledgement": "acked", "SUBACK": "subscribed", "CONNACK": "connected"}
        self.busy.look()
        events = self.events()
        for kind, what in first.items():
            self._note(kind, answered, _firsts(events, what, answered).values())
        # A consumer has a leader of its own. It may be elected later than those of the streams.
        last = max([at for at, what in elections(self.cluster) if " > " in what], default=0)
        self._note("delivery", max(answered, last), _firsts(events, "delivered", answered).values())

    def _note(self, kind: str, since: int, times: Iterable[int]) -> None:
        longest = max((at - since for at in times), default=0) / 1e9
        self.late[kind] = max(self.late.get(kind, 0.0), longest)
        if longest > (LATE if self.setting.long else self.busy.allowed(LATE_SHORT)):
            self.violations.append(f"late: {kind} {longest:.1f} s after the first answers")

    async def end(self) -> Result:
        """Wait for what is still to come, and judge."""
        await asyncio.gather(*(load.still(RECOVERY) for load in self.loads))
        verdicts = [await load.finish(RECOVERY) for load in self.loads]
        sent, clean = first_sent(self.events()), {client.client_id for _, client in self.clean}
        for verdict in verdicts:
            verdict.violations = [one for one in verdict.violations if not excused(one, clean, sent, self.outages)]
        for client in (*(one for _, one in self.clean), *self.asking, self.herald):
            await client.close()
        missing = [
            f"lost: {client.client_id} has not got {of}/{n}, and has been connected all the time"
            for load, client in self.clean
            for of, n in _acknowledged(load) - client.delivered
        ]
        lost = disconnected(self.events())
        figures: dict[str, int | float | str] = {
            "messages": _sum(verdicts, "acked"),
            "kills": self.kills,
            "lost": _sum(verdicts, "lost") + len(missing),
            "duplicated": _sum(verdicts, "duplicated"),
            "longest_pause_ms": max(verdict.figures["longest_pause_ms"] for verdict in verdicts),
            "repeated": _sum(verdicts, "repeated"),
            "disconnected": len(lost),
            "acknowledged without a majority": self.meanwhile,
            "sessions moved": self.moved,
            "wills": _sum(verdicts, "wills"),
        }
        figures |= {f"{kind} after": f"{seconds:.1f} s" for kind, seconds in self.late.items()}
        async with looking(self.cluster.url) as look:
            stored = [await look.count(MESSAGES, f"$MQTT.msgs.{load.filter[:-2]}.>") for load in self.loads]
        figures["stored"] = sum(stored)
        lines = [*self.violations, *missing[:5], *lost[:5], *(line for one in verdicts for line in one.lines())]
        if figures["stored"] != figures["messages"]:
            lines.append(f"stored: {figures['stored']} messages, {figures['messages']} were acknowledged")
        return Result(figures, lines)


class Mover:
    """A client that is connected, and that connects to another gateway as well while JetStream has no majority."""

    def __init__(self, scene: Scene, number: int, version: int, clean: bool) -> None:
        self.scene = scene
        self.version = version
        self.clean = clean
        name = f"moves-{number}-{version}{clean}"
        at = scene.chance.randrange(3)
        self.former = scene.client(None, name, at, version, clean=clean, stay=False)
        self.latter = scene.client(None, f"{name}-again", at + 1, version, clean=clean)
        self.latter.client_id = self.former.client_id
        self.topic = f"moved/{name}"

    async def begin(self) -> None:
        """Connect and subscribe."""
        await self.former.connect(RECOVERY)
        await self.former.subscribe(self.topic, 2, RECOVERY)

    async def claim(self) -> None:
        """Connect once more, again and again until that is accepted."""
        await self.latter.connect(max(OUTAGES_LONG) + RECOVERY)

    async def end(self) -> None:
        """See that the former connection was told, and that the session goes on with the latter one."""
        scene, former, latter = self.scene, self.former, self.latter
        await aeventually(lambda: former.link is None, RECOVERY, what="the end of a connection whose session has moved")
        scene.moved += 1
        told = any(one.what == "taken-over" for one in read([former.history.path]))
        if self.version == 5 and not told:
            scene.violations.append(f"moved without a reason: {former.client_id}")
        if latter.present == self.clean:
            scene.violations.append(f"session gone: {former.client_id} was connected")
        if not self.clean:
            before = scene.herald.acked
            for n in range(1, HERALDED + 1):
                await scene.herald.publish(self.topic, before + n, 1 + n % 2)
            with contextlib.suppress(AssertionError):
                await aeventually(lambda: len(latter.delivered) >= HERALDED, RECOVERY)
            if len(latter.delivered) != HERALDED or former.delivered:
                got = len(latter.delivered), len(former.delivered)
                scene.violations.append(f"lost: {former.client_id} got {got} of {HERALDED} messages, here and there")
        await former.close()
        await latter.close()


async def first_answers(survivor: NatsServer) -> int:
    """Wait until all leaders have answered; when the last of them first did (``time.monotonic_ns``)."""
    client = await nats.connect(survivor.url)

    async def answer(subject: str, text: bytes) -> None:
        payload = b"" if subject.startswith("$JS.API.") else b"probe"

        async def answered() -> bool:
            try:
                return text in (await client.request(subject, payload, timeout=0.3)).data
            except (nats.errors.Error, TimeoutError):
                return False

        await aeventually(answered, RECOVERY, what=f"an answer to {subject}")

    try:
        await asyncio.gather(*(answer(*one) for one in ASKED.items()))
    finally:
        await client.close()
    return time.monotonic_ns()


def confirmed(events: Iterable[Event]) -> list[Event]:
    """What can only be said when it is stored: PUBACK, PUBCOMP, SUBACK and CONNACK of durable sessions."""
    return [
        one
        for one in events
        if one.what == "acked" or (one.what in {"subscribed", "connected"} and "clean" not in one.who)
    ]


def key_of(event: Event) -> tuple[str, str, object]:
    """What an event is about: a message, a subscription or a connection of a client."""
    kind = {"acked": "publish", "subscribed": "subscribe", "connected": "connect"}.get(event.what, event.what)
    return event.who, kind, {"publish": event.n, "subscribe": event.filter, "connect": event.conn}.get(kind)


def first_sent(events: Iterable[Event]) -> dict[tuple[str, str, object], int]:
    """When each message, SUBSCRIBE and CONNECT was sent first (``time.monotonic_ns``)."""
    found: dict[tuple[str, str, object], int] = {}
    for one in events:
        if one.what in {"publish", "subscribe", "connect"}:
            key = key_of(one)
            found[key] = min(found.get(key, one.t), one.t)
    return found


def excused(
    violation: Violation,
    clean: Collection[str],
    sent: Mapping[tuple[str, str, object], int],
    outages: Iterable[tuple[int, int]],
) -> bool:
    """Whether a clean session got late what it had missed in an outage of more than 30 s: see docs/promises.md.

    Args:
        clean: client ids of clean sessions.
        sent: when each message was sent first, see `first_sent`.
        outages: begin and end of each, in nanoseconds.
    """
    if violation.kind != "out of order" or violation.who not in clean or violation.message is None:
        return False
    of, n = violation.message
    at = sent[of, "publish", n]
    return any(
        killed - GRACE_BEFORE * 1e9 < at < answered and answered - killed > BACKFILL_TIMEOUT * 1e9
        for killed, answered in outages
    )


def disconnected(events: Sequence[Event]) -> list[str]:
    """A line for each connection of clients that stay which has ended without being asked to."""
    refused = {one.conn for one in events if one.what == "connect"} - {
        one.conn for one in events if one.what == "connected"
    }
    return [
        f"disconnected: {one.who}, {one.reason}"
        for one in events
        if one.what == "lost" and one.conn not in refused and "moves-" not in one.who
    ]


def _firsts(events: Iterable[Event], what: str, since: int) -> dict[str, int]:
    """When each client has first done something after ``since``."""
    found: dict[str, int] = {}
    for one in events:
        if one.what == what and one.t > since:
            found[one.who] = min(found.get(one.who, one.t), one.t)
    return found


def _acknowledged(load: Workload) -> set[tuple[str, int]]:
    names = {client.client_id for client in load.publishers}
    return {(one.who, one.n) for one in load.events() if one.what == "acked" and one.who in names}


def _sum(verdicts: Iterable[Verdict], name: str) -> int:
    return sum(verdict.figures[name] for verdict in verdicts)


async def _regime(setting: Setting, name: str, *arguments: str) -> Result:
    scene = Scene(setting, name, *arguments)
    await scene.begin()
    async with scene.busy.watched():
        for number, seconds in enumerate(OUTAGES_LONG if setting.long else OUTAGES):
            await scene.round(number, seconds)
    return await scene.end()


async def _run(setting: Setting) -> Result:
    """As gateways are by default; in the long version also with sessions that have no consumers."""
    result = await _regime(setting, "default")
    if setting.long and not setting.positions:
        records = await _regime(setting, "records", "--session-positions", "records")
        result.peers["sessions without consumers"] = records
        result.violations += [f"{line} (sessions without consumers)" for line in records.violations]
    return result


EXPERIMENTS = [
    Experiment(
        "R29",
        "two of three nats-servers are killed, and are back after 60 to 100 s: no majority meanwhile",
        "nobody is disconnected, nothing acknowledged meanwhile; 2 s after the first answers all goes on; nothing lost",
        _run,
    ),
]
