# SPDX-License-Identifier: Apache-2.0
"""Stubs send what idle gateways send: the messages of a minute are compared, by kind and number."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from math import sqrt

import nats
import pytest
from nats.aio.msg import Msg

from benchmarks.gateways import stubs
from benchmarks.stub_gateways import CONNECTIONS, NAME
from mqtt_streams.gateway_subjects import INBOX
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.monitor import Monitor
from tests.harness.nats import NatsServer
from tests.harness.waiting import free_port

pytestmark = [pytest.mark.processes, pytest.mark.soak]

SETTLE_S = 40.0
"""Seconds after which a gateway hears claims that concern it, and checks what it checks seldom."""

CAPTURE_S = 60.0
"""Seconds for which messages are counted: the longest time between two messages of one kind."""

VARIABLE = re.compile(r"(?<=lease\.).*|(?<=gateway\.).*|(?<=brokers\.)[^.]*")
"""What is different in subjects of one kind: the id of the gateway."""

MANY = 40
"""Stubs among which a gateway does not read the reports of others: more than `GATEWAYS_READ_MOST`."""

SETTLE_MANY_S = 75.0
"""Seconds after which a gateway among so many others has sent its second report, and reads those of others no more."""

OTHERS = ("$MQTT.gateways.here", "$JS.EVENT.", INBOX)
"""Subjects of messages that one gateway sends for all on its nats-server, or that nats-server sends."""


async def captured(server: NatsServer) -> Counter[str]:
    """Count the messages of `CAPTURE_S` seconds by their kind."""
    found: Counter[str] = Counter()

    async def count(message: Msg) -> None:
        if not message.subject.startswith(OTHERS):
            found[VARIABLE.sub("*", message.subject)] += 1

    client = await nats.connect(server.url)
    try:
        await asyncio.sleep(SETTLE_S)
        await client.subscribe(">", cb=count)
        await asyncio.sleep(CAPTURE_S)
    finally:
        await client.close()
    return found


def test_a_stub_sends_what_a_gateway_sends(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    """Beside a gateway of its own on another server, of which the messages are taken off."""
    alone, beside = nats_factory(), nats_factory()
    gateway_factory(alone)
    gateway_factory(beside)

    async def both() -> tuple[Counter[str], Counter[str]]:
        return await asyncio.gather(captured(alone), captured(beside))

    with stubs(1, beside.url):
        real, together = asyncio.run(both())
    assert len(real) > 40
    assert real.keys() == together.keys()
    for kind, number in real.items():
        assert together[kind] - number == pytest.approx(number, rel=0.2, abs=2), (kind, real, together)


async def requests_of(server: NatsServer) -> dict[str, Counter[str]]:
    """Count the requests of `CAPTURE_S` seconds by the inbox of who asks, and by their kind."""
    found: dict[str, Counter[str]] = {}

    async def count(message: Msg) -> None:
        if message.reply.startswith(INBOX):
            _, _, inbox, *_ = message.reply.split(".")
            kinds = found.setdefault(inbox.partition("s")[0], Counter())  # of pages and pull requests: <inbox>s<number>
            kinds[VARIABLE.sub("*", message.subject)] += 1

    client = await nats.connect(server.url)
    try:
        await asyncio.sleep(SETTLE_MANY_S)
        await client.subscribe(">", cb=count)
        await asyncio.sleep(CAPTURE_S)
    finally:
        await client.close()
    return found


def test_a_stub_among_many_asks_what_a_gateway_asks(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    """What a gateway leaves to others of many it asks at random, so about as often as stubs do on average."""
    monitor = Monitor(port := free_port())
    server = nats_factory(config=f'http: "127.0.0.1:{port}"')
    gateway_factory(server)
    with stubs(MANY, server.url):
        found = asyncio.run(requests_of(server))
        connections = monitor.get("connz?limit=10000&subs=1")["connections"]
    subjects = [
        one for each in connections if each["name"].startswith("mqtt-nats ") for one in each["subscriptions_list"]
    ]
    (gateway,) = found.keys() & {one.split(".")[2] for one in subjects if one.startswith(INBOX)}
    real = found.pop(gateway)
    assert len(found) == MANY
    for kind in set(real).union(*found.values()):
        average = sum(one[kind] for one in found.values()) / MANY
        assert abs(real[kind] - average) <= 2 + 3 * sqrt(average), (kind, real, average)
    assert not any(one["$JS.API.STREAM.INFO.$MQTT_rmsgs"] for one in (real, *found.values()))


def test_a_stub_has_as_many_connections(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    """nats-server answers pings on each of them."""
    monitor = Monitor(port := free_port())
    server = nats_factory(config=f'http: "127.0.0.1:{port}"')
    gateway_factory(server)
    with stubs(1, server.url):
        assert len(monitor.connections("mqtt-nats ")) == len(monitor.connections(NAME)) == CONNECTIONS
