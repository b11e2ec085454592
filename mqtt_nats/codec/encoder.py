# SPDX-License-Identifier: Apache-2.0
"""Encoder: packets to bytes. `encode` for any packet; functions with precomputed parts for the message path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from mqtt_nats.codec.acks import FIRST, Ack, AckRun, put_ack
from mqtt_nats.codec.connect import Connack, Connect, put_connack, put_connect
from mqtt_nats.codec.control import Auth, Disconnect, PingReq, PingResp, put_auth, put_disconnect
from mqtt_nats.codec.decoder import Packet
from mqtt_nats.codec.errors import EncodeError
from mqtt_nats.codec.publish import Publish, PublishRun, put_publish, put_run
from mqtt_nats.codec.subscribe import (
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    put_suback,
    put_subscribe,
    put_unsuback,
    put_unsubscribe,
)

PINGREQ: Final = b"\xc0\0"
PINGRESP: Final = b"\xd0\0"

ID: Final = tuple(number.to_bytes(2, "big") for number in range(0x1_0000))
"""Two-byte encodings of all packet identifiers; 0 has no legal use."""

_ACK_HEAD: Final = tuple(bytes((FIRST[kind], 2)) if kind in FIRST else b"" for kind in range(8))


def ack_bytes(kind: int, packet_id: int) -> bytes:
    """Return PUBACK (4), PUBREC (5), PUBREL (6) or PUBCOMP (7) with success: four bytes in both versions."""
    return _ACK_HEAD[kind] + ID[packet_id]


def ack_run_bytes(kind: int, ids: list[int]) -> bytes:
    """Return acknowledgements of one kind for at least one packet identifier, in order."""
    head = _ACK_HEAD[kind]
    return head + head.join([ID[number] for number in ids])


def _put_acks(packet: AckRun, version: int) -> bytes:
    return b"".join([put_ack(Ack(packet.kind, number, 0), version) for number in packet.ids])


_PUT: Final[dict[type, Callable[[Any, int], bytes]]] = {
    Ack: put_ack,
    AckRun: _put_acks,
    Auth: put_auth,
    Connack: put_connack,
    Connect: put_connect,
    Disconnect: put_disconnect,
    PingReq: lambda packet, version: PINGREQ,
    PingResp: lambda packet, version: PINGRESP,
    Publish: put_publish,
    PublishRun: put_run,
    Suback: put_suback,
    Subscribe: put_subscribe,
    Unsuback: put_unsuback,
    Unsubscribe: put_unsubscribe,
}


def encode(packet: Packet, version: int) -> bytes:
    """Encode any packet in a version, 4 (MQTT 3.1.1) or 5. EncodeError without a legal encoding."""
    if version not in (4, 5):
        raise EncodeError(f"version {version} is neither 4 nor 5")
    return _PUT[type(packet)](packet, version)
