# SPDX-License-Identifier: Apache-2.0
"""JetStream has no room: what cannot be stored is not acknowledged, and everything else goes on."""

import re
from collections.abc import AsyncIterator

import httpx
import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, StreamConfig

from tests.admin.support import PATIENCE, address
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw, raw5
from tests.harness.bystanders import Paho
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, connect, publish
from tests.harness.raw5 import Raw5
from tests.harness.waiting import aeventually, eventually
from tests.integration.conftest import live

MESSAGES = "$MQTT_msgs"

FULL = "JetStream storage is full: insufficient resources (JetStream error 10023)"

WAITING_S = 3.0
"""Without an acknowledgement for so long a publish waits for room."""


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
def local(server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(server)


@pytest.fixture
async def js(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(server.url)
    yield client.jetstream()
    await client.close()


async def limited(js: JetStreamContext, name: str, max_bytes: int) -> None:
    config: StreamConfig = (await js.stream_info(name)).config
    config.max_bytes = max_bytes
    if not config.discard_new_per_subject:
        config.discard = DiscardPolicy.NEW if max_bytes > 0 else DiscardPolicy.OLD
    await js.update_stream(config)


def fill(client: Raw, topic: str, qos: int, acknowledged: list[bytes]) -> bytes:
    """Publish until the connection ends, or nothing is acknowledged for a while; the message that was published last.

    Args:
        acknowledged: gets what was acknowledged.
    """
    for number in range(1, 60_000):
        payload = b"%d " % number + bytes(4000)
        client.send(publish(topic, payload, qos=qos, id=number))
        try:
            one = client.receive(WAITING_S)
            if qos == 2 and one is not None and one.kind == raw.PUBREC:
                client.send(raw.ack(raw.PUBREL, number))
                one = client.receive(WAITING_S)
        except TimeoutError:
            return payload
        if one is None:
            return payload
        assert one.kind == (raw.PUBACK if qos == 1 else raw.PUBCOMP)
        acknowledged.append(payload)
    raise AssertionError("never refused")


def fill5(client: Raw5, topic: str) -> None:
    """Publish by 5.0 until not even a small message is stored."""
    number = 0
    for size in (4000, 0):
        while True:
            number += 1
            client.send(raw5.publish(topic, bytes(size), qos=1, id=number))
            if client.answer(raw.PUBACK, number).reasons == (0x97,):
                break


def filled(port: int, topic: str, qos: int) -> list[bytes]:
    """What is acknowledged to a publisher until there is no room, and it goes."""
    acknowledged: list[bytes] = []
    with Raw.connected(port) as client:
        fill(client, topic, qos, acknowledged)
    return acknowledged


@pytest.mark.parametrize("qos", [1, 2])
async def test_the_message_stream_is_full(server: NatsServer, local: Gateway, js: JetStreamContext, qos: int) -> None:
    with (
        Paho(local.port, "durable", clean=False) as durable,
        Paho(local.port, "regular") as regular,
        Raw.connected(local.port, "bystander") as bystander,
        Raw.connected(local.port, "willing") as will_watcher,
    ):
        durable.subscribe("full", 2)
        regular.subscribe("full", 2)
        assert bystander.subscribe(("zero", 0)) == [0]
        assert will_watcher.subscribe(("will/full", 1)) == [1]
        await limited(js, MESSAGES, 1_000_000)
        acknowledged = filled(local.port, "full", qos)
        assert 100 < len(acknowledged) < 250
        # Everything that needs no room in that stream works.
        for number in range(3):
            bystander.send(publish("zero", b"%d" % number))
            assert bystander.expect(raw.PUBLISH).payload == b"%d" % number
        assert bystander.subscribe(("more", 1), id=2) == [1]
        with Raw.connected(local.port, "newcomer", clean=False) as newcomer:
            assert newcomer.subscribe(("full", 1)) == [1]
        # The will of a publisher that waits for room goes at least to who is connected.
        with Raw(local.port) as client:
            client.send(connect(flags=0x0E, tail=("will/full", "gone")))
            client.expect(raw.CONNACK)
            client.send(publish("full", bytes(5000), qos=1))
            assert client.ping() == []
        assert will_watcher.expect(raw.PUBLISH).payload == b"gone"
        for subscriber in (durable, regular):
            eventually(lambda s=subscriber: set(acknowledged) <= set(s.payloads("full")))  # type: ignore[misc]
            assert subscriber.disconnections == []
        assert durable.payloads("full") == acknowledged

        await limited(js, MESSAGES, -1)
        durable.publish_acknowledged("full", b"after", qos)
        for subscriber in (durable, regular):
            eventually(lambda s=subscriber: b"after" in s.payloads("full"))  # type: ignore[misc]
        assert bystander.ping() == []
    assert "connection to NATS is lost" not in local.log


@pytest.mark.parametrize(
    ("stream", "qos", "retain"), [("$MQTT_qos2in", 2, 0), ("$MQTT_rmsgs", 1, 1), ("$MQTT_rmsgs", 2, 1)]
)
async def test_another_stream_is_full(
    server: NatsServer, local: Gateway, js: JetStreamContext, stream: str, qos: int, retain: int
) -> None:
    with Raw.connected(local.port, "bystander") as bystander, Raw.connected(local.port, "publisher") as publisher:
        assert bystander.subscribe(("other", 1)) == [1]
        await limited(js, stream, 100)
        if stream == "$MQTT_rmsgs":
            await aeventually(lambda: f"changed stream {stream}" in local.log, PATIENCE)  # seen twice a minute
        publisher.send(publish("other/x", bytes(1000), qos=qos, flags=retain))
        if retain and qos == 2:
            publisher.expect(raw.PUBREC)
            publisher.send(raw.ack(raw.PUBREL, 1))
        assert publisher.ping() == []
        bystander.send(publish("other", b"fine", qos=1, id=3))
        found = [bystander.receive(), bystander.receive()]
        assert {one.kind for one in found if one} == {raw.PUBACK, raw.PUBLISH}
        assert publisher.ping() == []
        await limited(js, stream, -1)
        publisher.expect(raw.PUBACK if qos == 1 else raw.PUBCOMP if retain else raw.PUBREC)


async def test_no_room_for_sessions(server: NatsServer, gateway_factory: GatewayFactory, js: JetStreamContext) -> None:
    """No new session is stored; who is connected stays and can publish."""
    local = gateway_factory(server, "--max-client-id-length", "1000")
    with Raw.connected(local.port, "bystander", clean=False) as bystander:
        assert bystander.subscribe(("t", 1)) == [1]
        async with await nats.connect(server.url) as client:
            await live(client, "bystander")
        await limited(js, "$MQTT_sess", 600)
        with Raw(local.port) as client:
            client.send(connect("x" * 600, clean=False))
            (answer,) = client.expect_closed()
            assert answer.body == b"\0\x03"
        with Raw.connected(local.port, "x" * 600) as clean:
            assert clean.ping() == []
        bystander.send(publish("t", b"x", qos=1, id=5))
        found = [bystander.receive(), bystander.receive()]
        assert {one.kind for one in found if one} == {raw.PUBACK, raw.PUBLISH}
        assert bystander.subscribe(("u" * 500, 1), id=6) == [0x80]
        assert bystander.ping() == []
        await limited(js, "$MQTT_sess", -1)
        assert bystander.subscribe(("u" * 500, 1), id=7) == [1]
        for number, topic in enumerate(("t", "u" * 500), 8):
            bystander.send(publish(topic, b"y", qos=1, id=number))
            found = [bystander.receive(), bystander.receive()]
            assert {one.kind for one in found if one} == {raw.PUBACK, raw.PUBLISH}
        Raw.connected(local.port, "x" * 600, clean=False).close()


@pytest.mark.parametrize("qos", [1, 2])
def test_the_server_has_no_room(nats_factory: NatsFactory, gateway_factory: GatewayFactory, qos: int) -> None:
    server = nats_factory(config="jetstream { max_file_store: 2MB }")
    gateway = gateway_factory(server)
    with Raw.connected(gateway.port, "bystander") as bystander, Paho(gateway.port) as subscriber:
        assert bystander.subscribe(("zero", 0)) == [0]
        subscriber.subscribe("full", qos)
        acknowledged = filled(gateway.port, "full", qos)
        assert acknowledged
        for number in range(3):
            bystander.send(publish("zero", b"%d" % number))
            assert bystander.expect(raw.PUBLISH).payload == b"%d" % number
        eventually(lambda: set(acknowledged) <= set(subscriber.payloads("full")))
        assert subscriber.disconnections == []
    assert "connection to NATS is lost" not in gateway.log


async def test_the_server_has_no_room_for_the_lease(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    """No durable session is let in, so the gateway is not ready, and says why; it is again when there is room."""
    server = nats_factory(config="jetstream { max_file_store: 3MB }")
    gateway = gateway_factory(server, "--gateway-lease", "4", "--admin-listen", "127.0.0.1:0")
    reason = f"the lease of the gateway is not renewed: {FULL}"
    with Raw5.open(gateway.port, "filler") as filler:
        fill5(filler, "full")
        await _without_room(server, gateway, reason)
    assert "ready again" in gateway.log
    Raw.connected(gateway.port, "let in").close()


async def _without_room(server: NatsServer, gateway: Gateway, reason: str) -> None:
    async with httpx.AsyncClient(base_url=address(gateway), timeout=PATIENCE) as http:

        async def says(status: int, text: str) -> None:
            async def said() -> bool:
                answer = await http.get("/readyz")
                return answer.status_code == status and text in answer.text

            await aeventually(said, what=f"{status} {text}")

        await says(503, reason)
        begin = reason[:80]  # the log shortens what is long
        assert re.search(rf"not ready: {re.escape(begin)}.*; new clients are refused", gateway.log)
        assert gateway.log.count(f"WARNING mqtt_nats.broker: {begin}") == 1
        with Raw(gateway.port) as client:
            client.send(connect("refused", clean=False))
            (answer,) = client.expect_closed()
            assert answer.body == b"\0\x03"
        assert f"client 'refused' cannot be served: {begin}" in gateway.log
        nats_client = await nats.connect(server.url)
        await nats_client.jetstream().purge_stream(MESSAGES)
        await nats_client.close()
        await says(200, "ready")


@pytest.mark.parametrize("qos", [1, 2])
async def test_publishers_of_3_1_1_wait_for_room(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, qos: int
) -> None:
    """On the connection that they have; one of 5.0 is told. The log says it once, `ctl` and metrics too."""
    server = nats_factory(config="jetstream { max_file_store: 3MB }")
    gateway = gateway_factory(server, "--admin-listen", "127.0.0.1:0")
    acknowledged: list[bytes] = []
    with Raw.connected(gateway.port, "old") as old, Raw5.open(gateway.port, "new") as new:
        assert fill(old, "full", qos, acknowledged) not in acknowledged
        for number in range(1, 200):
            new.send(raw5.publish("full", bytes(4000), qos=qos, id=number))
            kind = raw.PUBACK if qos == 1 else raw.PUBREC
            assert new.answer(kind, number, 0x97)
        assert old.ping() == []
        url = address(gateway)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
            metrics = (await http.get("/metrics")).text
            refused = re.search(r'stores_refused_total\{reason="storage_full",worker="1"\} (\d+)', metrics)
            assert refused is not None
            assert int(refused[1]) >= 200
            assert re.search(r"^mqtt_nats_jetstream_used_bytes [1-9]", metrics, re.MULTILINE)
            assert "mqtt_nats_jetstream_allowed_bytes +Inf" in metrics, "max_file_store is not told to clients"

            async def said() -> bool:
                answer = await http.get("/readyz")
                return answer.status_code == 503 and FULL in answer.text

            await aeventually(said, what="not ready")
        nats_client = await nats.connect(server.url)
        await nats_client.jetstream().purge_stream(MESSAGES)
        await nats_client.close()
        answer = old.receive()
        assert answer is not None
        assert answer.kind in ((raw.PUBACK,) if qos == 1 else (raw.PUBREC, raw.PUBCOMP))
        assert answer.id == len(acknowledged) + 1
    assert gateway.log.count("WARNING mqtt_nats.nats: JetStream does not store: JetStream storage is full") == 1
    # A summary of what was omitted names one of them again.
    assert gateway.log.count("WARNING mqtt_nats.broker: client 'new': a message was not stored") == 1
