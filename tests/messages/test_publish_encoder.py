# SPDX-License-Identifier: Apache-2.0
"""Packets of one subscriber's own: aliases, size limit, expiry, identifiers."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.codec import ClientDecoder, Limits, Publish, PublishRun
from mqtt_nats.hooks.events import DropReason
from mqtt_nats.messages.message import Message, Rich, Stored, encoded_id, expired, left, tailored
from mqtt_nats.messages.publish_encoder import Aliases, encode_for_subscriber, encode_publish
from mqtt_nats.messages.terms import Terms
from mqtt_nats.transport.write_buffer import FlushRound, WriteBuffer

LIMITS = Limits(
    max_packet_size=1 << 20, connect_packet_size=1 << 16, max_topic_levels=128, max_filters=100, max_user_properties=64
)
KEY = b"\0\x03a/b"
UTF8 = b"\x01\x01"


class OneSubscriber:
    """A `Subscriber`: the client that the packets are for."""

    checks_each = False

    def __init__(self, version: int, terms: Terms) -> None:
        self.version, self.terms = version, terms
        most = terms.topic_alias_maximum
        self.outgoing = Aliases(most) if most else None
        self.write_buffer = WriteBuffer(FlushRound(lambda flush: None), 1)

    def withheld(self, key: bytes, qos: int, message_id: str) -> bool:
        return False

    def drop(self, topic: str, qos: int, reason: DropReason, message_id: str = "") -> None:
        """Nobody counts it."""


def client(*, limit: int = 1 << 28, aliases: int = 0, clogged: bool = False, version: int = 5) -> OneSubscriber:
    """As much of a client as the packets need."""
    found = OneSubscriber(version, Terms(maximum_packet_size=limit, topic_alias_maximum=aliases))
    if clogged:
        found.write_buffer.send_by(lambda data: None)
        found.write_buffer.clog()
    return found


def read(data: bytes, version: int = 5) -> Any:
    """The packet, as a client reads it."""
    packets = ClientDecoder(LIMITS, version).feed(data)
    assert len(packets) == 1
    return packets[0]


def test_aliases_are_given_to_the_topics_used_last() -> None:
    aliases = Aliases(2)
    assert aliases.give(b"a") == (1, False)
    assert aliases.give(b"b") == (2, False)
    assert aliases.give(b"a") == (1, True)
    assert aliases.give(b"c") == (2, False), "b was not used for the longest time"
    assert aliases.give(b"a") == (1, True)
    assert aliases.give(b"b") == (2, False)


@given(st.integers(1, 5), st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])))
def test_the_receiver_always_knows_the_topic(maximum: int, topics: list[bytes]) -> None:
    aliases = Aliases(maximum)
    known: dict[int, bytes] = {}
    for topic in topics:
        alias, named = aliases.give(topic)
        assert 1 <= alias <= maximum
        if named:
            assert known[alias] == topic
        else:
            known[alias] = topic


def test_alias_replaces_the_topic_once_it_is_known() -> None:
    one = client(aliases=3)
    first = read(encode_publish(one, Message(KEY, b"x", 1), 1, 7, ids=b"", retain=False))
    second = read(encode_publish(one, Message(KEY, b"y", 1), 1, 8, ids=b"", retain=False))
    assert (first.key, first.properties) == (KEY, {"topic_alias": 1})
    assert (second.key, second.properties, second.packet_id) == (b"\0\0", {"topic_alias": 1}, 8)


def test_no_alias_in_what_may_be_dropped() -> None:
    full = client(aliases=3, clogged=True)
    packet = read(encode_publish(full, Message(KEY, b"x", 0), 0, 0, ids=b"", retain=False))
    assert isinstance(packet, PublishRun), "no properties"
    assert packet.key == KEY
    packet = read(encode_publish(full, Message(KEY, b"x", 1), 1, 1, ids=b"", retain=False))
    assert packet.properties == {"topic_alias": 1}, "QoS 1 is not dropped"


@pytest.mark.parametrize("aliases", [0, 3])
def test_what_is_too_large_for_the_client_is_not_sent(aliases: int) -> None:
    message = Message(KEY, b"x" * 100, 1)
    size = len(tailored(message, 5, 1, 1, 0.0))
    exact = client(limit=size)
    assert encode_publish(exact, message, 1, 1, ids=b"", retain=False)
    small = client(limit=size - 1, aliases=aliases)
    assert encode_publish(small, message, 1, 1, ids=b"", retain=False) == b""
    little = read(encode_publish(small, Message(KEY, b"y", 1), 1, 2, ids=b"", retain=False))
    assert little.key == KEY, "the packet that was not sent has given no alias"


def test_remaining_expiry() -> None:
    now = time.time()
    packet = read(encode_publish(client(), Rich(KEY, b"x", 0, expiry=60, born=now - 10.5), 0, 0, ids=b"", retain=False))
    assert packet.properties == {"message_expiry_interval": 50}
    assert encode_publish(client(), Rich(KEY, b"x", 0, expiry=10, born=now - 10.5), 0, 0, ids=b"", retain=False) == b""
    again = encode_publish(
        client(), Rich(KEY, b"x", 1, expiry=10, born=now - 10.5), 1, 3, ids=b"", retain=False, dup=True
    )
    assert read(again).properties == {"message_expiry_interval": 0}, "what was sent is sent again"
    assert (
        encode_publish(client(version=4), Rich(KEY, b"x", 0, expiry=10, born=now - 11), 0, 0, ids=b"", retain=False)
        == b""
    )


@pytest.mark.parametrize(
    ("expiry", "age", "gone"), [(0, 0.1, False), (0, 1.1, True), (1, 0.9, False), (1, 1.0, True), (5, 4.9, False)]
)
def test_when_a_message_has_expired(expiry: int, age: float, gone: bool) -> None:
    assert expired(Rich(KEY, b"", 0, expiry=expiry, born=1000.0), 1000.0 + age) is gone


def test_no_expiry_never_expires() -> None:
    assert not expired(Message(KEY, b"", 0), 1e12)
    assert left(-1, 0.0, 1e12) == -1
    assert left(5, 0.0, 7.0) == 0


def test_stored_message_reads_its_headers() -> None:
    block = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Client:me%2Fyou\r\nNmqtt-Retain:1\r\nNmqtt-Expiry:30\r\n\r\n"
    stored = Stored("a.b", KEY, b"x", 1, 5, False, b"2000000000000", block)
    assert (stored.sender, stored.kept, stored.expiry, stored.timed, stored.born) == ("me/you", True, 30, True, 2000.0)
    plain = Stored("a.b", KEY, b"x", 1, 5, False, b"2000000000000", b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n")
    assert (plain.sender, plain.kept, plain.expiry, plain.timed, plain.body) == ("", False, -1, False, b"")
    packet = read(plain.packet5(1))
    assert isinstance(packet, Publish)
    assert (packet.packet_id, packet.key, packet.payload, packet.properties) == (5, KEY, b"x", None)


def test_tailored_packet_has_everything() -> None:
    ids = encoded_id(1) + encoded_id(300)
    message = Rich(KEY, b"x", 2, body=UTF8, kept=True)
    packet = read(encode_for_subscriber(client(), message, 2, 2, ids, kept=True)(9))
    assert packet.properties == {"subscription_identifier": [1, 300], "payload_format_indicator": 1}
    assert (packet.retain, packet.qos, packet.packet_id, packet.dup) == (True, 2, 9, False)
    assert not read(encode_for_subscriber(client(), Rich(KEY, b"x", 2, body=UTF8), 2, 2, ids, kept=True)(9)).retain
