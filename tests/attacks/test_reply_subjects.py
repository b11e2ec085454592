# SPDX-License-Identifier: Apache-2.0
"""A NATS client wants to be answered on a topic: who answers has to be permitted to publish there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from pydantic import ValidationError

from mqtt_nats.config.settings import Settings
from mqtt_nats.hooks.chain import Stop
from mqtt_nats.hooks.events import Authorizing
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE
from tests.harness.fence import fence
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBREC, RawClient
from tests.harness.rawclient5 import RawClient5
from tests.integration.requests import NOT_AUTHORIZED, QOS, answer, response_topic

pytestmark = pytest.mark.anyio

RULES = """
[[rules]]
effect = "deny"
access = "publish"
topics = ["secret/#", "replies/#", "_INBOX_own/#"]

[[rules]]
effect = "allow"
topics = "#"
"""
HELD = ["secret.topic", "secret.topic/", "replies.of.b", "_INBOX_other.x"]
GRANTED = ["open.topic", "_INBOX.abc", "replies.of.a.1", "_INBOX_own.x"]


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    acl: Path = tmp_path_factory.mktemp("acl") / "acl.toml"
    acl.write_text(RULES.replace('"_INBOX_own/#"', '"_INBOX_own/#", "_INBOX_other/#"'), encoding="utf-8")
    settings = Settings(
        listen="127.0.0.1:0", nats=(nats_server.url,), acl_file=acl, reply_prefixes=("replies.of.a", "_INBOX_own")
    )
    with running(settings) as found:
        yield found


@pytest.fixture
async def requester(nats_server: NatsServer) -> AsyncIterator[NatsClient]:
    client = await nats.connect(nats_server.url)
    try:
        yield client
    finally:
        await client.close()


class Replies:
    """What arrives on a reply subject."""

    def __init__(self) -> None:
        self._found: asyncio.Queue[Msg] = asyncio.Queue()

    async def begin(self, client: NatsClient, subject: str) -> None:
        await client.subscribe(subject, cb=self._found.put)
        await fence(client)

    async def next(self) -> bytes:
        return (await asyncio.wait_for(self._found.get(), 30)).data

    @property
    def empty(self) -> bool:
        return self._found.empty()


@QOS
@pytest.mark.parametrize("filters", [("ask/x",), ("$share/g/ask/x",)], ids=["plain", "shared"])
@pytest.mark.parametrize("reply", HELD)
async def test_a_topic_that_the_client_may_not_publish_to(
    gateway: InProcess, requester: NatsClient, reply: str, filters: tuple[str, ...], qos: int
) -> None:
    """It is told so, and nothing arrives; at QoS 0 the answer is dropped."""
    replies = Replies()
    await replies.begin(requester, reply)
    async with (
        await RawClient5.connect5(gateway.port, "victim") as client,
        await RawClient.connect(gateway.port, "watcher") as watcher,
    ):
        await client.subscribe(*filters)
        await watcher.subscribe("secret/#", "replies/#")
        await requester.publish("ask.x", b"?", reply=reply)
        topic = response_topic(await client.message("ask/x", b"?"))
        number = client.publish5(topic, b"!", qos)
        if qos:
            await client.expect_refusal(PUBACK if qos == 1 else PUBREC, number, NOT_AUTHORIZED)
        await client.quiet()
        await watcher.quiet()
        await fence(requester)
        assert replies.empty


@QOS
@pytest.mark.parametrize("reply", GRANTED)
async def test_inboxes_and_topics_that_are_permitted(
    gateway: InProcess, requester: NatsClient, reply: str, qos: int
) -> None:
    """No rule is about an inbox, nor about the prefixes of the settings."""
    replies = Replies()
    await replies.begin(requester, reply)
    async with await RawClient5.connect5(gateway.port, "client") as client:
        await client.subscribe("ask/y")
        await requester.publish("ask.y", b"?", reply=reply)
        await answer(client, response_topic(await client.message("ask/y", b"?")), b"!", qos)
        assert await replies.next() == b"!"


async def test_hooks_are_asked_too(nats_server: NatsServer, requester: NatsClient) -> None:
    with running(Settings(listen="127.0.0.1:0", nats=(nats_server.url,))) as gateway:

        def decide(event: Authorizing, allowed: bool) -> Stop[bool] | None:
            return Stop(False) if event.topic == "secret/x" else None

        gateway.call(lambda: gateway.account.services.hooks.add(CLIENT_AUTHORIZE, decide))
        async with await RawClient5.connect5(gateway.port, "client") as client:
            await client.subscribe("ask/z")
            await requester.publish("ask.z", b"?", reply="secret.x")
            topic = response_topic(await client.message("ask/z", b"?"))
            number = client.publish5(topic, b"!", 1)
            await client.expect_refusal(PUBACK, number, NOT_AUTHORIZED)


async def test_what_cannot_be_a_topic_is_not_answered(gateway: InProcess, requester: NatsClient) -> None:
    async with await RawClient5.connect5(gateway.port, "client") as client:
        await client.subscribe("ask/w")
        await requester.publish("ask.w", b"?", reply="open.a+b")
        await client.message("ask/w", b"?", properties=None)


@pytest.mark.parametrize("value", ["", "a.*", "a.>", ".a", "a.", "a b", "$JS", "$MQTT.x", "_INBOX"])
def test_prefixes_that_are_none(value: str) -> None:
    with pytest.raises(ValidationError, match="is not a prefix of reply subjects"):
        Settings(reply_prefixes=(value,))
