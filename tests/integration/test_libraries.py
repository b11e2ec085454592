# SPDX-License-Identifier: Apache-2.0
"""The client libraries that people use: paho-mqtt, with its own threads and retries, and aiomqtt."""

import asyncio
import threading
from collections.abc import Iterator

import aiomqtt
import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode

from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.paho import stop as end
from tests.harness.waiting import eventually
from tests.integration.conftest import Connector


class Paho:
    """A paho client with its network thread, and what it has received."""

    def __init__(self, gateway: Gateway, client_id: str, *, clean: bool = True, keepalive: int = 30) -> None:
        self.client = paho.Client(CallbackAPIVersion.VERSION2, client_id, clean_session=clean, protocol=paho.MQTTv311)
        self.client.reconnect_delay_set(0.05, 0.2)  # type: ignore[arg-type]  # any number of seconds does
        self.client.max_inflight_messages_set(50)
        self.got: list[tuple[str, bytes, int, bool]] = []
        self.present: list[bool] = []
        self.granted: dict[int, list[int]] = {}
        self._connected = threading.Event()
        self.client.on_connect = self._on_connect
        self.client.on_message = self._on_message
        self.client.on_subscribe = self._on_subscribe
        self.client.connect(gateway.host, gateway.port, keepalive)
        self.client.loop_start()
        assert self._connected.wait(30)

    def _on_connect(self, client: object, data: object, flags: paho.ConnectFlags, reason: object, _: object) -> None:
        self.present.append(flags.session_present)
        self._connected.set()

    def _on_message(self, client: object, data: object, message: paho.MQTTMessage) -> None:
        self.got.append((message.topic, bytes(message.payload), message.qos, message.retain))

    def _on_subscribe(self, client: object, data: object, mid: int, codes: list[ReasonCode], _: object) -> None:
        self.granted[mid] = [code.value for code in codes]

    def subscribe(self, topic_filter: str, qos: int) -> None:
        """Subscribe and wait for SUBACK."""
        _, mid = self.client.subscribe(topic_filter, qos)
        assert mid is not None
        assert eventually(lambda: self.granted.get(mid)) == [qos]

    def publish(self, topic: str, payload: bytes, qos: int, retain: bool = False) -> None:
        """Publish and wait until it is acknowledged."""
        self.client.publish(topic, payload, qos, retain).wait_for_publish(30)

    def close(self) -> None:
        """Disconnect, and end the thread."""
        self.client.disconnect()
        end(self.client)


def stop(client: Paho) -> None:
    """Do not reconnect; may be called in the network thread."""
    client.client.loop_stop()


@pytest.fixture
def clients() -> Iterator[list[Paho]]:
    """Clients that are closed when the test ends."""
    opened: list[Paho] = []
    yield opened
    for client in opened:
        client.close()


@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
def test_paho_exchange(gateway: Gateway, name: str, clients: list[Paho], clean: bool) -> None:
    """500 messages at each QoS, in order, and a retained one: no more is needed than the standard [MQTT-7.0.0-2]."""
    publisher = Paho(gateway, f"{name}-publisher")
    subscriber = Paho(gateway, name, clean=clean)
    clients += [publisher, subscriber]
    publisher.publish(f"{name}/retained", b"kept", 2, retain=True)
    subscriber.subscribe(f"{name}/#", 2)
    assert eventually(lambda: list(subscriber.got)) == [(f"{name}/retained", b"kept", 2, True)]
    for qos in (0, 1, 2):
        infos = [publisher.client.publish(f"{name}/{qos}", b"%d" % index, qos) for index in range(500)]
        for info in infos:
            info.wait_for_publish(30)
    assert eventually(lambda: len(subscriber.got) == 1501)
    for qos in (0, 1, 2):
        expected = [(f"{name}/{qos}", b"%d" % index, qos, False) for index in range(500)]
        assert [one for one in subscriber.got if one[0] == f"{name}/{qos}"] == expected
    publisher.publish(f"{name}/retained", b"", 1, retain=True)


def test_paho_session(gateway: Gateway, second_gateway: Gateway, name: str, clients: list[Paho]) -> None:
    """What came while the client was away is there when it is back, on another gateway."""
    publisher = Paho(gateway, f"{name}-publisher")
    clients.append(publisher)
    first = Paho(gateway, name, clean=False)
    assert first.present == [False]
    first.subscribe(f"{name}/+", 2)
    first.close()
    for index in range(200):
        publisher.client.publish(f"{name}/a", b"%d" % index, 2)
    publisher.publish(f"{name}/b", b"last", 2)
    second = Paho(second_gateway, name, clean=False)
    clients.append(second)
    assert second.present == [True]
    assert eventually(lambda: len(second.got) == 201)
    assert [int(one[1]) for one in second.got[:200]] == list(range(200))


@pytest.mark.parametrize("kill", [False, True], ids=["restart", "crash"])
def test_paho_through_gateway_restarts(
    gateway: Gateway,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    name: str,
    clients: list[Paho],
    kill: bool,
) -> None:
    """[MQTT-4.3.3-1], [MQTT-4.4.0-1]: the subscriber reconnects by itself and gets all exactly once, in order.

    The publisher stays connected: paho sends a QoS 2 PUBLISH anew, although it has sent PUBREL, when it had to try
    twice to reconnect.
    """
    shaky = gateway_factory(nats_server)
    publisher = Paho(gateway, f"{name}-publisher")
    subscriber = Paho(shaky, name, clean=False)
    clients += [publisher, subscriber]
    subscriber.subscribe(f"{name}/#", 2)
    for start in (0, 150):
        infos = [publisher.client.publish(f"{name}/a", b"%d" % index, 2) for index in range(start, start + 150)]
        eventually(lambda start=start: len(subscriber.got) > start + 50)  # type: ignore[misc]
        shaky.restart(kill=kill)
        for info in infos:
            info.wait_for_publish(30)
    assert eventually(lambda: len(subscriber.got) >= 300)
    assert [int(one[1]) for one in subscriber.got] == list(range(300))
    assert all(subscriber.present[1:])


def test_paho_publisher_through_a_gateway_restart(
    nats_server: NatsServer, gateway_factory: GatewayFactory, name: str, clients: list[Paho]
) -> None:
    """[MQTT-4.3.2-1], [MQTT-4.4.0-1]: at QoS 1 nothing is lost on the way of a publisher whose gateway is killed."""
    gateway = gateway_factory(nats_server)
    publisher = Paho(gateway, f"{name}-publisher", clean=False)
    subscriber = Paho(gateway, name, clean=False)
    clients += [publisher, subscriber]
    subscriber.subscribe(name, 1)
    infos = [publisher.client.publish(name, b"%d" % index, 1) for index in range(300)]
    eventually(lambda: len(subscriber.got) > 50)
    gateway.restart(kill=True)
    assert eventually(lambda: all(info.is_published() for info in infos))
    assert eventually(lambda: {int(one[1]) for one in subscriber.got} == set(range(300)))


def test_paho_takeover(gateway: Gateway, second_gateway: Gateway, name: str, clients: list[Paho]) -> None:
    """[MQTT-3.1.4-2]: a client that moves takes its session with it; the former connection notices."""
    publisher = Paho(gateway, f"{name}-publisher")
    first = Paho(gateway, name, clean=False)
    first.client.on_disconnect = lambda *_: stop(first)
    clients.append(publisher)
    first.subscribe(name, 1)
    second = Paho(second_gateway, name, clean=False)
    clients.append(second)
    assert second.present == [True]
    publisher.publish(name, b"x", 1)
    assert eventually(lambda: second.got) == [(name, b"x", 1, False)]
    assert not first.got
    end(first.client)


async def test_aiomqtt_exchange(gateway: Gateway, name: str) -> None:
    """Publish and subscribe at each QoS, with a will that is not used."""
    will = aiomqtt.Will(f"{name}/will", b"farewell", 1)
    async with (
        aiomqtt.Client(gateway.host, gateway.port, identifier=f"{name}-a", will=will) as publisher,
        aiomqtt.Client(gateway.host, gateway.port, identifier=f"{name}-b") as subscriber,
    ):
        await subscriber.subscribe(f"{name}/#", 2)
        for index in range(60):
            await publisher.publish(f"{name}/{index % 3}", b"%d" % index, index % 3)
        got = []
        async with asyncio.timeout(30):
            async for message in subscriber.messages:
                got.append((str(message.topic), message.payload, message.qos))
                if len(got) == 60:
                    break
        for qos in (0, 1, 2):
            assert [one for one in got if one[2] == qos] == [
                (f"{name}/{qos}", b"%d" % index, qos) for index in range(qos, 60, 3)
            ]


async def test_aiomqtt_will_and_session(
    gateway: Gateway, second_gateway: Gateway, name: str, connect: Connector
) -> None:
    """A will of a client that raw sockets push out, and a session that is continued."""
    listener = await connect(f"{name}-listener")
    await listener.subscribe(f"{name}/will", qos=1)
    will = aiomqtt.Will(f"{name}/will", b"farewell", 1)
    session = aiomqtt.Client(gateway.host, gateway.port, identifier=name, clean_session=False, will=will)

    async def robbed() -> None:
        async with session:
            await session.subscribe(f"{name}/a", 1)
            thief = await connect(name, clean=False, to=second_gateway)
            assert thief.session_present
            await listener.receive(f"{name}/will", b"farewell")
            await thief.disconnect()
            async for _ in session.messages:
                pass

    with pytest.raises(aiomqtt.MqttError):
        await robbed()
    await listener.deliver(f"{name}/a", b"kept", 1)
    async with aiomqtt.Client(gateway.host, gateway.port, identifier=name, clean_session=False) as again:
        async with asyncio.timeout(30):
            message = await anext(again.messages)
        assert (message.payload, message.qos) == (b"kept", 1)
