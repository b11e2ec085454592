# SPDX-License-Identifier: Apache-2.0
"""Requests and answers between NATS clients and MQTT 5.0 clients, both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg
from nats.micro import add_service
from nats.micro.request import Request

from mqtt_nats.codec import Ack, Publish
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.integration.conftest import Connector5, Stored
from tests.integration.libraries5 import LIBRARIES
from tests.integration.library5 import Library
from tests.integration.requests import (
    NOT_AUTHORIZED,
    QOS,
    TOPIC_NAME_INVALID,
    answer,
    asked,
    response_topic,
    service,
    subscriber,
)


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
    async def test_a_micro_service_that_fails(
        self, connect5: Connector5, name: str, stored: Stored, second_gateway: Gateway, qos: int
    ) -> None:
        """Its two headers are user properties of the answer; others that begin with `Nats-` are not."""

        async def fail(request: Request) -> None:
            await request.respond_error("400", "no such room", b"why", headers={"Nats-Other": "x", "retry": "no"})

        micro = await add_service(stored.nats, name="rooms", version="1.0.0")
        await micro.add_endpoint(name="ask", subject=f"{name}.ask", handler=fail)
        await fence(stored.nats)
        asker = await connect5(f"{name}-asker")  # another client: the answer may come before the last acknowledgement
        client = await subscriber(connect5, name, f"{name}/answers", qos=qos)
        there = await subscriber(connect5, f"{name}-there", f"{name}/answers", to=second_gateway)
        await answer(asker, f"{name}/ask", b"q", qos, response_topic=f"{name}/answers", correlation_data=b"1")
        for each in (client, there):
            found = await each.receive(f"{name}/answers", b"why")
            assert found.properties is not None
            assert found.properties["correlation_data"] == b"1"
            assert sorted(found.properties["user_property"]) == [
                ("Nats-Service-Error", "no such room"),
                ("Nats-Service-Error-Code", "400"),
                ("retry", "no"),
            ]
        await micro.stop()

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
        await fence(stored.nats)
        client = await subscriber(connect5, name, f"{name}/answers")
        client.publish5(f"{name}/ask", b"q", response_topic=f"{name}/answers", correlation_data=b"c")
        reply = (await asyncio.wait_for(requests.get(), 30)).reply
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
        await fence(requester)
        client.publish5(f"{name}/ask", b"q", response_topic=f"{name}/answers", correlation_data=b"c")
        await client.message(f"{name}/ask", b"q")
        question = await asyncio.wait_for(requests.get(), 30)
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
