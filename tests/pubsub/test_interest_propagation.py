# SPDX-License-Identifier: Apache-2.0
"""One gateway of a nats-server announces it; one of each server answers a gateway that has connected."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import nats
import pytest
from nats.aio.msg import Msg

from mqtt_nats.backbone.connect import NatsLinks
from mqtt_nats.backbone.inbox import NO_RESPONDERS
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.pubsub import interest_propagation
from mqtt_nats.pubsub.interest_propagation import ANNOUNCEMENT_PAUSE_LEAST_S, Nodes, time_to_announcement
from mqtt_streams.gateway_subjects import HERE
from tests.conftest import GatewayFactory
from tests.harness.doubles import stands_for
from tests.harness.fence import fence
from tests.harness.nats import NatsServer
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeLink, FakeServices, as_link

GATEWAYS = 3
REPEATS = 2


@pytest.mark.long
async def test_announcements_of_several_gateways(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """They are about as many as of one gateway."""
    for _ in range(GATEWAYS):
        gateway_factory(nats_server)
    client = await nats.connect(nats_server.url)
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        await client.subscribe(HERE.decode(), cb=hear)
        await asyncio.sleep(REPEATS * 2 * ANNOUNCEMENT_PAUSE_LEAST_S)
        assert REPEATS <= len(heard) <= 2 * REPEATS + 1
        assert len(set(heard)) == 1
        answers: list[bytes] = []

        async def answer(message: Msg) -> None:
            answers.append(message.data)

        inbox = client.new_inbox()
        await client.subscribe(inbox, cb=answer)
        await client.publish(HERE.decode(), b"ANOTHER", reply=inbox)
        await fence(client)
        await aeventually(lambda: bool(answers))
        await asyncio.sleep(1)
        assert answers == [heard[0]]


@pytest.mark.parametrize("gateways", [1, 10, 1000, 10_000])
def test_few_gateways_of_many_announce_their_server(monkeypatch: pytest.MonkeyPatch, gateways: int) -> None:
    """Also where an announcement takes a while: whoever's time has come until then announces the server, too."""
    monkeypatch.setattr(random, "random", random.Random(5).random)
    takes, rounds = 0.1, 20
    announced = 0
    for _ in range(rounds):
        times = sorted(time_to_announcement() for _ in range(gateways))
        assert ANNOUNCEMENT_PAUSE_LEAST_S <= times[0] <= times[-1] <= 2 * ANNOUNCEMENT_PAUSE_LEAST_S
        announced += sum(each <= times[0] + takes for each in times)
    assert announced / rounds < 3


@stands_for(NatsConnection)
class FencedLink(FakeLink):
    """Stands for `NatsConnection`: its server has taken everything at once."""

    async def fence(self) -> None:
        """Nothing is to be waited for."""


async def test_an_answer_that_comes_late_restores_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gateway was slow. Where none is left, nats-server says so."""
    monkeypatch.setattr(interest_propagation, "SERVERS_TIMEOUT", 0.01)
    fake, services = FencedLink(), FakeServices()
    nodes = Nodes(
        NatsLinks(as_link(fake), as_link(FakeLink()), as_link(FakeLink()), services.nats.inbox, services.nats.store)
    )
    answers, handler = fake.fake_subjects[b"1"], fake.handlers[b"1"]
    fake.fake_bring(HERE, b"SLOW")
    assert nodes.others == {b"SLOW"}
    await nodes.fence(as_link(fake))
    assert nodes.others == set()
    handler(answers[:-1] + b"1.SLOW", b"", b"", b"")
    assert nodes.others == {b"SLOW"}
    handler(answers[:-1] + b"1.SLOW", b"", NO_RESPONDERS, b"")
    assert nodes.others == set()
