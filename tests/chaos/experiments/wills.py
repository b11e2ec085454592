# SPDX-License-Identifier: Apache-2.0
"""R8: wills are published once or not at all, and what has a deadline keeps it, also while no gateway runs."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from mqtt_nats.codec import Publish, Will
from mqtt_streams.hashing import name_hash
from mqtt_streams.timers import EXPIRY, timer_subject
from mqtt_streams.timers import STREAM as TIMERS
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.looking import Look, looking
from tests.chaos.rival import Device, Rival
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.rawclient5 import RawClient5

LEASE = 4  # seconds: a living gateway that waits for a processor does not pass for dead
ROUNDS_LONG = 6
EACH = 3
EACH_LONG = 30
"""Clients to which the same happens."""

SHORT = 5
"""A delay, or a session expiry interval, that passes (seconds)."""
LONG = 600
"""One that does not."""

PATIENCE = 60.0
"""Seconds in which what is due has happened."""

RESOLUTION = 0.3
"""Seconds by which JetStream may be early: it counts in quarters."""


@dataclass
class Expected:
    """A will that was accepted, and what is to become of it."""

    topic: str
    qos: int
    why: str
    fewest: int = 1
    most: int = 1
    begun: float = 0.0
    """A time before CONNECT was sent."""
    not_before: float = 0.0


@dataclass
class Round:
    """One round: what was begun, and what it has to come to."""

    number: int
    each: int
    random: random.Random
    expected: list[Expected] = field(default_factory=list)
    clients: list[Rival] = field(default_factory=list)
    _count: Any = field(default_factory=itertools.count)

    async def client(
        self,
        gateway: Gateway,
        why: str,
        *,
        count: int = 1,
        delay: int = 0,
        expiry: int = LONG,
        version: int = 5,
        qos: int = -1,
        keepalive: int = 0,
        name: str = "",
        clean: bool = True,
    ) -> tuple[Rival, Expected]:
        """Connect a client whose will is to be published ``count`` times, 0 or 1."""
        number = next(self._count)
        qos = number % 3 if qos < 0 else qos
        topic = f"wills/{self.number}/{number}"
        properties: Any = {"will_delay_interval": delay} if delay else None
        client = Rival(gateway.port, name or f"will-{self.number}-{number}", version, topic)
        will = Will(topic, topic.encode(), qos, False, properties)
        begun = time.time()
        await client.connect(clean=clean, expiry=expiry, keepalive=keepalive, will=will)
        assert await client.entered(), f"{why}: not accepted, {client.reason}"
        self.clients.append(client)
        expected = Expected(topic, qos, why, count, count, begun)
        self.expected.append(expected)
        return client, expected

    async def close(self) -> None:
        """Break what is left."""
        for client in self.clients:
            await client.drop()


class Watch:
    """What becomes of the wills: as NATS clients see it, as it is stored, and as a durable session gets it."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self.device = Device("")
        self.bare: Counter[bytes] = Counter()
        self.connected: Rival | None = None

    async def begin(self) -> None:
        """Have core NATS counted."""

        async def arrived(message: Any) -> None:
            self.bare[message.data] += 1

        await self.look.nats.subscribe("wills.>", cb=arrived)
        await fence(self.look.nats)

    async def attach(self, gateway: Gateway, *, first: bool = False) -> None:
        """Receive through a gateway from now on."""
        if self.connected is not None:
            await self.connected.drop()
        rival = self.connected = Rival(gateway.port, "watch", 5, "")
        await rival.connect(clean=first, expiry=LONG)
        assert await rival.entered()
        if first:
            await rival.subscribe("wills/#", 2)
        elif not rival.present:
            raise AssertionError("the session of the watching client is gone")

    async def stored(self) -> dict[str, list[float]]:
        """When the stored wills were stored, by topic."""
        found: dict[str, list[float]] = {}
        for one in await self.look.messages("$MQTT.msgs.wills.>"):
            found.setdefault(one.payload.decode(), []).append(
                datetime.fromisoformat(one.time[:26] + "+00:00").timestamp()
            )
        return found

    def receive(self) -> None:
        """Do what packets that have come ask for."""
        if self.connected is not None:
            self.device.work(self.connected, 100_000)


async def _alive(round_: Round, near: Gateway, far: Gateway) -> None:
    """Whatever may end a connection while its gateway runs."""
    dice = round_.random

    async def quit(reason: int, count: int) -> None:
        client, _ = await round_.client(near, f"DISCONNECT {reason:#04x}", count=count)
        client.disconnect(reason)

    async def old_quit() -> None:
        client, _ = await round_.client(near, "DISCONNECT of 3.1.1", count=0, version=4)
        client.disconnect()

    async def broken(version: int) -> None:
        client, _ = await round_.client(near, f"broken, version {version}", version=version, clean=dice.random() < 0.5)
        await client.drop()

    async def silent() -> None:
        _, expected = await round_.client(near, "keep alive", keepalive=1)
        expected.not_before = expected.begun + 1 - RESOLUTION

    async def taken(version: int, delay: int, clean: bool) -> None:
        count = 0 if delay and not clean else 1
        why = f"taken over, version {version}, delay {delay}, clean start {clean}"
        client, _ = await round_.client(near, why, count=count, delay=delay, version=version)
        other = dice.choice((near, far))
        after, _ = await round_.client(
            other, "left after a takeover", count=0, version=version, name=client.client_id, clean=clean
        )
        after.disconnect()

    async def delayed(delay: int, expiry: int, back: bool) -> None:
        why = f"delay {delay}, session expiry {expiry}, {'back in time' if back else 'not back'}"
        client, expected = await round_.client(near, why, count=int(not back), delay=delay, expiry=expiry)
        expected.not_before = time.time() + min(delay, expiry) - RESOLUTION
        await client.drop()
        if back:
            after, _ = await round_.client(far, "back", count=0, name=client.client_id, clean=False, delay=delay)
            if not after.present:
                raise AssertionError(f"{why}: the session is gone")
            after.disconnect()

    def all_of() -> Iterator[Awaitable[None]]:
        yield from (quit(0, 0), quit(4, 1), old_quit(), broken(4), broken(5), silent())
        for clean in (False, True):
            yield from (taken(4, 0, clean), taken(5, 0, clean), taken(5, LONG, clean))
        yield from (delayed(SHORT, LONG, False), delayed(LONG, SHORT, False), delayed(LONG, LONG, True))

    for _ in range(round_.each):
        await asyncio.gather(*all_of())


async def _on_a_dying_gateway(round_: Round, dying: Gateway) -> list[Rival]:
    """Clients of a gateway that is about to be killed; returns those that come back elsewhere, in time."""
    back = []
    for _ in range(round_.each):
        for version in (4, 5):
            await round_.client(dying, "gateway killed", version=version)
            left, _ = await round_.client(dying, "left before its gateway was killed", count=0, version=version)
            left.disconnect()
            await left.answers(PATIENCE)
        _, expected = await round_.client(dying, "gateway killed, delayed", delay=SHORT)
        # Counted from when the gateway was last known to be alive.
        expected.not_before = expected.begun + SHORT - LEASE - RESOLUTION
        client, _ = await round_.client(dying, "gateway killed, delayed, back elsewhere", count=0, delay=LONG)
        back.append(client)
    return back


async def _with_gateways(round_: Round, gateways: list[Gateway]) -> None:
    dying, near, far = gateways
    back = await _on_a_dying_gateway(round_, dying)
    await asyncio.gather(_alive(round_, near, far), asyncio.to_thread(dying.kill))
    for client in back:
        after, _ = await round_.client(far, "back elsewhere", count=0, name=client.client_id, clean=False, delay=LONG)
        if not after.present:
            raise AssertionError("the session of a killed gateway's client is gone")
        after.disconnect()


class Absence:
    """What has deadlines that pass, or do not, while no gateway runs."""

    def __init__(self, round_: Round, gateways: list[Gateway], look: Look, result: Result) -> None:
        self.round = round_
        self.gateways = gateways
        self.look = look
        self.result = result
        self.names = {
            (state, expiry): f"absence-{round_.number}-{state}-{expiry}"
            for state in ("connected", "gone")
            for expiry in (SHORT, LONG)
        }
        self.killed = 0.0
        self.had: dict[str, int] = {}
        """How many messages clients that were connected to the end have got; one may have expired on its way."""

    async def begin(self) -> None:
        """Sessions, some of whose clients have gone, and messages for them."""
        first, second = self.gateways
        topic = f"absence/{self.round.number}"
        connected: dict[str, Rival] = {}
        for (state, expiry), name in self.names.items():
            client = Rival(first.port, name, 5, "")
            await client.connect(clean=True, expiry=expiry)
            assert await client.entered()
            self.round.clients.append(client)
            await client.subscribe(topic, 1)
            if state == "gone":
                await client.drop()
            else:
                connected[name] = client
        for _ in range(self.round.each):
            gone, expected = await self.round.client(second, "delay passed while no gateway ran", delay=SHORT)
            expected.not_before = time.time() + SHORT - RESOLUTION
            await gone.drop()
            await self.round.client(first, "all gateways killed")
            _, expected = await self.round.client(second, "all gateways killed, delayed", delay=SHORT)
            expected.not_before = expected.begun + SHORT - LEASE - RESOLUTION
        publisher = await RawClient5.connect5(second.port, "")
        for payload, interval in ((b"short", SHORT), (b"long", LONG), (b"for good", None)):
            properties: Any = {} if interval is None else {"message_expiry_interval": interval}
            publisher.publish5(topic, payload, 1, **properties)
            await publisher.packet()
        publisher.drop()
        deadline = time.monotonic() + PATIENCE
        while not all([await self._timed(name) for (state, _), name in self.names.items() if state == "gone"]):
            assert time.monotonic() < deadline, "the deadlines of absent sessions are not stored"
            await asyncio.sleep(0.05)
        deadline = time.monotonic() + PATIENCE
        while not all(b"for good" in _payloads(one) for one in connected.values()):
            assert time.monotonic() < deadline, "messages do not come"
            await asyncio.sleep(0.05)
        self.had = {name: len(_payloads(one)) for name, one in connected.items()}
        for gateway in self.gateways:
            await asyncio.to_thread(gateway.kill)
        self.killed = time.time()

    async def _timed(self, name: str) -> bool:
        """Whether the deadline of an absent session is stored; on a slow machine it may have passed by now."""
        timer = timer_subject(EXPIRY, name_hash(name))
        return bool(await self.look.count(TIMERS, timer)) or await self.look.session(name) is None

    async def end(self, gateway: Gateway) -> None:
        """Whose session is there, with which messages."""
        for (state, expiry), name in self.names.items():
            if expiry == SHORT:
                continue
            client = await RawClient5.connect5(gateway.port, name, clean=False, session_expiry_interval=0)
            if not client.session_present:
                self.result.violations.append(f"a session ended early ({state} when all gateways were killed)")
            else:
                await self._messages(client, state, self.had.get(name, 2))
            client.drop()
        deadline = time.monotonic() + PATIENCE
        short = [name for (_, expiry), name in self.names.items() if expiry == SHORT]
        for name in short:
            while await self.look.session(name) is not None:
                if time.monotonic() > deadline:
                    self.result.violations.append(f"the session {name} did not end")
                    break
                await asyncio.sleep(0.05)

    async def _messages(self, client: RawClient5, state: str, count: int) -> None:
        found = {}
        # What was sent before it expired is sent again: the client may have it.
        for one in await client.messages(count, PATIENCE):
            await client.complete(one)
            if not (state == "connected" and one.dup and one.payload == b"short"):
                found[one.payload] = (one.properties or {}).get("message_expiry_interval")
        await client.quiet()
        left = found.get(b"long")
        if set(found) != {b"long", b"for good"} or found[b"for good"] is not None:
            self.result.violations.append(f"{state}: not the messages that have not expired: {found}")
        elif left is None or left > LONG - SHORT + 1:
            self.result.violations.append(f"{state}: a message has {left} s left of {LONG}, after {SHORT} s and more")


def _payloads(client: Rival) -> list[bytes]:
    """The messages that a client has got and not answered."""
    return [one.payload for one in client.inbox if isinstance(one, Publish)]


async def _judge(watch: Watch, rounds: list[Round], result: Result) -> None:
    """Wait until every will that is due has come; then nothing more may come."""
    expected = [one for each in rounds for one in each.expected]
    deadline = time.monotonic() + PATIENCE
    found: dict[str, list[float]] = {}
    while time.monotonic() < deadline:
        watch.receive()
        found = await watch.stored()
        given = Counter(watch.device.given)
        late = [
            one
            for one in expected
            if (len(found.get(one.topic, ())) if one.qos else watch.bare[one.topic.encode()]) < one.fewest
            or (one.qos and given[one.topic.encode()] < one.fewest)
        ]
        if not late:
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(2 * LEASE)  # what should not come has this time to do so
    watch.receive()
    found = await watch.stored()
    given = Counter(watch.device.given)
    lateness = [0.0]
    for one in expected:
        times = found.get(one.topic, [])
        count = len(times) if one.qos else watch.bare[one.topic.encode()]
        if not one.fewest <= count <= one.most:
            result.violations.append(f"{one.why}: QoS {one.qos} will published {count} times, not {one.fewest}")
        elif one.qos and times and times[0] < one.not_before:
            result.violations.append(f"{one.why}: will published {one.not_before - times[0]:.2f} s early")
        elif times and one.not_before:
            lateness.append(times[0] - one.not_before)
        received = given[one.topic.encode()]
        if one.qos and (received < count or (one.qos == 2 and received > 1)):
            result.violations.append(f"{one.why}: QoS {one.qos} will received {received} times")
    result.figures["wills"] = len(expected)
    result.figures["to be published"] = sum(one.fewest for one in expected)
    result.figures["published"] = sum(
        len(found.get(one.topic, ())) if one.qos else watch.bare[one.topic.encode()] for one in expected
    )
    result.figures["delayed ones, latest after its time, s"] = round(max(lateness), 1)


async def run(setting: Setting) -> Result:
    """Run it."""
    result = Result()
    server = setting.nats()
    dice = random.Random(setting.seed)
    arguments = ("--gateway-lease", str(LEASE), "--log-level", "warning")
    gateways = [setting.gateway(server.url, *arguments) for _ in range(3)]
    rounds: list[Round] = []
    kills = down = 0.0
    async with looking(server.url) as look:
        watch = Watch(look)
        await watch.begin()
        for number in range(ROUNDS_LONG if setting.long else 1):
            each = EACH_LONG if setting.long else EACH
            round_ = Round(number, each, dice)
            rounds.append(round_)
            await watch.attach(gateways[2], first=not number)
            await _with_gateways(round_, gateways)
            await _judge(watch, rounds, result)
            absence = Absence(round_, gateways[1:], look, result)
            watch.receive()
            await absence.begin()
            kills += 3
            await asyncio.sleep(max(0.0, absence.killed + SHORT + LEASE - time.time()))
            down += time.time() - absence.killed
            for gateway in gateways:
                await asyncio.to_thread(gateway.start)
            await watch.attach(gateways[2])
            await absence.end(gateways[1])
            await _judge(watch, rounds, result)
            await round_.close()
        if left := await look.left("$MQTT_wills", PATIENCE):
            result.violations.append(f"{left} wills are still stored")
        if watch.connected is not None:
            await watch.connected.drop()
    result.violations = list(dict.fromkeys(result.violations))
    result.figures |= {"rounds": len(rounds), "gateways killed": int(kills), "without any gateway, s": round(down)}
    return result


EXPERIMENTS = [
    Experiment(
        "R8",
        "connections end in every way, gateways are killed, all at once too: wills, session and message expiry",
        "each will exactly once or not at all, as its client has left; no deadline early, none forgotten",
        run,
    )
]
