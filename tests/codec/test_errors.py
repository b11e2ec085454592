# SPDX-License-Identifier: Apache-2.0
"""Bytes that break a rule, and the error that each gives."""

from __future__ import annotations

import pytest

from mqtt_nats.codec import (
    Decoder,
    InvalidClientId,
    Limits,
    MalformedPacket,
    MqttError,
    NewerProtocolVersion,
    PacketTooLarge,
    ProtocolError,
    QuotaExceeded,
    ReasonCode,
    TopicAliasInvalid,
    TopicNameInvalid,
    UnsupportedProtocolVersion,
)
from tests.codec.support import LIMITS, decoder, outcome

MALFORMED, PROTOCOL, VERSION = MalformedPacket, ProtocolError, UnsupportedProtocolVersion
NEWER = NewerProtocolVersion
NAME = "00044d515454"

Row = tuple[str, int, str, type[MqttError]]

FROM_CLIENT: list[Row] = [
    # before CONNECT
    ("PUBLISH first [MQTT-3.1.0-1]", 0, "3003 0001 61", PROTOCOL),
    ("PINGREQ first [MQTT-3.1.0-1]", 0, "c000", PROTOCOL),
    ("PUBACK first [MQTT-3.1.0-1]", 0, "4002 0001", PROTOCOL),
    ("AUTH first [MQTT-3.1.0-1]", 0, "f000", PROTOCOL),
    ("CONNECT flags [MQTT-2.2.2-2]", 0, "11", MALFORMED),
    ("reserved type 0", 0, "00", MALFORMED),
    ("reserved type 0 later", 4, "00", MALFORMED),
    ("an HTTP request", 0, b"GET / HTTP/1.1\r\n\r\n".hex(), MALFORMED),
    ("a TLS hello", 0, "160301", MALFORMED),
    # protocol name and level
    ("wrong name [MQTT-3.1.2-1]", 0, f"100d {'00044d515455'} 04 02 003c 0001 61", VERSION),
    ("name in lower case", 0, "100d 00046d717474 04 02 003c 0001 61", VERSION),
    ("empty name", 0, "1009 0000 04 02 003c 0001 61", VERSION),
    ("MQTT 3.1, empty client id", 0, "100e 00064d5149736470 03 02 003c 0000", InvalidClientId),
    ("MQTT 3.1, password without user name", 0, "1012 00064d5149736470 03 42 003c 0001 61 0001 70", MALFORMED),
    ("name of 3.1, level 4", 0, "100f 00064d5149736470 04 02 003c 0001 61", VERSION),
    *[
        (
            f"level {level:#04x} [MQTT-3.1.2-2]",
            0,
            f"100d {NAME} {level:02x} 02 003c 0001 61",
            VERSION if level < 6 else NEWER,
        )
        for level in (0, 1, 2, 3, 6, 0x7F, 0x80, 0x82, 0x85, 0xFF)
    ],
    ("level missing", 0, f"1006 {NAME}", MALFORMED),
    ("name cut short", 0, "1004 0004 4d51", MALFORMED),
    ("empty CONNECT", 0, "1000", MALFORMED),
    # connect flags
    ("reserved connect flag [MQTT-3.1.2-3]", 0, f"100d {NAME} 04 03 003c 0001 61", MALFORMED),
    ("reserved connect flag [MQTT-3.1.2-3] (5.0) v5", 0, f"100e {NAME} 05 03 003c 00 0001 61", MALFORMED),
    ("will QoS without will [MQTT-3.1.2-11] [MQTT-3.1.2-13]", 0, f"100d {NAME} 04 0a 003c 0001 61", MALFORMED),
    ("will retain without will [MQTT-3.1.2-11] [MQTT-3.1.2-15]", 0, f"100d {NAME} 04 22 003c 0001 61", MALFORMED),
    ("will QoS 3 [MQTT-3.1.2-14]", 0, f"1012 {NAME} 04 1e 003c 0001 61 0001 77 0000", MALFORMED),
    ("password without user [MQTT-3.1.2-22]", 0, f"1010 {NAME} 04 42 003c 0001 61 0001 70", MALFORMED),
    ("empty id, no clean session [MQTT-3.1.3-7]", 0, f"100c {NAME} 04 00 003c 0000", InvalidClientId),
    # connect payload
    ("no client id [MQTT-3.1.3-3]", 0, f"100a {NAME} 04 02 003c", MALFORMED),
    ("client id longer than the packet", 0, f"100d {NAME} 04 02 003c 0002 61", MALFORMED),
    ("client id not UTF-8 [MQTT-1.5.3-1] [MQTT-3.1.3-4]", 0, f"100e {NAME} 04 02 003c 0002 c328", MALFORMED),
    ("client id with surrogate [MQTT-1.5.3-1]", 0, f"100f {NAME} 04 02 003c 0003 eda080", MALFORMED),
    ("client id with overlong UTF-8", 0, f"100e {NAME} 04 02 003c 0002 c080", MALFORMED),
    ("client id with NUL [MQTT-1.5.3-2]", 0, f"100e {NAME} 04 02 003c 0002 6100", MALFORMED),
    ("user name with NUL [MQTT-3.1.3-11]", 0, f"1010 {NAME} 04 82 003c 0001 61 0001 00", MALFORMED),
    ("user name missing [MQTT-3.1.2-19]", 0, f"100d {NAME} 04 82 003c 0001 61", MALFORMED),
    ("will missing [MQTT-3.1.2-9]", 0, f"100d {NAME} 04 06 003c 0001 61", MALFORMED),
    ("will payload missing", 0, f"1010 {NAME} 04 06 003c 0001 61 0001 77", MALFORMED),
    ("will topic not UTF-8 [MQTT-3.1.3-10]", 0, f"1012 {NAME} 04 06 003c 0001 61 0001 ff 0000", MALFORMED),
    ("will topic with wildcard [MQTT-4.7.1-1]", 0, f"1012 {NAME} 04 06 003c 0001 61 0001 23 0000", TopicNameInvalid),
    ("will topic empty [MQTT-4.7.3-1]", 0, f"1011 {NAME} 04 06 003c 0001 61 0000 0000", TopicNameInvalid),
    ("trailing byte", 0, f"100e {NAME} 04 02 003c 0001 61 00", MALFORMED),
    ("password not announced [MQTT-3.1.2-20]", 0, f"1013 {NAME} 04 82 003c 0001 61 0001 75 0001 70", MALFORMED),
    ("password missing [MQTT-3.1.2-21]", 0, f"1010 {NAME} 04 c2 003c 0001 61 0001 75", MALFORMED),
    ("will not announced [MQTT-3.1.2-11]", 0, f"1012 {NAME} 04 02 003c 0001 61 0001 77 0000", MALFORMED),
    ("user name not announced [MQTT-3.1.2-18]", 0, f"1010 {NAME} 04 02 003c 0001 61 0001 75", MALFORMED),
    # connect properties
    ("properties missing", 0, f"100a {NAME} 05 02 003c", MALFORMED),
    ("properties longer than the packet", 0, f"100d {NAME} 05 02 003c 05 0000", MALFORMED),
    ("unknown property", 0, f"100f {NAME} 05 02 003c 02 7f00 0000", MALFORMED),
    ("property of another packet", 0, f"100f {NAME} 05 02 003c 02 0101 0000", MALFORMED),
    ("property cut short", 0, f"1010 {NAME} 05 02 003c 03 110000 0000", MALFORMED),
    ("property repeated", 0, f"1011 {NAME} 05 02 003c 04 1701 1701 0000", PROTOCOL),
    ("boolean property 2", 0, f"100f {NAME} 05 02 003c 02 1702 0000", PROTOCOL),
    ("receive maximum 0", 0, f"1010 {NAME} 05 02 003c 03 210000 0000", PROTOCOL),
    ("maximum packet size 0", 0, f"1012 {NAME} 05 02 003c 05 2700000000 0000", PROTOCOL),
    ("authentication data alone", 0, f"1011 {NAME} 05 02 003c 04 16000161 0000", PROTOCOL),
    ("property length not minimal [MQTT-1.5.5-1] (5.0)", 0, f"100e {NAME} 05 02 003c 8000 0000", MALFORMED),
    ("property length of five bytes", 0, f"1011 {NAME} 05 02 003c 8080808001 0000", MALFORMED),
    ("user property with NUL [MQTT-1.5.4-2] (5.0)", 0, f"1013 {NAME} 05 02 003c 06 26 0001 00 0000 0000", MALFORMED),
    ("user properties above the limit", 0, f"1044 {NAME} 05 02 003c 37 {'2600000000' * 11} 0000", QuotaExceeded),
    # after CONNECT
    ("second CONNECT [MQTT-3.1.0-2]", 4, f"100d {NAME} 04 02 003c 0001 61", PROTOCOL),
    ("second CONNECT [MQTT-3.1.0-2] (5.0) v5", 5, f"100d {NAME} 05 02 003c 00 0000", PROTOCOL),
    *[
        (f"{name} from a client v{version}", version, raw, PROTOCOL)
        for version in (4, 5)
        for name, raw in (("CONNACK", "20"), ("SUBACK", "90"), ("UNSUBACK", "b0"), ("PINGRESP", "d0"))
    ],
    ("AUTH in 3.1.1", 4, "f000", MALFORMED),
    # fixed header
    *[
        (
            f"reserved flags {first:02x} [MQTT-2.2.2-2] (3.1.1), [MQTT-2.1.3-1] (5.0) v{version}",
            version,
            f"{first:02x}",
            MALFORMED,
        )
        for version in (4, 5)
        for first in (0x21, 0x41, 0x48, 0x5F, 0x60, 0x63, 0x72, 0x80, 0x83, 0x8A, 0xA0, 0xA3, 0xC1, 0xE8, 0xF2)
    ],
    *[
        (f"QoS 3 {first:02x} [MQTT-3.3.1-4] (3.1.1, 5.0) v{version}", version, f"{first:02x}", MALFORMED)
        for version in (4, 5)
        for first in (0x36, 0x37, 0x3E, 0x3F)
    ],
    *[
        (f"DUP at QoS 0 {first:02x} [MQTT-3.3.1-2] (3.1.1, 5.0) v{version}", version, f"{first:02x}", MALFORMED)
        for version in (4, 5)
        for first in (0x38, 0x39)
    ],
    ("remaining length of five bytes", 4, "30ffffffff", MALFORMED),
    ("remaining length of five bytes, zeros", 4, "3080808080", MALFORMED),
    ("remaining length not minimal [MQTT-1.5.5-1] (5.0)", 5, "c08000", MALFORMED),
    ("remaining length not minimal, long [MQTT-1.5.5-1] (5.0)", 5, "308680 00", MALFORMED),
    ("packet above the limit", 4, "30ffff7f", PacketTooLarge),
    ("CONNECT above its limit", 0, "10808004", PacketTooLarge),
    ("largest packet there is", 5, "30ffffff7f", PacketTooLarge),
    # PUBLISH
    ("PUBLISH empty [MQTT-3.3.2-1]", 4, "3000", MALFORMED),
    ("PUBLISH of one byte", 4, "3001 00", MALFORMED),
    ("PUBLISH of one byte QoS 1", 4, "3201 00", MALFORMED),
    ("topic longer than the packet", 4, "3004 0003 6161", MALFORMED),
    ("topic longer than the packet, retained", 4, "3104 0003 6161", MALFORMED),
    ("topic longer than the packet v5", 5, "3004 0003 6161", MALFORMED),
    ("no packet id", 4, "3203 0001 61", MALFORMED),
    ("half a packet id", 4, "3404 0001 61 00", MALFORMED),
    ("packet id 0 [MQTT-2.3.1-1]", 4, "3205 0001 61 0000", PROTOCOL),
    ("packet id 0 [MQTT-2.2.1-3] (5.0)", 5, "3406 0001 61 0000 00", PROTOCOL),
    ("packet id 0, properties [MQTT-2.2.1-3] (5.0)", 5, "3408 0001 61 0000 02 0101", PROTOCOL),
    ("no property length", 5, "3003 0001 61", MALFORMED),
    ("no property length QoS 1", 5, "3205 0001 61 0001", MALFORMED),
    ("no property length retained", 5, "3103 0001 61", MALFORMED),
    ("properties longer than the packet v5", 5, "3006 0001 61 03 0101", MALFORMED),
    ("empty topic without alias", 5, "3003 0000 00", PROTOCOL),
    ("empty topic without alias, QoS 1", 5, "3205 0000 0001 00", PROTOCOL),
    ("empty topic, other property", 5, "3005 0000 02 0100", PROTOCOL),
    ("topic alias 0 [MQTT-3.3.2-8] (5.0)", 5, "3007 0001 61 03 230000", TopicAliasInvalid),
    ("subscription identifier [MQTT-3.3.4-6] (5.0)", 5, "3006 0001 61 02 0b01", PROTOCOL),
    ("response topic with wildcard [MQTT-3.3.2-14] (5.0)", 5, "3008 0001 61 04 0800012b", PROTOCOL),
    ("response topic empty", 5, "3007 0001 61 03 080000", PROTOCOL),
    ("response topic not UTF-8 [MQTT-3.3.2-13] (5.0)", 5, "3008 0001 61 04 080001ff", MALFORMED),
    ("payload format 2", 5, "3006 0001 61 02 0102", PROTOCOL),
    ("will delay in PUBLISH", 5, "3009 0001 61 05 1800000001", MALFORMED),
    # acknowledgements
    ("PUBACK empty", 4, "4000", MALFORMED),
    ("PUBACK of one byte", 5, "4001 00", MALFORMED),
    ("PUBACK with reason in 3.1.1", 4, "4003 0001 00", MALFORMED),
    ("PUBREC id 0", 4, "5002 0000", PROTOCOL),
    ("PUBREL id 0", 5, "6202 0000", PROTOCOL),
    ("PUBCOMP id 0, reason", 5, "7003 0000 00", PROTOCOL),
    ("PUBACK reason of PUBCOMP [MQTT-3.4.2-1] (5.0)", 5, "4003 0001 92", PROTOCOL),
    ("PUBREC unknown reason [MQTT-3.5.2-1] (5.0)", 5, "5003 0001 55", PROTOCOL),
    ("PUBREL reason of PUBACK [MQTT-3.6.2-1] (5.0)", 5, "6203 0001 97", PROTOCOL),
    ("PUBCOMP unknown reason [MQTT-3.7.2-1] (5.0)", 5, "7003 0001 01", PROTOCOL),
    ("PUBACK trailing", 5, "4005 0001 00 00 00", MALFORMED),
    ("PUBACK property out of place", 5, "4006 0001 00 02 0101", MALFORMED),
    # SUBSCRIBE
    ("SUBSCRIBE id 0 [MQTT-2.3.1-1]", 4, "8206 0000 0001 61 00", PROTOCOL),
    ("SUBSCRIBE without filter [MQTT-3.8.3-3]", 4, "8202 0001", PROTOCOL),
    ("SUBSCRIBE without filter [MQTT-3.8.3-2] (5.0)", 5, "8203 0001 00", PROTOCOL),
    ("SUBSCRIBE without packet id", 4, "8201 00", MALFORMED),
    ("SUBSCRIBE without QoS", 4, "8205 0001 0001 61", MALFORMED),
    ("SUBSCRIBE QoS 3 [MQTT-3-8.3-4]", 4, "8206 0001 0001 61 03", PROTOCOL),
    ("SUBSCRIBE options in 3.1.1 [MQTT-3-8.3-4]", 4, "8206 0001 0001 61 04", MALFORMED),
    ("SUBSCRIBE reserved options [MQTT-3.8.3-5] (5.0)", 5, "8207 0001 00 0001 61 40", MALFORMED),
    ("SUBSCRIBE retain handling 3", 5, "8207 0001 00 0001 61 30", PROTOCOL),
    ("SUBSCRIBE no local, shared [MQTT-3.8.3-4] (5.0)", 5, "8210 0001 00 000a 2473686172652f612f62 04", PROTOCOL),
    ("SUBSCRIBE empty filter [MQTT-4.7.3-1]", 4, "8205 0001 0000 00", MALFORMED),
    ("SUBSCRIBE a# [MQTT-4.7.1-2]", 4, "8207 0001 0002 6123 00", MALFORMED),
    ("SUBSCRIBE shared, empty filter", 5, "820f 0001 00 0009 2473686172652f612f 00", MALFORMED),
    ("UNSUBSCRIBE empty filter [MQTT-4.7.3-1]", 4, "a204 0001 0000", MALFORMED),
    ("UNSUBSCRIBE +a [MQTT-4.7.1-2] (5.0)", 5, "a207 0001 00 0002 2b61", MALFORMED),
    ("SUBSCRIBE filter not UTF-8 [MQTT-3.8.3-1]", 4, "8206 0001 0001 fe 00", MALFORMED),
    ("SUBSCRIBE filter with NUL [MQTT-4.7.3-2]", 4, "8206 0001 0001 00 00", MALFORMED),
    ("SUBSCRIBE too many filters", 4, "8256 0001" + "0001 61 00" * 21, QuotaExceeded),
    ("subscription identifier 0", 5, "8209 0001 02 0b00 0001 61 00", PROTOCOL),
    ("two subscription identifiers", 5, "820b 0001 04 0b01 0b02 0001 61 00", PROTOCOL),
    # UNSUBSCRIBE
    ("UNSUBSCRIBE id 0 [MQTT-2.3.1-1]", 4, "a205 0000 0001 61", PROTOCOL),
    ("UNSUBSCRIBE without filter [MQTT-3.10.3-2]", 4, "a202 0001", PROTOCOL),
    ("UNSUBSCRIBE without filter [MQTT-3.10.3-2] (5.0) v5", 5, "a203 0001 00", PROTOCOL),
    ("UNSUBSCRIBE filter cut short", 4, "a204 0001 0001", MALFORMED),
    ("UNSUBSCRIBE filter not UTF-8 [MQTT-3.10.3-1] (5.0)", 5, "a206 0001 00 0001 ff", MALFORMED),
    ("UNSUBSCRIBE too many filters", 4, "a241 0001" + "0001 61" * 21, QuotaExceeded),
    # PINGREQ, DISCONNECT, AUTH
    ("PINGREQ with body", 4, "c001 00", MALFORMED),
    ("DISCONNECT with body in 3.1.1", 4, "e001 00", MALFORMED),
    ("DISCONNECT reason of a server [MQTT-3.14.2-1] (5.0)", 5, "e001 8e", PROTOCOL),
    ("DISCONNECT server reference", 5, "e006 00 04 1c000161", PROTOCOL),
    ("DISCONNECT trailing", 5, "e003 00 00 00", MALFORMED),
    ("AUTH without method", 5, "f001 18", PROTOCOL),
    ("AUTH success from a client [MQTT-3.15.2-1] (5.0)", 5, "f000", PROTOCOL),
    ("AUTH trailing", 5, "f007 19 04 15000161 00", MALFORMED),
]

FROM_SERVER: list[Row] = [
    ("CONNECT from a server", 4, f"100d {NAME} 04 02 003c 0001 61", PROTOCOL),
    ("SUBSCRIBE from a server", 5, "8207 0001 00 0001 61 00", PROTOCOL),
    ("DISCONNECT in 3.1.1", 4, "e000", PROTOCOL),
    ("CONNACK reserved flags [MQTT-3.2.2-1] (5.0)", 5, "2003 02 00 00", MALFORMED),
    ("CONNACK reserved code", 4, "2002 00 06", PROTOCOL),
    ("CONNACK reason [MQTT-3.2.2-8] (5.0)", 5, "2003 00 01 00", PROTOCOL),
    ("CONNACK refused, session present", 4, "2002 01 01", PROTOCOL),
    ("CONNACK refused, session present v5", 5, "2003 01 80 00", PROTOCOL),
    ("CONNACK cut short", 4, "2001 00", MALFORMED),
    ("CONNACK trailing", 4, "2003 00 00 00", MALFORMED),
    ("SUBACK code 3", 4, "9003 0001 03", PROTOCOL),
    ("SUBACK code of UNSUBACK [MQTT-3.9.3-2] (5.0)", 5, "9004 0001 00 11", PROTOCOL),
    ("SUBACK without code", 4, "9002 0001", PROTOCOL),
    ("UNSUBACK with code in 3.1.1", 4, "b003 0001 00", MALFORMED),
    ("UNSUBACK code 1 [MQTT-3.11.3-2] (5.0)", 5, "b004 0001 00 01", PROTOCOL),
    ("DISCONNECT expiry from a server [MQTT-3.14.2-2] (5.0)", 5, "e007 00 05 1100000000", PROTOCOL),
    ("DISCONNECT reason of a client [MQTT-3.14.2-1] (5.0)", 5, "e001 04", PROTOCOL),
    ("AUTH reason of a client [MQTT-3.15.2-1] (5.0)", 5, "f006 19 04 15000161", PROTOCOL),
]

ROWS = [("client", *row) for row in FROM_CLIENT] + [("server", *row) for row in FROM_SERVER]


@pytest.mark.parametrize(("side", "name", "version", "raw", "kind"), ROWS, ids=[f"{row[0]}: {row[1]}" for row in ROWS])
def test_error(side: str, name: str, version: int, raw: str, kind: type[MqttError]) -> None:
    data = bytes.fromhex(raw)
    reader = decoder(version, side)
    assert reader.feed(data) == []
    error = reader.error
    assert type(error) is kind
    assert error.reason is kind.reason
    assert str(error)
    by_byte = outcome(decoder(version, side), (data[at : at + 1] for at in range(len(data))))
    assert by_byte == ([], kind, str(error))


@pytest.mark.parametrize(
    ("version", "raw", "text"),
    [
        (0, "c000", "PINGREQ before CONNECT"),
        (4, f"100d {NAME} 04 02 003c 0001 61", "second CONNECT"),
        (5, "2003 00 00 00", "CONNACK is not sent by this side"),
    ],
)
def test_what_is_said_of_a_packet_that_may_not_come(version: int, raw: str, text: str) -> None:
    reader = decoder(version, "client")
    reader.feed(bytes.fromhex(raw))
    assert str(reader.error) == text


def test_error_after_packets() -> None:
    reader = decoder(4, "client")
    packets = reader.feed(bytes.fromhex("c000 4002 0001 4002 0002 4002 0000 c000"))
    assert len(packets) == 2
    assert list(packets) == reader_packets("c000 4002 0001 4002 0002")
    assert isinstance(reader.error, ProtocolError)
    assert reader.feed(b"\xc0\0") == []


def reader_packets(raw: str) -> list[object]:
    return list(decoder(4, "client").feed(bytes.fromhex(raw)))


@pytest.mark.parametrize(
    ("raw", "version"),
    [
        (f"100e {NAME} 04 02 003c 0002 6100", 4),
        (f"100f {NAME} 05 02 003c 02 7f00 0000", 5),
        (f"100d {NAME} 06 02 003c 0001 61", 0),
        ("1010 00064d5149736470 03 02 003c 0002 6100", 4),
        ("100f 00064d5149736470 04 02 003c 0001 61", 0),
    ],
)
def test_version_tells_how_to_answer_a_bad_connect(raw: str, version: int) -> None:
    reader = Decoder(LIMITS)
    reader.feed(bytes.fromhex(raw))
    assert reader.error is not None
    assert reader.version == version


def test_limits_are_exact() -> None:
    limits = Limits(20, 15, 2, 2, 1)
    connect = f"100d {NAME} 04 02 003c 0001 61"
    longer = f"100e {NAME} 04 02 003c 0002 6161"
    assert outcome(Decoder(limits), [bytes.fromhex(connect)])[1] is None
    assert outcome(Decoder(limits), [bytes.fromhex(longer)])[1] is PacketTooLarge
    publish = b"\x30\x12\0\1a" + bytes(15)
    assert outcome(Decoder(limits, 4), [publish])[1] is None
    assert outcome(Decoder(limits), [bytes.fromhex(connect) + publish])[1] is None
    assert outcome(Decoder(limits, 4), [b"\x30\x13\0\1a" + bytes(16)])[1] is PacketTooLarge
    assert outcome(Decoder(limits, 4), [b"\x30\x13"])[1] is PacketTooLarge
    two = bytes.fromhex("820a 0001" + "0001 61 00" * 2)
    assert outcome(Decoder(limits, 4), [two])[1] is None
    three = bytes.fromhex("820e 0001" + "0001 61 00" * 3)
    assert outcome(Decoder(limits, 4), [three])[1] is QuotaExceeded


def test_will_topic_levels() -> None:
    limits = Limits(1000, 1000, 2, 2, 1)
    two = bytes.fromhex(f"1014 {NAME} 04 06 003c 0001 61 0003 772f77 0000")
    three = bytes.fromhex(f"1016 {NAME} 04 06 003c 0001 61 0005 772f772f77 0000")
    assert outcome(Decoder(limits), [two])[1] is None
    assert outcome(Decoder(limits), [three])[1] is TopicNameInvalid


def test_a_reason_of_its_own() -> None:
    assert MqttError("x").reason is ReasonCode.UNSPECIFIED_ERROR
    assert MqttError("x", ReasonCode.SERVER_BUSY).reason is ReasonCode.SERVER_BUSY
    assert MalformedPacket("x").reason is ReasonCode.MALFORMED_PACKET


def test_an_error_keeps_nothing_of_what_was_read() -> None:
    """Frames of its traceback would have it as long as the connection: 64 KB for each that was refused."""
    found = decoder(4, "client")
    assert not found.feed(b"\x00" * 60_000)
    assert found.error is not None
    assert found.error.__traceback__ is None


def test_the_length_of_a_client_id() -> None:
    """[MQTT-3.1.3-5] (3.1.1, 5.0): at least 23 bytes are allowed."""
    limits = Limits(
        max_packet_size=1000,
        connect_packet_size=1000,
        max_topic_levels=9,
        max_filters=9,
        max_user_properties=9,
        max_client_id_length=23,
    )
    for level in (4, 5):
        for client_id in ("x" * 23, "é" * 11 + "x", "x" * 24, "é" * 12):
            name = client_id.encode()
            body = bytes.fromhex(NAME) + bytes((level, 2, 0, 60)) + b"\0" * (level - 4)
            body += len(name).to_bytes(2) + name
            found = Decoder(limits)
            packets = found.feed(bytes((0x10, len(body))) + body)
            assert len(packets) == (len(name) == 23)
            assert isinstance(found.error, InvalidClientId) == (len(name) > 23)
            assert found.version == level
