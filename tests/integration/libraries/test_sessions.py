# SPDX-License-Identifier: Apache-2.0
"""Connections, sessions, wills and takeover with each library."""

import time
from typing import Any

import pytest

from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.waiting import aeventually
from tests.integration.conftest import Connector, Stored, until
from tests.integration.libraries.conftest import EVERYTHING, USER, Maker
from tests.integration.libraries5 import LIBRARIES
from tests.integration.library5 import Farewell, RefusedError


async def test_connect_with_properties(make: Maker, name: str) -> None:
    """[MQTT-3.1.2-2] (5.0)."""
    client = await make(
        name,
        session_expiry_interval=60,
        receive_maximum=10,
        maximum_packet_size=100_000,
        topic_alias_maximum=5,
        request_problem_information=1,
        request_response_information=1,
        user_property=[("a", "b"), ("a", "c")],
    )
    assert not client.present
    assert client.connack["receive_maximum"] == 1024
    assert client.connack["topic_alias_maximum"] == 32
    assert client.connack["maximum_packet_size"] > 100_000
    assert client.connack.get("maximum_qos", 2) == 2


async def test_what_a_gateway_may_be_set_to_say(
    make: Maker, nats_server: NatsServer, gateway_factory: GatewayFactory, name: str
) -> None:
    """[MQTT-3.1.2-21], [MQTT-3.1.2-28] (5.0): another keep-alive than was asked for, and where to expect answers."""
    settings = ["--server-keep-alive", "7", "--response-information", "answers/%c/", "--receive-maximum", "9"]
    gateway = gateway_factory(nats_server, *settings, "--topic-alias-maximum", "0")
    curious = await make(name, to=gateway, request_response_information=1)
    assert curious.connack["server_keep_alive"] == 7
    assert curious.connack["response_information"] == f"answers/{name}/"
    assert curious.connack["receive_maximum"] == 9
    assert "topic_alias_maximum" not in curious.connack
    assert "response_information" not in (await make(f"{name}-other", to=gateway)).connack


async def test_assigned_client_id(make: Maker, name: str) -> None:
    """[MQTT-3.1.3-7] (5.0): each such client gets one of its own."""
    first, second = await make(""), await make("")
    if not isinstance(first, LIBRARIES["gmqtt"]):  # which makes one up itself
        assert first.connack["assigned_client_identifier"] != second.connack["assigned_client_identifier"]
    await second.subscribe(name)
    await first.publish(name, b"x")
    assert await second.payloads(1) == [b"x"]


async def test_a_refused_client_sees_why(make: Maker) -> None:
    """[MQTT-4.12.0-1] (5.0)."""
    with pytest.raises(RefusedError) as refused:
        await make("somebody", authentication_method="a method that nobody knows")
    assert refused.value.reason == 0x8C


async def test_session_that_is_continued(make: Maker, second_gateway: Gateway, name: str) -> None:
    """[MQTT-3.1.2-5], [MQTT-3.1.2-23] (5.0): what came meanwhile is there, with its properties, on another gateway."""
    publisher = await make(f"{name}-publisher")
    first = await make(name, session_expiry_interval=600)
    await first.subscribe(name, 2, identifier=7)
    await first.disconnect()
    for index in range(20):
        await publisher.publish(name, b"%d" % index, 1 + index % 2, **EVERYTHING)
    second = await make(name, to=second_gateway, clean=False, session_expiry_interval=600)
    assert second.present
    got = await second.receive(20)
    for qos in (1, 2):  # paho shows a message of QoS 2 when it is released
        assert [int(one.payload) for one in got if one.qos == qos] == list(range(qos - 1, 20, 2))
    assert all(one.properties == {**EVERYTHING, "subscription_identifier": [7]} for one in got)


async def test_session_that_ends_with_its_connection(make: Maker, name: str, stored: Stored) -> None:
    """[MQTT-3.1.2-4], [MQTT-3.2.2-3] (5.0): without an interval, and after a clean start."""
    first = await make(name)
    await first.subscribe(name, 1)
    await first.disconnect()
    second = await make(name, clean=False, session_expiry_interval=600)
    assert not second.present
    await second.subscribe(name, 1)
    await second.disconnect()
    third = await make(name, clean=True, session_expiry_interval=600)
    assert not third.present
    await third.publish(name, b"x", 1)
    await third.subscribe(f"{name}/end", 1)
    await third.publish(f"{name}/end", b"y", 1)
    assert await third.payloads(1) == [b"y"]


async def test_session_that_expires(make: Maker, name: str, stored: Stored) -> None:
    """[MQTT-4.1.0-2], [MQTT-3.1.2-23] (5.0): nothing of it is left when its interval is over."""
    client = await make(name, session_expiry_interval=1)
    await client.subscribe(name, 1)
    assert await stored.traces(name)
    await client.disconnect()

    async def gone() -> None:
        assert not await stored.traces(name)

    await until(gone)
    assert not (await make(name, clean=False)).present


async def test_disconnect_changes_the_expiry(make_either: Maker, name: str, stored: Stored) -> None:
    """Section 3.14.2.2.2: a client that says goodbye for good leaves nothing behind."""
    client = await make_either(name, session_expiry_interval=600)
    await client.subscribe(name, 1)
    await client.disconnect(session_expiry_interval=0)

    async def gone() -> None:
        assert not await stored.traces(name)

    await until(gone)
    assert not (await make_either(name, clean=False)).present


WILL: dict[str, Any] = {
    "content_type": "text/plain",
    "user_property": USER,
    "response_topic": "a/b",
    "correlation_data": b"\x00",
}


async def test_will_with_properties(make: Maker, name: str) -> None:
    """[MQTT-3.1.2-8], [MQTT-3.1.3-10] (5.0)."""
    watcher = await make(f"{name}-watcher")
    await watcher.subscribe(f"{name}/will", 2)
    client = await make(name, will=Farewell(f"{name}/will", b"gone", 1, False, WILL))
    await client.drop()
    (will,) = await watcher.receive(1)
    assert (will.payload, will.qos, will.properties) == (b"gone", 1, WILL)


DELAY = 5
"""Seconds within which a client that is connected again is back in time."""


@pytest.mark.long
async def test_will_with_delay(make: Maker, name: str) -> None:
    """[MQTT-3.1.3-9] (5.0), section 3.1.3.2.2: not before the delay is over; not if the client is back in time."""
    watcher = await make(f"{name}-watcher")
    await watcher.subscribe(f"{name}/#", 1)
    patient = await make(
        f"{name}-back",
        session_expiry_interval=600,
        will=Farewell(f"{name}/back", b"wrong", 1, False, {"will_delay_interval": DELAY}),
    )
    will = Farewell(f"{name}/gone", b"gone", 1, False, {"will_delay_interval": DELAY, **WILL})
    client = await make(name, session_expiry_interval=600, will=will)
    await patient.drop()
    began = time.monotonic()
    await client.drop()
    back = await make(f"{name}-back", clean=False, session_expiry_interval=600)
    assert back.present
    (got,) = await watcher.receive(1)
    assert time.monotonic() - began > DELAY - 0.5
    assert (got.topic, got.payload, got.properties) == (f"{name}/gone", b"gone", WILL)
    await back.publish(f"{name}/end", b"end", 1)
    assert await watcher.payloads(2) == [b"gone", b"end"]


async def test_will_of_a_client_that_wants_it(make_either: Maker, name: str) -> None:
    """[MQTT-3.14.4-3] (5.0): DISCONNECT with reason 0x04 does not remove it, 0x00 does."""
    watcher = await make_either(f"{name}-watcher")
    await watcher.subscribe(f"{name}/#", 1)
    for reason in (0, 4):
        client = await make_either(name, will=Farewell(f"{name}/will", b"%d" % reason, 1))
        await client.disconnect(reason)
    assert await watcher.payloads(1) == [b"4"]


async def test_takeover_says_why(make: Maker, second_gateway: Gateway, name: str) -> None:
    """[MQTT-3.1.4-3] (5.0): the former connection hears 0x8E, on the same gateway and from another."""
    first = await make(name, session_expiry_interval=600)
    await first.subscribe(name, 1)
    second = await make(name, clean=False, session_expiry_interval=600)
    await aeventually(lambda: first.farewells == [0x8E])
    third = await make(name, to=second_gateway, clean=False, session_expiry_interval=600)
    await aeventually(lambda: second.farewells == [0x8E])
    assert (second.present, third.present) == (True, True)
    await third.publish(name, b"x", 1)
    assert await third.payloads(1) == [b"x"]


async def test_both_versions_on_one_session(make: Maker, name: str, connect: Connector, stored: Stored) -> None:
    """A client that is upgraded finds its 3.1.1 session, and one that goes back finds its own of 5.0."""
    publisher = await make(f"{name}-publisher")
    old = await connect(name, clean=False)
    await old.subscribe(name, qos=1)
    await old.disconnect()
    await publisher.publish(name, b"first", 1, **EVERYTHING)
    new = await make(name, clean=False, session_expiry_interval=600)
    assert new.present
    assert [(one.payload, one.properties) for one in await new.receive(1)] == [(b"first", EVERYTHING)]
    await stored.settled(name)
    await new.disconnect()
    await publisher.publish(name, b"second", 1, **EVERYTHING)
    again = await connect(name, clean=False)
    assert again.session_present
    await again.receive(name, b"second")
