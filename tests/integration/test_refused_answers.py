# SPDX-License-Identifier: Apache-2.0
"""Answers to requests of NATS clients that are not taken."""

from __future__ import annotations

import asyncio

import nats
import pytest
from nats.aio.msg import Msg

from mqtt_nats.codec import Suback, Subscribe, Subscription, Will
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBACK, PUBREC
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector, Connector5, Stored
from tests.integration.requests import (
    NOT_AUTHORIZED,
    answer,
    response_topic,
    subscriber,
)


class TestRefusedAnswers:
    async def request(self, client: RawClient5, stored: Stored, name: str) -> str:
        await stored.nats.publish(f"{name}.ask", b"?", reply=stored.nats.new_inbox())
        return response_topic(await client.message(f"{name}/ask", b"?"))

    async def test_unknown(self, connect5: Connector5, name: str, stored: Stored) -> None:
        """0x87 in the acknowledgement; at QoS 0 it is as if the answer came too late: it is dropped."""
        client = await subscriber(connect5, name, f"{name}/ask")
        topic = await self.request(client, stored, name)
        for wrong in ("$reply/", "$reply/x", topic + "x", topic[:-1], topic + "/x", "$reply/\u00e9"):
            client.publish(wrong, b"x")
            client.publish5(wrong, b"x", content_type="a")
            packet_id = client.publish(wrong, b"x", 1)
            await client.expect_refusal(PUBACK, packet_id, NOT_AUTHORIZED)
            packet_id = client.publish(wrong, b"x", 2)
            await client.expect_refusal(PUBREC, packet_id, NOT_AUTHORIZED)
        await answer(client, topic, b"right", 1)

    async def test_somebody_elses(self, connect5: Connector5, name: str, stored: Stored) -> None:
        """Only who is subscribed to the request's topic may answer."""
        client = await subscriber(connect5, name, f"{name}/ask")
        other = await subscriber(connect5, f"{name}-other", f"{name}/other", f"{name}/ask/+")
        topic = await self.request(client, stored, name)
        packet_id = other.publish(topic, b"x", 1)
        await other.expect_refusal(PUBACK, packet_id, NOT_AUTHORIZED)
        await other.subscribe("+/ask")
        await answer(other, topic, b"x", 1)
        await client.unsubscribe(f"{name}/ask")
        packet_id = client.publish(topic, b"x", 2)
        await client.expect_refusal(PUBREC, packet_id, NOT_AUTHORIZED)

    async def test_known_on_its_gateway_only(
        self, connect5: Connector5, name: str, stored: Stored, second_gateway: Gateway
    ) -> None:
        client = await subscriber(connect5, name, f"{name}/ask")
        there = await subscriber(connect5, f"{name}-there", f"{name}/ask", to=second_gateway)
        topic = await self.request(client, stored, name)
        response_topic(await there.message(f"{name}/ask", b"?"))
        packet_id = there.publish(topic, b"x", 1)
        await there.expect_refusal(PUBACK, packet_id, NOT_AUTHORIZED)

    async def test_retained(self, connect5: Connector5, name: str, stored: Stored) -> None:
        client = await subscriber(connect5, name, f"{name}/ask")
        topic = await self.request(client, stored, name)
        packet_id = client.publish(topic, b"x", 1, retain=True)
        await client.expect_refusal(PUBACK, packet_id, NOT_AUTHORIZED)
        client.publish(topic, b"x", retain=True)
        await client.expect_disconnect(NOT_AUTHORIZED)

    async def test_from_an_old_client(
        self, connect: Connector, connect5: Connector5, name: str, stored: Stored
    ) -> None:
        """3.1.1 knows no Response Topic: ``$reply`` is a reserved root like others."""
        client = await subscriber(connect5, name, f"{name}/ask")
        topic = await self.request(client, stored, name)
        old = await connect(f"{name}-old")
        await old.subscribe(f"{name}/ask")
        old.publish(topic, b"x", 1)
        await old.expect_closed()

    async def test_no_subscription(self, connect: Connector, connect5: Connector5, name: str) -> None:
        client = await connect5(name)
        for topic_filter in ("$reply/#", "$reply/x", "$reply/+", "$reply"):
            client.send(Subscribe(9, (Subscription(topic_filter, 1),)))
            (code,) = (await client.expect(Suback, packet_id=9)).codes
            assert code >= 0x80
        old = await connect(f"{name}-old")
        assert await old.subscribe("$reply/#") == (0x80,)

    async def test_no_response_topic(self, connect5: Connector5, name: str, stored: Stored) -> None:
        """A token cannot be passed on as somebody else's Response Topic."""
        client = await subscriber(connect5, name, f"{name}/ask")
        topic = await self.request(client, stored, name)
        packet_id = client.publish5(f"{name}/x", b"x", 1, response_topic=topic)
        await client.expect_refusal(PUBACK, packet_id, NOT_AUTHORIZED)

    @pytest.mark.parametrize("where", ["topic", "response topic"])
    async def test_no_will(self, connect5: Connector5, name: str, stored: Stored, where: str) -> None:
        """[MQTT-3.1.4-2] (5.0): CONNACK says so."""
        client = await subscriber(connect5, name, f"{name}/ask")
        topic = await self.request(client, stored, name)
        will = Will("a", b"x", 0, False, {"response_topic": topic})
        if where == "topic":
            will = Will(topic, b"x", 0, False)
        await connect5(f"{name}-will", will=will, code=NOT_AUTHORIZED)

    async def test_too_large(
        self, connect5: Connector5, name: str, nats_factory: NatsFactory, gateway_factory: GatewayFactory
    ) -> None:
        """Checked before it is sent: nats-server would end the gateway's connection."""
        server = nats_factory(config="max_payload: 65536")
        client = await subscriber(connect5, name, name, to=gateway_factory(server))
        requester = await nats.connect(server.url)
        await requester.publish(name, b"?", reply=requester.new_inbox())
        topic = response_topic(await client.message(name, b"?"))
        client.publish(topic, bytes(65_500), 1)
        await client.expect_disconnect(0x95)
        await requester.close()

    @pytest.mark.parametrize(
        "reply",
        [
            "$MQTT.msgs.x",
            "$MQTT.sess.x",
            "$MQTT_SYS.x",
            "$JS.API.STREAM.DELETE.$MQTT_msgs",
            "$JS.ACK.s.c.1.1.1.1.1",
            "$KV.bucket.key",
            "$O.x",
            "$SYS.REQ.SERVER.PING",
            "$reply.x",
            "_INBOX.*",
            "a.>",
            "x" * 3900,
        ],
    )
    async def test_hostile_reply_subject(self, connect5: Connector5, name: str, stored: Stored, reply: str) -> None:
        """A requester cannot have a gateway publish where it may not: the message comes without a Response Topic."""
        client = await subscriber(connect5, name, f"{name}/ask")
        await stored.nats.publish(f"{name}.ask", b"?", reply=reply)
        await stored.nats.publish(f"{name}.ask", b"next")
        if not reply.startswith("$JS.ACK."):  # the copy of a push consumer is no message of this topic
            await client.message(f"{name}/ask", b"?", properties=None)
        await client.message(f"{name}/ask", b"next", properties=None)

    async def test_longest_reply_subject(self, connect5: Connector5, name: str, stored: Stored) -> None:
        """Whatever is shown can be answered, without an end of the gateway's connection."""
        client = await subscriber(connect5, name, f"{name}/ask")
        reply = f"{name}." + "x" * (3799 - len(name))
        replies: asyncio.Queue[Msg] = asyncio.Queue()
        await stored.nats.subscribe(f"{name}.*", cb=replies.put)
        await stored.nats.publish(f"{name}.ask", b"?", reply=reply)
        topic = response_topic(await client.message(f"{name}/ask", b"?"))
        await answer(client, topic, b"!", 1, response_topic="y" * 200, user_property=[("a", "b" * 50_000)])
        await replies.get()
        assert (await asyncio.wait_for(replies.get(), 30)).subject == reply
