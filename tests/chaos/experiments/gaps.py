# SPDX-License-Identifier: Apache-2.0
"""R28: gaps of NATS, and clients with clean sessions at QoS 1 and 2, which live on live copies.

Messages flow at QoS 1 and 2 through two gateways. In each round a client subscribes, then NATS has a gap: a gateway's
connections are reset (R28), the only nats-server is killed (R28b), or of three nats-servers the one is killed that
leads the stream of messages (R28c). The connections of the clients last. A subscriber has to get what was acknowledged
since it subscribed, once, in each publisher's order, and nothing that was acknowledged before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import nats

from mqtt_nats.codec import matches
from tests.chaos.client import ChaosClient
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.history import Event, History, read
from tests.chaos.messages import Message
from tests.harness.cluster import Cluster, lead
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.proxy import Proxy
from tests.harness.waiting import aeventually

MESSAGES: Final = "$MQTT_msgs"

ROUNDS: Final = 200
ROUNDS_SHORT: Final = 3

RATE: Final = 40.0
"""Messages per second of each publisher."""

TOPICS: Final = 3
"""Topics of each publisher."""

STAY: Final = 12.0
"""Seconds for which such a client stays, and two gaps at least."""

UNDER_WAY: Final = 5.0
"""Seconds before it leaves in which messages may still be under way to it."""

RECOVERY: Final = 90.0
"""Seconds in which everything that waited for NATS has come."""

ON_ITS_WAY: Final = 1.0
"""Seconds for which a live copy may be on its way between two nats-servers of a loaded machine."""

FILTERS: Final = ("g/#", "+/+/0", "g/+/1")
"""Filters of the subscribers: the first two of each gateway overlap, and the second has a connection of its own."""

Gap = Callable[[int], Awaitable[None]]
"""``await gap(number)``: makes the gap of a round, and ends it."""


class Scene:
    """Publishers at QoS 1 and 2 and subscribers with clean sessions, each at every gateway."""

    def __init__(self, setting: Setting, gateways: Sequence[Gateway]) -> None:
        self._directory = setting.directory / "histories"
        self._directory.mkdir()
        self._chance = random.Random(setting.seed)
        self._gateways = gateways
        self._histories: list[History] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = asyncio.Event()
        self.publishers = [
            self._client(f"p{number}-{qos}", gateway, 4 + number % 2, clean=False)
            for number, gateway in enumerate(gateways)
            for qos in (1, 2)
        ]
        self.subscribers = [
            self._client(f"s{number}-{version}-{qos}", gateway, version)
            for number, gateway in enumerate(gateways)
            for version in (4, 5)
            for qos in (1, 2)
        ]
        self._came: deque[tuple[ChaosClient, float, dict[str, int]]] = deque()
        """Clients that subscribed shortly before a gap, the time, and the last number of each publisher then."""
        self._numbers = {one.client_id: 0 for one in self.publishers}
        """The last number of each publisher."""

    def _client(self, name: str, gateway: Gateway, version: int, *, clean: bool = True) -> ChaosClient:
        history = History(self._directory / f"{name}.jsonl")
        self._histories.append(history)
        return ChaosClient(name, [gateway.port], history, version, clean, expiry=0 if clean else 86_400)

    async def begin(self) -> None:
        """Connect all, subscribe, and begin to publish."""
        await asyncio.gather(*(one.connect() for one in (*self.publishers, *self.subscribers)))
        for number, one in enumerate(self.subscribers):
            qos = int(one.client_id[-1])
            await one.subscribe(FILTERS[number % 3], qos)
            if number % 2:  # two subscriptions that overlap
                await one.subscribe(FILTERS[(number + 1) % 3], qos)
        self._tasks = [asyncio.create_task(self._publish(one)) for one in self.publishers]
        await self.flowing()

    async def _publish(self, client: ChaosClient) -> None:
        qos, n = int(client.client_id[-1]), 0
        began = time.monotonic()
        while not self._stopped.is_set():
            n += 1
            self._numbers[client.client_id] = n
            await client.publish(_topic(client.client_id, n), n, qos)
            await asyncio.sleep(max(began + n / RATE - time.monotonic(), 0.001))

    async def flowing(self) -> None:
        """Wait until messages of every publisher are acknowledged."""
        wanted = [(one, one.acked + 5) for one in self.publishers]
        await aeventually(lambda: all(one.acked >= n for one, n in wanted), RECOVERY, what="acknowledged messages")

    async def round(self, gap: Gap, number: int) -> None:
        """Have a client subscribe shortly before a gap, and leave when messages flow again."""
        gateway = self._gateways[number % len(self._gateways)]
        newcomer = self._client(f"n{number}", gateway, 4 + number % 2)
        await newcomer.connect(RECOVERY)
        await newcomer.subscribe(FILTERS[number % 3], 1 + number // 2 % 2, RECOVERY)
        self._came.append((newcomer, time.monotonic(), dict(self._numbers)))
        await asyncio.sleep(self._chance.uniform(0, 1.5))
        await gap(number)
        await self.flowing()
        while len(self._came) > 1 and time.monotonic() - self._came[0][1] > STAY:
            client, _, since = self._came.popleft()
            with contextlib.suppress(AssertionError):  # then it is judged
                await aeventually(partial(self._owed(client, since).__le__, client.delivered), RECOVERY)
            client.history.note("leaves")
            await client.close()

    def _owed(self, client: ChaosClient, since: Mapping[str, int]) -> set[Message]:
        """What is acknowledged by now, was sent after these numbers, and has to come to a client."""
        return {
            (who, n)
            for one in self.publishers
            for who, n in one.acknowledged
            if n > since[who] and any(matches(text, _topic(who, n)) for text in client.filters)
        }

    async def end(self, rounds: int, *, cluster: bool) -> Result:
        """Wait until everything is acknowledged and has come, and judge."""
        self._stopped.set()
        await asyncio.gather(*self._tasks)
        for one in self.publishers:
            await one.settled(RECOVERY)
        unacknowledged = sum(one.unacknowledged for one in self.publishers)
        until = time.monotonic() + RECOVERY
        while (result := await self._judge(cluster)).figures["lost"] and time.monotonic() < until:
            pass  # it may be on its way
        for one in (*self.subscribers, *(one for one, *_ in self._came), *self.publishers):
            await one.close()
        result.figures = {"gaps": rounds, **result.figures, "unacknowledged": unacknowledged}
        if unacknowledged:
            result.violations.append(f"{unacknowledged} messages were never acknowledged")
        return result

    async def _judge(self, cluster: bool) -> Result:
        """Wait until nothing has come for two seconds, and judge."""
        quiet = 0
        while quiet < 20:
            before = sum(len(one.delivered) for one in self.subscribers)
            await asyncio.sleep(0.1)
            quiet = quiet + 1 if before == sum(len(one.delivered) for one in self.subscribers) else 0
        for history in self._histories:
            history.flush()
        return judge(read(history.path for history in self._histories), cluster=cluster)


def _topic(publisher: str, n: int) -> str:
    """The topic of a message."""
    return f"g/{publisher}/{n % TOPICS}"


def judge(events: Iterable[Event], *, cluster: bool = False) -> Result:
    """Compare what subscribers with clean sessions have got with what was promised.

    Args:
        cluster: of three nats-servers the leader is killed (docs/promises.md). A message may be overtaken that was not
            acknowledged yet when the newer one was sent. One that was acknowledged just before SUBSCRIBE may come: it
            was on its way between two servers.
    """
    sent: dict[tuple[str, int], Event] = {}
    acked: dict[tuple[str, int], int] = {}
    filters: defaultdict[str, list[str]] = defaultdict(list)
    asked: dict[str, int] = {}
    granted: dict[str, int] = {}
    until: dict[str, int] = {}
    got: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    events = list(events)
    for event in events:
        match event.what:
            case "publish":
                sent.setdefault((event.who, event.n), event)
            case "acked":
                acked[event.who, event.n] = event.t
            case "subscribe":
                filters[event.who].append(event.filter)
                asked.setdefault(event.who, event.t)
            case "subscribed":
                granted[event.who] = event.t
            case "leaves":
                until[event.who] = event.t
            case "delivered":
                got[event.who].append((event.of, event.n))
    result = Result(violations=[f"a client's connection has ended: {one}" for one in _ended(events)])
    counts: Counter[str] = Counter()

    def broken(kind: str, who: str, one: tuple[str, int]) -> None:
        counts[kind] += 1
        if counts[kind] <= 10:
            result.violations.append(f"{kind}: {who} and {one[0]}/{one[1]}")

    for who, some in got.items():
        times = Counter(some)
        newest: dict[tuple[str, str], int] = {}
        for one in some:
            line = one[0], sent[one].topic
            if one[1] < (later := newest.get(line, 0)):
                if cluster and acked.get(one, 1 << 62) > sent[one[0], later].t:
                    counts["overtaken"] += 1
                else:
                    broken("out of order", who, one)
            newest[line] = max(newest.get(line, 0), one[1])
        for one, count in times.items():
            if count > 1:
                broken("duplicated", who, one)
            if acked.get(one, asked[who]) < asked[who] - cluster * ON_ITS_WAY * 1e9:
                broken("old", who, one)
    for who in granted:
        had = set(got[who])
        for one, event in sent.items():
            in_time = granted[who] < event.t and one in acked and acked[one] < until.get(who, 1 << 62) - UNDER_WAY * 1e9
            if in_time and one not in had and any(matches(text, event.topic) for text in filters[who]):
                broken("lost", who, one)
    result.figures = {
        "messages": len(acked),
        "receipts": sum(map(len, got.values())),
        **{kind: counts[kind] for kind in ("lost", "duplicated", "old", "out of order", "overtaken")},
    }
    return result


def _ended(events: Sequence[Event]) -> list[str]:
    """A line for each connection that was accepted and has ended by itself."""
    refused = {one.conn for one in events if one.what == "connect"}
    refused -= {one.conn for one in events if one.what == "connected"}
    return [f"{one.who}: lost {one.reason}" for one in events if one.what == "lost" and one.conn not in refused]


async def _rounds(setting: Setting, gateways: Sequence[Gateway], gap: Gap, *, cluster: bool = False) -> Result:
    rounds = ROUNDS if setting.long else ROUNDS_SHORT
    scene = Scene(setting, gateways)
    await scene.begin()
    for number in range(rounds):
        await scene.round(gap, number)
    return await scene.end(rounds, cluster=cluster)


async def _reset(setting: Setting) -> Result:
    """The connections of one gateway, or of both, are reset; some stay away for a while."""
    server = await asyncio.to_thread(setting.nats)
    proxies = [Proxy(server.port) for _ in range(2)]
    for proxy in proxies:
        setting.on_close(proxy.close)
    gateways = [await asyncio.to_thread(setting.gateway, proxy.url) for proxy in proxies]
    chance = random.Random(setting.seed)

    async def gap(number: int) -> None:
        some = (proxies[:1], proxies[1:], proxies)[number % 3]
        for proxy in some:
            await asyncio.to_thread(proxy.cut)
        await asyncio.sleep(chance.choice((0.0, 0.3, 1.0)))
        for proxy in some:
            proxy.restore()

    return await _rounds(setting, gateways, gap)


async def _killed(setting: Setting) -> Result:
    """The only nats-server is killed, and started again."""
    server = await asyncio.to_thread(setting.nats)
    gateways = [await asyncio.to_thread(setting.gateway, server.url) for _ in range(2)]

    async def gap(number: int) -> None:
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)

    return await _rounds(setting, gateways, gap)


async def _leader_killed(setting: Setting) -> Result:
    """Of three nats-servers the one is killed that leads the stream of messages."""
    cluster: Cluster = await asyncio.to_thread(setting.cluster)
    gateways = [
        await asyncio.to_thread(setting.gateway, cluster.url, "--stream-replicas", "3") for _ in cluster.servers
    ]
    await cluster.settled(MESSAGES)

    async def gap(number: int) -> None:
        victim = cluster.servers[number % 3]
        await _lead(victim, f"n{number % 3}")
        await asyncio.to_thread(victim.kill)
        others = [one for one in cluster.servers if one is not victim]
        await aeventually(lambda: _led(cluster, others), RECOVERY, what="a leader of the messages")
        await asyncio.to_thread(victim.start)
        await cluster.settled(MESSAGES)

    return await _rounds(setting, gateways, gap, cluster=True)


async def _lead(server: NatsServer, name: str) -> None:
    client = await nats.connect(server.url)
    try:
        await lead(client, f"STREAM.{MESSAGES}", name)
    finally:
        await client.close()


async def _led(cluster: Cluster, servers: Sequence[NatsServer]) -> bool:
    return bool(await cluster.leader_at(servers[0], MESSAGES))


EXPERIMENTS = [
    Experiment(
        "R28",
        "clean sessions at QoS 1 and 2: the connections of one gateway, or of both, to NATS are reset",
        "what was acknowledged since SUBACK comes once and in order, and nothing older",
        _reset,
    ),
    Experiment("R28b", "the same: the only nats-server is killed", "the same", _killed),
    Experiment(
        "R28c", "the same: of three nats-servers the leader of the messages is killed", "the same", _leader_killed
    ),
]
