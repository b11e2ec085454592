# SPDX-License-Identifier: Apache-2.0
"""Requests and answers between NATS clients and MQTT 5.0 clients, both ways."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeout

from mqtt_nats.codec import Ack, Publish, Suback, Subscribe, Subscription, Will
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, key_of
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector, Connector5, Stored
from tests.integration.libraries5 import LIBRARIES
from tests.integration.library5 import Library

NOT_AUTHORIZED = 0x87
TOPIC_NAME_INVALID = 0x90

QOS = pytest.mark.parametrize("qos", [0, 1, 2])


def response_topic(message: Publish) -> str:
    """The Response Topic of a request from NATS."""
    topic = (message.properties or {}).get("response_topic", "")
    assert topic.startswith("$reply/"), message
    assert len(topic) > 25  # nobody can guess it
    return topic


async def answer(client: RawClient5, topic: str, payload: bytes, qos: int = 0, **properties: Any) -> None:
    """Publish an answer and see it acknowledged."""
    packet_id = client.publish5(topic, payload, qos, **properties)
    if qos == 0:
        await client.quiet()
    elif qos == 1:
        await client.expect_ack(PUBACK, packet_id)
    else:
        await client.expect_ack(PUBREC, packet_id)
        client.ack(PUBREL, packet_id)
        await client.expect_ack(PUBCOMP, packet_id)


@contextlib.asynccontextmanager
async def asked(stored: Stored, subject: str, payload: bytes = b"question", **options: Any) -> AsyncIterator[Any]:
    """A NATS request under way; its answer can be awaited."""
    task = asyncio.ensure_future(stored.nats.request(subject, payload, timeout=8, **options))
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, NatsTimeout, NoRespondersError):
            await task


async def service(client: NatsClient, subject: str, respond: Callable[[Msg], Awaitable[None]]) -> asyncio.Queue[Msg]:
    """A NATS service; the requests that it has answered."""
    seen: asyncio.Queue[Msg] = asyncio.Queue()

    async def handle(message: Msg) -> None:
        await respond(message)
        await seen.put(message)

    await client.subscribe(subject, cb=handle)
    await client.flush()
    return seen


async def subscriber(connect5: Connector5, client_id: str, *filters: str, qos: int = 0, **options: Any) -> RawClient5:
    client = await connect5(client_id, **options)
    await client.subscribe(*filters, qos=qos)
    return client


@pytest.fixture(params=LIBRARIES)
async def library(request: pytest.FixtureRequest, gateway: Gateway, name: str) -> AsyncIterator[Library]:
    """A client of each library in turn."""
    client: Library = LIBRARIES[request.param](gateway, name)
    await client.connect()
    yield client
    await client.close()


class TestLibraries:
    async def test_library_answers(self, library: Library, name: str, stored: Stored) -> None:
        await library.subscribe(f"{name}/ask", 1)
        for qos in (0, 1, 2):
            headers = {"Nmqtt-Correlation": "QUI="}
            async with asked(stored, f"{name}.ask", b"%d" % qos, headers=headers) as reply:
                request = (await library.receive(qos + 1))[-1]
                topic, data = request.properties["response_topic"], request.properties["correlation_data"]
                await library.publish(topic, b"re: %d" % qos, qos, correlation_data=data, user_property=[("a", "b")])
                found = await reply
            assert found.data == b"re: %d" % qos
            assert found.headers["Nmqtt-Correlation"] == "QUI="
            assert found.headers["a"] == "b"

    async def test_library_asks(self, library: Library, name: str, stored: Stored) -> None:
        """A service of nats-py, which sends the request's headers back with its answer."""

        async def respond(message: Msg) -> None:
            await message.respond(b"re: " + message.data)

        await service(stored.nats, f"{name}.ask", respond)
        await library.subscribe(f"{name}/answers", 1)
        for qos in (0, 1, 2):
            data = bytes([255, qos])
            await library.publish(
                f"{name}/ask", b"%d" % qos, qos, response_topic=f"{name}/answers", correlation_data=data
            )
            found = (await library.receive(qos + 1))[-1]
            assert (found.payload, found.properties) == (b"re: %d" % qos, {"correlation_data": data})


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
            assert (await asyncio.wait_for(replies.get(), 8)).data == b"%03d" % index
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
        assert [(await asyncio.wait_for(replies.get(), 8)).data for _ in range(2)] == [b"1", b"2"]

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
        answers = {(await asyncio.wait_for(replies.get(), 8)).data for _ in clients}
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
        await stored.nats.flush()

        async def work(member: RawClient5) -> None:
            while True:
                request = await member.expect(Publish, 60)
                member.publish(response_topic(request), request.payload)

        tasks = [asyncio.ensure_future(work(member)) for member in members]
        answers = [int((await asyncio.wait_for(replies.get(), 8)).data) for _ in range(30)]
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
        assert [(await asyncio.wait_for(replies.get(), 8)).data for _ in range(2)] == [b"1", b"2"]
        assert replies.empty()


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
        assert (await asyncio.wait_for(replies.get(), 8)).subject == reply


class TestRequestFromMqtt:
    @QOS
    async def test_with_correlation_data(
        self, connect5: Connector5, name: str, stored: Stored, second_gateway: Gateway, qos: int
    ) -> None:
        """The gateway adds the correlation data to whatever an ordinary NATS service answers."""

        async def respond(message: Msg) -> None:
            assert message.reply.startswith("_INBOX.")
            await stored.nats.publish(message.reply, b"re: " + message.data, headers={"unit": "C"})

        seen = await service(stored.nats, f"{name}.ask", respond)
        asker = await connect5(f"{name}-asker")
        client = await subscriber(connect5, name, f"{name}/answers", qos=qos)
        there = await subscriber(connect5, f"{name}-there", f"{name}/#", to=second_gateway)
        wild = await subscriber(connect5, f"{name}-wild", "+/answers")
        correlation = b"\0\xffcorrelation"
        await answer(asker, f"{name}/ask", b"q", qos, response_topic=f"{name}/answers", correlation_data=correlation)
        expected = {"correlation_data": correlation, "user_property": [("unit", "C")]}
        await client.message(f"{name}/answers", b"re: q", qos=0, properties=expected)
        await wild.message(f"{name}/answers", b"re: q", qos=0, properties=expected)
        await there.receive(f"{name}/ask", b"q")
        await there.message(f"{name}/answers", b"re: q", qos=0, properties=expected)
        request = await seen.get()
        assert request.headers is not None
        assert request.headers["Nmqtt-Reply"] == f"{name}/answers"
        assert "Nmqtt-Correlation" in request.headers
        for each in (client, there, wild):
            await each.quiet()

    @QOS
    async def test_without_correlation_data(
        self, connect5: Connector5, name: str, stored: Stored, second_gateway: Gateway, qos: int
    ) -> None:
        """At QoS 0 the reply subject is the Response Topic's own."""

        async def respond(message: Msg) -> None:
            assert (message.reply == f"{name}.answers") == (qos == 0)
            await stored.nats.publish(message.reply, b"re: " + message.data)

        await service(stored.nats, f"{name}.ask", respond)
        asker = await connect5(f"{name}-asker")
        client = await subscriber(connect5, name, f"{name}/answers", qos=qos)
        there = await subscriber(connect5, f"{name}-there", f"{name}/answers", to=second_gateway)
        await answer(asker, f"{name}/ask", b"q", qos, response_topic=f"{name}/answers")
        await client.message(f"{name}/answers", b"re: q", qos=0, properties=None)
        await there.message(f"{name}/answers", b"re: q", qos=0, properties=None)
        await client.quiet()

    @QOS
    @pytest.mark.parametrize("correlation", [{}, {"correlation_data": b"c"}], ids=["plain", "correlated"])
    async def test_headers_sent_back(
        self, connect5: Connector5, name: str, stored: Stored, qos: int, correlation: dict[str, Any]
    ) -> None:
        """A client library that answers with the headers of the request does not make its answer a stored message."""

        async def respond(message: Msg) -> None:
            assert message.headers is not None
            assert message.headers["Nmqtt-Pub"] == str(qos)
            await message.respond(b"1")
            await message.respond(b"2")

        await service(stored.nats, f"{name}.ask", respond)
        asker = await connect5(f"{name}-asker")
        clients = [
            await subscriber(connect5, f"{name}-{seconds}", f"{name}/answers", qos=2, session_expiry_interval=seconds)
            for seconds in (0, 60)
        ]
        topic = f"{name}/answers"
        await answer(asker, f"{name}/ask", b"q", qos, response_topic=topic, content_type="a", **correlation)
        expected: dict[str, Any] = {"content_type": "a"} | correlation
        if not qos and not correlation:
            expected["response_topic"] = topic
        for client in clients:
            for payload in (b"1", b"2"):
                found = await client.message(topic, payload, qos=0)
                assert found.properties == expected

    async def test_answers_properties_stay(self, connect5: Connector5, name: str, stored: Stored) -> None:
        """Whatever the service says is kept but its own correlation data; so is every one of several answers."""
        headers = {
            "Content-Type": "text/plain",
            "Nmqtt-Format": "1",
            "Nmqtt-Expiry": "100",
            "Nmqtt-Correlation": "QQ==",
        }

        async def respond(message: Msg) -> None:
            for payload in (b"1", b"2", b""):
                await stored.nats.publish(message.reply, payload, headers=headers | {"Nats-Msg-Id": "x"})

        await service(stored.nats, f"{name}.ask", respond)
        client = await subscriber(connect5, name, f"{name}/answers")
        client.publish5(f"{name}/ask", b"q", response_topic=f"{name}/answers", correlation_data=b"c")
        for payload in (b"1", b"2", b""):
            found = await client.message(f"{name}/answers", payload)
            assert found.properties == {
                "payload_format_indicator": 1,
                "message_expiry_interval": 100,
                "content_type": "text/plain",
                "correlation_data": b"c",
            }

    async def test_nobody_listens(self, connect5: Connector5, name: str, stored: Stored) -> None:
        """NATS then says so on the reply subject: that is no answer of anybody's."""
        asker = await connect5(f"{name}-asker")
        client = await subscriber(connect5, name, f"{name}/answers", qos=1)
        for qos in (0, 1, 2):
            for properties in ({}, {"correlation_data": b"c"}, {"correlation_data": b""}):
                await answer(asker, f"{name}/nobody", b"q", qos, response_topic=f"{name}/answers", **properties)
        await stored.nats.publish(f"{name}.answers", b"ordinary")
        await client.message(f"{name}/answers", b"ordinary")

    async def test_held_by_another_gateway(
        self, connect5: Connector5, name: str, stored: Stored, nats_server: NatsServer, gateway_factory: GatewayFactory
    ) -> None:
        """A QoS 2 request that is released elsewhere can be answered there."""

        async def respond(message: Msg) -> None:
            await message.respond(b"!")

        await service(stored.nats, f"{name}.ask", respond)
        first = gateway_factory(nats_server)
        client = await subscriber(connect5, name, f"{name}/answers", to=first, session_expiry_interval=60)
        given: dict[str, Any] = {"response_topic": f"{name}/answers", "correlation_data": b"\0"}
        packet_id = client.publish5(f"{name}/ask", b"?", 2, **given)
        await client.expect_ack(PUBREC, packet_id)
        first.kill()
        client = await connect5(name, clean=False, session_expiry_interval=60)
        client.ack(PUBREL, packet_id)
        found = [await client.packet() for _ in range(2)]
        assert Ack(PUBCOMP, packet_id, 0) in found
        (message,) = (one for one in found if isinstance(one, Publish))
        assert (message.payload, message.properties) == (b"!", {"correlation_data": b"\0"})

    async def test_without_local_dispatch(
        self, connect5: Connector5, name: str, stored: Stored, nats_server: NatsServer, gateway_factory: GatewayFactory
    ) -> None:
        """Where a gateway hears itself everything comes once, and its own requests stay MQTT's."""

        async def respond(message: Msg) -> None:
            await stored.nats.publish(message.reply, b"!")

        await service(stored.nats, f"{name}.ask", respond)
        gateway = gateway_factory(nats_server, env={"MQTT_NATS_LOCAL_DISPATCH": "false"})
        asker = await connect5(f"{name}-asker", to=gateway)
        client = await subscriber(connect5, name, f"{name}/#", qos=1, to=gateway)
        correlations: list[dict[str, Any]] = [{}, {"correlation_data": b"c"}]
        for qos in (0, 1, 2):
            for correlation in correlations:
                given = {"response_topic": f"{name}/answers"} | correlation
                await answer(asker, f"{name}/ask", b"?", qos, **given)
                await client.receive(f"{name}/ask", b"?", qos=min(qos, 1), properties=given)
                await client.receive(f"{name}/answers", b"!", qos=0, properties=correlation or None)
                await answer(asker, f"{name}/nobody", b"?", qos, **given)
                await client.receive(f"{name}/nobody", b"?", properties=given)
        await client.quiet()

    async def test_too_large_with_correlation_data(
        self, connect5: Connector5, name: str, nats_factory: NatsFactory, gateway_factory: GatewayFactory
    ) -> None:
        """An answer that NATS would not take any more is dropped; the gateway's connection goes on."""
        server = nats_factory(config="max_payload: 65536")
        client = await subscriber(connect5, name, f"{name}/answers", to=gateway_factory(server))
        responder = await nats.connect(server.url)

        async def respond(message: Msg) -> None:
            await responder.publish(message.reply, bytes(64_000))
            await responder.publish(message.reply, b"small")

        await service(responder, f"{name}.ask", respond)
        given: dict[str, Any] = {"response_topic": f"{name}/answers", "correlation_data": bytes(2000)}
        client.publish5(f"{name}/ask", b"?", **given)
        await client.message(f"{name}/answers", b"small")
        await client.quiet()
        await responder.close()

    async def test_long_response_topic(self, connect5: Connector5, name: str, stored: Stored) -> None:
        """Both subjects have to fit into one line: above 200 bytes the gateway answers for it."""

        async def respond(message: Msg) -> None:
            await message.respond(b"!")

        subject = f"{name}/" + "a" * (3780 - len(name))
        topic = f"{name}/" + "b" * 3700
        await service(stored.nats, f"{name}.*", respond)
        client = await subscriber(connect5, name, topic)
        client.publish5(subject, b"?", response_topic=topic)
        await client.message(topic, b"!", properties=None)

    @pytest.mark.parametrize(
        ("topic", "reason"),
        [
            ("$MQTT/msgs/x", NOT_AUTHORIZED),
            ("$JS/API/STREAM/DELETE/$MQTT_msgs", NOT_AUTHORIZED),
            ("$SYS/REQ/SERVER/PING", NOT_AUTHORIZED),
            ("_INBOX/x", NOT_AUTHORIZED),
            ("$reply/x", NOT_AUTHORIZED),
            ("$KV/a/b", NOT_AUTHORIZED),
            ("x" * 4000, TOPIC_NAME_INVALID),
            ("a" + "/a" * 200, TOPIC_NAME_INVALID),
        ],
    )
    async def test_reserved_response_topic(
        self, connect5: Connector5, name: str, stored: Stored, topic: str, reason: int
    ) -> None:
        """A Response Topic is one that the client could publish to; nothing is published otherwise."""
        spy = await subscriber(connect5, f"{name}-spy", f"{name}/#", qos=2)
        client = await connect5(name)
        correlations: list[dict[str, Any]] = [{}, {"correlation_data": b"c"}]
        for properties in correlations:
            packet_id = client.publish5(f"{name}/ask", b"q", 1, response_topic=topic, **properties)
            await client.expect_refusal(PUBACK, packet_id, reason)
            packet_id = client.publish5(f"{name}/ask", b"q", 2, response_topic=topic, **properties)
            await client.expect_refusal(PUBREC, packet_id, reason)
        client.publish5(f"{name}/ask", b"q", 0, response_topic=topic)
        await client.expect_disconnect(reason)
        await spy.quiet()

    async def test_forged_answers(self, connect5: Connector5, name: str, stored: Stored) -> None:
        """Only the subject that the gateway has given leads to an answer."""
        requests: asyncio.Queue[Msg] = asyncio.Queue()
        await stored.nats.subscribe(f"{name}.ask", cb=requests.put)
        await stored.nats.flush()
        client = await subscriber(connect5, name, f"{name}/answers")
        client.publish5(f"{name}/ask", b"q", response_topic=f"{name}/answers", correlation_data=b"c")
        reply = (await asyncio.wait_for(requests.get(), 8)).reply
        prefix, _, token = reply.rpartition(".")
        assert len(token) >= 22
        for wrong in (f"{prefix}.1", f"{prefix}.{token[:-1]}", f"{prefix}.{token}x"):
            await stored.nats.publish(wrong, b"forged")
        await stored.nats.publish(reply, b"right")
        await client.message(f"{name}/answers", b"right")
        await client.quiet()

    async def test_answer_after_a_reconnect_of_nats(
        self, connect5: Connector5, name: str, nats_factory: NatsFactory, gateway_factory: GatewayFactory
    ) -> None:
        """The gateway goes on listening, and knows its requests."""
        server = nats_factory()
        gateway = gateway_factory(server)
        client = await subscriber(connect5, name, f"{name}/#", to=gateway)
        back = asyncio.Event()

        async def reconnected() -> None:
            back.set()

        requester = await nats.connect(
            server.url, max_reconnect_attempts=-1, reconnect_time_wait=1, reconnected_cb=reconnected
        )
        requests: asyncio.Queue[Msg] = asyncio.Queue()
        await requester.subscribe(f"{name}.ask", cb=requests.put)
        inbox = requester.new_inbox()
        replies: asyncio.Queue[Msg] = asyncio.Queue()
        await requester.subscribe(inbox, cb=replies.put)
        await requester.flush()
        client.publish5(f"{name}/ask", b"q", response_topic=f"{name}/answers", correlation_data=b"c")
        await client.message(f"{name}/ask", b"q")
        question = await asyncio.wait_for(requests.get(), 8)
        await requester.publish(f"{name}.from-nats", b"?", reply=inbox)
        topic = response_topic(await client.message(f"{name}/from-nats", b"?"))
        server.kill()
        packet_id = client.publish(topic, b"lost", 1)
        await client.expect_refusal(PUBACK, packet_id, 0x80)
        packet_id = client.publish(topic, b"lost", 2)
        await client.expect_refusal(PUBREC, packet_id, 0x80)
        server.start()
        async with asyncio.timeout(20):
            await back.wait()
            while True:  # until the gateway is back too
                packet_id = client.publish(topic, b"again", 2)
                ack = await client.packet()
                assert isinstance(ack, Ack)
                if not ack.reason:
                    break
            client.ack(PUBREL, packet_id)
            await client.expect_ack(PUBCOMP, packet_id)
            await answer(client, topic, b"once more", 1)
            assert (await replies.get()).data == b"again"
            assert (await replies.get()).data == b"once more"
            await requester.publish(question.reply, b"late")
        await client.message(f"{name}/answers", b"late", properties={"correlation_data": b"c"})
        await requester.close()
