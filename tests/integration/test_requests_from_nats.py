# SPDX-License-Identifier: Apache-2.0
"""Requests of NATS clients that MQTT 5.0 clients answer."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from nats.aio.msg import Msg

from mqtt_nats.codec import Publish, Subscription
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, key_of
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector, Connector5, Stored
from tests.integration.requests import (
    NOT_AUTHORIZED,
    QOS,
    answer,
    asked,
    response_topic,
    subscriber,
)


class TestRequestFromNats:
    @QOS
    async def test_answered(self, connect5: Connector5, name: str, stored: Stored, qos: int) -> None:
        """The answer's properties are headers of the reply."""
        client = await subscriber(connect5, name, f"{name}/ask", qos=qos)
        headers = {"trace": "1", "Content-Type": "text/plain", "Nmqtt-Correlation": "QUI="}
        async with asked(stored, f"{name}.ask", headers=headers) as reply:
            request = await client.message(f"{name}/ask", b"question", qos=0)
            assert request.properties is not None
            assert request.properties["user_property"] == [("trace", "1")]
            assert request.properties["content_type"] == "text/plain"
            assert request.properties["correlation_data"] == b"AB"
            await answer(
                client,
                response_topic(request),
                b"answer",
                qos,
                content_type="a/b",
                correlation_data=b"AB",
                user_property=[("x", "1"), ("x", "2")],
                message_expiry_interval=60,
            )
            found = await reply
        assert found.data == b"answer"
        assert found.headers["Content-Type"] == "a/b"
        assert found.headers["Nmqtt-Correlation"] == "QUI="
        assert found.headers["Nmqtt-Expiry"] == "60"
        assert found.headers["Nmqtt-Pub"] == "0"
        assert found.headers["Nmqtt-Client"] == name
        assert found.headers["x"] in ("1", "2")  # nats-py shows one of them
        assert "Nats-TTL" not in found.headers

    async def test_without_properties(self, connect5: Connector5, name: str, stored: Stored) -> None:
        """Several answers at QoS 0, in one packet run: a requester that collects them gets all."""
        client = await subscriber(connect5, name, f"{name}/#")
        inbox = stored.nats.new_inbox()
        replies: asyncio.Queue[Msg] = asyncio.Queue()
        await stored.nats.subscribe(inbox, cb=replies.put)
        await stored.nats.publish(f"{name}.ask", b"", reply=inbox)
        topic = response_topic(await client.message(f"{name}/ask", b""))
        client.send(*(Publish(0, False, False, key_of(topic), 0, b"%03d" % index) for index in range(100)))
        for index in range(100):
            assert (await asyncio.wait_for(replies.get(), 30)).data == b"%03d" % index
        await client.quiet()

    async def test_over_an_alias(self, connect5: Connector5, name: str, stored: Stored) -> None:
        """The Response Topic may be sent once and then named by its alias."""
        client = await subscriber(connect5, name, f"{name}/ask")
        inbox = stored.nats.new_inbox()
        replies: asyncio.Queue[Msg] = asyncio.Queue()
        await stored.nats.subscribe(inbox, cb=replies.put)
        await stored.nats.publish(f"{name}.ask", b"?", reply=inbox)
        topic = response_topic(await client.message(f"{name}/ask", b"?"))
        await answer(client, topic, b"1", topic_alias=3)
        await answer(client, "", b"2", 1, topic_alias=3)
        assert [(await asyncio.wait_for(replies.get(), 30)).data for _ in range(2)] == [b"1", b"2"]

    async def test_every_encoding(
        self, connect: Connector, connect5: Connector5, name: str, stored: Stored, second_gateway: Gateway
    ) -> None:
        """Who wants a packet of its own sees the Response Topic too; 3.1.1 clients get the message without."""
        old = await connect(f"{name}-old")
        await old.subscribe(f"{name}/#")
        clients = [
            await subscriber(connect5, f"{name}-plain", f"{name}/+"),
            await subscriber(connect5, f"{name}-alias", f"{name}/#", topic_alias_maximum=5),
            await subscriber(connect5, f"{name}-size", f"{name}/ask", maximum_packet_size=1000),
            await subscriber(connect5, f"{name}-wild", "+/ask"),
            await subscriber(connect5, f"{name}-there", f"{name}/#", to=second_gateway),
            await subscriber(connect5, f"{name}-durable", f"{name}/#", qos=2, session_expiry_interval=60),
        ]
        identified = await connect5(f"{name}-identified")
        await identified.subscribe5(Subscription(f"{name}/ask", 1, no_local=True), subscription_identifier=[7])
        clients.append(identified)
        inbox = stored.nats.new_inbox()
        replies: asyncio.Queue[Msg] = asyncio.Queue()
        await stored.nats.subscribe(inbox, cb=replies.put)
        await stored.nats.publish(f"{name}.ask", b"?", reply=inbox)
        await old.message(f"{name}/ask", b"?")
        for index, client in enumerate(clients):
            topic = response_topic(await client.message(f"{name}/ask", b"?"))
            await answer(client, topic, b"%d" % index, 1)
        answers = {(await asyncio.wait_for(replies.get(), 30)).data for _ in clients}
        assert answers == {b"%d" % index for index in range(len(clients))}

    async def test_shared_subscription(
        self, connect5: Connector5, name: str, stored: Stored, second_gateway: Gateway
    ) -> None:
        """One member gets a request, and answers it; who is not of the group cannot."""
        members = [
            await subscriber(connect5, f"{name}-{index}", f"$share/crew/{name}/+", qos=1, to=to)
            for index, to in enumerate((None, None, second_gateway))
        ]
        stranger = await subscriber(connect5, f"{name}-x", f"$share/other/{name}/x", f"{name}/y")
        inbox = stored.nats.new_inbox()
        replies: asyncio.Queue[Msg] = asyncio.Queue()
        await stored.nats.subscribe(inbox, cb=replies.put)
        for index in range(30):
            await stored.nats.publish(f"{name}.ask", b"%d" % index, reply=inbox)
        await fence(stored.nats)

        async def work(member: RawClient5) -> None:
            while True:
                request = await member.expect(Publish, 60)
                member.publish(response_topic(request), request.payload)

        tasks = [asyncio.ensure_future(work(member)) for member in members]
        answers = [int((await asyncio.wait_for(replies.get(), 30)).data) for _ in range(30)]
        assert sorted(answers) == list(range(30))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await stored.nats.publish(f"{name}.ask", b"last", reply=inbox)
        waiting = [asyncio.ensure_future(member.expect(Publish)) for member in members]
        done, late = await asyncio.wait(waiting, timeout=8, return_when=asyncio.FIRST_COMPLETED)
        for other in late:
            other.cancel()
        (request,) = [one.result() for one in done]
        packet_id = stranger.publish(response_topic(request), b"x", 1)
        await stranger.expect_refusal(PUBACK, packet_id, NOT_AUTHORIZED)
        assert replies.empty()

    async def test_at_qos_1(self, connect5: Connector5, name: str, stored: Stored) -> None:
        """A request with ``Nmqtt-Pub: 1`` reaches regular sessions at QoS 1, and can be answered."""
        client = await subscriber(connect5, name, f"{name}/ask", qos=1)
        async with asked(stored, f"{name}.ask", headers={"Nmqtt-Pub": "1", "Nmqtt-Id": secrets.token_hex(16)}) as reply:
            request = await client.receive(f"{name}/ask", b"question", qos=1)
            await answer(client, response_topic(request), b"answer")
            assert (await reply).data == b"answer"

    async def test_reply_subject_that_is_a_topic(
        self, connect: Connector, connect5: Connector5, name: str, stored: Stored, second_gateway: Gateway
    ) -> None:
        """MQTT subscribers of the reply subject get the answer too, on the answering client's gateway and elsewhere."""
        client = await subscriber(connect5, name, f"{name}/ask")
        here = await connect(f"{name}-here")
        await here.subscribe(f"{name}/replies", qos=1)
        there = await subscriber(connect5, f"{name}-there", f"{name}/replies", to=second_gateway)
        await stored.nats.publish(f"{name}.ask", b"?", reply=f"{name}.replies")
        topic = response_topic(await client.message(f"{name}/ask", b"?"))
        await answer(client, topic, b"answer", 1, content_type="a")
        await here.message(f"{name}/replies", b"answer", qos=0)
        await there.message(f"{name}/replies", b"answer", qos=0, properties={"content_type": "a"})

    async def test_answer_with_a_question_of_its_own(self, connect5: Connector5, name: str, stored: Stored) -> None:
        """A Response Topic in an answer is the reply subject of the reply."""
        client = await subscriber(connect5, name, f"{name}/ask", f"{name}/more")
        async with asked(stored, f"{name}.ask") as reply:
            topic = response_topic(await client.message(f"{name}/ask", b"question"))
            client.publish5(topic, b"which one?", response_topic=f"{name}/more", correlation_data=b"c")
            found = await reply
        assert found.data == b"which one?"
        await stored.nats.publish(found.reply, b"the second")
        await client.message(f"{name}/more", b"the second", properties={"correlation_data": b"c"})

    async def test_response_topic_of_another_gateways_client(
        self, connect5: Connector5, name: str, second_gateway: Gateway
    ) -> None:
        """Between MQTT clients the Response Topic stays what it was, also across gateways [MQTT-3.3.2-15] (5.0)."""
        properties: dict[str, Any] = {"response_topic": f"{name}/answers", "correlation_data": b"\0\xff"}
        responder = await subscriber(connect5, f"{name}-r", f"{name}/ask", to=second_gateway)
        wild = await subscriber(connect5, f"{name}-w", "+/ask")
        here = await subscriber(connect5, f"{name}-h", f"{name}/ask", qos=1)
        requester = await subscriber(connect5, name, f"{name}/answers", qos=1)
        for qos in (0, 1, 2):
            await answer(requester, f"{name}/ask", b"?", qos, **properties)
            for client in (responder, wild, here):
                request = await client.receive(f"{name}/ask", b"?")
                assert request.properties == properties
        await answer(responder, f"{name}/answers", b"!", 1, correlation_data=b"\0\xff")
        await requester.receive(f"{name}/answers", b"!", qos=1, properties={"correlation_data": b"\0\xff"})

    async def test_qos_2_over_a_reconnect(self, connect5: Connector5, name: str, stored: Stored) -> None:
        """An answer whose PUBREC was lost comes again and is not sent twice; its identifier is free after PUBREL.

        [MQTT-4.3.3-10] (5.0)
        """
        client = await subscriber(connect5, name, f"{name}/ask", session_expiry_interval=60)
        inbox = stored.nats.new_inbox()
        replies: asyncio.Queue[Msg] = asyncio.Queue()
        await stored.nats.subscribe(inbox, cb=replies.put)
        await stored.nats.publish(f"{name}.ask", b"?", reply=inbox)
        topic = response_topic(await client.message(f"{name}/ask", b"?"))
        client.publish(topic, b"1", 2, packet_id=5)
        await client.expect_ack(PUBREC, 5)
        client.publish(topic, b"1", 2, packet_id=5, dup=True)
        await client.expect_ack(PUBREC, 5)
        client.drop()
        client = await connect5(name, clean=False, session_expiry_interval=60)
        assert client.session_present
        for payload in (b"1", b"2"):
            client.publish(topic, payload, 2, packet_id=5, dup=True)
            await client.expect_ack(PUBREC, 5)
            client.ack(PUBREL, 5)
            await client.expect_ack(PUBCOMP, 5)
        assert [(await asyncio.wait_for(replies.get(), 30)).data for _ in range(2)] == [b"1", b"2"]
        assert replies.empty()
