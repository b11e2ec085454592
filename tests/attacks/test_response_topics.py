# SPDX-License-Identifier: Apache-2.0
"""A service that answers a request publishes on the request's response topic: only where the requester may itself.

That is decided when the request is published, and stored with what is published later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from mqtt_nats.codec import Will
from tests.harness.fence import fence
from tests.harness.inprocess import InProcess
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5
from tests.plugins.conftest import installed, running_with

pytestmark = pytest.mark.anyio

LATE = 30.0  # seconds in which something that is due must come
RULES = """
[[rules]]
effect = "deny"
access = "publish"
topics = "alarm/#"

[[rules]]
effect = "allow"
topics = "#"
"""
DELAYED = '[[rules]]\neffect = "allow"\ntopics = "$delayed/#"\n'
OPEN = '[[rules]]\neffect = "allow"\ntopics = ["#", "$delayed/#"]\n'


class Gateways:
    """Gateways of one account; ``ruled`` permits nobody to publish on ``alarm/#``, ``free`` permits everything."""

    def __init__(self, url: str, directory: Path, stack: ExitStack) -> None:
        self._url = url
        self._stack = stack
        self.file = directory / "acl.toml"
        self.file.write_text(RULES + DELAYED, encoding="utf-8")
        self._open = directory / "open.toml"
        self._open.write_text(OPEN, encoding="utf-8")

    def ruled(self) -> InProcess:
        return self._start(self.file)

    def free(self) -> InProcess:
        return self._start(self._open)

    def _start(self, acl: Path) -> InProcess:
        return self._stack.enter_context(running_with({"delayed": {}}, self._url, acl_file=acl))


@pytest.fixture
def gateways(nats_server: NatsServer, tmp_path: Path) -> Iterator[Gateways]:
    with installed(), ExitStack() as stack:
        yield Gateways(nats_server.url, tmp_path, stack)


class Service:
    """A NATS service on ``svc.ask`` that answers everybody who wants an answer."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[Msg] = asyncio.Queue()

    async def begin(self, client: NatsClient) -> None:
        async def answer(message: Msg) -> None:
            if message.reply:
                await message.respond(b"fire")
            await self.asked.put(message)

        await client.subscribe("svc.ask", cb=answer)
        await fence(client)

    async def reply(self) -> str:
        """Where the next request wants to be answered; empty: nowhere."""
        return (await asyncio.wait_for(self.asked.get(), LATE)).reply


@pytest.fixture
async def service(nats_server: NatsServer) -> AsyncIterator[Service]:
    client = await nats.connect(nats_server.url)
    found = Service()
    await found.begin(client)
    try:
        yield found
    finally:
        await client.close()


async def publish(client: RawClient5, topic: str, payload: bytes, qos: int, **properties: Any) -> None:
    number = client.publish5(topic, payload, qos, **properties)
    if qos == 1:
        await client.expect_ack(PUBACK, number)
    elif qos == 2:
        await client.expect_ack(PUBREC, number)
        client.ack(PUBREL, number)
        await client.expect_ack(PUBCOMP, number)


@pytest.mark.parametrize("more", [{}, {"correlation_data": b"c"}], ids=["plain", "correlation data"])
async def test_a_scheduled_request(gateways: Gateways, service: Service, more: dict[str, Any]) -> None:
    """It is published later by any gateway, and its answer arrives only where its publisher may publish."""
    gateway = gateways.ruled()
    async with (
        await RawClient5.connect5(gateway.port, "attacker") as attacker,
        await RawClient.connect(gateway.port, "watcher") as watcher,
    ):
        await watcher.subscribe("alarm/#", "ok/#")
        for qos in (0, 1, 2):
            await publish(attacker, "$delayed/0/svc/ask", b"?", qos, response_topic="alarm/fire", **more)
            assert await service.reply() == ""
            await publish(attacker, "$delayed/0/svc/ask", b"?", qos, response_topic="ok/answers", **more)
            assert await service.reply() != ""
            await watcher.message("ok/answers", b"fire")
        await watcher.quiet()


@pytest.mark.long
async def test_a_scheduled_request_of_another_gateway(gateways: Gateways, service: Service) -> None:
    """The gateway that publishes it permits everything: what the first one has decided counts."""
    first, second = gateways.ruled(), gateways.free()
    async with await RawClient.connect(second.port, "watcher") as watcher:
        await watcher.subscribe("alarm/#", "ok/#")
        async with await RawClient5.connect5(first.port, "attacker") as attacker:
            for topic in ("alarm/fire", "ok/answers"):
                await publish(attacker, "$delayed/5/svc/ask", b"?", 1, response_topic=topic)
        first.stop()
        assert service.asked.empty()
        assert {bool(await service.reply()) for _ in range(2)} == {True, False}
        await watcher.message("ok/answers", b"fire")
        await watcher.quiet()


@pytest.mark.parametrize("delayed", [False, True], ids=["plain", "scheduled"])
async def test_a_request_that_another_gateway_releases(gateways: Gateways, service: Service, delayed: bool) -> None:
    """QoS 2: PUBREL comes to a gateway that permits everything, or one that does not any more."""
    topic = "$delayed/0/svc/ask" if delayed else "svc/ask"
    ruled, free = gateways.ruled(), gateways.free()
    given: dict[str, Any] = {"session_expiry_interval": 100}
    for first, second, answers, answered in (
        (ruled, free, "alarm/fire", False),
        (free, ruled, "alarm/fire", True),
        (ruled, free, "ok/answers", True),
    ):
        async with await RawClient5.connect5(first.port, "asker", **given) as client:
            number = client.publish5(topic, b"?", 2, response_topic=answers)
            await client.expect_ack(PUBREC, number)
        async with await RawClient5.connect5(second.port, "asker", clean=False, **given) as client:
            client.ack(PUBREL, number)
            await client.expect_ack(PUBCOMP, number)
            await client.disconnect5(session_expiry_interval=0)
        assert bool(await service.reply()) is answered


async def test_a_record_that_does_not_say_so(gateways: Gateways, service: Service, nats_server: NatsServer) -> None:
    """Somebody else has taken the line out: nobody is answered."""
    gateways.free()
    client = await nats.connect(nats_server.url)
    try:
        headers = {
            "Nats-Schedule": "@at 2020-01-01T00:00:00Z",
            "Nats-Schedule-Target": "$MQTT.timers.fired.message.one",
            "Nmqtt-Epoch": "0",
            "Nmqtt-Pub": "1",
            "Nmqtt-Subject": "svc.ask",
            "Nmqtt-Reply": "alarm/fire",
        }
        await client.jetstream().publish("$MQTT.timers.message.one", b"?", headers=headers)
        assert await service.reply() == ""
    finally:
        await client.close()


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_will(gateways: Gateways, service: Service, qos: int) -> None:
    """The answer to a will is published where it was permitted at CONNECT, and nowhere else."""
    gateway = gateways.ruled()
    for delay in (0, 1):
        given: dict[str, Any] = {"session_expiry_interval": 100} if delay else {}
        denied = Will("svc/ask", b"?", qos, False, {"response_topic": "alarm/fire", "will_delay_interval": delay})
        async with await RawClient5.connect5(gateway.port, "heir", will=denied, code=0x87, **given) as client:
            await client.expect_closed()
        granted = Will("svc/ask", b"?", qos, False, {"response_topic": "ok/x", "will_delay_interval": delay})
        async with await RawClient5.connect5(gateway.port, "heir", will=granted, **given) as client:
            client.drop()
        assert await service.reply() != ""


async def test_a_will_whose_response_topic_is_not_permitted_any_more(gateways: Gateways, service: Service) -> None:
    """New rules end it, as they do when they are about its topic."""
    gateway = gateways.ruled()
    will = Will("svc/ask", b"?", 1, False, {"response_topic": "ok/x"})
    async with (
        await RawClient5.connect5(gateway.port, "heir", will=will) as client,
        await RawClient5.connect5(gateway.port, "other", will=Will("svc/ask", b"last", 1, False)) as other,
    ):
        gateways.file.write_text(RULES.replace("alarm", "ok") + DELAYED, encoding="utf-8")
        assert gateway.call(gateway.gateway.reload) == []
        client.drop()
        other.drop()
        message = await asyncio.wait_for(service.asked.get(), LATE)
        assert (message.data, message.reply) == (b"last", "")
        assert service.asked.empty()
