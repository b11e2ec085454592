# SPDX-License-Identifier: Apache-2.0
"""What the encoder refuses, and the helpers of the message path against the general encoder."""

from __future__ import annotations

import pytest

from mqtt_nats.codec import (
    ID,
    MAX_REMAINING_LENGTH,
    Ack,
    AckRun,
    Auth,
    Connack,
    ConnackCode,
    Connect,
    Disconnect,
    EncodeError,
    MalformedPacket,
    Packet,
    Publish,
    PublishRun,
    ReasonCode,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    Will,
    ack_bytes,
    ack_run_bytes,
    connack_code,
    encode,
    encode_publish,
    publish_head,
)
from mqtt_nats.codec.wire import Reader, put_varint
from tests.codec.support import key

LONG = "x" * 65536
K = b"\0\1t"

REFUSED: list[tuple[str, Packet, int]] = [
    ("version 3", Connect(3, "a", True, 0), 3),
    ("CONNECT of another version", Connect(5, "a", True, 0), 4),
    ("client id too long", Connect(4, LONG, True, 0), 4),
    ("client id with NUL", Connect(4, "a\0", True, 0), 4),
    ("client id with surrogate", Connect(4, "\ud800", True, 0), 4),
    ("keep alive too long", Connect(4, "a", True, 65536), 4),
    ("password alone", Connect(4, "a", True, 0, password=b""), 4),
    ("password too long", Connect(5, "a", True, 0, password=LONG.encode()), 5),
    ("will QoS 3", Connect(4, "a", True, 0, will=Will("w", b"", 3, False)), 4),
    ("will payload too long", Connect(4, "a", True, 0, will=Will("w", LONG.encode(), 0, False)), 4),
    ("CONNECT properties", Connect(4, "a", True, 0, properties={"receive_maximum": 1}), 4),
    ("will properties", Connect(4, "a", True, 0, will=Will("w", b"", 0, False, {"content_type": ""})), 4),
    ("CONNACK code", Connack(False, 6), 4),
    ("CONNACK code of 5.0", Connack(False, 0x84), 4),
    ("CONNACK reason", Connack(False, 1), 5),
    ("CONNACK refused with session [MQTT-3.2.2-4]", Connack(True, 1), 4),
    ("CONNACK properties", Connack(False, 0, {"receive_maximum": 1}), 4),
    ("PUBLISH QoS 3", Publish(3, False, False, K, 1, b""), 4),
    ("PUBLISH DUP at QoS 0 [MQTT-3.3.1-2]", Publish(0, False, True, K, 0, b""), 4),
    ("PUBLISH id at QoS 0 [MQTT-2.3.1-5]", Publish(0, False, False, K, 1, b""), 4),
    ("PUBLISH id 0", Publish(1, False, False, K, 0, b""), 4),
    ("PUBLISH id too large", Publish(1, False, False, K, 65536, b""), 4),
    ("PUBLISH key without length", Publish(0, False, False, b"t", 0, b""), 4),
    ("PUBLISH key with wrong length", Publish(0, False, False, b"\0\2t", 0, b""), 4),
    ("PUBLISH properties", Publish(0, False, False, K, 0, b"", {"topic_alias": 1}), 4),
    ("PUBLISH property of another packet", Publish(0, False, False, K, 0, b"", {"receive_maximum": 1}), 5),
    ("ack of another kind", Ack(3, 1, 0), 5),
    ("ack id 0", Ack(4, 0, 0), 5),
    ("ack reason in 3.1.1", Ack(4, 1, 0x80), 4),
    ("ack reason of another kind", Ack(6, 1, 0x80), 5),
    ("acks with id 0", AckRun(4, [1, 0]), 4),
    ("SUBSCRIBE without filter", Subscribe(1, ()), 4),
    ("SUBSCRIBE id 0", Subscribe(0, (Subscription("a", 0),)), 4),
    ("SUBSCRIBE QoS 3", Subscribe(1, (Subscription("a", 3),)), 4),
    ("SUBSCRIBE retain handling 3", Subscribe(1, (Subscription("a", 0, retain_handling=3),)), 5),
    ("SUBSCRIBE options", Subscribe(1, (Subscription("a", 0, no_local=True),)), 4),
    ("SUBSCRIBE filter too long [MQTT-4.7.3-3]", Subscribe(1, (Subscription(LONG, 0),)), 4),
    ("SUBSCRIBE properties", Subscribe(1, (Subscription("a", 0),), {"subscription_identifier": [1]}), 4),
    ("SUBSCRIBE two ids", Subscribe(1, (Subscription("a", 0),), {"subscription_identifier": [1, 2]}), 5),
    ("SUBACK without code", Suback(1, ()), 4),
    ("SUBACK code [MQTT-3.9.3-2]", Suback(1, (3,)), 4),
    ("SUBACK reason of 5.0", Suback(1, (0x8F,)), 4),
    ("UNSUBSCRIBE without filter", Unsubscribe(1, ()), 4),
    ("UNSUBACK code", Unsuback(1, (0,)), 4),
    ("UNSUBACK without reason", Unsuback(1), 5),
    ("DISCONNECT reason", Disconnect(0x80), 4),
    ("DISCONNECT unknown reason", Disconnect(0x01), 5),
    ("AUTH in 3.1.1", Auth(0x18, {"authentication_method": "m"}), 4),
    ("AUTH unknown reason", Auth(0x01, {"authentication_method": "m"}), 5),
    ("AUTH without method", Auth(0x18), 5),
]


@pytest.mark.parametrize(("packet", "version"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(packet: Packet, version: int) -> None:
    with pytest.raises(EncodeError):
        encode(packet, version)


def test_level_of_mqtt_31() -> None:
    """For clients that test how a server refuses MQTT 3.1."""
    assert encode(Connect(3, "a", True, 60), 4) == bytes.fromhex("100f 00064d5149736470 03 02 003c 0001 61")


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16383, 16384, 2097151, 2097152, MAX_REMAINING_LENGTH])
def test_varint(value: int) -> None:
    raw = put_varint(value)
    assert len(raw) == 1 + (value > 127) + (value > 16383) + (value > 2097151)
    reader = Reader(raw + b"\0", 0, len(raw))
    assert reader.varint() == value
    reader.finish()


def test_varint_of_five_bytes() -> None:
    with pytest.raises(MalformedPacket, match="four bytes"):
        Reader(b"\xff\xff\xff\xff\x01", 0, 5).varint()


def test_varint_out_of_range() -> None:
    for value in (-1, MAX_REMAINING_LENGTH + 1):
        with pytest.raises(EncodeError):
            put_varint(value)
    with pytest.raises(EncodeError):
        publish_head(0x30, K, MAX_REMAINING_LENGTH - 2)
    assert publish_head(0x30, K, MAX_REMAINING_LENGTH - 3) == b"\x30\xff\xff\xff\x7f" + K


@pytest.mark.parametrize("size", [0, 1, 122, 123, 124, 125, 4090, 4093, 16378, 16379, 16380, 16381, 70000])
def test_publish_head(size: int) -> None:
    payload = bytes(size)
    assert publish_head(0x31, K, size) + payload == encode(Publish(0, True, False, K, 0, payload), 4)
    with_id = publish_head(0x3C, K, size + 2) + ID[77] + payload
    assert with_id == encode_publish(K, payload, 2, False, True, 77, 4)


def test_ack_bytes() -> None:
    for kind, first in ((4, 0x40), (5, 0x50), (6, 0x62), (7, 0x70)):
        assert ack_bytes(kind, 0x1234) == bytes((first, 2, 0x12, 0x34))
        for ids in ([1], [1, 65535, 256], list(range(1, 300))):
            assert ack_run_bytes(kind, ids) == b"".join(ack_bytes(kind, one) for one in ids)
            assert ack_run_bytes(kind, ids) == encode(AckRun(kind, ids), 4) == encode(AckRun(kind, ids), 5)


def test_ids() -> None:
    assert len(ID) == 65536
    assert all(ID[number] == number.to_bytes(2, "big") for number in (0, 1, 255, 256, 65535))


def test_run_in_the_other_version() -> None:
    one = encode_publish(key("t"), b"x", 0, False, False, 0, 4)
    run = PublishRun(key("t"), one * 3, 3, len(one), len(one) - 1)
    assert encode(run, 4) == one * 3
    assert encode(run, 5) == encode_publish(key("t"), b"x", 0, False, False, 0, 5) * 3


def test_connack_codes() -> None:
    assert connack_code(ReasonCode.SUCCESS) is ConnackCode.ACCEPTED
    assert connack_code(ReasonCode.UNSUPPORTED_PROTOCOL_VERSION) is ConnackCode.UNACCEPTABLE_PROTOCOL_VERSION
    assert connack_code(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID) is ConnackCode.IDENTIFIER_REJECTED
    assert connack_code(ReasonCode.BAD_USER_NAME_OR_PASSWORD) is ConnackCode.BAD_USER_NAME_OR_PASSWORD
    assert connack_code(ReasonCode.NOT_AUTHORIZED) is ConnackCode.NOT_AUTHORIZED
    for reason in ReasonCode:
        assert (connack_code(reason) is ConnackCode.ACCEPTED) is (reason is ReasonCode.SUCCESS)
