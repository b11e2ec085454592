# SPDX-License-Identifier: Apache-2.0
"""CONNECT and CONNACK: authentication, limits, the claim of the session, and the resume of an earlier session."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import lacks_room
from mqtt_nats.backbone.retry import TimedPermit
from mqtt_nats.base.admission import Verdict
from mqtt_nats.base.logs import about, log_failure
from mqtt_nats.client.authentication import UNSERVED, authenticate
from mqtt_nats.client.subscribe import withdraw
from mqtt_nats.codec import (
    Connack,
    Connect,
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
from mqtt_nats.delivery.resume import resubscribe, resume
from mqtt_nats.lifecycle.claim import announce_claim, claim_session
from mqtt_nats.lifecycle.connection_hooks import connected
from mqtt_nats.lifecycle.will import admit_will
from mqtt_nats.messages.terms import TERMS, TERMS_OLD, UNLIMITED, Terms
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.headers import FOR

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.transport.listener_settings import ConnectionSettings

log = logging.getLogger("mqtt_nats.broker")

EXPIRY_NEVER: Final = 0xFFFFFFFF
"""Session expiry interval of a session that does not expire (section 3.1.2.11.2)."""

HEADED: Final = 5120
"""Bytes of `max_payload` for the rest of a stored message: subject, client id, names of headers."""

CLIENT_USUAL: Final = 256
CLIENT_COPIES: Final = 12
"""Header bytes for each character of a client id beyond `CLIENT_USUAL`, percent-encoded."""

MAXIMUM_PACKET_SIZE_LEAST: Final = 1024
"""Smallest Maximum Packet Size of CONNACK, in bytes."""

TEMPORARY: Final = frozenset(
    {
        ReasonCode.SERVER_UNAVAILABLE,
        ReasonCode.SERVER_BUSY,
        ReasonCode.SERVER_SHUTTING_DOWN,
        ReasonCode.KEEP_ALIVE_TIMEOUT,
        ReasonCode.SESSION_TAKEN_OVER,
        ReasonCode.QUOTA_EXCEEDED,
        ReasonCode.USE_ANOTHER_SERVER,
        ReasonCode.CONNECTION_RATE_EXCEEDED,
    }
)
"""Reasons that pass: the same CONNECT may be accepted later. Some clients never connect again after such a CONNACK."""

_IN_CONNACK: Final = frozenset((*range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, *range(0x99, 0x9E), 0x9F))
_CONNACK_INSTEAD: Final = {
    ReasonCode.SERVER_SHUTTING_DOWN: ReasonCode.SERVER_UNAVAILABLE,
    ReasonCode.SESSION_TAKEN_OVER: ReasonCode.SERVER_BUSY,
    ReasonCode.KEEP_ALIVE_TIMEOUT: ReasonCode.SERVER_BUSY,
}


async def handle_connect(client: Client, connect: Connect) -> None:
    """Answer a CONNECT packet."""
    try:
        present, granted = await _open(client, connect)
    except MqttError as error:
        refuse(client, error)
        return
    except (RequestTimeout, NoResponders, ApiError, TimeoutError) as error:
        ids = about(client=connect.client_id, connection=client.connection.number)
        if isinstance(error, RequestTimeout | NoResponders):
            client.services.records.note_silence(error)
        text = "client %r cannot be served: %s"
        log_failure(log, logging.WARNING, "connect", text, connect.client_id, error, extra=ids)
        full = client.account.lease.full or (isinstance(error, ApiError) and lacks_room(error))
        refuse(client, MqttError(str(error), ReasonCode.QUOTA_EXCEEDED if full else ReasonCode.SERVER_UNAVAILABLE))
        return
    if client.ending:
        return
    # [MQTT-3.1.4-4] [MQTT-3.2.0-1] [MQTT-3.2.2-1] [MQTT-3.2.2-2] [MQTT-3.2.2-3] (3.1.1)
    # [MQTT-3.1.4-5] [MQTT-3.2.0-1] [MQTT-3.2.0-2] [MQTT-3.2.2-2] [MQTT-3.2.2-3] (5.0)
    client.write_buffer.write(_welcome(client, connect, present, granted))
    client.greet()
    try:
        if client.durable_side is not None and present:
            # CONNACK leaves when all subscriptions are live: the client may rely on that, as after SUBACK.
            client.write_buffer.clog()
            resubscribed = await resubscribe(client)
            client.write_buffer.unclog()
            if client.delivery.resumes.locked():
                client.resuming()
            client.begin_waiting()
            async with TimedPermit(client.delivery.resumes):
                client.end_waiting()
                await resume(client, client.durable_side, resubscribed, partial(withdraw, client))
    except (RequestTimeout, NoResponders, ApiError, TimeoutError) as error:
        log_failure(log, logging.WARNING, "resume", "%s: its session cannot be resumed: %s", client, error)
        client.end_connection(MqttError(str(error), ReasonCode.SERVER_UNAVAILABLE))
        return
    finally:
        # Also on failure: hooks get the end of a connection only after its beginning.
        connected(client, client.account.presence, present)
    client.opened()


def refuse(client: Client, error: MqttError) -> None:
    """Answer CONNECT with a return code or reason code and close the connection, unless it ends already.

    A refusal that passes has no answer, unless the setting `temporary_refusals` wants one.

    [MQTT-3.1.3-9] [MQTT-3.2.2-4] [MQTT-3.2.2-5] (3.1.1), [MQTT-3.1.3-8] [MQTT-3.1.4-2] [MQTT-4.13.2-1] (5.0)
    """
    if client.ending:
        return
    client.services.counters.refuse(error.reason.name.lower())
    if error.reason not in TEMPORARY or client.connection.settings.temporary_refusals == "connack":
        old = client.version != 5
        answer = encode(Connack(False, connack_code(error.reason)), 4) if old else _connack_error(error, client.terms)
        client.write_buffer.write(answer)
    client.end_connection(error)


async def _open(client: Client, connect: Connect) -> tuple[bool, Properties | None]:
    """Authenticate the client and claim its session; returns Session Present and properties for CONNACK."""
    if client.services.registry.closing:
        raise MqttError("the gateway is shutting down", ReasonCode.SERVER_SHUTTING_DOWN)
    if not client.tenant_served:
        raise MqttError(UNSERVED, ReasonCode.SERVER_UNAVAILABLE)
    if not connect.client_id and not connect.clean_start and connect.protocol_level != 5:  # [MQTT-3.1.3-8]
        raise InvalidClientId("an empty client id needs a clean session")
    # [MQTT-3.1.3-6] (3.1.1, 5.0) [MQTT-3.1.3-7] (5.0)
    client_id = connect.client_id or f"auto-{client.services.identity.new_nuid()}"
    await _wait_for_rate(client)
    granted = await authenticate(client, connect, client_id)
    _negotiate(client, connect, granted)
    if connect.will is not None:
        connect = replace(connect, will=await admit_will(client, connect.will))
    wills, lease = client.account.wills, client.account.lease
    await announce_claim(client, connect, wills.claims, lease)
    client.begin_waiting(asyncio.get_running_loop().time())
    place = TimedPermit(client.delivery.claims)
    async with place:
        client.end_waiting()
        present = await claim_session(client, connect, wills, lease, place)
    client.delivery.note_claim()
    return present, granted


async def _wait_for_rate(client: Client) -> None:
    """Wait until the rate of connections allows the CONNECT.

    Raises:
        MqttError: that would take too long.
    """
    connection = client.connection
    verdict, due = connection.admission
    if verdict is Verdict.CONNACK_REFUSAL:
        raise MqttError("too many connections in a short time", ReasonCode.CONNECTION_RATE_EXCEEDED)
    if not due:
        return
    client.begin_waiting()
    try:
        await asyncio.sleep(due - monotonic())
    finally:
        client.end_waiting()
    connection.restart_timeout(asyncio.get_running_loop().time())


# -- limits and options -------------------------------------------------------------------------------


def _negotiate(client: Client, connect: Connect, more: Properties | None) -> None:
    """Set keep alive, session expiry interval and options; ``more`` are the properties of the authentication.

    Raises:
        PacketTooLarge: CONNACK, whose properties cannot be left out, is too large for the client [MQTT-3.1.2-24] (5.0).
    """
    settings = client.connection.settings
    client.connection.expect_packets(float(_keep_alive(connect, settings)))
    client.negotiate(_session_expiry(connect, settings), bridge=connect.bridge)
    limit = client.terms.maximum_packet_size
    if limit < UNLIMITED and len(_welcome(client, connect, False, more)) > limit:
        raise PacketTooLarge(f"CONNACK has more than {limit} bytes")


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


def _session_expiry(connect: Connect, settings: ConnectionSettings) -> int | None:
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
    return None if asked == EXPIRY_NEVER else asked


def _keep_alive(connect: Connect, settings: ConnectionSettings) -> int:
    """Return the keep alive in seconds; 0 = no limit [MQTT-3.1.2-22] [MQTT-3.2.2-22] (5.0)."""
    longest = settings.server_keep_alive
    if connect.protocol_level != 5 or longest is None or 0 < connect.keepalive <= longest:
        return connect.keepalive
    return longest


def _largest_packet(client: Client, client_id: str) -> int:
    """Return the Maximum Packet Size in bytes: a PUBLISH of that size without properties can be stored."""
    most = client.path.store.max_payload - HEADED - CLIENT_COPIES * max(len(client_id) - CLIENT_USUAL, 0)
    return min(int(client.connection.settings.max_packet_size), max(most, MAXIMUM_PACKET_SIZE_LEAST))


# -- CONNACK ------------------------------------------------------------------------------------------


def _welcome(client: Client, connect: Connect, present: bool, more: Properties | None = None) -> bytes:
    """Return the CONNACK of an accepted connection; ``more`` are the properties of its authentication."""
    if client.version != 5:
        return encode(Connack(present and not client.terms.old, 0), 4)
    settings = client.connection.settings
    usual = (
        connect.client_id
        and client.connection.keepalive == connect.keepalive
        and more is None
        and not settings.carried_messages
        and (settings.response_information is None or not client.terms.response_information)
    )
    # section 3.2.2.3.2
    asked = (connect.properties or {}).get("session_expiry_interval", 0)
    expiry = EXPIRY_NEVER if client.expiry is None else client.expiry
    told = -1 if expiry == asked else expiry
    largest = _largest_packet(client, client.client_id)
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
    if settings.carried_messages:
        properties["user_property"] = [(FOR, "")]
    if more is not None:  # [MQTT-4.12.0-6] (5.0)
        properties |= more
    data = encode(Connack(present, 0, properties), 5)
    if usual:
        client.account.welcomes[kind] = data
    return data


def refusal(version: int, error: MqttError) -> bytes:
    """Return the answer to a CONNECT that cannot be read or accepted; empty: no answer may be sent.

    Args:
        version: protocol version of the CONNECT packet; 0 = not known.
    """
    if version == 5 or isinstance(error, NewerProtocolVersion):  # [MQTT-3.1.2-2] (5.0)
        return _connack_error(error, TERMS)
    # [MQTT-3.1.2-2], [MQTT-3.1.3-8]; any other bad CONNECT gets no answer [MQTT-3.1.4-1] [MQTT-3.2.2-6]
    if isinstance(error, (UnsupportedProtocolVersion, InvalidClientId)):
        return encode(Connack(False, connack_code(error.reason)), 4)
    return b""


def _connack_error(error: MqttError, agreed: Terms) -> bytes:
    """Return the CONNACK of a refused 5.0 connection [MQTT-3.2.2-7] (5.0); empty: the client cannot take it.

    It has no user properties [MQTT-3.2.2-20] (5.0).
    """
    reason = _CONNACK_INSTEAD.get(error.reason, error.reason)
    if reason not in _IN_CONNACK:
        reason = ReasonCode.UNSPECIFIED_ERROR
    needed: Properties = {}
    if isinstance(error, UseAnotherServer):
        needed = {"server_reference": error.reference}
    data = encode(Connack(False, reason, {**needed, "reason_string": str(error)[:1000]}), 5)
    if len(data) > agreed.maximum_packet_size:  # [MQTT-3.2.2-19] (5.0)
        data = encode(Connack(False, reason, needed or None), 5)
    return data if len(data) <= agreed.maximum_packet_size else b""
