# SPDX-License-Identifier: Apache-2.0
"""WebSocket: frames and packets that have nothing to do with each other, bad upgrades, bad frames, limits."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import paho.mqtt.client as paho
import psutil
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from mqtt_nats.transport.websocket import BARREN_MOST
from tests.conftest import GatewayFactory
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.paho import stop
from tests.harness.raw import Raw
from tests.harness.waiting import eventually
from tests.transport.support import PATIENCE, ports, write_config
from tests.transport.web import BINARY, CLOSE, CONTINUATION, PING, Web, frame, length, request
from tests.transport.websocket_gateway import EXCHANGE, Setup, answered, greeted, serving


@pytest.fixture(scope="module")
def setup(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with serving(nats_server, tmp_path_factory.mktemp("web")) as found:
        yield found


# -- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_messages(setup: Setup, secure: bool) -> None:
    """Binary frames [MQTT-6.0.0-1] (3.1.1, 5.0) of the subprotocol mqtt [MQTT-6.0.0-4] (3.1.1, 5.0)."""
    client = Web(setup.secure, setup.trust) if secure else Web(setup.port)
    with client, Raw.connected(setup.gateway.port) as other:
        greeted(client)
        assert client.subscribe(("web/#", 1)) == [1]
        for size in (0, 1, 100, 125, 126, 127, 65_535, 65_536, 150_000):
            payload = bytes(size)
            other.send(raw.publish("web/in", payload, qos=1, id=7))
            message = client.expect(raw.PUBLISH)
            assert message.payload == payload
            client.send(raw.ack(raw.PUBACK, message.id))
            client.send(raw.publish("web/out", payload, qos=1, id=8))
            kinds = sorted((client.receive(), client.receive()), key=lambda one: one.kind)  # type: ignore[union-attr]
            assert [one.kind for one in kinds if one] == [raw.PUBLISH, raw.PUBACK]
            client.send(raw.ack(raw.PUBACK, kinds[0].id))  # type: ignore[union-attr]
            assert other.expect(raw.PUBACK).id == 7
        for payload in (b"a" * 160_000, b"b" * 160_000):  # read into buffers of their own, at QoS 0
            other.send(raw.publish("web/in", payload))
            assert client.expect(raw.PUBLISH).payload == payload
        client.send(raw.packet(0xE0))
        assert client.closed() == 1000


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("protocol", [paho.MQTTv311, paho.MQTTv5])
def test_paho(setup: Setup, protocol: Any, secure: bool) -> None:
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=protocol, transport="websockets")
    if secure:
        client.tls_set_context(setup.trust)
    got: list[bytes] = []
    subscribed: list[Any] = []
    client.on_message = lambda _client, _data, message: got.append(bytes(message.payload))
    client.on_subscribe = lambda _client, _data, _id, codes, _properties: subscribed.extend(codes)
    client.connect("127.0.0.1", setup.secure if secure else setup.port)
    client.loop_start()
    try:
        eventually(client.is_connected, PATIENCE)
        client.subscribe("paho/web", 2)
        eventually(lambda: subscribed, PATIENCE)
        payloads = [bytes(size) for size in (0, 10, 1000, 100_000)]
        for payload in payloads:
            client.publish("paho/web", payload, 2)
        eventually(lambda: got == payloads, PATIENCE)
    finally:
        client.disconnect()
        stop(client)


# -- frames and packets -----------------------------------------------------------------------------


def test_packets_that_are_split_at_every_byte(setup: Setup) -> None:
    """Frames and packets need not begin and end together [MQTT-6.0.0-2] (3.1.1, 5.0)."""
    for at in range(1, len(EXCHANGE)):
        with Web(setup.port) as client:
            client.wire(frame(EXCHANGE[:at]) + frame(EXCHANGE[at:]))
            answered(client)


def test_messages_of_two_fragments(setup: Setup) -> None:
    """With a ping between them, and an empty one at the end."""
    for at in range(0, len(EXCHANGE) + 1, 5):
        with Web(setup.port) as client:
            client.wire(frame(EXCHANGE[:at], fin=False) + frame(b"%d" % at, PING))
            client.wire(frame(EXCHANGE[at:], CONTINUATION, fin=False) + frame(b"", CONTINUATION))
            answered(client)
            assert client.framed.pongs == [b"%d" % at]


def test_frames_that_are_split_at_every_byte(setup: Setup) -> None:
    """By TCP, in the head of a frame as well."""
    wire = frame(raw.connect("split")) + frame(raw.subscribe(("split/a", 1)) + raw.packet(0xC0) + b"")
    wire += frame(b"x", PING)
    for at in range(1, len(wire)):
        with Web(setup.port) as client:
            client.wire(wire[:at])
            if at % 8 == 0:
                time.sleep(0.01)  # else the kernel may put them together again
            client.wire(wire[at:])
            answered(client)


def test_every_byte_alone(setup: Setup) -> None:
    """In a segment of its own from the upgrade on, then in a frame of its own."""
    with socket.create_connection(("127.0.0.1", setup.port), PATIENCE) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request():
            plain.sendall(bytes((byte,)))
        assert plain.recv(12) == b"HTTP/1.1 101"
    with Web(setup.port) as client:
        for byte in b"".join(frame(bytes((byte,))) for byte in EXCHANGE):
            client.wire(bytes((byte,)))
        answered(client)


def test_what_comes_with_the_request(setup: Setup) -> None:
    """A client that does not wait for the answer to its request is served all the same."""
    with socket.create_connection(("127.0.0.1", setup.port), PATIENCE) as plain:
        plain.sendall(request() + frame(EXCHANGE))
        data = b""
        while not data.endswith(raw.packet(0x90, b"\0\1\1")):
            more = plain.recv(4096)
            assert more, data
            data += more
        assert data.startswith(b"HTTP/1.1 101")


def test_many_packets_in_one_frame(setup: Setup) -> None:
    """More in a frame than a packet may have, and than is handled in one turn."""
    with Web(setup.port) as client:
        greeted(client)
        packets = [raw.publish("many", bytes(1000), qos=1, id=number) for number in range(1, 1001)]
        client.send(b"".join(packets))
        assert [client.expect(raw.PUBACK).id for _ in packets] == list(range(1, 1001))


def test_a_frame_without_end(setup: Setup) -> None:
    """Its length says nothing: packets in it are handled as they come, and it takes no memory."""
    with Web(setup.port) as client:
        key = b"\0\0\0\0"
        client.wire(bytes((0x80 | BINARY,)) + length(2**62) + key + raw.connect("endless"))
        assert client.expect(raw.CONNACK).body == b"\0\0"
        process = psutil.Process(setup.gateway.pid)
        before = process.memory_info().rss
        for number in range(1, 601):
            client.wire(raw.publish("endless", bytes(150_000), qos=0))
            if number % 100 == 0:
                client.wire(raw.packet(0xC0))
                client.expect(raw.PINGRESP)
        assert process.memory_info().rss - before < 60_000_000


def test_thousands_of_tiny_frames(setup: Setup) -> None:
    """Others are served meanwhile."""
    count = 40_000
    with Web(setup.port) as client, Raw.connected(setup.gateway.port, patience=PATIENCE) as other:
        greeted(client)
        wire = b"".join(bytes((0x82, 0x81)) + b"\0\0\0\0" + bytes((byte,)) for byte in raw.packet(0xC0) * (count // 2))
        client.wire(wire)
        assert other.ping() == []
        for _ in range(count // 2):
            client.expect(raw.PINGRESP)


def test_pings_of_a_client_that_does_not_read(setup: Setup) -> None:
    """Take no memory, and hold up nobody."""
    process = psutil.Process(setup.gateway.pid)
    with Web(setup.port) as client, Raw.connected(setup.gateway.port, patience=PATIENCE) as other:
        greeted(client)
        before = process.memory_info().rss
        client.wire(frame(b"x" * 125, PING) * BARREN_MOST)
        assert other.ping() == []
        assert process.memory_info().rss - before < 20_000_000
        client.send(raw.packet(0xC0))
        client.expect(raw.PINGRESP)
        assert 0 < len(client.framed.pongs) <= BARREN_MOST


@pytest.mark.long
def test_a_reader_that_stops(setup: Setup) -> None:
    total = 400
    with Web(setup.port) as reader, Web(setup.port) as writer:
        greeted(reader, "web-reader")
        greeted(writer, "web-writer")
        assert reader.subscribe(("flood", 1)) == [1]
        for number in range(total):
            writer.send(raw.publish("flood", number.to_bytes(4, "big") + bytes(50_000), qos=1, id=number + 1))
        for _ in range(total):
            writer.expect(raw.PUBACK)
        for number in range(total):
            message = reader.expect(raw.PUBLISH)
            assert int.from_bytes(message.payload[:4], "big") == number
            reader.send(raw.ack(raw.PUBACK, message.id))


# -- the end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [None, 1000, 1001, 4999])
def test_the_client_closes(setup: Setup, code: int | None) -> None:
    """Without DISCONNECT: its will is published."""
    payload = b"" if code is None else code.to_bytes(2, "big")
    with Raw.connected(setup.gateway.port, patience=PATIENCE) as other, Web(setup.port) as client:
        assert other.subscribe(("web/will", 0)) == [0]
        client.send(raw.connect("closes", flags=0x06, tail=("web/will", "gone")))
        assert client.expect(raw.CONNACK).body == b"\0\0"
        client.wire(frame(payload, CLOSE))
        assert client.closed() == (1005 if code is None else code)
        assert other.expect(raw.PUBLISH).payload == b"gone"


def test_the_last_packets_come_with_the_end(setup: Setup) -> None:
    """PUBLISH, DISCONNECT, Close and the end of TCP at once."""
    with Raw.connected(setup.gateway.port, patience=PATIENCE) as other, Web(setup.port) as client:
        assert other.subscribe(("web/last", 0)) == [0]
        greeted(client)
        client.wire(frame(raw.publish("web/last", bytes(30_000)) + raw.publish("web/last", b"b") + raw.packet(0xE0)))
        client.wire(frame(b"\x03\xe8", CLOSE))
        client.framed.plain.shutdown(socket.SHUT_WR)
        assert other.expect(raw.PUBLISH).payload == bytes(30_000)
        assert other.expect(raw.PUBLISH).payload == b"b"


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("agrees", [True, False])
def test_the_gateway_ends_it(setup: Setup, agrees: bool, secure: bool) -> None:
    """DISCONNECT, then Close, then the socket; the last when the client answers, or after a while.

    What it sends meanwhile is ignored.
    """
    client = Web(setup.secure, setup.trust) if secure else Web(setup.port)
    with client, Raw.connected(setup.gateway.port, patience=PATIENCE) as watch:
        assert watch.subscribe(("web/late", 0)) == [0]
        client.send(raw5.connect("wrong"))
        assert client.expect(raw.CONNACK).body[1] == 0
        client.send(raw.packet(0x30, b"\0\0") + raw.publish("web/late", b"x", qos=1, id=3))
        assert client.expect(raw.DISCONNECT).body[0] == 0x81
        assert client.closed() == 1000
        client.wire(frame(raw5.publish("web/late", b"x")))
        if agrees:
            client.wire(frame(b"\x03\xe8", CLOSE))
        assert client.gone()
        assert watch.ping() == []


def test_takeover(setup: Setup) -> None:
    with Web(setup.port) as former, Web(setup.secure, setup.trust) as owner:
        greeted(former, "taken-over-web")
        greeted(owner, "taken-over-web")
        assert former.closed() == 1000
        assert owner.ping() == []


@pytest.mark.long
def test_stopping(nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Any) -> None:
    """Clients hear of it; those that do not answer, and upgrades that are not complete, do not keep it."""
    config = write_config(tmp_path / "gateway.toml", {"listen": "127.0.0.1:0", "type": "ws"})
    gateway = gateway_factory(nats_server, "--config", config, "--connect-timeout", "60")
    (port,) = ports(gateway, "WS")
    with socket.create_connection(("127.0.0.1", port)) as half, Web(port) as client, Web(port):
        half.sendall(request()[:50])
        client.send(raw5.connect("hears"))
        assert client.expect(raw.CONNACK).body[1] == 0
        assert gateway.term() == 0
        assert client.expect(raw.DISCONNECT).body[0] == 0x8B
        assert client.closed() == 1000


@pytest.mark.parametrize("qos", [0, 1])
def test_a_publish_behind_a_subscribe(setup: Setup, qos: int) -> None:
    """[MQTT-3.8.4-4] (3.1.1): in one frame, and in frames of a few bytes."""
    with Web(setup.port) as client:
        greeted(client, f"order-{qos}")
        for number in range(40):
            topic = f"order/{qos}/{number}"
            data = raw.subscribe((topic, qos), id=2 * number + 1)
            data += raw.publish(topic, b"own", qos=qos, id=2 * number + 2) + raw.packet(0xC0)
            if number % 2:
                client.send(data)
            else:
                for start in range(0, len(data), 7):
                    client.send(data[start : start + 7])
            kinds = []
            for _ in range(4 if qos else 3):
                packet = client.receive()
                assert packet is not None
                kinds.append(packet.kind)
                if packet.kind == raw.PUBLISH and packet.qos:
                    client.send(raw.ack(raw.PUBACK, packet.id))
            assert raw.PUBLISH in kinds, number
