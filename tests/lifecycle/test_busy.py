# SPDX-License-Identifier: Apache-2.0
"""A gateway that is merely busy, or whose JetStream is slow, is not taken for dead."""

from __future__ import annotations

import asyncio
import secrets
import time

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

LEASE = 2
"""Seconds."""


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
        eventually(lambda: looks, 3 * LEASE, what="a look")
        identity = gateway.account.services.identity.id
        renewed: set[float] = set()

        def grown() -> bool:
            renewed.add(lease._renewed)
            return time.monotonic() > looks[0] + 2 * LEASE and len(renewed) > 5

        eventually(grown, 6 * LEASE, what="renewals")
        assert len(looks) == 1, "one look at a time"
        assert not lease.obstacle
        assert gateway.account.services.identity.id == identity


@pytest.mark.parametrize("kind", ["packets", "one run"])
def test_much_work_in_one_write(nats_server: NatsServer, gateway_factory: GatewayFactory, kind: str) -> None:
    """Each of thousands of messages has hundreds of receivers: it takes several leases, and nobody notices."""
    arguments = ("--gateway-lease", str(LEASE), "--max-outbound-bytes", "65536")
    busy, other = gateway_factory(nats_server, *arguments), gateway_factory(nats_server, *arguments)
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
                    count = 5000
                    ends = (b"x", b"x") if kind == "one run" else (b"x", b"yy")
                    begun = time.monotonic()
                    writer.send(b"".join(raw.publish(topic, ends[at % 2]) for at in range(count)))
                    waited = []
                    while time.monotonic() < begun + 3 * LEASE:
                        since = time.monotonic()
                        light.quiet()
                        waited.append(time.monotonic() - since)
                    writer.ping()
                    print(f"{kind}: {time.monotonic() - begun:.1f} s, others waited {max(waited):.3f} s at most")
                    assert max(waited) < 2.0
                watcher.quiet()
                victim.quiet()
            finally:
                for reader in readers:
                    reader.close()
            victim.send(raw5.disconnect())
    assert "considered dead" not in busy.log
