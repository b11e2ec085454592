# SPDX-License-Identifier: Apache-2.0
"""paho-mqtt over a socket: what it sends decodes and encodes to the same bytes, and it understands what we send."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt import properties as paho_properties
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.subscribeoptions import SubscribeOptions

from mqtt_nats.codec import (
    AckRun,
    Connack,
    Connect,
    Decoder,
    Disconnect,
    Packet,
    Properties,
    Publish,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    Will,
    encode,
)
from tests.codec.support import LIMITS, flatten, key
from tests.harness.paho import stop


class Peer:
    """Our side of one connection of a paho client, both driven from the test."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.decoder = Decoder(LIMITS)
        self.listener = socket.create_server(("127.0.0.1", 0))
        protocol = paho.MQTTv5 if version == 5 else paho.MQTTv311
        kind: dict[str, Any] = {} if version == 5 else {"clean_session": True}
        self.client = paho.Client(CallbackAPIVersion.VERSION2, "paho", protocol=protocol, **kind)
        self.socket: socket.socket | None = None

    def connect(self, **options: Any) -> list[Packet]:
        self.client.connect(*self.listener.getsockname(), **options)
        self.socket, _ = self.listener.accept()
        self.socket.setblocking(False)
        return self.read(1)

    def read(self, count: int) -> list[Packet]:
        """The next packets of the client, after a check that they encode to the bytes that came."""
        assert self.socket is not None
        raw = b""
        packets: list[Packet] = []
        end = time.monotonic() + 10
        while len(packets) < count:
            assert time.monotonic() < end, f"only {packets}"
            self.client.loop(0.01)
            try:
                data = self.socket.recv(65536)
            except BlockingIOError:
                continue
            raw += data
            packets.extend(flatten(self.decoder.feed(data)))
            assert self.decoder.error is None
        assert b"".join(encode(packet, self.version) for packet in packets) == raw
        return packets

    def write(self, packet: Packet) -> None:
        """Send a packet."""
        assert self.socket is not None
        self.socket.sendall(encode(packet, self.version))

    def send(self, packet: Packet, done: Callable[[], object]) -> None:
        """Send a packet and let the client work until `done` is true."""
        self.write(packet)
        end = time.monotonic() + 10
        while not done():
            assert time.monotonic() < end, packet
            self.client.loop(0.01)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self.listener.close()
        stop(self.client)


@pytest.fixture(params=[4, 5])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    peer = Peer(request.param)
    yield peer
    peer.close()


def _properties(kind: int, **values: Any) -> Any:
    make: Any = paho_properties.Properties  # untyped
    properties = make(kind)
    for name, value in values.items():
        setattr(properties, name, value)
    return properties


def test_conversation(peer: Peer) -> None:
    v5 = peer.version == 5
    client = peer.client
    seen: dict[str, Any] = {}
    client.on_connect = lambda _c, _u, flags, reason, props: seen.update(connect=(flags.session_present, reason.value))
    client.on_subscribe = lambda _c, _u, mid, codes, props: seen.update(subscribe=(mid, [code.value for code in codes]))
    client.on_unsubscribe = lambda _c, _u, mid, codes, props: seen.update(unsubscribe=mid)
    client.on_publish = lambda _c, _u, mid, code, props: seen.update(publish=mid)
    client.on_message = lambda _c, _u, message: seen.update(
        message=(message.topic, message.payload, message.qos, message.retain, message.properties if v5 else None)
    )

    client.username_pw_set("user", "secret")
    will_properties = _properties(PacketTypes.WILLMESSAGE, WillDelayInterval=5, UserProperty=("k", "v")) if v5 else None
    client.will_set("will/topic", b"bye", 2, True, will_properties)
    options: dict[str, Any] = {"keepalive": 30}
    if v5:
        options["properties"] = _properties(PacketTypes.CONNECT, SessionExpiryInterval=60, ReceiveMaximum=7)
        options["clean_start"] = True
    will = Will(
        "will/topic", b"bye", 2, True, {"will_delay_interval": 5, "user_property": [("k", "v")]} if v5 else None
    )
    found: Properties | None = {"session_expiry_interval": 60, "receive_maximum": 7} if v5 else None
    assert peer.connect(**options) == [Connect(peer.version, "paho", True, 30, "user", b"secret", will, found)]
    peer.send(Connack(False, 0, {"topic_alias_maximum": 3} if v5 else None), lambda: "connect" in seen)
    assert seen["connect"] == (False, 0)

    if v5:
        several: Any = [("a/#", SubscribeOptions(2, True, True, 1)), ("$share/g/b", SubscribeOptions(1))]
        _, mid = client.subscribe(several, properties=_properties(PacketTypes.SUBSCRIBE, SubscriptionIdentifier=300))
        wanted = (Subscription("a/#", 2, True, True, 1), Subscription("$share/g/b", 1))
        assert peer.read(1) == [Subscribe(mid or 0, wanted, {"subscription_identifier": [300]})]
    else:
        _, mid = client.subscribe([("a/#", 2), ("b", 1)])
        assert peer.read(1) == [Subscribe(mid or 0, (Subscription("a/#", 2), Subscription("b", 1)))]
    peer.send(Suback(mid or 0, (2, 0x80)), lambda: "subscribe" in seen)
    assert seen["subscribe"] == (mid, [2, 0x80])

    for qos, size in ((0, 0), (0, 200), (1, 20000), (2, 5)):
        found = None
        properties = None
        if v5 and size:
            found = {"content_type": "text", "correlation_data": b"\0\1", "user_property": [("a", "b"), ("a", "c")]}
            properties = _properties(
                PacketTypes.PUBLISH,
                ContentType="text",
                CorrelationData=b"\0\1",
                UserProperty=[("a", "b"), ("a", "c")],
            )
        seen.pop("publish", None)
        info = client.publish("t/é", b"p" * size, qos, retain=size == 5, properties=properties)
        number = info.mid if qos else 0
        assert peer.read(1) == [Publish(qos, size == 5, False, key("t/é"), number, b"p" * size, found)]
        if qos == 1:
            peer.send(AckRun(4, [number]), lambda: "publish" in seen)
        if qos == 2:
            peer.write(AckRun(5, [number]))
            assert peer.read(1) == [AckRun(6, [number])]
            peer.send(AckRun(7, [number]), lambda: "publish" in seen)

    for qos in (0, 1, 2):
        seen.pop("message", None)
        found = {"subscription_identifier": [300], "message_expiry_interval": 9} if v5 else None
        packet: Packet = Publish(qos, True, False, key("a/b"), 500 if qos else 0, b"hello", found)
        if qos == 2:
            peer.write(packet)
            assert peer.read(1) == [AckRun(5, [500])]
            packet = AckRun(6, [500])
        peer.send(packet, lambda: "message" in seen)
        assert seen["message"][:4] == ("a/b", b"hello", qos, True)
        if v5:
            assert seen["message"][4].SubscriptionIdentifier == [300]
            assert seen["message"][4].MessageExpiryInterval == 9
        if qos:
            assert peer.read(1) == [AckRun(4 if qos == 1 else 7, [500])]

    _, mid = client.unsubscribe(["a/#", "b"])
    assert peer.read(1) == [Unsubscribe(mid or 0, ("a/#", "b"))]
    peer.send(Unsuback(mid or 0, (0, 0x11) if v5 else ()), lambda: "unsubscribe" in seen)
    assert seen["unsubscribe"] == mid

    client.disconnect()
    assert peer.read(1) == [Disconnect()]
