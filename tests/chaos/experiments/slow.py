# SPDX-License-Identifier: Apache-2.0
"""R11 and R12: clients that do not read, or slowly; the gateway's memory is bounded and nobody else waits."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.pacing import MIB, Memory, Paced, Probe, Tally, spread
from tests.harness.gateway import Gateway
from tests.harness.waiting import aeventually

UNREAD = 64 * MIB
"""What may wait for clients that do not read (`max_unread_bytes`)."""
OUTBOUND = 16 * MIB
"""QoS 0 that waits for one client (`max_outbound_bytes`)."""
BESIDE = 96 * MIB
"""What a gateway may grow by beside that: its cache of stored messages, pages of retained ones, what it has in hand."""
STALL = 1.0
"""Seconds (`stall_time`)."""
BUFFER = 16_384
"""Receive buffer of clients that do not read, so that the kernel hides little (bytes)."""

SLOWER = 5.0
"""Others may wait this many times as long as with readers of the same load, and ``GRACE`` seconds: the median."""
GRACE = 0.5

ARGUMENTS = ("--stall-time", str(STALL), "--max-unread-bytes", str(UNREAD), "--max-outbound-bytes", str(OUTBOUND))


@dataclass(frozen=True)
class Load:
    """What is published while clients do not read."""

    flood: int
    """Messages of 1,000 bytes at QoS 0."""
    backlog: int
    """Messages of 100 bytes at QoS 1."""
    wide: int
    """Clients with a window of large messages."""


SHORT = Load(50_000, 20_000, 16)
LONG = Load(500_000, 1_000_000, 40)
CONTROL_MOST = 100_000
LARGE = 100_000
"""Bytes of each of the ``WINDOW`` large messages of a client."""
WINDOW = 60


class Slow:
    """One gateway, a probe beside it, and a publisher."""

    def __init__(self, setting: Setting, *arguments: str) -> None:
        self.server = setting.nats()
        self.gateway: Gateway = setting.gateway(self.server.url, *arguments)
        self.memory = Memory(self.gateway)
        self.probe = Probe(setting.directory / "probe.log", self.gateway.port)
        setting.on_close(self.probe.process.discard)
        self.result = Result()
        self.publisher: Paced | None = None
        self.base = 0

    async def begin(self) -> Paced:
        """Start what goes on beside; the publisher."""
        self.publisher = await Paced.connect(self.gateway.port, "publisher")
        self.probe.start()
        await self.probe.settled()
        return self.publisher

    def rested(self) -> None:
        """From here on memory counts."""
        self.base = self.memory.peak = self.memory.now

    def mentions(self, client_id: str, text: str) -> bool:
        """Whether the gateway's log says something of a client."""
        return any(repr(client_id) in line and text in line for line in self.gateway.log.splitlines())

    async def delays(self, name: str, since: float, until: float) -> float:
        """Report how long the probe waited between two times; the median of its arrivals in seconds.

        What it has under way at the end is waited for.
        """
        await self.probe.settled(1)
        arrivals, acks = self.probe.measured(since, until)
        self.result.figures[f"others_{name}_ms"] = spread(arrivals)
        self.result.figures[f"others_puback_{name}_ms"] = spread(acks)
        if not arrivals:
            self.result.violations.append(f"nobody else was served: {name}")
        return statistics.median(arrivals) if arrivals else 0.0

    def compare(self, control: float, stuck: float) -> None:
        """Others may not notice whether clients read."""
        if stuck > SLOWER * control + GRACE:
            self.result.violations.append(
                f"others waited for {stuck * 1e3:.0f} ms (median), and {control * 1e3:.0f} ms when everybody reads"
            )

    def bounded(self, most: int) -> None:
        """Report the memory, which must not have grown by more than ``most`` bytes."""
        grown = self.memory.peak - self.base
        self.result.figures["rss_before_mb"] = round(self.base / MIB)
        self.result.figures["rss_peak_mb"] = round(self.memory.peak / MIB)
        self.result.figures["rss_after_mb"] = round(self.memory.now / MIB)
        if grown > most:
            self.result.violations.append(f"the gateway grew by {grown // MIB} MiB, allowed are {most // MIB}")

    async def end(self) -> Result:
        """Everybody else is still being served."""
        await self.probe.settled()
        if not self.probe.alive:
            self.result.violations.append(f"the client beside was not served: {self.probe.process.text[-300:]}")
        assert self.publisher is not None
        self.publisher.drop()
        return self.result


def numbered(topic: str, count: int, size: int) -> list[tuple[str, bytes]]:
    """Messages that begin with their number."""
    return [(topic, (b"%d " % number).ljust(size, b".")) for number in range(count)]


async def _unread(setting: Setting) -> Result:
    slow = Slow(setting, *ARGUMENTS)
    load = LONG if setting.long else SHORT
    port = slow.gateway.port
    publisher = await slow.begin()
    result = slow.result
    async with slow.memory.watched():
        # The same load with clients that read.
        readers = [await Paced.connect(port, f"reads{number}", clean=bool(number)) for number in range(2)]
        await readers[0].subscribe("backlog", 1)
        await readers[1].subscribe("flood", 0)
        begun = time.monotonic()
        some = min(load.flood, CONTROL_MOST)
        await publisher.publish(numbered("flood", some, 1000), 0)
        backlog = min(load.backlog, CONTROL_MOST)
        await publisher.publish(numbered("backlog", backlog, 100), 1)
        await aeventually(lambda: readers[0].received == backlog and readers[1].received == some, 60)
        control = await slow.delays("reading", begun, time.monotonic())
        for reader in readers:
            reader.drop()

        slow.rested()
        tallies: dict[str, Tally] = {}
        stuck: dict[str, Paced] = {}

        async def join(client_id: str, topic: str, qos: int, expected: int) -> None:
            tally = tallies[client_id] = Tally(expected)
            stuck[client_id] = client = await Paced.connect(
                port, client_id, clean=not qos, heard=tally.heard, buffer=BUFFER
            )
            await client.subscribe(topic, qos)
            client.stop()

        await join("floods", "flood", 0, 0)
        await join("hoards", "backlog", 1, load.backlog)
        for number in range(load.wide):
            await join(f"wide{number}", f"wide/{number}", 1, WINDOW)
        begun = time.monotonic()
        await publisher.publish(numbered("flood", load.flood, 1000), 0)
        for number in range(load.wide):
            await publisher.publish(numbered(f"wide/{number}", WINDOW, LARGE), 1, window=20)
        await publisher.publish(numbered("backlog", load.backlog, 100), 1)
        stored = time.monotonic() - begun
        held = [name for name in stuck if name.startswith("wide")]
        await aeventually(lambda: all(slow.mentions(name, "wait in JetStream") for name in held), 60)
        slow.compare(control, await slow.delays("stuck", begun, time.monotonic()))
        result.figures["rss_stuck_mb"] = round(slow.memory.now / MIB)

        begun = time.monotonic()
        for client in stuck.values():
            client.go_on()
        await _progress(lambda: sum(one.next for one in tallies.values()), lambda: _done(tallies))
        caught_up = time.monotonic() - begun
        await slow.delays("catching_up", begun, begun + caught_up)
        await asyncio.gather(*(client.ping() for client in stuck.values()))
    flood = stuck["floods"].received
    for name, tally in tallies.items():
        if name != "floods":
            result.violations += tally.wrong
        if not tally.complete:
            result.violations.append(f"{name}: {tally.next} of {tally.expected} came")
    if not 0 < flood < load.flood:
        result.violations.append(f"{flood} of {load.flood} messages at QoS 0 came to a client that did not read")
    slow.bounded(UNREAD + BESIDE)
    result.figures |= {
        "qos0_sent": load.flood,
        "qos0_kept": flood,
        "backlog": load.backlog,
        "large": load.wide * WINDOW,
        "large_mb": load.wide * WINDOW * LARGE // 1_000_000,
        "stored_s": round(stored, 1),
        "caught_up_s": round(caught_up, 1),
        "with_dup": sum(one.dups for one in tallies.values()),
    }
    result.remarks.append("others_*: median / 99 % / longest, in ms, of a client that publishes to itself at QoS 1")
    for client in stuck.values():
        client.drop()
    return await slow.end()


def _done(tallies: dict[str, Tally]) -> bool:
    return all(one.complete for one in tallies.values())


async def _progress(count: Callable[[], int], done: Callable[[], bool], patience: float = 60.0) -> None:
    """Wait for ``done``; give up when ``count`` stays the same for ``patience`` seconds."""
    last, since = count(), time.monotonic()
    while not done():
        await asyncio.sleep(0.05)
        now = count()
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > patience:
            return


# -- retained messages --------------------------------------------------------------------------------------

MATCHES = 5_000
MATCHES_LONG = 100_000
MATCH = 4_000
MATCH_LONG = 1_000
"""Bytes of each."""
RATE = 4_000_000
"""Bytes per second that slow readers read."""
CHANGED = 50
"""Topics that get a newer message while the retained ones are on their way."""


class Reader:
    """Who gets retained messages: how often each, and what came last on each topic."""

    def __init__(self) -> None:
        self.retained: dict[str, int] = {}
        self.latest: dict[str, bytes] = {}
        self.live = 0

    def heard(self, topic: str, payload: bytes, qos: int, dup: bool, retain: bool) -> None:
        """A message has come; others than those on ``kept/…`` do not count."""
        if not topic.startswith("kept/"):
            return
        if retain:
            self.retained[topic] = self.retained.get(topic, 0) + 1
        else:
            self.live += 1
        self.latest[topic] = payload.split(b" ", 1)[0]


async def _retained(setting: Setting) -> Result:
    slow = Slow(setting, *ARGUMENTS)
    count = MATCHES_LONG if setting.long else MATCHES
    size = MATCH_LONG if setting.long else MATCH
    port = slow.gateway.port
    publisher = await slow.begin()
    result = slow.result
    topics = [f"kept/{number % 100}/{number}" for number in range(count)]
    for qos in range(3):
        messages = [(topic, b"old ".ljust(size, b".")) for topic in topics[qos::3]]
        await publisher.publish(messages, qos, retain=True)
    async with slow.memory.watched():
        # A reader that is as fast as it can be.
        fast = Reader()
        begun = time.monotonic()
        client = await Paced.connect(port, "fast", heard=fast.heard)
        client.subscribe_soon("#", 2)
        await _progress(lambda: client.received, lambda: len(fast.retained) >= count)
        result.figures["fast_s"] = round(time.monotonic() - begun, 1)
        control = await slow.delays("reading", begun, time.monotonic())
        client.drop()

        slow.rested()
        begun = time.monotonic()
        readers = {name: Reader() for name in ("regular", "durable")}
        clients: dict[str, Paced] = {}
        for name, reader in readers.items():
            clients[name] = await Paced.connect(port, name, clean=name == "regular", heard=reader.heard, buffer=BUFFER)
            clients[name].rate = RATE
            clients[name].subscribe_soon("#", 2)
        await _progress(
            lambda: _seen(readers), lambda: all(len(one.retained) > count // 10 for one in readers.values())
        )
        for one in clients.values():
            one.stop()
        changed = topics[:: count // CHANGED][:CHANGED]
        await publisher.publish([(topic, b"new ".ljust(size, b".")) for topic in changed], 1, retain=True)
        await aeventually(lambda: slow.mentions("durable", "wait in JetStream"), 60)
        for one in clients.values():
            one.go_on()
        await _progress(
            lambda: _seen(readers),
            lambda: all(
                len(one.latest) >= count and all(one.latest[topic] == b"new" for topic in changed)
                for one in readers.values()
            ),
        )
        result.figures["slow_s"] = round(time.monotonic() - begun, 1)
        slow.compare(control, await slow.delays("slow", begun, time.monotonic()))
        await asyncio.gather(*(one.ping() for one in clients.values()))
    for name, reader in {"fast": fast, **readers}.items():
        # One that is replaced before it was read is not sent any more: the newer one is.
        missing = [topic for topic in topics if topic not in reader.latest]
        repeated = [topic for topic, times in reader.retained.items() if times > 1]
        if missing:
            result.violations.append(f"{name}: {len(missing)} retained messages did not come, such as {missing[0]}")
        if repeated:
            result.violations.append(f"{name}: {len(repeated)} retained messages came again, such as {repeated[0]}")
        if reader.live != (0 if name == "fast" else len(changed)):
            result.violations.append(f"{name}: {reader.live} new messages came, of {len(changed)}")
        if name != "fast" and any(reader.latest.get(topic) != b"new" for topic in changed):
            result.violations.append(f"{name}: the last message on a topic was not the newest")
    slow.bounded(BESIDE)
    result.figures |= {"retained": count, "retained_mb": count * size // 1_000_000, "slow_readers": len(readers)}
    result.figures["changed_meanwhile"] = len(changed)
    result.remarks.append("others_*: median / 99 % / longest, in ms, of a client that publishes to itself at QoS 1")
    for one in clients.values():
        one.drop()
    return await slow.end()


def _seen(readers: dict[str, Reader]) -> int:
    return sum(len(one.retained) + one.live for one in readers.values())


EXPERIMENTS = [
    Experiment(
        "R11",
        "clients that do not read: a flood at QoS 0, a backlog at QoS 1 (long: 1 M), windows of large messages",
        "the gateway's memory is bounded, others wait no longer, and what was promised comes once and in order",
        _unread,
    ),
    Experiment(
        "R12",
        "more retained messages than one page (long: 100,000) to `#` subscribers that read slowly, or not for a while",
        "every one once, the newest last; the gateway's memory is bounded, others wait no longer",
        _retained,
    ),
]
