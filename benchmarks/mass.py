# SPDX-License-Identifier: Apache-2.0
"""Events that concern many sessions at once: ``python -m benchmarks.mass``.

``expiry``: absent sessions whose deadlines pass in the same second; beside them a client publishes to itself at QoS 1.
``killed``: the clients of a gateway that is killed come back to another one. ``rolling``: gateways are stopped and
started again, one after the other, and their clients go to the others. All times are wall times: other work on the
machine makes them longer; CPU times are those of the processes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import nats
from nats.js import JetStreamContext

from benchmarks import crowd, page, peers, proc
from benchmarks.job import CROWD_TIMEOUT
from benchmarks.report import table
from benchmarks.runner import machine
from benchmarks.sizing import Sender
from mqtt_nats.mqtt_clients.load import packets
from mqtt_nats.mqtt_clients.load.answers import packet_at
from mqtt_nats.mqtt_clients.load.clients import Client, Connection, Greeting, Loop, connect_all
from mqtt_nats.mqtt_clients.load.packets import Layout
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.timers import STREAM as TIMERS

OPTIONS: Final = ("--max-sessions", "10000000", "--max-durable-consumers", "10000000", "--shared-reader", "always")
"""Arguments of gateways; without the limits one address has 10,000 sessions at most."""

RATE: Final = 300.0
"""Sessions that are made in a second at least: they are due after all are made."""

SPARE_S: Final = 35.0
"""Seconds until sessions are due, beside the time to make them: gateways hear all claims in their first 30 seconds."""

AT_ONCE: Final = 50
"""Clients that connect at the same time while sessions are made."""

LOOK_S: Final = 0.05
"""Seconds between two looks at the streams."""

PAUSE_S: Final = 0.02
"""Seconds between two publishes of the bystander."""

QUIET_S: Final = 2.0
"""Seconds in which the bystander is watched before anything happens."""

SETTLE_S: Final = 3.0
"""Seconds from the last connection until gateways are ended."""

WINDOW: Final = 50
"""Messages to the devices that are not acknowledged."""

EVENTS: Final = {"killed": "a gateway was killed", "rolling": "rolling restart"}
"""Events after which clients come back, and their names in the table."""

GATEWAYS: Final = {"killed": 2, "rolling": 10}
"""Number of gateways of each event."""


class Expiry(NamedTuple):
    """Figures of the expiry of sessions."""

    sessions: int
    positions: str
    gateways: int
    took: float
    """Seconds from the first session that has ended until nothing of any is left."""
    effort: tuple[float, float]
    """CPU time of the gateways and nats-server for each session, in seconds."""
    before: float
    """The 99th percentile, in seconds, of the bystander's round trips before."""
    delay: float
    """The same during the expiry."""
    longest: float
    """Its longest round trip during the expiry, in seconds."""


class Return(NamedTuple):
    """Figures of the return of clients."""

    event: str
    clients: int
    positions: str
    gateways: int
    took: float
    """Seconds from the event until all clients are served and have had their messages."""
    median: float
    """Seconds for which a client was not served."""
    longest: float
    failed: Mapping[str, int]
    """Connections that were refused or lost before CONNACK, by cause."""
    effort: tuple[float, float]
    """CPU time of the gateways and nats-server for each return, in seconds."""


class Due(Greeting):
    """A client of 5.0 whose session ends at a given time, of `time.time`, if its connection ends at once."""

    due = 0.0

    def hello(self) -> bytes:
        expiry = max(1, round(self.due - time.time()))
        return packets.connect(self.client.client_id, clean=False, version=5, session_expiry=expiry)


class Echo(Connection):
    """Subscriber of its own messages at QoS 1."""

    def __init__(self, greeting: Greeting) -> None:
        super().__init__(greeting.loop, greeting.sock, greeting.name)
        self.received = 0
        self.loop.add(self)

    def readable(self) -> None:
        end, start = self.fill(), 0
        while (found := packet_at(self.loop.view, start, end)) is not None:
            kind, body, start = found
            if kind & 0xF0 == packets.PUBLISH:
                at = 2 + int.from_bytes(body[:2])
                self.send(b"\x40\x02" + body[at : at + 2])
                self.received += 1
        self.keep(start, end)


class Bystander(threading.Thread):
    """A client that publishes to itself at QoS 1, again and again, and notes how long each message takes."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._ended = threading.Event()
        self.trips: list[float] = []
        """Seconds of each round trip."""

    def run(self) -> None:
        """Publish until `end` is called."""
        loop, topic = Loop(), "bench/bystander/echo"
        client = Client("bystander", topic, 1)
        (greeting,) = connect_all(loop, (peers.HOST, self._port), [client], timeout=CROWD_TIMEOUT)
        echo, layout = Echo(greeting), Layout(topic, 128, 1)
        template = bytearray(layout.template)
        while not self._ended.wait(PAUSE_S):
            count, begun = echo.received + 1, time.monotonic()
            template[layout.packet_id : layout.packet_id + 2] = (count % packets.PID_PERIOD + 1).to_bytes(2)
            echo.send(bytes(template))
            while echo.received < count:
                loop.turn(0.1)
                if time.monotonic() > begun + CROWD_TIMEOUT:
                    raise TimeoutError("a message of the bystander has not come back")
            self.trips.append(time.monotonic() - begun)
        loop.close()

    def end(self) -> None:
        """End the connection."""
        self._ended.set()
        self.join(CROWD_TIMEOUT)


def percentile(trips: Sequence[float]) -> float:
    """Return the 99th percentile; 0 without trips."""
    return statistics.quantiles(trips, n=100, method="inclusive")[98] if len(trips) > 1 else sum(trips)


def _make(ports: Sequence[int], sessions: int, due: float) -> None:
    """Make absent sessions that are due at the same time, at each gateway in turn."""
    kind = type("DueThen", (Due,), {"due": due})
    for start in range(0, sessions, AT_ONCE):
        loop = Loop()
        numbers = range(start, min(start + AT_ONCE, sessions))
        clients = [
            Client(f"mass{number:06}", f"bench/mass/{number:06}/+", 1, clean=False, version=5) for number in numbers
        ]
        port = ports[start // AT_ONCE % len(ports)]
        connect_all(loop, (peers.HOST, port), clients, timeout=CROWD_TIMEOUT, at_once=AT_ONCE, kind=kind)
        loop.close()
    if time.time() > due - 1:
        raise peers.PeerError(f"fewer than {RATE:.0f} sessions were made in a second: the first ones are due already")


async def _ended(stream: JetStreamContext, others: int, until: float) -> float:
    """Wait until all sessions are gone; return the seconds since the first one went."""
    begun, most = 0.0, (await stream.stream_info(SESSIONS)).state.messages
    while True:
        left = (await stream.stream_info(SESSIONS)).state.messages
        timers = (await stream.stream_info(TIMERS)).state.messages
        now = time.monotonic()
        if left < most and not begun:
            begun = now - LOOK_S
        if left <= others and not timers:
            return now - begun
        if now > until:
            raise peers.PeerError(f"{left - others:,} sessions are left")
        await asyncio.sleep(LOOK_S)


async def _expire(url: str, cpu: Callable[[], tuple[float, float]], parts: Sequence[int], sessions: int,
                  by: Bystander) -> tuple[float, int, tuple[float, float]]:  # fmt: skip
    """Return the seconds that the expiry takes, the number of the bystander's trips before it, and the CPU time."""
    client = await nats.connect(url)
    try:
        stream = client.jetstream()
        others = (await stream.stream_info(SESSIONS)).state.messages
        due = time.time() + SPARE_S + sessions / RATE
        await asyncio.to_thread(_make, parts, sessions, due)
        await asyncio.sleep(max(0.0, due - 1.0 - QUIET_S - time.time()))
        by.trips.clear()
        await asyncio.sleep(max(0.0, due - 1.0 - time.time()))
        count, spent = len(by.trips), cpu()
        took = await _ended(stream, others, time.monotonic() + CROWD_TIMEOUT + sessions / 100)
        return took, count, _less(cpu(), spent, sessions)
    finally:
        await client.close()


def _less(after: tuple[float, float], before: tuple[float, float], count: int) -> tuple[float, float]:
    return (after[0] - before[0]) / count, (after[1] - before[1]) / count


def expiry(sessions: int, positions: str, number: int) -> Expiry:
    """Measure the expiry of so many sessions at so many gateways."""
    with (
        peers.monitored_nats_server() as (url, _, server),
        crowd.gateways(number, url, [*OPTIONS, "--session-positions", positions]) as gateways,
    ):
        by = Bystander(gateways[0].port)
        by.start()
        try:
            crowd.wait(lambda: bool(by.trips), "the bystander is not served")
            took, count, effort = asyncio.run(
                _expire(
                    url,
                    lambda: (crowd.cpu_seconds(gateways), proc.cpu_seconds(server)),
                    [one.port for one in gateways],
                    sessions,
                    by,
                )
            )
        finally:
            by.end()
    before, during = by.trips[:count], by.trips[count:]
    delays = percentile(before), percentile(during), max(during)
    return Expiry(sessions, positions, number, took, effort, *delays)


def _deliver(devices: crowd.Crowd, sender: Sender, begun: float) -> None:
    """Publish a message for each device, and wait until each is served and has had its message.

    Raises:
        DeliveryError: a device has had a message twice whose connection was not lost meanwhile.
    """
    layout, sent, total = Layout(f"{crowd.TOPIC}/000000/set", 128, 1), 0, len(devices.messages)
    template, digits = bytearray(layout.template), layout.template.index(b"000000")
    while devices.waiting or sender.acked < total or min(devices.messages) < 1:
        while sent < min(total, sender.acked + WINDOW):
            template[digits : digits + 6] = b"%06d" % sent
            template[layout.packet_id : layout.packet_id + 2] = (sent % packets.PID_PERIOD + 1).to_bytes(2)
            sender.send(bytes(template))
            sent += 1
        devices.turn(0.1)
        if time.monotonic() > begun + CROWD_TIMEOUT:
            late = sum(one < 1 for one in devices.messages)
            raise TimeoutError(f"{devices.waiting} clients are not served, {late} have not had their messages")


def returning(event: str, clients: int, positions: str, number: int, drain: float) -> Return:
    """Measure the return of so many clients: `killed`, all of one gateway, or `rolling`, those of all gateways."""
    options = [*OPTIONS, "--session-positions", positions, "--drain-time", str(drain)]
    with (
        peers.monitored_nats_server() as (url, _, server),
        crowd.gateways(number, url, options) as gateways,
    ):
        devices = crowd.Crowd([one.port for one in gateways])
        try:
            devices.join(clients, 0 if event == "killed" else None)
            address = peers.HOST, gateways[-1].port
            until = time.monotonic() + SETTLE_S
            while time.monotonic() < until:
                devices.turn(0.1)
            begun, spent = time.monotonic(), (crowd.cpu_seconds(gateways), proc.cpu_seconds(server))
            if event == "killed":
                gateways[0].process.kill()
                gateways[0].process.wait()
            else:
                for one in gateways:
                    one.process.terminate()
                    crowd.wait(one.ended, "a gateway has not ended", devices.turn)
                    one.start()
                    crowd.wait(one.ready, "a gateway does not serve", devices.turn)
            (greeting,) = connect_all(devices.loop, address, [Client("sender")], timeout=CROWD_TIMEOUT)
            _deliver(devices, Sender(greeting), begun)
            took, waits = time.monotonic() - begun, devices.waits
            effort = _less((crowd.cpu_seconds(gateways), proc.cpu_seconds(server)), spent, len(waits))
            median, longest = statistics.median(waits), devices.longest()
            return Return(event, clients, positions, number, took, median, longest, dict(devices.failed), effort)
        finally:
            devices.close()


def document_expiry(rows: Sequence[Expiry], command: str) -> str:
    """The part of the page with the expiry of sessions."""
    lines = table(
        [
            [
                "sessions", "`session_positions`", "gateways", "ended in", "each second",
                "CPU of each: gateways, nats-server", "p99 of another client before", "meanwhile", "longest",
            ],
            *(
                [
                    f"{row.sessions:,}",
                    row.positions,
                    str(row.gateways),
                    f"{row.took:.1f} s",
                    f"{row.sessions / row.took:,.0f}",
                    f"{row.effort[0] * 1e6:,.0f} µs, {row.effort[1] * 1e6:,.0f} µs",
                    f"{row.before * 1000:.0f} ms",
                    f"{row.delay * 1000:.0f} ms",
                    f"{row.longest * 1000:.0f} ms",
                ]
                for row in rows
            ),
        ]
    )  # fmt: skip
    return "\n".join(["## Expiry of sessions", "", f"{machine(['ours', 'nats'])}  \n`{command}`", "", *lines])


def document_return(rows: Sequence[Return], command: str) -> str:
    """The part of the page with the return of clients."""
    lines = table(
        [
            [
                "event", "clients", "`session_positions`", "gateways", "all back in", "one waited (median)", "longest",
                "refused or lost",
                "CPU of each return: gateways, nats-server",
            ],
            *(
                [
                    EVENTS[row.event],
                    f"{row.clients:,}",
                    row.positions,
                    str(row.gateways),
                    f"{row.took:.1f} s",
                    f"{row.median:.1f} s",
                    f"{row.longest:.1f} s",
                    f"{sum(row.failed.values()):,}",
                    f"{row.effort[0] * 1e6:,.0f} µs, {row.effort[1] * 1e6:,.0f} µs",
                ]
                for row in rows
            ),
        ]
    )  # fmt: skip
    causes = [
        f"- Refused or lost, {row.clients:,} clients, {row.positions}: "
        + ", ".join(f"{number:,} × {cause}" for cause, number in sorted(row.failed.items()))
        for row in rows
        if row.failed
    ]
    head = ["## Return of many clients", "", f"{machine(['ours', 'nats'])}  \n`{command}`", ""]
    return "\n".join([*head, *lines, *([""] if causes else []), *causes])


def _put(report: Path | None, part: str, text: str) -> None:
    print("\n" + text)
    if report:
        page.put(report, "How cost grows", part, text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mass", description=__doc__)
    parser.add_argument("event", choices=("expiry", *EVENTS), nargs="+")
    parser.add_argument("--sessions", default="1000,10000,100000", metavar="N[,N]", help="that expire (%(default)s)")
    parser.add_argument("--positions", default="records,consumers", help="of each (%(default)s)")
    parser.add_argument("--gateways", type=int, metavar="N", help="expiry: 1, killed: 2, rolling: 10")
    parser.add_argument("--clients", default="5000,15000", metavar="N[,N]", help="that come back (%(default)s)")
    parser.add_argument("--drain", type=float, default=0.0, metavar="S", help="`drain_time` (%(default)s)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the tables as parts of this page")
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = " ".join(["python -m benchmarks.mass", *given])
    positions = options.positions.split(",")
    ends = []
    for sessions, each in product(map(int, options.sessions.split(",")), positions):
        if "expiry" in options.event:
            ends.append(expiry(sessions, each, options.gateways or 1))
            print(ends[-1], flush=True)
    if ends:
        _put(options.report, "growth expiry", document_expiry(ends, command))
    returns = []
    for event, clients, each in product(EVENTS, map(int, options.clients.split(",")), positions):
        if event in options.event:
            returns.append(returning(event, clients, each, options.gateways or GATEWAYS[event], options.drain))
            print(returns[-1], flush=True)
    if returns:
        _put(options.report, "growth return", document_return(returns, command))


if __name__ == "__main__":
    main()
