# SPDX-License-Identifier: Apache-2.0
"""Stubs in place of gateways without clients: ``python -m benchmarks.stub_gateways NATS_URL NUMBER``.

A stub sends to NATS what an idle gateway sends, as often, by the stores and requests of the gateway's own code. It has
as many connections and serves no clients. A real gateway has to run there: streams and the first report are its own.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import orjson

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.config.nats_connect import connect_link
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.desired_state import WISHES_READ_S as FLEET_EVERY
from mqtt_nats.lifecycle.cluster_bans import BANS_READ_S as BANS_EVERY
from mqtt_nats.lifecycle.lease import LEASE_WATCHERS, RENEWALS_PER_LEASE, STREAM_CHECKERS
from mqtt_nats.lifecycle.timers import PULL_WAIT_S, TAKERS_CHOICE_S, TIMER_TAKERS, TIMERS_AT_ONCE
from mqtt_nats.observability.jetstream_state import STORAGE_S
from mqtt_nats.observability.sys_topics import GATEWAYS_READ_MOST
from mqtt_nats.observability.topics import of_gateway
from mqtt_nats.pubsub.interest_propagation import time_to_announcement
from mqtt_nats.sessions.listener_clients import CHECK_SELDOM_S, LISTENER
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.bans import BanStore
from mqtt_streams.consumers import consumer_names
from mqtt_streams.fleet import FleetStore
from mqtt_streams.gateway_subjects import ECHO, HERE, REPORTS, REPORTS_WANTED, new_inbox
from mqtt_streams.gateways import GatewayStore
from mqtt_streams.generations import GenerationStore
from mqtt_streams.hashing import name_hash
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.sessions import V5_VERSION
from mqtt_streams.subjects import system_subject
from mqtt_streams.timers import OthersWait, TimerStore

AT_A_TIME: Final = 20
"""Stubs that connect at the same time."""

CONNECTIONS: Final = 3
"""Connections of a gateway, each of which is kept alive by pings."""

NAME: Final = "stub of a gateway"
"""Name of these connections."""

READY: Final = "the stubs are connected"
"""Line that is printed when all stubs are there."""

LEARN_S: Final = 30.0
"""Seconds in which a real gateway has reported."""


class Stub:
    """Stub of a gateway without clients.

    Args:
        number: of stubs and gateways that there are; a real gateway estimates it.
        report: what a real gateway has told other gateways for their `$SYS` topics.
    """

    def __init__(self, inbox: RequestInbox, settings: Settings, number: int, report: dict[str, Any]) -> None:
        self._inbox, self._settings, self._number = inbox, settings, number
        self.identity = name_hash(secrets.token_hex(16))
        self._report = report | {"id": self.identity, "name": f"stub-{self.identity}"}
        self._gateways = GatewayStore(inbox)
        self._stream = GenerationStore(inbox)
        self._timers = TimerStore(inbox)
        self._bans, self._fleet = BanStore(inbox), FleetStore(inbox)
        self._lease = self._registration = 0
        self._announced = 0.0
        """Loop time in seconds at which the stub announces its nats-server, unless another one does before."""
        link = inbox.link
        self._server = str(link.server["server_id"]).encode()
        link.subscribe_raw(HERE, self._heard)
        link.subscribe_raw(HERE, self._answer, self._server)
        link.subscribe_raw(ECHO + self._server, self._answer, b"echo")

    async def run(self) -> None:
        """Send what a gateway sends, until it is cancelled."""
        await self._renew()
        self._postpone()
        every: Sequence[tuple[float, Callable[[], Awaitable[None]]]] = (
            (self._settings.gateway_lease / RENEWALS_PER_LEASE, self._renew),
            (CHECK_SELDOM_S, self._look_at_others),
            (STORAGE_S, self._read_storage),
            (BANS_EVERY, self._read_bans),
            (FLEET_EVERY, self._read_fleet),
            (self._settings.sys_interval, self._tell),
            (1.0, self._announce),
        )
        async with asyncio.TaskGroup() as tasks:
            for seconds, work in every:
                tasks.create_task(_again(seconds, work))
            tasks.create_task(self._take_timers())

    def _watches(self, gateways: float) -> bool:
        """As `lifecycle.lease.Lease.watches`."""
        return random.random() * self._number < gateways

    async def _renew(self) -> None:
        """As `lifecycle.lease.Lease` renews, checks the stream of messages, and looks for dead gateways."""
        store, identity = self._gateways, self.identity
        info = {"version": self._report["version"], "records": V5_VERSION}
        more = {"started": time.time(), "name": self._report["name"], "process": secrets.token_hex(24)}
        self._lease = await store.hold(identity, identity, self._lease, self._settings.gateway_lease)
        self._registration = await store.register(identity, time.time(), info | more, self._registration)
        if self._watches(STREAM_CHECKERS):
            await self._stream.look(identity)
        if self._watches(LEASE_WATCHERS):
            await store.oldest()

    async def _look_at_others(self) -> None:
        """As `sessions.listener_clients.ListenerClients` looks."""
        if self._watches(LISTENER):
            await consumer_names(self._inbox, RETAINED, RETAINED + "_")

    async def _read_storage(self) -> None:
        await call(self._inbox, "INFO")

    async def _read_bans(self) -> None:
        await self._bans.all()

    async def _read_fleet(self) -> None:
        await self._fleet.all()

    async def _tell(self) -> None:
        """As `observability.sys_topics` does, in a gateway that no client asks."""
        for stream in (MESSAGES, RETAINED, SESSIONS) if self._number - 1 <= GATEWAYS_READ_MOST else ():
            await call(self._inbox, f"STREAM.INFO.{stream}")
        link = self._inbox.link
        _publish(link, REPORTS, orjson.dumps(self._report))
        for topic, value in of_gateway(self._report).items():
            _publish(link, system_subject(topic).encode(), value.encode())

    async def _take_timers(self) -> None:
        """As `lifecycle.timers` does; a stub leaves to others what it takes."""
        await asyncio.sleep(PULL_WAIT_S * random.random())
        waits = True
        while True:
            try:
                if waits:
                    await self._timers.fetch(PULL_WAIT_S, TIMERS_AT_ONCE)
                else:
                    await asyncio.sleep(TAKERS_CHOICE_S)
                waits = self._watches(TIMER_TAKERS)
            except OthersWait:
                await asyncio.sleep(PULL_WAIT_S * random.random())

    async def _announce(self) -> None:
        """As `pubsub.interest_propagation` does."""
        if asyncio.get_running_loop().time() >= self._announced:
            self._postpone()
            _publish(self._inbox.link, HERE, self._server)

    def _postpone(self) -> None:
        self._announced = asyncio.get_running_loop().time() + time_to_announcement()

    def _heard(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if payload == self._server:
            self._postpone()

    def _answer(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if reply:
            _publish(self._inbox.link, reply, self._server)


async def _again(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do something again and again, first at a random time, also when JetStream has not answered."""
    await asyncio.sleep(seconds * random.random())
    while True:
        try:
            await work()
        except (ApiError, NoResponders, RequestTimeout) as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        await asyncio.sleep(seconds)


def _publish(link: NatsConnection, subject: bytes, payload: bytes) -> None:
    link.out.append(b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload))
    link.kick()


async def _connect(settings: Settings) -> RequestInbox:
    """Connect a stub: for requests, and as a gateway does for filters with a wildcard first and for queue groups."""

    async def offline() -> None:
        return

    async def online() -> None:
        return

    connect = partial(connect_link, settings, name=NAME, no_echo=True, on_online=online, on_offline=offline)
    for _ in range(CONNECTIONS - 1):
        (await connect()).subscribe_raw(new_inbox() + b">", _ignore)
    return RequestInbox(await connect())


def _ignore(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
    """Nobody sends anything to a connection that has no requests."""


async def _learn(inbox: RequestInbox) -> dict[str, Any]:
    """Return the last report of a real gateway."""
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    subject = b"%b.stub" % REPORTS

    def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if not heard.done():
            heard.set_result(payload)

    inbox.link.subscribe_raw(subject, arrived)
    inbox.link.out.append(b"PUB %b %b 0\r\n\r\n" % (REPORTS_WANTED, subject))
    inbox.link.kick()
    async with asyncio.timeout(LEARN_S):
        found: dict[str, Any] = orjson.loads(await heard)
    return found


async def run(url: str, number: int, others: int = 1) -> None:
    """Run so many stubs beside ``others`` real gateways until the task is cancelled."""
    settings = Settings.model_validate({"nats": url})
    inboxes: list[RequestInbox] = []
    while len(inboxes) < number:
        some = min(AT_A_TIME, number - len(inboxes))
        inboxes += await asyncio.gather(*(_connect(settings) for _ in range(some)))
    report = await _learn(inboxes[0]) if inboxes else {}
    async with asyncio.TaskGroup() as tasks:
        for inbox in inboxes:
            tasks.create_task(Stub(inbox, settings, number + others, report).run())
        print(READY, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stub_gateways", description=__doc__)
    parser.add_argument("url", metavar="NATS_URL")
    parser.add_argument("number", type=int, metavar="NUMBER")
    options = parser.parse_args(arguments)
    asyncio.run(run(options.url, options.number))


if __name__ == "__main__":
    main()
