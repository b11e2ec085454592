# SPDX-License-Identifier: Apache-2.0
"""The function between a client and its socket: packets that it reports to hooks, as they are encoded."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mqtt_nats.codec import Ack, Connack, Packet, Properties, Publish, ReasonCode, encode
from mqtt_nats.codec.wire import PacketKind
from mqtt_nats.hooks.events import Answered, Delivered, DropReason
from mqtt_nats.hooks.points import MESSAGE_ACKED, MESSAGE_ANSWERED, MESSAGE_DELIVERED, MESSAGE_DROPPED
from mqtt_nats.hooks.registry import Hooks
from mqtt_nats.messages.delivery_hooks import DeliveryHooks, extent, lost, set_delivery_hooks
from mqtt_nats.messages.publish_encoder import Aliases
from mqtt_nats.transport.write_buffer import FlushRound, WriteBuffer
from tests.plugins.fakes import PlainClient


class Taker(PlainClient):
    """A subscriber with a write buffer; notes which messages it does not get."""

    def __init__(self, version: int = 5) -> None:
        super().__init__("taker")
        self.version = version
        self.write_buffer = WriteBuffer(FlushRound(lambda flush: None), 1024)
        self.outgoing: Aliases | None = None
        self.dropped: list[tuple[str, int, DropReason]] = []

    def drop(self, topic: str, qos: int, reason: DropReason, message_id: str = "") -> None:
        self.dropped.append((topic, qos, reason))


class Seen:
    """Hooks for all that a client is sent, and their events."""

    def __init__(self) -> None:
        self.hooks = Hooks(lambda work, name: work.close())
        self.delivered: list[Delivered] = []
        self.answered: list[Answered] = []
        self.hooks.add(MESSAGE_DELIVERED, self.delivered.append, owner="delivered")
        self.hooks.add(MESSAGE_ANSWERED, self.answered.append, owner="answered")


def message(topic: str, payload: bytes = b"x", qos: int = 0, packet_id: int = 0, **more: Any) -> Publish:
    key = len(topic).to_bytes(2) + topic.encode()
    retain, dup = more.pop("retain", False), more.pop("dup", False)
    return Publish(qos, retain, dup, key, packet_id, payload, cast("Properties", more) or None)


def watched(client: Taker, seen: Seen) -> tuple[DeliveryHooks, list[bytes]]:
    """The function in place of the socket's ``write``, and the bytes that the socket has got."""
    sent: list[bytes] = []
    return DeliveryHooks(client, seen.hooks, lambda data: sent.append(bytes(data)), True, "id {}".format), sent


def wire(version: int, *packets: Packet) -> bytes:
    return b"".join(encode(one, version) for one in packets)


@pytest.mark.parametrize("version", [4, 5])
def test_each_message_of_a_write_is_reported_after_it_was_sent(version: int) -> None:
    seen = Seen()
    client = Taker(version)
    write, sent = watched(client, seen)
    seen.hooks.add(MESSAGE_DELIVERED, lambda one: sent.append(one.payload))
    large = b"y" * 20_000  # its length takes three bytes
    first, last = message("c", large, 1, 7, retain=True), message("d", b"", 2, 9, dup=True)
    data = wire(version, message("a/b"), Connack(False, 0), first, last)
    write(data)
    assert sent == [data, b"x", large, b""]
    assert [(one.topic, one.qos, one.packet_id, one.retain, one.dup) for one in seen.delivered] == [
        ("a/b", 0, 0, False, False),
        ("c", 1, 7, True, False),
        ("d", 2, 9, False, True),
    ]
    assert [one.message_id for one in seen.delivered] == ["", "id 7", "id 9"]
    assert {one.client.client_id for one in seen.delivered} == {"taker"}


def test_an_alias_stands_for_the_topic_that_has_set_it() -> None:
    seen = Seen()
    client = Taker()
    client.outgoing = Aliases(10)
    alias, known = client.outgoing.give(b"\0\x05known")
    assert not known
    write, _ = watched(client, seen)  # from now on: the client has this alias already
    write(wire(5, message("", topic_alias=alias)))
    write(wire(5, message("new", topic_alias=2), message("", message_expiry_interval=9, topic_alias=2)))
    write(wire(5, message("", topic_alias=3)))
    assert [one.topic for one in seen.delivered] == ["known", "new", "new", ""]


def test_properties_are_reported_as_they_are_in_the_packet() -> None:
    seen = Seen()
    write, _ = watched(Taker(5), seen)
    write(wire(5, message("a", b"payload", 1, 1, content_type="text"), message("a", b"payload")))
    assert [one.properties for one in seen.delivered] == [b"\x03\0\x04text", b""]
    assert [one.payload for one in seen.delivered] == [b"payload", b"payload"]
    old = Seen()
    write, _ = watched(Taker(4), old)
    write(wire(4, message("a", b"payload", 1, 1)))
    assert [(one.properties, one.payload) for one in old.delivered] == [(b"", b"payload")]


def test_answers_to_the_publisher_are_reported_with_their_reason() -> None:
    seen = Seen()
    write, _ = watched(Taker(5), seen)
    kinds = (PacketKind.PUBREC, PacketKind.PUBREL, PacketKind.PUBCOMP)
    accepted = [Ack(kind, number, ReasonCode.SUCCESS) for number, kind in enumerate(kinds, 2)]
    write(wire(5, Ack(PacketKind.PUBACK, 258, ReasonCode.NOT_AUTHORIZED), *accepted))
    assert [(one.kind, one.packet_id, one.reason) for one in seen.answered] == [(4, 258, 0x87), (5, 2, 0), (7, 4, 0)]


def test_messages_are_kept_for_hooks_of_acknowledgements_only_where_there_are_such_hooks() -> None:
    seen = Seen()
    write, _ = watched(Taker(), seen)
    write(wire(5, message("a", b"", 1, 1)))
    assert write.sent == {}
    seen.hooks.add(MESSAGE_ACKED, lambda one: None)
    write(wire(5, message("a", b"", 1, 1), message("b")))
    assert write.sent.keys() == {1}


# -- when it is there -----------------------------------------------------------------------------------


def insert(client: Taker, hooks: Hooks) -> None:
    set_delivery_hooks(client, hooks, lambda identifier: "")


def test_without_hooks_bytes_go_to_the_socket_directly() -> None:
    seen = Seen()
    client = Taker()
    sent: list[bytes | bytearray] = []
    write = sent.append
    client.write_buffer.send_by(write)
    insert(client, seen.hooks)
    between = client.write_buffer.send
    assert isinstance(between, DeliveryHooks)
    insert(client, seen.hooks)
    assert client.write_buffer.send is between
    seen.hooks.remove_all("delivered")
    seen.hooks.add(MESSAGE_DROPPED, lambda one: None, owner="dropped")
    seen.hooks.remove_all("answered")
    insert(client, seen.hooks)
    between(wire(5, message("a")))
    assert (client.write_buffer.send, between.looks, seen.delivered) == (between, False, [])
    seen.hooks.remove_all("dropped")
    insert(client, seen.hooks)
    assert client.write_buffer.send is write


def test_a_closed_socket_stays_closed() -> None:
    client = Taker()
    insert(client, Seen().hooks)
    assert client.write_buffer.send is None


def test_messages_that_a_slow_client_does_not_get_are_dropped_one_by_one() -> None:
    seen = Seen()
    client = Taker()
    client.write_buffer.send_by(lambda data: None)
    data = wire(5, message("a/b"), message("c", b"y" * 300))
    lost(client.write_buffer, data)
    assert client.dropped == []  # nobody wants to hear of it
    insert(client, seen.hooks)
    lost(client.write_buffer, data)
    assert client.dropped == [("a/b", 0, "slow client"), ("c", 0, "slow client")]


@pytest.mark.parametrize("size", [0, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_the_extent_of_a_packet(size: int) -> None:
    packet = wire(4, message("a", b"x" * (size - 3))) if size > 2 else b"\xc0\0"
    body, end = extent(b"\0" + packet, 1)
    assert (end, end - body) == (len(packet) + 1, size)
