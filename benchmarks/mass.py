# SPDX-License-Identifier: Apache-2.0
"""Events that concern many sessions at once: ``python -m benchmarks.mass``.

``expiry``: absent sessions whose deadlines pass in the same second; beside them a client publishes to itself at QoS 1.
How fast a few others are made tells when all can be absent; they are due later than that, or the run fails.
``killed``: the clients of a gateway that is killed come back to another one. ``rolling``: gateways are stopped and
started again, one after the other, and their clients go to the others. All times are wall times: other work on the
machine makes them longer; CPU times are those of the processes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import nats
from nats.js import JetStreamContext

from benchmarks import bystander, crowd, page, peers, proc
from benchmarks.durable_sessions import MANY, UNLIMITED, make_absent
from benchmarks.generator import packets
from benchmarks.generator.clients import Client, connect_all
from benchmarks.generator.packets import Layout
from benchmarks.job import CROWD_TIMEOUT
from benchmarks.report import table
from benchmarks.runner import machine
from benchmarks.sizing import Sender
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.timers import STREAM as TIMERS

OTHERS: Final = 50
"""Sessions that are made before those that expire, and tell how long one takes; of many, one in fifty."""

OTHERS_LAST_S: Final = 86_400.0
"""Seconds for which these last."""

SLOWER: Final = 1.5
"""All sessions may take so many times as long to make as the others have taken, session by session."""

SPARE_S: Final = 35.0
"""Seconds until sessions are due, beside the time to make them: gateways hear all claims in their first 30 seconds."""

LOOK_S: Final = 0.05
"""Seconds between two looks at the streams."""

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
    before: bystander.Delay
    """The bystander's messages before."""
    meanwhile: bystander.Delay
    """The same during the expiry."""


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


def _clients(numbers: range, due: float) -> Iterator[Client]:
    """Clients of 5.0; the session of each ends at that time, of `time.time`, if the client connects now and leaves."""
    for number in numbers:
        expiry = max(1, round(due - time.time()))
        name, topic = f"mass{number:06}", f"bench/mass/{number:06}/+"
        yield Client(name, topic, 1, clean=False, version=5, session_expiry=expiry)


async def _ended(stream: JetStreamContext, others: int, others_timers: int, until: float) -> float:
    """Wait until only other sessions and their timers are left; return the seconds since the first one went."""
    begun, most = 0.0, (await stream.stream_info(SESSIONS)).state.messages
    while True:
        left = (await stream.stream_info(SESSIONS)).state.messages
        timers = (await stream.stream_info(TIMERS)).state.messages
        now = time.monotonic()
        if left < most and not begun:
            begun = now - LOOK_S
        if left <= others and timers <= others_timers:
            return now - begun
        if now > until:
            raise peers.PeerError(f"{left - others:,} sessions are left")
        await asyncio.sleep(LOOK_S)


def _make(ports: Sequence[int], sessions: int) -> float:
    """Make absent sessions that are due at the same time, and the others; return that time, of `time.time`.

    Raises:
        PeerError: they were made so slowly that the first ones are due already.
    """
    others = _others(sessions)
    each = make_absent(ports, _clients(range(sessions, sessions + others), time.time() + OTHERS_LAST_S)) / others
    due = time.time() + SPARE_S + SLOWER * each * sessions
    took = make_absent(ports, _clients(range(sessions), due))
    if time.time() > due - 1.0 - bystander.QUIET_S:
        raise peers.PeerError(
            f"the first sessions are due already: {sessions / took:,.0f} were made in a second, "
            f"and {1 / each:,.0f} of the others before"
        )
    return due


def _others(sessions: int) -> int:
    return max(OTHERS, sessions // 50)


async def _expire(
    url: str, cpu: Callable[[], tuple[float, float]], ports: Sequence[int], sessions: int
) -> tuple[float, float, tuple[float, float]]:
    """Return the monotonic time just before the expiry, the seconds that the expiry takes, and the CPU time of each."""
    client = await nats.connect(url)
    try:
        stream = client.jetstream()
        others = _others(sessions)
        left = (await stream.stream_info(SESSIONS)).state.messages + others
        due = await asyncio.to_thread(_make, ports, sessions)
        await asyncio.sleep(due - 1.0 - time.time())
        begun, spent = time.monotonic(), cpu()
        took = await _ended(stream, left, others, begun + CROWD_TIMEOUT + sessions / 100)
        return begun, took, _less(cpu(), spent, sessions)
    finally:
        await client.close()


def _less(after: tuple[float, float], before: tuple[float, float], count: int) -> tuple[float, float]:
    return (after[0] - before[0]) / count, (after[1] - before[1]) / count


def expiry(sessions: int, positions: str, number: int) -> Expiry:
    """Measure the expiry of so many sessions at so many gateways."""
    options = [*UNLIMITED, "--session-positions", positions]
    with (
        peers.monitored_nats_server() as (url, _, server),
        crowd.gateways(number, url, options) as gateways,
    ):
        ports = [one.port for one in gateways]
        with bystander.bystander(ports[0]) as client:
            begun, took, effort = asyncio.run(
                _expire(url, lambda: (crowd.cpu_seconds(gateways), proc.cpu_seconds(server)), ports, sessions)
            )
            trips = client.trips()
    before = bystander.delay(trips, begun - bystander.QUIET_S, begun)
    return Expiry(sessions, positions, number, took, effort, before, bystander.delay(trips, begun))


def _deliver(devices: crowd.Crowd, sender: Sender) -> None:
    """Publish a message for each device, and wait until each is served and has had its message.

    Raises:
        TimeoutError: that takes more than `CROWD_TIMEOUT`.
    """
    layout, sent, total = Layout(f"{crowd.TOPIC}/000000/set", 128, 1), 0, len(devices.messages)
    until = time.monotonic() + CROWD_TIMEOUT
    template, digits = bytearray(layout.template), layout.template.index(b"000000")
    while devices.waiting or sender.acked < total or min(devices.messages) < 1:
        while sent < min(total, sender.acked + WINDOW):
            template[digits : digits + 6] = b"%06d" % sent
            template[layout.packet_id : layout.packet_id + 2] = (sent % packets.PID_PERIOD + 1).to_bytes(2)
            sender.send(bytes(template))
            sent += 1
        devices.turn(0.1)
        if time.monotonic() > until:
            late = sum(one < 1 for one in devices.messages)
            raise TimeoutError(f"{devices.waiting} clients are not served, {late} have not had their messages")


def returning(event: str, clients: int, positions: str, number: int, drain: float) -> Return:
    """Measure the return of so many clients: `killed`, all of one gateway, or `rolling`, those of all gateways."""
    options = [*MANY, "--session-positions", positions, "--drain-time", str(drain)]
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
            _deliver(devices, Sender(greeting))
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
                "CPU of each: gateways, nats-server", *bystander.HEADS,
            ],
            *(
                [
                    f"{row.sessions:,}",
                    row.positions,
                    str(row.gateways),
                    f"{row.took:.1f} s",
                    f"{row.sessions / row.took:,.0f}",
                    f"{row.effort[0] * 1e6:,.0f} µs, {row.effort[1] * 1e6:,.0f} µs",
                    str(row.before),
                    str(row.meanwhile),
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
