# SPDX-License-Identifier: Apache-2.0
"""R22 and R23: how soon messages go on when JetStream has elected its leaders, and in which order.

Before each round one nats-server leads whatever a message needs on its way. Then that server is killed (R22), or ends
in good order (R23), while messages flow at QoS 1: to a session with consumers of its own, to one of the shared reader,
to a group with members at both gateways. A few wills are due meanwhile. The time of each election is in the logs of the
nats-servers.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

import nats
import nats.errors
import orjson
from nats.aio.client import Client

from mqtt_streams.hashing import name_hash
from tests.chaos.checker import Promises
from tests.chaos.client import ChaosClient
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.history import Event
from tests.chaos.messages import ClientWill
from tests.chaos.workload import Workload
from tests.harness.cluster import Cluster
from tests.harness.nats import NatsServer, ProcessNatsServer
from tests.harness.waiting import aeventually

MESSAGES: Final = "$MQTT_msgs"
TIMERS: Final = "$MQTT_timers"

RECOVERY: Final = 90.0
"""Seconds in which an election is over and everything that waited for it is done."""

RATE: Final = 25.0
"""Messages per second of each of two publishers: few enough that members with a window of one are done at once."""

DELAYS: Final = (1, 4, 7, 10)
"""Seconds after which wills are due that each round leaves behind."""

LATE_MS: Final = 1000
LATE_SHORT_MS: Final = 3000
"""Milliseconds after an election in which everything goes on; more in the short version, beside other tests."""

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
    """Three nats-servers, two gateways of which one uses the shared reader, and clients that go on through it all."""

    def __init__(self, setting: Setting, *, ordered: bool) -> None:
        self.setting = setting
        self.ordered = ordered
        """Whether no message may overtake another one that is not acknowledged."""
        self.late: defaultdict[str, list[int]] = defaultdict(list)
        """Milliseconds from election to delivery, the longest of each round, by who waited."""
        self.took: list[int] = []
        """Milliseconds from the end of a leader to the next one of the messages."""
        self.watched = 0

    async def begin(self) -> None:
        """Start everything; messages flow."""
        setting = self.setting
        self.cluster: Cluster = await asyncio.to_thread(setting.cluster, config=_CONFIG)
        self.gateways = [
            await asyncio.to_thread(
                setting.gateway, self.cluster.url, "--stream-replicas", "3", "--shared-reader", reader
            )
            for reader in ("always", "never")
        ]
        await self.cluster.settled(MESSAGES)
        self.load = Workload(
            setting.directory / "histories",
            [gateway.port for gateway in self.gateways],
            rate=RATE,
            restless=0.0,
            promises=Promises(leaders_change=not self.ordered, shared=True),
        )
        await self.load.start()
        self.watcher = ChaosClient("watcher", [self.gateways[1].port], self.load.history("watcher"))
        await self.watcher.connect()
        await self.watcher.subscribe("wills/#", 1)
        await self.flowing()

    async def flowing(self) -> None:
        """Wait until messages are acknowledged, and everybody has got what was acknowledged before."""
        more = self.load.acked + 50

        def through() -> bool:
            had = [len(one.delivered) for one in self.load.subscribers]
            group = set().union(*(one.delivered for one in self.load.members))
            return min(self.load.acked, len(group), *had) >= more

        await aeventually(through, RECOVERY, what="messages that are acknowledged and delivered")

    async def gather(self, victim: NatsServer) -> None:
        """Have one server lead whatever the messages need, so that all of it has to be elected."""
        name = f"n{self.cluster.servers.index(victim)}"
        client = await nats.connect(victim.url, error_cb=_quiet)
        try:
            consumers = [f"CONSUMER.{MESSAGES}.{one}" for one in await _consumers(client, MESSAGES)]
            consumers += [f"CONSUMER.{TIMERS}.{one}" for one in await _consumers(client, TIMERS)]
            for what in (f"STREAM.{MESSAGES}", f"STREAM.{TIMERS}", *consumers):
                await _lead(client, what, name)
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
            await will.connect()
        await asyncio.gather(*(will.abandon() for will in wills))
        await asyncio.sleep(0.5)
        began = time.monotonic_ns()
        ending = asyncio.create_task(asyncio.to_thread(act, victim))
        self.load.nemesis.note("killed", victim=number)
        await self.flowing()
        await ending
        self.watched += len(DELAYS)
        await aeventually(lambda: len(self.watcher.delivered) >= self.watched, RECOVERY, what="wills")
        await self.flowing()
        ended = time.monotonic_ns()
        self.judge(began, ended)
        await asyncio.to_thread(victim.start)
        await self.cluster.settled(MESSAGES)

    def judge(self, began: int, ended: int) -> None:
        """Note how long after the elections everybody has waited."""
        last: dict[str, int] = {}
        for at, what in elections(self.cluster):
            if began < at < ended:
                last[what] = at
        self.took.append((last.get(MESSAGES, began) - began) // 1_000_000)

        def reference(*whats: str) -> int:
            named = (at for what, at in last.items() if any(one in what for one in whats))
            return max((last.get(MESSAGES, began), last.get("metadata", began), *named))

        events = self.load.events()
        sent = {(one.who, one.n): one.t for one in events if one.what == "publish" and began - 1e9 < one.t < ended}
        acked = {(one.who, one.n): one.t for one in events if one.what == "acked"}
        self._note("publisher", last.get(MESSAGES, began), ((sent[one], acked[one]) for one in sent if one in acked))
        shared, own = self.load.subscribers[1].client_id, self.load.subscribers[0].client_id
        members = [one.client_id for one in self.load.members]
        for kind, whom, since in (
            ("own consumer", [own], reference(name_hash(own), "$MQTT_sess")),
            ("shared reader", [shared], reference("$MQTT_sess", "$MQTT_pos")),
            ("group", members, reference("share_")),
        ):
            first = _first(events, whom)
            delays = ((acked[one], first[one]) for one in sent if one in acked and one in first)
            self._note(kind, since, delays)
        due = {(one.who, one.n): one.t + one.delay * 1_000_000_000 for one in events if one.what == "will"}
        timers = _first(events, [self.watcher.client_id])
        waited = ((due[one], at) for one, at in timers.items() if one in due and began < at < ended)
        self._note("timer", reference(TIMERS, "$MQTT_sess", "$MQTT_wills", name_hash("watcher")), waited)

    def _note(self, kind: str, since: int, spans: Iterable[tuple[int, int]]) -> None:
        longest = max((end - max(start, since) for start, end in spans), default=0)
        self.late[kind].append(longest // 1_000_000)

    async def end(self) -> Result:
        """Wait for what is still to come, and judge."""
        await self.watcher.close()
        verdict = await self.load.finish(RECOVERY)
        figures: dict[str, int | float | str] = {
            "messages": verdict.figures["acked"],
            "kills": len(self.took),
            "lost": verdict.figures["lost"],
            "duplicated": verdict.figures["duplicated"],
            "longest_pause_ms": verdict.figures["longest_pause_ms"],
            "repeated": verdict.figures["repeated"],
            "reordered": verdict.figures["reordered"],
            "shortest_election_ms": min(self.took),
            "longest_election_ms": max(self.took),
        }
        result = Result(figures, verdict.lines())
        most = LATE_MS if self.setting.long else LATE_SHORT_MS
        for kind, delays in self.late.items():
            in_time = sum(one <= most for one in delays)
            figures[f"{kind}_ms"] = f"{max(delays)} ({in_time} of {len(delays)} in time)"
            if in_time < len(delays):
                result.violations.append(f"late: {kind}, {' / '.join(map(str, delays))} ms after the election")
        return result


def _first(events: Sequence[Event], whom: Sequence[str]) -> dict[tuple[str, int], int]:
    """When the first of some clients got each message."""
    found: dict[tuple[str, int], int] = {}
    for event in events:
        if event.what == "delivered" and event.who in whom:
            found.setdefault((event.of, event.n), event.t)
    return found


async def _consumers(client: Client, stream: str) -> list[str]:
    """The replicated consumers of a stream."""
    answer = orjson.loads((await client.request(f"$JS.API.CONSUMER.LIST.{stream}", timeout=5)).data)
    return [one["name"] for one in answer["consumers"] if len((one.get("cluster") or {}).get("replicas") or []) == 2]


async def _lead(client: Client, what: str, name: str) -> None:
    """Have ``STREAM.<stream>`` or ``CONSUMER.<stream>.<consumer>`` led by the server ``name``."""
    kind, _, path = what.partition(".")

    async def led() -> bool:
        try:
            info = orjson.loads((await client.request(f"$JS.API.{kind}.INFO.{path}", timeout=2)).data)
            if info.get("cluster", {}).get("leader") == name:
                return True
            body = orjson.dumps({"placement": {"preferred": name}})
            await client.request(f"$JS.API.{kind}.LEADER.STEPDOWN.{path}", body, timeout=2)
        except (nats.errors.Error, TimeoutError):
            pass
        await asyncio.sleep(0.3)
        return False

    await aeventually(led, RECOVERY, what=f"{what} led by {name}")


async def _quiet(error: Exception) -> None:
    """nats-py prints errors where nobody listens for them."""


def _lame_duck(server: NatsServer) -> None:
    """Have a server say that it goes, and go."""
    assert isinstance(server, ProcessNatsServer)
    server.process.send(signal.SIGUSR2)
    server.process.wait(60)


async def _rounds(setting: Setting, acts: Sequence[Act], *, ordered: bool) -> Result:
    """Do the acts in turn."""
    scene = Scene(setting, ordered=ordered)
    await scene.begin()
    for number in range(20 if setting.long else 1):
        await scene.round(acts[number % len(acts)], number)
    return await scene.end()


async def _killed(setting: Setting) -> Result:
    return await _rounds(setting, [lambda server: server.kill()], ordered=False)


async def _planned(setting: Setting) -> Result:
    return await _rounds(setting, [lambda server: server.stop(), _lame_duck], ordered=True)


EXPERIMENTS = [
    Experiment(
        "R22",
        "three nats-servers, streams with three replicas: the server is killed that leads everything",
        "nothing acknowledged is lost; delivery goes on a second after the election",
        _killed,
    ),
    Experiment(
        "R23",
        "the same server ends in good order, by SIGTERM and as a lame duck in turn",
        "nothing acknowledged is lost; messages keep their order",
        _planned,
    ),
]
