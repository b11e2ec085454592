# SPDX-License-Identifier: Apache-2.0
"""Negotiation with a client: limits and options of CONNECT, and the CONNACK and DISCONNECT of the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mqtt_nats.codec import (
    Connack,
    Connect,
    Disconnect,
    InvalidClientId,
    MqttError,
    NewerProtocolVersion,
    PacketTooLarge,
    Properties,
    ReasonCode,
    UnsupportedProtocolVersion,
    UseAnotherServer,
    connack_code,
    encode,
)
from mqtt_nats.messages.terms import TERMS, TERMS_OLD, UNLIMITED, Terms

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.transport.listener_settings import ConnectionSettings

NEVER: Final = 0xFFFFFFFF
"""Session expiry interval of a session that does not expire (section 3.1.2.11.2)."""

HEADED: Final = 5120
"""Bytes of `max_payload` for the rest of a stored message: subject, client id, names of headers."""

CLIENT_USUAL: Final = 256
CLIENT_COPIES: Final = 12
"""Header bytes for each character of a client id beyond `CLIENT_USUAL`, percent-encoded."""

SMALLEST: Final = 1024
"""Smallest Maximum Packet Size of CONNACK, in bytes."""

_IN_CONNACK: Final = frozenset((*range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, *range(0x99, 0x9E), 0x9F))
_CONNACK_INSTEAD: Final = {
    ReasonCode.SERVER_SHUTTING_DOWN: ReasonCode.SERVER_UNAVAILABLE,
    ReasonCode.SESSION_TAKEN_OVER: ReasonCode.SERVER_BUSY,
    ReasonCode.KEEP_ALIVE_TIMEOUT: ReasonCode.SERVER_BUSY,
}
_DISCONNECT_INSTEAD: Final = {
    ReasonCode.UNSUPPORTED_PROTOCOL_VERSION: ReasonCode.PROTOCOL_ERROR,
    ReasonCode.CLIENT_IDENTIFIER_NOT_VALID: ReasonCode.PROTOCOL_ERROR,
    ReasonCode.BAD_USER_NAME_OR_PASSWORD: ReasonCode.NOT_AUTHORIZED,
    ReasonCode.SERVER_UNAVAILABLE: ReasonCode.SERVER_BUSY,
    ReasonCode.BANNED: ReasonCode.NOT_AUTHORIZED,
    ReasonCode.PACKET_IDENTIFIER_IN_USE: ReasonCode.PROTOCOL_ERROR,
    ReasonCode.PACKET_IDENTIFIER_NOT_FOUND: ReasonCode.PROTOCOL_ERROR,
}


def terms(connect: Connect) -> Terms:
    """Return the limits and options of a CONNECT packet."""
    properties = connect.properties
    if properties is None:
        return TERMS_OLD if connect.protocol_level == 3 else TERMS
    return Terms(
        properties.get("receive_maximum", 65535),
        properties.get("maximum_packet_size", UNLIMITED),
        properties.get("topic_alias_maximum", 0),
        bool(properties.get("request_problem_information", 1)),
        bool(properties.get("request_response_information", 0)),
    )


def session_expiry(connect: Connect, settings: ConnectionSettings) -> int | None:
    """Return the session expiry interval in seconds; None = the session does not expire."""
    if not settings.durable_sessions:
        return 0
    if connect.protocol_level != 5:
        return 0 if connect.clean_start else settings.session_expiry_interval
    return bounded_expiry((connect.properties or {}).get("session_expiry_interval", 0), settings)


def bounded_expiry(asked: int, settings: ConnectionSettings) -> int | None:
    """Return the session expiry interval that a 5.0 client gets, in seconds; None = the session does not expire."""
    most = settings.max_session_expiry_interval
    if most is not None:
        return min(asked, most)
    return None if asked == NEVER else asked


def keep_alive(connect: Connect, settings: ConnectionSettings) -> int:
    """Return the keep alive in seconds; 0 = no limit [MQTT-3.1.2-22] [MQTT-3.2.2-22] (5.0)."""
    longest = settings.server_keep_alive
    if connect.protocol_level != 5 or longest is None or 0 < connect.keepalive <= longest:
        return connect.keepalive
    return longest


def largest_packet(client: Client, client_id: str) -> int:
    """Return the Maximum Packet Size in bytes: a PUBLISH of that size without properties can be stored."""
    most = client.path.store.max_payload - HEADED - CLIENT_COPIES * max(len(client_id) - CLIENT_USUAL, 0)
    return min(int(client.connection.settings.max_packet_size), max(most, SMALLEST))


def welcome(client: Client, connect: Connect, present: bool, more: Properties | None = None) -> bytes:
    """Return the CONNACK of an accepted connection; ``more`` are the properties of its authentication."""
    if client.version != 5:
        return encode(Connack(present and not client.terms.old, 0), 4)
    settings = client.connection.settings
    usual = (
        connect.client_id
        and client.connection.keepalive == connect.keepalive
        and more is None
        and (settings.response_information is None or not client.terms.response_information)
    )
    # section 3.2.2.3.2
    asked = (connect.properties or {}).get("session_expiry_interval", 0)
    expiry = NEVER if client.expiry is None else client.expiry
    told = -1 if expiry == asked else expiry
    largest = largest_packet(client, client.client_id)
    kind = (present, settings.receive_maximum, largest, settings.max_qos, told)
    known = client.account.welcomes.get(kind) if usual else None
    if known is not None:
        return known
    properties: Properties = {
        "receive_maximum": settings.receive_maximum,
        "maximum_packet_size": largest,
    }
    if settings.max_qos < 2:
        properties["maximum_qos"] = settings.max_qos  # [MQTT-3.2.2-9] (5.0)
    if settings.topic_alias_maximum:
        properties["topic_alias_maximum"] = settings.topic_alias_maximum
    if told >= 0:
        properties["session_expiry_interval"] = told
    if not connect.client_id:
        properties["assigned_client_identifier"] = client.client_id  # [MQTT-3.2.2-16] (5.0)
    if client.connection.keepalive != connect.keepalive:
        properties["server_keep_alive"] = int(client.connection.keepalive)
    if settings.response_information is not None and client.terms.response_information:
        # [MQTT-3.1.2-28] (5.0)
        properties["response_information"] = settings.response_information.replace("%c", client.client_id)
    if more is not None:  # [MQTT-4.12.0-6] (5.0)
        properties |= more
    data = encode(Connack(present, 0, properties), 5)
    if usual:
        client.account.welcomes[kind] = data
    return data


def check_greeting(client: Client, connect: Connect, more: Properties | None) -> None:
    """Check that the client takes the whole CONNACK: its properties cannot be left out [MQTT-3.1.2-24] (5.0).

    Raises:
        PacketTooLarge: CONNACK exceeds the client's Maximum Packet Size.
    """
    limit = client.terms.maximum_packet_size
    if limit < UNLIMITED and len(welcome(client, connect, False, more)) > limit:
        raise PacketTooLarge(f"CONNACK has more than {limit} bytes")


def refusal(version: int, error: MqttError) -> bytes:
    """Return the answer to a CONNECT that cannot be read or accepted; empty: no answer may be sent.

    Args:
        version: protocol version of the CONNECT packet; 0 = not known.
    """
    if version == 5 or isinstance(error, NewerProtocolVersion):  # [MQTT-3.1.2-2] (5.0)
        return connack_error(error, TERMS)
    # [MQTT-3.1.2-2], [MQTT-3.1.3-8]; any other bad CONNECT gets no answer [MQTT-3.1.4-1] [MQTT-3.2.2-6]
    if isinstance(error, (UnsupportedProtocolVersion, InvalidClientId)):
        return encode(Connack(False, connack_code(error.reason)), 4)
    return b""


def connack_error(error: MqttError, agreed: Terms) -> bytes:
    """Return the CONNACK of a refused 5.0 connection [MQTT-3.2.2-7] (5.0); empty: the client cannot take it.

    It has no user properties [MQTT-3.2.2-20] (5.0).
    """
    reason = _CONNACK_INSTEAD.get(error.reason, error.reason)
    if reason not in _IN_CONNACK:
        reason = ReasonCode.UNSPECIFIED_ERROR
    data = encode(Connack(False, reason, {"reason_string": str(error)[:1000]}), 5)
    if len(data) > agreed.maximum_packet_size:  # [MQTT-3.2.2-19] (5.0)
        data = encode(Connack(False, reason), 5)
    return data if len(data) <= agreed.maximum_packet_size else b""


def goodbye(error: MqttError, agreed: Terms) -> bytes:
    """Return the DISCONNECT of a 5.0 connection that ends with an error, without user properties [MQTT-3.14.2-4] (5.0).

    Empty: the client cannot take it.
    """
    reason = _DISCONNECT_INSTEAD.get(error.reason, error.reason)
    needed: Properties = {}
    if isinstance(error, UseAnotherServer):
        needed = {"server_reference": error.reference}
    data = encode(Disconnect(reason, {**needed, "reason_string": str(error)[:1000]}), 5)
    if len(data) > agreed.maximum_packet_size:  # [MQTT-3.14.2-3] (5.0)
        data = encode(Disconnect(reason, needed or None), 5)
    return data if len(data) <= agreed.maximum_packet_size else b""
