# SPDX-License-Identifier: Apache-2.0
"""R22 and R23: how soon messages go on when JetStream has elected its leaders, and in which order.

Before each round one nats-server leads whatever a message needs on its way. Then that server is killed (R22), or ends
in good order (R23), while messages flow at QoS 1 and at QoS 2: to a session with consumers, to one without, to a group
with members at both gateways. Retained messages are replaced, and a few wills are due meanwhile. The time of each
election is in the logs of the nats-servers. Further clients at QoS 2 drop their connections all the time: how long they
wait is not measured, but their wills are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

import nats
import orjson
from nats.aio.client import Client

from mqtt_streams.hashing import name_hash
from tests.chaos.busy import Busy
from tests.chaos.checker import Promises
from tests.chaos.client import ChaosClient
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.history import Event
from tests.chaos.messages import ClientWill, Message
from tests.chaos.workload import Workload
from tests.harness.cluster import Cluster, lead
from tests.harness.nats import NatsServer, ProcessNatsServer
from tests.harness.waiting import aeventually

MESSAGES: Final = "$MQTT_msgs"
TIMERS: Final = "$MQTT_timers"
HELD: Final = "$MQTT_qos2in"
PUBRELS: Final = "$MQTT_out"
SHARED: Final = "$MQTT_shared"
RETAINED: Final = "$MQTT_rmsgs"

LED: Final = (MESSAGES, TIMERS, HELD, PUBRELS, SHARED, RETAINED, "$MQTT_sess", "$MQTT_wills")
"""Streams that the server leads to which something is done."""

KILLS: Final = 20
RESTARTS: Final = 15
"""Restarts in good order: each of the three servers in turn, five times."""

TOPICS: Final = 5
"""Topics whose retained message is replaced again and again."""

RECOVERY: Final = 90.0
"""Seconds in which an election is over and everything that waited for it is done."""

RATE: Final = 25.0
"""Messages per second of each of two publishers: few enough that members with a window of one are done at once."""

SLOW: Final = 2.5
"""The same at QoS 2, which takes a member six confirmed stores and requests."""

DELAYS: Final = (1, 4, 7, 10)
"""Seconds after which wills are due that each round leaves behind."""

LATE_MS: Final = 1000
LATE_SHORT_MS: Final = 3000
"""Milliseconds after an election in which everything goes on; more in the short version, which runs beside other tests:
for each process that waits for a processor as much again, and as long as this process has once not run."""

_CONFIG: Final = "logtime_utc: true\nlame_duck_duration: 30s\nlame_duck_grace_period: 1s\n"

_ELECTED: Final = re.compile(
    r"^\[\d+\] (\S+ \S+) \[INF\] .*new (?:(metadata) leader|stream leader for '\S+ > ([^ ']+)'"
    r"|consumer leader for '\S+ > ([^']+)')",
    re.MULTILINE,
)

Act = Callable[[NatsServer], None]
"""What is done to a nats-server."""


def elections(cluster: Cluster) -> list[tuple[int, str]]:
    """When (``time.monotonic_ns``) a leader of what was elected: a stream, ``stream > consumer``, or ``metadata``."""
    offset = time.time_ns() - time.monotonic_ns()
    found = []
    for server in cluster.servers:
        log = (server.directory / "nats-server.log").read_text(encoding="utf-8", errors="replace")
        for stamp, *names in _ELECTED.findall(log):
            at = datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f").replace(tzinfo=UTC)
            found.append((int(at.timestamp() * 1e9) - offset, next(filter(None, names))))
    return sorted(found)


class Scene:
    """Three nats-servers, two gateways, of which one has no consumers for sessions, and clients that go on."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.late: defaultdict[str, list[int]] = defaultdict(list)
        """Milliseconds from election to delivery, the longest of each round, by who waited."""
        self.took: list[int] = []
        """Milliseconds from the end of a leader to the next one of the messages."""
        self.busy = Busy()
        self.due: set[Message] = set()
        """Wills that each round has left behind."""
        self.violations: list[str] = []

    async def begin(self) -> None:
        """Start everything; messages flow."""
        setting = self.setting
        self.cluster: Cluster = await asyncio.to_thread(setting.cluster, config=_CONFIG)
        self.gateways = [
            await asyncio.to_thread(
                setting.gateway, self.cluster.url, "--stream-replicas", "3", "--session-positions", positions
            )
            for positions in ("consumers", "records")
        ]
        await self.cluster.settled(MESSAGES)
        ports = [gateway.port for gateway in self.gateways]
        promises = Promises(leaders_change=True, shared=True)
        places = [setting.directory / f"histories {name}" for name in ("1", "2", "restless")]
        self.load = Workload(places[0], ports, rate=RATE, restless=0.0, promises=promises)
        self.exact = Workload(places[1], ports, rate=SLOW, restless=0.0, promises=promises, qos=2, prefix="x")
        self.restless = Workload(
            places[2], ports, rate=SLOW, restless=4.0, promises=promises, qos=2, prefix="r", ack_after=0.01
        )
        self.loads = (self.load, self.exact, self.restless)
        for load in self.loads:
            await load.start()
        self.watcher = ChaosClient("watcher", [ports[1]], self.load.history("watcher"))
        await self.watcher.connect(RECOVERY)
        await self.watcher.subscribe("wills/#", 1, RECOVERY)
        self.retainer = ChaosClient("retainer", [ports[0]], self.load.history("retainer"))
        await self.retainer.connect(RECOVERY)
        self.retaining = asyncio.create_task(self._retain())
        await self.flowing()

    async def _retain(self) -> None:
        """Replace retained messages, at QoS 1 and 2 in turn."""
        for number in itertools.count(1):
            await self.retainer.publish(f"kept/{number % TOPICS}", number, 1 + number % 2, retain=True)
            await asyncio.sleep(5 / RATE)

    async def retained(self, number: int) -> None:
        """See that each topic has the retained message that was acknowledged last, or a later one."""
        acked: dict[str, int] = {}
        for event in self.load.events():
            if event.who == self.retainer.client_id and event.what == "acked":
                acked[event.topic] = max(acked.get(event.topic, 0), event.n)
        found: dict[str, int] = {}

        def note(of: str, n: int, topic: str) -> None:
            found[topic] = max(found.get(topic, 0), n)

        history = self.load.history(f"newcomer-{number}")
        newcomer = ChaosClient(history.who, [self.gateways[number % 2].port], history, clean=True, on_message=note)
        await newcomer.connect(RECOVERY)
        await newcomer.subscribe("kept/#", 1, RECOVERY)
        with contextlib.suppress(AssertionError):
            await aeventually(lambda: all(found.get(topic, 0) >= n for topic, n in acked.items()), RECOVERY)
        await newcomer.close()
        self.violations += [
            f"retained: {topic} has message {found.get(topic, 0)}, and {n} was acknowledged"
            for topic, n in acked.items()
            if found.get(topic, 0) < n
        ]

    async def flowing(self) -> None:
        """Wait until messages are acknowledged, and everybody has got what was acknowledged before."""
        more = [(self.load, self.load.acked + 50), (self.exact, self.exact.acked + 5)]
        few = self.restless.acked + 5

        def through(load: Workload, most: int) -> bool:
            had = [len(one.delivered) for one in load.subscribers]
            group = set().union(*(one.delivered for one in load.members))
            return min(load.acked, len(group), *had) >= most

        def all_through() -> bool:
            return all(through(*one) for one in more) and self.restless.acked >= few

        await aeventually(all_through, RECOVERY, what="messages that are acknowledged and delivered")

    async def gather(self, victim: NatsServer) -> None:
        """Have one server lead whatever the messages need, so that all of it has to be elected."""
        name = f"n{self.cluster.servers.index(victim)}"
        client = await nats.connect(victim.url, error_cb=_quiet)
        try:
            passing = [name_hash(one.client_id) for one in self.restless.clients]  # their consumers come and go
            consumers = [
                f"CONSUMER.{stream}.{one}"
                for stream in (MESSAGES, TIMERS, PUBRELS)
                for one in await _consumers(client, stream)
                if not any(name in one for name in passing)
            ]
            streams = [f"STREAM.{stream}" for stream in LED]
            await asyncio.gather(*(lead(client, what, name) for what in (*streams, *consumers)))
        finally:
            await client.close()
        await self.flowing()

    async def round(self, act: Act, number: int) -> None:
        """Do ``act`` to the leader of everything, and see when all goes on; then start the server again."""
        victim = self.cluster.servers[number % 3]
        await self.gather(victim)
        wills = [
            ChaosClient(
                f"will-{number}-{delay}",
                [self.gateways[number % 2].port],
                self.load.history(f"will-{number}-{delay}"),
                5,
                will=ClientWill(f"wills/{number}", delay=delay),
                stay=False,
            )
            for delay in DELAYS
        ]
        for will in wills:
            await will.connect(RECOVERY)
        await asyncio.gather(*(will.abandon() for will in wills))
        self.due.update(*(will.wills_due for will in wills))
        await asyncio.sleep(0.5)
        began = time.monotonic_ns()
        ending = asyncio.create_task(asyncio.to_thread(act, victim))
        self.load.nemesis.note("killed", victim=number)
        await self.flowing()
        await ending
        await aeventually(lambda: self.due <= self.watcher.delivered, RECOVERY, what="wills")
        await self.flowing()
        ended = time.monotonic_ns()
        self.judge(began, ended)
        await asyncio.to_thread(victim.start)
        await self.cluster.settled(MESSAGES)
        await self.retained(number)

    def judge(self, began: int, ended: int) -> None:
        """Note how long after the elections everybody has waited."""
        self.busy.look()
        last: dict[str, int] = {}
        for at, what in elections(self.cluster):
            if began < at < ended:
                last[what] = at
        self.took.append((last.get(MESSAGES, began) - began) // 1_000_000)

        def reference(*whats: str) -> int:
            named = (at for what, at in last.items() if any(one in what for one in whats))
            return max((last.get(MESSAGES, began), last.get("metadata", began), *named))

        self._judge_load(self.load, "", began, ended, reference)
        self._judge_load(self.exact, ", QoS 2", began, ended, reference, HELD, PUBRELS)
        events = self.load.events()
        # A retained message is stored when its client's session is known to be here: the gateway may have lost NATS.
        since = reference(RETAINED, HELD, "$MQTT_sess")
        self._note("retained", since, _acknowledged(events, [self.retainer], began, ended).values())
        delays = {(one.who, one.n): one.delay * 1_000_000_000 for one in events if one.what == "will"}
        left = {(one.who, -one.conn): one.t for one in events if one.what == "abandoned"}
        timers = _first(events, [self.watcher.client_id])
        waited = (
            (left[one] + delays[one], at)
            for one, at in timers.items()
            if one in left and one in delays and began < at < ended
        )
        self._note("timer", reference(TIMERS, "$MQTT_sess", "$MQTT_wills", name_hash("watcher")), waited)

    def _judge_load(
        self, load: Workload, text: str, began: int, ended: int, reference: Callable[..., int], *more: str
    ) -> None:
        """Note how long publishers and receivers of one workload have waited; ``more``: streams that its QoS needs."""
        events = load.events()
        acked = _acknowledged(events, load.publishers, began, ended)
        # While one of `$MQTT_msgs` and `$MQTT_rmsgs` has no leader, nothing is stored in either.
        self._note(f"publisher{text}", reference(RETAINED, *more[:1]), acked.values())
        records, consumers = load.subscribers[1].client_id, load.subscribers[0].client_id
        members = [one.client_id for one in load.members]
        for kind, whom, since in (
            ("with consumers", [consumers], reference("$MQTT_sess", "$MQTT_pos", *more)),
            ("without consumers", [records], reference("$MQTT_sess", "$MQTT_pos", *more)),
            ("group", members, reference("share_", *(more and (*more, SHARED)))),
        ):
            first = _first(events, whom)
            delays = ((acked[one][1], first[one]) for one in acked if one in first)
            self._note(f"{kind}{text}", since, delays)

    def _note(self, kind: str, since: int, spans: Iterable[tuple[int, int]]) -> None:
        longest = max((end - max(start, since) for start, end in spans), default=0)
        self.late[kind].append(longest // 1_000_000)

    async def end(self) -> Result:
        """Wait for what is still to come, and judge."""
        self.retaining.cancel()
        await self.watcher.close()
        await self.retainer.close()
        verdicts = [await load.finish(RECOVERY) for load in self.loads]

        def total(name: str) -> int:
            return sum(verdict.figures[name] for verdict in verdicts)

        figures: dict[str, int | float | str] = {
            "messages": total("acked"),
            "kills": len(self.took),
            "lost": total("lost"),
            "duplicated": total("duplicated"),
            "longest_pause_ms": max(verdict.figures["longest_pause_ms"] for verdict in verdicts),
            "repeated": total("repeated"),
            "reordered": total("reordered"),
            "wills": total("wills") + len(self.due),
            "shortest_election_ms": min(self.took),
            "longest_election_ms": max(self.took),
        }
        result = Result(figures, [*self.violations, *(line for one in verdicts for line in one.lines())])
        most = LATE_MS if self.setting.long else self.busy.allowed(LATE_SHORT_MS / 1000) * 1000
        for kind, delays in self.late.items():
            in_time = sum(one <= most for one in delays)
            figures[f"{kind}_ms"] = f"{max(delays)} ({in_time} of {len(delays)} in time)"
            if in_time < len(delays):
                result.violations.append(f"late: {kind}, {' / '.join(map(str, delays))} ms after the election")
        return result


def _acknowledged(
    events: Sequence[Event], whom: Sequence[ChaosClient], began: int, ended: int
) -> dict[tuple[str, int], tuple[int, int]]:
    """When messages of some clients were sent in a round, or a second before it, and when they were acknowledged."""
    names = {one.client_id for one in whom}
    sent: dict[tuple[str, int], int] = {}
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for event in events:
        key = event.who, event.n
        if event.what == "publish" and event.who in names and began - 1e9 < event.t < ended:
            sent.setdefault(key, event.t)
        elif event.what == "acked" and key in sent:
            found[key] = sent[key], event.t
    return found


def _first(events: Sequence[Event], whom: Sequence[str]) -> dict[tuple[str, int], int]:
    """When the first of some clients got each message."""
    found: dict[tuple[str, int], int] = {}
    for event in events:
        if event.what == "delivered" and event.who in whom:
            found.setdefault((event.of, event.n), event.t)
    return found


async def _consumers(client: Client, stream: str) -> list[str]:
    """The replicated consumers of a stream."""
    answer = orjson.loads((await client.request(f"$JS.API.CONSUMER.LIST.{stream}", timeout=30)).data)
    return [one["name"] for one in answer["consumers"] if len((one.get("cluster") or {}).get("replicas") or []) == 2]


async def _quiet(error: Exception) -> None:
    """nats-py prints errors where nobody listens for them."""


def _lame_duck(server: NatsServer) -> None:
    """Have a server say that it goes, and go."""
    assert isinstance(server, ProcessNatsServer)
    server.process.send(signal.SIGUSR2)
    server.process.wait(60)


async def _rounds(setting: Setting, acts: Sequence[Act], rounds: int) -> Result:
    """Do the acts in turn; ``rounds``: how many in the long version."""
    scene = Scene(setting)
    await scene.begin()
    async with scene.busy.watched():
        for number in range(rounds if setting.long else 1):
            await scene.round(acts[number % len(acts)], number)
    return await scene.end()


async def _killed(setting: Setting) -> Result:
    return await _rounds(setting, [lambda server: server.kill()], KILLS)


async def _planned(setting: Setting) -> Result:
    return await _rounds(setting, [lambda server: server.stop(), _lame_duck], RESTARTS)


EXPERIMENTS = [
    Experiment(
        "R22",
        "three nats-servers, streams with three replicas: the server is killed that leads everything",
        "nothing is lost; at QoS 2 nothing comes twice, wills come once; delivery goes on a second after the election",
        _killed,
    ),
    Experiment(
        "R23",
        "the same server ends in good order, by SIGTERM and as a lame duck in turn",
        "nothing is lost; at QoS 2 nothing comes twice, wills come once; no message overtakes an acknowledged one",
        _planned,
    ),
]
