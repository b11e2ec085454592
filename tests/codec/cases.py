# SPDX-License-Identifier: Apache-2.0
"""The table of raw bytes: every packet in its forms, in both versions. Written by hand from the standards."""

from __future__ import annotations

from dataclasses import dataclass

from mqtt_nats.codec import (
    Ack,
    AckRun,
    Auth,
    Connack,
    ConnackCode,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    Publish,
    ReasonCode,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    Will,
)


@dataclass(frozen=True)
class Case:
    """One packet. `canonical` is False for a legal form that the encoder does not choose."""

    id: str
    version: int
    side: str
    raw: bytes
    packet: Packet
    canonical: bool = True


def _case(name: str, version: int, side: str, raw: str, packet: Packet, canonical: bool = True) -> Case:
    return Case(f"{name} v{version}", version, side, bytes.fromhex(raw), packet, canonical)


CASES = [
    # CONNECT, MQTT 3.1.1
    _case(
        "connect minimal [MQTT-3.1.3-3]", 4, "client", "100d 00044d515454 04 02 003c 0001 61", Connect(4, "a", True, 60)
    ),
    _case("connect empty id", 4, "client", "100c 00044d515454 04 02 0000 0000", Connect(4, "", True, 0)),
    _case("connect persistent", 4, "client", "100d 00044d515454 04 00 ffff 0001 61", Connect(4, "a", False, 65535)),
    _case(
        "connect all fields [MQTT-3.1.3-1]",
        4,
        "client",
        "1025 00044d515454 04 f6 000a 0002 6964 0003 772f74 0003 627965 0004 75736572 0005 00ff706173",
        Connect(4, "id", True, 10, "user", b"\0\xffpas", Will("w/t", b"bye", 2, True)),
    ),
    _case(
        "connect will QoS 1, empty payload",
        4,
        "client",
        "1012 00044d515454 04 0e 0000 0001 61 0001 77 0000",
        Connect(4, "a", True, 0, will=Will("w", b"", 1, False)),
    ),
    _case(
        "connect user without password",
        4,
        "client",
        "1010 00044d515454 04 82 003c 0001 61 0001 75",
        Connect(4, "a", True, 60, "u"),
    ),
    _case(
        "connect bridge 0x84",
        4,
        "client",
        "100d 00044d515454 84 02 003c 0001 61",
        Connect(4, "a", True, 60, bridge=True),
    ),
    _case(
        "connect bridge 0x83",
        4,
        "client",
        "100f 00064d5149736470 83 02 003c 0001 61",
        Connect(3, "a", True, 60, bridge=True),
    ),
    _case("connect MQTT 3.1", 4, "client", "100f 00064d5149736470 03 02 003c 0001 61", Connect(3, "a", True, 60)),
    _case(
        "connect MQTT 3.1, reserved bit, flags of no will, names that are missing",
        4,
        "client",
        "100f 00064d5149736470 03 bb 003c 0001 61",
        Connect(3, "a", True, 60),
        canonical=False,
    ),
    _case(
        "connect U+FEFF stays [MQTT-1.5.3-3]",
        4,
        "client",
        "1010 00044d515454 04 02 003c 0004 efbbbf61",
        Connect(4, "\ufeffa", True, 60),
    ),
    # CONNECT, MQTT 5.0
    _case("connect minimal", 5, "client", "100d 00044d515454 05 02 003c 00 0000", Connect(5, "", True, 60)),
    _case("connect resume, empty id", 5, "client", "100d 00044d515454 05 00 003c 00 0000", Connect(5, "", False, 60)),
    _case(
        "connect password without user",
        5,
        "client",
        "1010 00044d515454 05 42 003c 00 0000 0001 70",
        Connect(5, "", True, 60, password=b"p"),
    ),
    _case(
        "connect properties and will",
        5,
        "client",
        "1056 00044d515454 05 2e 003c"
        " 22 1100000e10 210014 2700010000 22000a 1901 1701 2600016b000176 26 00016b 000177"
        " 0001 61"
        " 1f 180000001e 0101 0200000078 030001 74 080001 72 090001 63 26 00016b 000176"
        " 0001 77 0001 78",
        Connect(
            5,
            "a",
            True,
            60,
            will=Will(
                "w",
                b"x",
                1,
                True,
                {
                    "will_delay_interval": 30,
                    "payload_format_indicator": 1,
                    "message_expiry_interval": 120,
                    "content_type": "t",
                    "response_topic": "r",
                    "correlation_data": b"c",
                    "user_property": [("k", "v")],
                },
            ),
            properties={
                "session_expiry_interval": 3600,
                "receive_maximum": 20,
                "maximum_packet_size": 65536,
                "topic_alias_maximum": 10,
                "request_response_information": 1,
                "request_problem_information": 1,
                "user_property": [("k", "v"), ("k", "w")],
            },
        ),
    ),
    # CONNACK
    _case("connack accepted", 4, "server", "2002 00 00", Connack(False, ConnackCode.ACCEPTED)),
    _case("connack resumed", 4, "server", "2002 01 00", Connack(True, ConnackCode.ACCEPTED)),
    _case("connack refused", 4, "server", "2002 00 05", Connack(False, ConnackCode.NOT_AUTHORIZED)),
    _case("connack accepted", 5, "server", "2003 00 00 00", Connack(False, ReasonCode.SUCCESS)),
    _case(
        "connack properties",
        5,
        "server",
        "200c 01 00 09 12000161 130001 2501",
        Connack(
            True,
            ReasonCode.SUCCESS,
            {"assigned_client_identifier": "a", "server_keep_alive": 1, "retain_available": 1},
        ),
    ),
    _case("connack refused", 5, "server", "2003 00 84 00", Connack(False, ReasonCode.UNSUPPORTED_PROTOCOL_VERSION)),
    # PUBLISH
    _case("publish QoS 0", 4, "client", "3005 0001 74 6869", Publish(0, False, False, b"\0\1t", 0, b"hi")),
    _case("publish empty payload", 4, "client", "3003 0001 74", Publish(0, False, False, b"\0\1t", 0, b"")),
    _case("publish retained", 4, "client", "3105 0001 74 6869", Publish(0, True, False, b"\0\1t", 0, b"hi")),
    _case("publish QoS 1", 4, "client", "3207 0001 74 0001 6869", Publish(1, False, False, b"\0\1t", 1, b"hi")),
    _case("publish QoS 1 DUP", 4, "client", "3a07 0001 74 ffff 6869", Publish(1, False, True, b"\0\1t", 65535, b"hi")),
    _case("publish QoS 2, all flags", 4, "client", "3d05 0001 74 0102", Publish(2, True, True, b"\0\1t", 258, b"")),
    _case(
        "publish, length longer than needed",
        4,
        "client",
        "308500 0001 74 6869",
        Publish(0, False, False, b"\0\1t", 0, b"hi"),
        canonical=False,
    ),
    _case(
        "publish of 127 bytes",
        4,
        "server",
        "307f 0001 74" + "61" * 124,
        Publish(0, False, False, b"\0\1t", 0, b"a" * 124),
    ),
    _case(
        "publish of 128 bytes",
        4,
        "server",
        "308001 0001 74" + "61" * 125,
        Publish(0, False, False, b"\0\1t", 0, b"a" * 125),
    ),
    _case(
        "publish of 16,384 bytes",
        4,
        "client",
        "30808001 0001 74" + "61" * 16381,
        Publish(0, False, False, b"\0\1t", 0, b"a" * 16381),
    ),
    _case("publish QoS 0", 5, "client", "3006 0001 74 00 6869", Publish(0, False, False, b"\0\1t", 0, b"hi")),
    _case("publish QoS 1", 5, "client", "3208 0001 74 0001 00 6869", Publish(1, False, False, b"\0\1t", 1, b"hi")),
    _case(
        "publish topic alias",
        5,
        "client",
        "3008 0000 03 230001 6869",
        Publish(0, False, False, b"\0\0", 0, b"hi", {"topic_alias": 1}),
    ),
    _case(
        "publish properties QoS 2",
        5,
        "client",
        "341b 0001 74 0007 15 0100 0200000001 08000172 0900020001 26 0000 0000",
        Publish(
            2,
            False,
            False,
            b"\0\1t",
            7,
            b"",
            {
                "payload_format_indicator": 0,
                "message_expiry_interval": 1,
                "response_topic": "r",
                "correlation_data": b"\0\1",
                "user_property": [("", "")],
            },
        ),
    ),
    _case(
        "publish subscription identifiers [MQTT-3.3.4-3] (5.0)",
        5,
        "server",
        "300b 0001 74 07 0b01 0bffffff7f",
        Publish(0, False, False, b"\0\1t", 0, b"", {"subscription_identifier": [1, 268435455]}),
    ),
    # acknowledgements
    *[
        _case(f"{name}", version, side, f"{first}02 1234", AckRun(kind, [0x1234]))
        for version in (4, 5)
        for side in ("client", "server")
        for kind, first, name in (
            (4, "40", "puback"),
            (5, "50", "pubrec"),
            (6, "62", "pubrel [MQTT-3.6.1-1] (3.1.1, 5.0)"),
            (7, "70", "pubcomp"),
        )
    ],
    _case("puback reason", 5, "client", "4003 0001 10", Ack(4, 1, ReasonCode.NO_MATCHING_SUBSCRIBERS)),
    _case("puback spelt success", 5, "client", "4003 0001 00", Ack(4, 1, ReasonCode.SUCCESS), canonical=False),
    _case("puback spelt all", 5, "client", "4004 0001 00 00", Ack(4, 1, ReasonCode.SUCCESS), canonical=False),
    _case(
        "pubrec properties",
        5,
        "server",
        "5009 0001 97 05 1f00026e6f",
        Ack(5, 1, ReasonCode.QUOTA_EXCEEDED, {"reason_string": "no"}),
    ),
    _case("pubrel not found", 5, "client", "6203 0001 92", Ack(6, 1, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND)),
    _case(
        "pubcomp properties",
        5,
        "client",
        "700b 0001 00 07 26 0001 61 0001 62",
        Ack(7, 1, ReasonCode.SUCCESS, {"user_property": [("a", "b")]}),
    ),
    # SUBSCRIBE, SUBACK, UNSUBSCRIBE, UNSUBACK
    _case(
        "subscribe",
        4,
        "client",
        "820a 0001 0001 23 02 0001 2b 00",
        Subscribe(1, (Subscription("#", 2), Subscription("+", 0))),
    ),
    _case("subscribe slash", 4, "client", "8206 0001 0001 2f 00", Subscribe(1, (Subscription("/", 0),))),
    _case(
        "subscribe options",
        5,
        "client",
        "820a 0001 03 0bc801 0001 61 2d",
        Subscribe(1, (Subscription("a", 1, True, True, 2),), {"subscription_identifier": [200]}),
    ),
    _case("suback", 4, "server", "9006 0001 00 01 02 80", Suback(1, (0, 1, 2, 0x80))),
    _case("suback", 5, "server", "9005 0001 00 01 8f", Suback(1, (1, 0x8F))),
    _case("unsubscribe", 4, "client", "a208 0001 0001 61 0001 62", Unsubscribe(1, ("a", "b"))),
    _case(
        "unsubscribe",
        5,
        "client",
        "a20d 0001 07 26 0001 6b 0001 76 0001 61",
        Unsubscribe(1, ("a",), {"user_property": [("k", "v")]}),
    ),
    _case("unsuback", 4, "server", "b002 0001", Unsuback(1)),
    _case("unsuback [MQTT-3.11.3-1] (5.0)", 5, "server", "b005 0001 00 00 11", Unsuback(1, (0, 0x11))),
    # PINGREQ, PINGRESP, DISCONNECT, AUTH
    _case("pingreq", 4, "client", "c000", PingReq()),
    _case("pingreq", 5, "client", "c000", PingReq()),
    _case("pingresp", 4, "server", "d000", PingResp()),
    _case("pingresp", 5, "server", "d000", PingResp()),
    _case("disconnect", 4, "client", "e000", Disconnect()),
    _case("disconnect", 5, "client", "e000", Disconnect()),
    _case("disconnect spelt", 5, "client", "e001 00", Disconnect(), canonical=False),
    _case("disconnect spelt all", 5, "client", "e002 00 00", Disconnect(), canonical=False),
    _case("disconnect with will", 5, "client", "e001 04", Disconnect(ReasonCode.DISCONNECT_WITH_WILL)),
    _case(
        "disconnect expiry",
        5,
        "client",
        "e007 00 05 1100000000",
        Disconnect(ReasonCode.SUCCESS, {"session_expiry_interval": 0}),
    ),
    _case(
        "disconnect moved",
        5,
        "server",
        "e006 9d 04 1c000162",
        Disconnect(ReasonCode.SERVER_MOVED, {"server_reference": "b"}),
    ),
    _case(
        "auth continue",
        5,
        "client",
        "f00a 18 08 15000161 16000162",
        Auth(ReasonCode.CONTINUE_AUTHENTICATION, {"authentication_method": "a", "authentication_data": b"b"}),
    ),
    _case(
        "auth again",
        5,
        "client",
        "f006 19 04 15000161",
        Auth(ReasonCode.REAUTHENTICATE, {"authentication_method": "a"}),
    ),
    _case("auth success", 5, "server", "f000", Auth()),
]
