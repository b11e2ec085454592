# SPDX-License-Identifier: Apache-2.0
"""R25: retained messages are cleared and sessions end, each after changes; then nats-servers are killed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

from mqtt_nats.codec import Publish, Subscription
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.looking import Look, looking
from tests.harness.cluster import Cluster
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

EACH = 6
EACH_LONG = 40
"""Topics, and sessions, of which two thirds are removed in each round."""

PAUSES = (0.0,)
PAUSES_LONG = (0.0, 3.0, 30.0, 70.0, 150.0)
"""Seconds from the removals to a kill, one round each."""

GONE = 1
"""Session expiry interval of a session that is to expire, in seconds."""
KEPT = 3600

PATIENCE = 90.0


STREAMS = (
    *("$MQTT_rmsgs", "$MQTT_sess", "$MQTT_pos", "$MQTT_msgs"),
    *("$MQTT_out", "$MQTT_qos2in", "$MQTT_shared", "KV_MQTT_gateways"),
)
"""Streams that have a leader again before a round goes on."""


async def connected(port: int, client_id: str, **options: Any) -> RawClient5:
    """Connect, once more after a refusal that passes: consumers and streams elect leaders after a kill."""
    return await aeventually(partial(RawClient5.connect5, port, client_id, **options), PATIENCE)


class Round:
    """Topics and sessions of one round: some are removed, the others stay as they were last."""

    def __init__(self, name: str, each: int, chance: random.Random, gateways: Sequence[Gateway]) -> None:
        self._chance, self._gateways = chance, gateways
        names = [f"{name}-{number}" for number in range(each)]
        self.kept = names[::3]
        self.removed = [one for one in names if one not in self.kept]
        self.last: dict[str, bytes] = {}

    def _port(self) -> int:
        return self._chance.choice(self._gateways).port

    async def use(self) -> None:
        """Change all, then remove some: messages by an empty one, sessions by their expiry or a clean start."""
        async with await connected(self._port(), "publisher") as publisher:
            for name in (*self.kept, *self.removed):
                for number in range(self._chance.randint(2, 4)):
                    self.last[name] = b"%d" % number
                    await publisher.deliver(f"kept/{name}", self.last[name], self._chance.randint(1, 2), retain=True)
            for name in self.removed:
                await publisher.deliver(f"kept/{name}", b"", self._chance.randint(1, 2), retain=True)
        for name in self.kept:
            await self._visit(name, KEPT)
        for number, name in enumerate(self.removed):
            await self._visit(name, GONE if number % 2 else KEPT)
            if not number % 2:
                async with await connected(self._port(), name) as client:
                    await client.disconnect5()

    async def _visit(self, name: str, expiry: int) -> None:
        for _ in range(self._chance.randint(2, 3)):
            async with await connected(self._port(), name, clean=False, session_expiry_interval=KEPT) as client:
                await client.subscribe5(Subscription(f"to/{name}", 1))
                await client.disconnect5(session_expiry_interval=expiry)
            if expiry == GONE:
                break

    async def seen(self, gateway: Gateway) -> dict[str, bytes]:
        """Return the retained messages that a new subscriber gets at a gateway, by the last level of the topic."""
        found: dict[str, bytes] = {}
        async with await connected(gateway.port, "reader") as reader:
            await reader.subscribe5(Subscription("kept/#", 1))
            reader.publish("kept", b"end", 1)
            while True:
                packet = await reader.packet()
                if not isinstance(packet, Publish):
                    continue
                reader.ack(PUBACK, packet.packet_id)
                if packet.payload == b"end":
                    return found
                found[topic_of(packet).removeprefix("kept/")] = packet.payload

    async def settled(self, look: Look) -> None:
        """Wait until no gateway shows anything that was removed, and sessions whose time is over are gone."""

        async def gone() -> bool:
            return not any([set(self.removed) & (await self.seen(one)).keys() for one in self._gateways])

        await aeventually(gone, PATIENCE)
        await asyncio.sleep(GONE + 1)

        async def ended() -> bool:
            return not any([await look.session(name) for name in self.removed])

        await aeventually(ended, PATIENCE, what="the end of sessions")

    async def admitted(self) -> None:
        """Wait until every gateway lets clients in."""
        for gateway in self._gateways:
            probe = await connected(gateway.port, "probe")
            await probe.disconnect5()

    async def judge(self, result: Result, why: str) -> None:
        """Compare what is there with what there must be."""
        for number, gateway in enumerate(self._gateways):
            found = await self.seen(gateway)
            own = {name: payload for name, payload in found.items() if name in self.last}
            wanted = {name: self.last[name] for name in self.kept}
            if own != wanted:
                back = sorted(own.keys() - wanted.keys())
                lost = sorted(wanted.keys() - own.keys())
                result.violations.append(f"{why}: gateway {number} has {back} again, lacks {lost}, of {own}")
        for name in (*self.kept, *self.removed):
            async with await connected(self._port(), name, clean=False, session_expiry_interval=KEPT) as client:
                if client.session_present is not (name in self.kept):
                    result.violations.append(f"{why}: session {name} is {'not ' * (name in self.kept)}there")
                await client.disconnect5()


async def _script(
    setting: Setting, name: str, servers: Sequence[NatsServer], gateways: Sequence[Gateway], cluster: Cluster | None
) -> Result:
    """Kill all servers at once, and one after the other."""
    chance = random.Random(setting.seed)
    result = Result()
    removed = kills = 0
    pauses = PAUSES_LONG if setting.long else PAUSES
    for turn, pause in enumerate(pauses * (2 if cluster else 1)):
        one = Round(f"{name}{turn}", EACH_LONG if setting.long else EACH, chance, gateways)
        await one.use()
        async with looking(",".join(server.url for server in servers)) as look:
            await one.settled(look)
        await asyncio.sleep(pause)
        together = turn >= len(pauses) or cluster is None
        for some in [servers] if together else [[server] for server in servers]:
            for server in some:
                await asyncio.to_thread(server.kill)
            for server in some:
                await asyncio.to_thread(server.start)
            if cluster is not None:
                for stream in STREAMS:
                    await cluster.settled(stream)
            kills += len(some)
        for gateway in gateways:
            await aeventually(lambda gateway=gateway: gateway.ready, PATIENCE)  # type: ignore[misc]
        await one.admitted()
        await one.judge(result, f"{name}, {pause:g} s, {'all' if together else 'in turn'}")
        removed += 2 * len(one.removed)
    result.figures = {"messages": removed, "kills": kills, "back": len(result.violations)}
    return result


async def _removals(setting: Setting) -> Result:
    """One nats-server with two gateways; then three nats-servers with a gateway at each."""
    server = await asyncio.to_thread(setting.nats)
    gateways = [await asyncio.to_thread(setting.gateway, server.url) for _ in range(2)]
    result = await _script(setting, "one", [server], gateways, None)
    result.remarks.append("messages: retained messages that were cleared, and sessions that have ended")
    if setting.long:
        cluster = await asyncio.to_thread(setting.cluster)
        several = [await asyncio.to_thread(setting.gateway, one.url) for one in cluster.servers]
        found = await _script(setting, "three", cluster.servers, several, cluster)
        result.peers["three nats-servers"] = found
        result.violations += found.violations
    return result


EXPERIMENTS = [
    Experiment(
        "R25",
        "retained messages are cleared and sessions end, each after changes; nats-servers are killed 0 to 150 s later",
        "nothing that was removed comes back, at no server; what was not removed is there as it was last",
        _removals,
    ),
]
