# SPDX-License-Identifier: Apache-2.0
"""R7, takeover storm: connections through several gateways claim one session at the same moment, again and again."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

from mqtt_nats.transport.turns import STANDSTILL
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.looking import Look, looking
from tests.chaos.rival import Device, Rival
from tests.harness.gateway import Gateway
from tests.harness.rawclient import RawClient

GATEWAYS = 3
ROUNDS = 25
ROUNDS_LONG = 1000

CLIENT = "storm"
FED = "storm/fed"
"""Topic of what the session is sent."""
MADE = "storm/made"
"""Topic of what the session's client publishes at QoS 2, wherever it is connected."""
OWN = "storm/own"
"""Below this each connection publishes for itself."""

SETTLE = 30.0
"""Seconds in which one owner has to be left."""

GRACE = STANDSTILL + 0.5
"""Seconds for which a gateway may not yet know that a session has moved: for longer it never stands still unnoticed."""

OWN_MOST = 12
FED_PER_ROUND = 3
MADE_PER_ROUND = 2
FINISH = 60.0


async def _feed(port: int, numbers: range) -> None:
    """Publish to the session, alternately at QoS 1 and 2."""
    client = await RawClient.connect(port, "storm-feed")
    try:
        for number in numbers:
            await client.deliver(FED, b"%d" % number, 1 + number % 2)
        await client.disconnect()
    finally:
        client.drop()


class Storm:
    """The rounds, and what they bring to light."""

    def __init__(self, setting: Setting, gateways: list[Gateway], look: Look) -> None:
        self.random = random.Random(setting.seed)
        self.gateways = gateways
        self.look = look
        self.device = Device(MADE)
        self.result = Result()
        self.rivals: list[Rival] = []
        self.owner: Rival | None = None
        self.accepted = 0
        self.late: list[float] = []
        self.settling: list[float] = []

    async def round(self, number: int) -> None:
        """Several claim the session, one of them or nobody is left: see to it that it is one."""
        dice = self.random
        ports = [one.port for one in self.gateways]
        some = [ports[at % len(ports)] for at in range(dice.randint(2, 5))]
        rivals = [
            Rival(port, CLIENT, dice.choice((4, 5)), f"{OWN}/{number}/{at}")
            for at, port in enumerate(dice.sample(some, len(some)))
        ]
        before = [self.owner] if self.owner is not None else []
        begun = time.monotonic()
        publishing = [asyncio.create_task(self._publish(one)) for one in (*before, *rivals)]
        self.rivals += rivals
        await asyncio.gather(*(self._connect(one) for one in rivals))
        owner = await self._settle([*before, *rivals], number)
        self.settling.append(time.monotonic() - begun)
        await asyncio.gather(*publishing)
        for one in (*before, *rivals):
            if one is not owner:
                await one.drop()
                self.accepted += len(one.acked)
                if owner is not None:
                    self._judge(one, owner, number)
        self.owner = owner
        if owner is not None:
            self.device.resume(owner)
            for _ in range(MADE_PER_ROUND):
                self.device.publish(owner)
            await self._serve(owner, dice.randint(0, 40))

    async def _connect(self, rival: Rival) -> None:
        if self.random.random() < 0.5:
            await asyncio.sleep(self.random.random() * 0.02)
        await rival.connect()

    async def _publish(self, rival: Rival) -> None:
        """Have a connection publish for as long as it seems to have the session, up to a number."""
        await rival.entered()
        first = len(rival.sent)
        while not rival.closed and len(rival.sent) - first < OWN_MOST:
            rival.publish_own()
            await asyncio.sleep(0.003)

    async def _settle(self, rivals: list[Rival], number: int) -> Rival | None:
        """Wait until one connection is left that is answered."""
        deadline = time.monotonic() + SETTLE
        while time.monotonic() < deadline:
            there = [one for one in rivals if not one.closed]
            if not there:
                self.result.violations.append(f"round {number}: nobody has the session")
                return None
            if len(there) == 1 and there[0].accepted and await there[0].answers(SETTLE):
                return there[0]
            await asyncio.sleep(0.002)
        names = [f"port {one.port}, {'accepted' if one.accepted else 'waiting'}" for one in rivals if not one.closed]
        self.result.violations.append(f"round {number}: still connected after {SETTLE:g} s: {names}")
        return None

    def _judge(self, loser: Rival, owner: Rival, number: int) -> None:
        """What a connection without the session has sent must not be accepted."""
        for one in loser.acked:
            late = loser.sent[one] - owner.accepted
            if late > 0:
                self.late.append(late)
            if late > GRACE:
                self.result.violations.append(
                    f"round {number}: a publish was acknowledged that was sent {late:.3f} s after the session had moved"
                )

    async def _serve(self, owner: Rival, packets: int) -> None:
        """Answer some of what the session is sent, and leave the rest for the next connection."""
        patience = time.monotonic() + 0.2
        while packets > 0 and time.monotonic() < patience and not owner.closed:
            packets -= self.device.work(owner, packets)
            await asyncio.sleep(0.002)

    async def finish(self, fed: int) -> None:
        """Let the session receive, and publish, everything; then compare."""
        owner = self.owner
        if owner is None:
            return
        deadline = time.monotonic() + FINISH
        while time.monotonic() < deadline and (len(set(self.device.given)) < fed or self.device.unfinished):
            self.device.work(owner, 1000)
            await asyncio.sleep(0.005)
        await owner.answers(SETTLE)
        self.device.work(owner, 1000)
        self.accepted += len(owner.acked)
        await self._compare(fed)

    async def _compare(self, fed: int) -> None:
        result, device = self.result, self.device
        given = Counter(device.given)
        lost = [number for number in range(fed) if b"%d" % number not in given]
        twice = [number for number in range(fed) if number % 2 and given[b"%d" % number] > 1]
        if lost:
            result.violations.append(f"{len(lost)} messages to the session were lost: {lost[:10]}")
        if twice:
            result.violations.append(f"{len(twice)} QoS 2 messages to the session came twice: {twice[:10]}")
        if device.undeclared:
            result.violations.append(f"came again without DUP: {device.undeclared[:10]}")
        await self._stored()

    async def _stored(self) -> None:
        result, device = self.result, self.device
        made = Counter(one.payload for one in await self.look.messages(f"$MQTT.msgs.{MADE.replace('/', '.')}"))
        lost = [number for number in range(device.made) if not made[b"%d" % number]]
        twice = [number for number in range(device.made) if made[b"%d" % number] > 1]
        if device.unfinished or lost or twice:
            result.violations.append(
                f"of the session's own QoS 2 messages {device.unfinished} are not complete, "
                f"{len(lost)} lost ({lost[:10]}), {len(twice)} stored twice ({twice[:10]})"
            )
        copies = Counter(
            (one.subject.removeprefix("$MQTT.msgs.").replace(".", "/"), int(one.payload))
            for one in await self.look.messages(f"$MQTT.msgs.{OWN.replace('/', '.')}.>")
        )
        missing = [(one.topic, n) for one in self.rivals for n in one.acked if not copies[one.topic, n]]
        doubled = [key for key, count in copies.items() if count > 1]
        if missing:
            result.violations.append(f"{len(missing)} acknowledged publishes were not stored: {missing[:10]}")
        if doubled:
            result.violations.append(f"{len(doubled)} publishes were stored twice: {doubled[:10]}")
        result.figures["stored, of connections"] = sum(copies.values())

    async def inspect(self, number: int) -> None:
        """The record must name the gateway of the one that is left, and its consumer deliver there."""
        if self.owner is None:
            return
        record = await self.look.session(CLIENT)
        if record is None:
            self.result.violations.append(f"round {number}: the session has no record")
            return
        known = {one["listen"][0].rpartition(":")[2]: one["id"] for one in await self.look.gateways(GATEWAYS, SETTLE)}
        if record["v5"]["owner"] != known.get(str(self.owner.port)):
            self.result.violations.append(f"round {number}: the record names another owner than the one that is left")


async def run(setting: Setting, module: str = "") -> Result:
    """Run it, with the gateways that ``python -m module`` starts where it is given."""
    rounds = ROUNDS_LONG if setting.long else ROUNDS
    server = setting.nats()
    arguments = ("--gateway-lease", "60", "--log-level", "warning")
    gateways = [setting.gateway(server.url, *arguments, module=module) for _ in range(GATEWAYS)]
    async with looking(server.url) as look:
        storm = Storm(setting, gateways, look)
        first = Rival(gateways[0].port, CLIENT, 5, f"{OWN}/first/0")
        await first.connect(clean=True)
        await first.subscribe(FED, 2)
        storm.owner = first
        storm.rivals.append(first)
        begun = time.monotonic()
        fed = rounds * FED_PER_ROUND
        try:
            for number in range(rounds):
                numbers = range(number * FED_PER_ROUND, (number + 1) * FED_PER_ROUND)
                async with asyncio.TaskGroup() as group:
                    group.create_task(_feed(gateways[number % GATEWAYS].port, numbers))
                    group.create_task(storm.round(number))
                if number % 25 == 24:
                    await storm.inspect(number)
            await storm.finish(fed)
        finally:
            for one in storm.rivals:
                await one.drop()
        result = storm.result
        given = Counter(storm.device.given)
        result.figures = {
            "rounds": rounds,
            "gateways": GATEWAYS,
            "connections": len(storm.rivals),
            "rounds without one owner": sum("round" in line and "session" in line for line in result.violations),
            "settled after, longest, ms": round(max(storm.settling) * 1000),
            "publishes acknowledged": storm.accepted,
            "acknowledged though sent after the move": len(storm.late),
            "longest such delay, ms": round(max(storm.late, default=0.0) * 1000, 1),
            "to the session": fed,
            "to the session, lost": fed - len(given),
            "to the session, QoS 2 twice": sum(n > 1 for one, n in given.items() if int(one) % 2),
            "by the session, QoS 2": storm.device.made,
            "seconds": round(time.monotonic() - begun),
            **result.figures,
        }
    return result


EXPERIMENTS = [
    Experiment(
        "R7",
        f"{ROUNDS_LONG:,} rounds in which 2 to 5 connections through {GATEWAYS} gateways claim one session at once",
        "each round leaves one owner; nothing is accepted under an old epoch; nothing lost, no QoS 2 message twice",
        run,
    )
]
