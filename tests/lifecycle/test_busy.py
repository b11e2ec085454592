# SPDX-License-Identifier: Apache-2.0
"""A gateway that is merely busy, or whose JetStream is slow, is not taken for dead."""

from __future__ import annotations

import asyncio
import secrets
import select
import time
from collections.abc import Callable

import pytest

from mqtt_nats.config.settings import Settings
from mqtt_nats.lifecycle.lease import Lease
from tests.conftest import GatewayFactory
from tests.harness import raw, raw5
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import SUBSCRIPTION_ID, Raw5, prop
from tests.harness.waiting import eventually
from tests.lifecycle.watchful import WATCHFUL

LEASE = 2
"""Seconds."""

BUSY_LEASE = 6
"""Seconds of the lease of a gateway that is busy: a slow machine gives it time for a renewal in that."""

WORK = 2.5 * BUSY_LEASE
"""Seconds that the gateway is busy, about."""

SAMPLE = 300
"""Messages with which it is measured how many that takes."""


def lease_of(gateway: InProcess) -> Lease:
    lease = gateway.account.lease
    assert lease is not None
    return lease


def test_a_look_at_others_that_hangs(nats_server: NatsServer) -> None:
    """Renewals do not wait for it."""
    settings = Settings.model_validate({"nats": nats_server.url, "listen": "127.0.0.1:0", "gateway_lease": LEASE})
    with running(settings) as gateway:
        lease = lease_of(gateway)
        looks: list[float] = []

        async def judge() -> None:
            looks.append(time.monotonic())
            await asyncio.Event().wait()

        gateway.call(lambda: setattr(lease, "_judge", judge))
        eventually(lambda: looks, what="a look")
        identity = gateway.account.services.identity.id
        renewed: set[float] = set()

        def grown() -> bool:
            renewed.add(lease._renewed)
            return time.monotonic() > looks[0] + 2 * LEASE and len(renewed) > 5

        eventually(grown, what="renewals")
        assert len(looks) == 1, "one look at a time"
        assert not lease.obstacle
        assert gateway.account.services.identity.id == identity


def work(writer: Raw, topic: str, kind: str, count: int, meanwhile: Callable[[], None]) -> float:
    """Publish in one write, with something to do until all is handled; the seconds that it took."""
    ends = (b"x", b"x") if kind == "one run" else (b"x", b"yy")
    begun = time.monotonic()
    writer.send(b"".join(raw.publish(topic, ends[at % 2]) for at in range(count)) + raw.packet(0xC0))
    while not select.select([writer.socket], [], [], 0)[0]:
        meanwhile()
    writer.expect(raw.PINGRESP)
    return time.monotonic() - begun


@pytest.mark.parametrize("kind", ["packets", "one run"])
def test_much_work_in_one_write(nats_server: NatsServer, gateway_factory: GatewayFactory, kind: str) -> None:
    """Each of thousands of messages has hundreds of receivers: it takes several leases, and nobody notices."""
    arguments = ("--gateway-lease", str(BUSY_LEASE), "--max-outbound-bytes", "65536")
    busy, other = (gateway_factory(nats_server, *arguments, module=one) for one in ("", WATCHFUL))
    topic = f"busy/{secrets.token_hex(4)}"
    wills = f"wills/{secrets.token_hex(4)}"
    with Raw5.open(other.port) as watcher, Raw5.open(busy.port) as light:
        watcher.subscribed((wills, 0))
        with Raw5(busy.port) as victim:
            victim.send(raw5.connect("victim", flags=4, tail=raw5.will(wills, b"dead")))
            victim.answer(raw.CONNACK, 0, 0)
            readers = [Raw5.open(busy.port, f"r{number}-{topic[5:]}") for number in range(200)]
            try:
                for number, reader in enumerate(readers):
                    reader.subscribed((topic, 0), parts=prop(SUBSCRIPTION_ID, number + 1))
                with Raw.connected(busy.port, patience=120) as writer:
                    waited: list[float] = []

                    def looks() -> None:
                        since = time.monotonic()
                        light.quiet()
                        waited.append(time.monotonic() - since)

                    count = int(SAMPLE * WORK / work(writer, topic, kind, SAMPLE, looks))
                    waited.clear()
                    took = work(writer, topic, kind, count, looks)
                    print(f"{kind}: {count} in {took:.1f} s, others waited {max(waited):.3f} s at most")
                    assert max(waited) < max(2.0, took / 4), "who waits for all of it waits for most of the time"
                watcher.quiet()
                victim.quiet()
            finally:
                for reader in readers:
                    reader.close()
            victim.send(raw5.disconnect())
    assert "considered dead" not in busy.log
