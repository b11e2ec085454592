# SPDX-License-Identifier: Apache-2.0
"""Calls of the hooks outside the message path: connections, subscriptions, wills."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from mqtt_nats.access.authenticator import IGNORE, Credentials, Denied
from mqtt_nats.base.logs import admits, frequent, shorten
from mqtt_nats.codec import Connect, MqttError, NotAuthorized, ReasonCode, Subscribe, Subscription, Unsubscribe, Will
from mqtt_nats.hooks.chain import DecisionChain, HookFailed
from mqtt_nats.hooks.events import (
    ClientView,
    Connected,
    Connecting,
    Disconnected,
    Drop,
    Published,
    Publishing,
    Refused,
    Subscribed,
    Subscribing,
    Unsubscribed,
    Unsubscribing,
)
from mqtt_nats.hooks.points import (
    CLIENT_AUTHENTICATE,
    CLIENT_CONNECT,
    CLIENT_CONNECTED,
    CLIENT_DISCONNECTED,
    CLIENT_SUBSCRIBE,
    CLIENT_UNSUBSCRIBE,
    MESSAGE_PUBLISH,
    SESSION_SUBSCRIBED,
    SESSION_TAKEN_OVER,
    SESSION_UNSUBSCRIBED,
    Verdict,
)
from mqtt_nats.hooks.session_notices import CAUSES, session

if TYPE_CHECKING:
    from mqtt_nats.ingress.publish import Publisher
    from mqtt_nats.observability.presence import Presence
    from mqtt_nats.sessions.session import Session

E = TypeVar("E")
V = TypeVar("V")

log = logging.getLogger("mqtt_nats.connections")

CONNECTIONS_PER_S: Final = 100.0
"""Records per second about connections that begin, and about connections that end."""


async def _ask(chain: DecisionChain[E, V], event: E, value: V) -> V:
    return await chain.decide_later(event, value) if chain.waits else chain.decide(event, value)


# -- connections --------------------------------------------------------------------------------------


async def ask_hooks_about_connect(client: Session, connect: Connect, client_id: str) -> None:
    """Run the hooks of ``client.connect``, which may refuse a CONNECT before its authentication.

    Raises:
        MqttError: a hook refuses the CONNECT, or has failed.
    """
    chain = client.services.hooks.deciding(CLIENT_CONNECT)
    if chain is None:
        return
    event = Connecting(
        client_id,
        connect.username,
        client.connection.host,
        connect.protocol_level,
        connect.clean_start,
        connect.keepalive,
        connect.will is not None,
        connect.properties or {},
    )
    try:
        reason = await _ask(chain, event, ReasonCode.SUCCESS)
    except HookFailed as error:
        raise NotAuthorized(str(error)) from None
    if reason is not ReasonCode.SUCCESS:
        raise MqttError("the connection is not accepted", reason)


async def verdict_of_hooks(client: Session, credentials: Credentials) -> Verdict:
    """Return the verdict of the hooks of ``client.authenticate``, which run before the authenticators."""
    chain = client.services.hooks.deciding(CLIENT_AUTHENTICATE)
    if chain is None:
        return IGNORE
    try:
        return await _ask(chain, credentials, IGNORE)
    except HookFailed as error:
        return Denied(str(error))


async def ask_hooks_about_will(client: Publisher, will: Will) -> Will | None:
    """Return a will after the hooks of ``message.publish``; None: the will is dropped.

    Raises:
        NotAuthorized: a hook refuses the will, or has failed.
    """
    chain = client.services.hooks.deciding(MESSAGE_PUBLISH)
    if chain is not None:
        delay = (will.properties or {}).get("will_delay_interval")
        shown = (will.properties or {}).copy()
        shown.pop("will_delay_interval", None)
        before = Published(will.topic, will.payload, will.qos, will.retain, shown)
        try:
            after = await _ask(chain, Publishing(ClientView(client), will=True), before)
        except HookFailed as error:
            raise NotAuthorized(str(error)) from None
        if isinstance(after, Drop):
            if after.reason is ReasonCode.SUCCESS:
                return None
            raise NotAuthorized(after.text)
        properties = after.properties.copy()
        if delay is not None:
            properties["will_delay_interval"] = delay
        will = Will(after.topic, after.payload, after.qos, after.retain, properties or None)
    if client.ingress.takers.of(will.topic) is not None:
        raise NotAuthorized("a plugin handles this topic: it cannot have a will")
    return will


def connected(client: Session, presence: Presence, present: bool) -> None:
    """Count, log and announce a connection whose CONNACK has been written."""
    client.services.counters.connect()
    if client.services.settings.log_connections and admits(log, logging.INFO, "connected"):
        text = "%s from %s is connected: MQTT %s, %s, keep alive %d s, %s"
        version = "5.0" if client.version == 5 else "3.1.1"
        user = "anonymous" if client.user is None else f"user {shorten(client.user)!r}"
        kind = "session resumed" if present else "new session"
        connection = client.connection
        extra = frequent("connected", CONNECTIONS_PER_S)
        log.info(text, client, connection.peer, version, user, connection.keepalive, kind, extra=extra)
    presence.connected(client, present)
    hooks = client.services.hooks
    chain = hooks.noticing(CLIENT_CONNECTED) if hooks.in_use else None
    if chain is not None:
        chain.emit(Connected(ClientView(client), present))


def _end_of(client: Session) -> tuple[str, ReasonCode, str]:
    """Return the cause of a connection's end (one of `DISCONNECTS`), its reason code, and its text."""
    if client.taken:
        return "taken over", ReasonCode.SESSION_TAKEN_OVER, "another connection has claimed the session"
    if client.sent_disconnect:
        return "client", ReasonCode.NORMAL_DISCONNECTION, "the client has sent DISCONNECT"
    if client.why is not None:
        return CAUSES.get(client.why.reason, "error"), client.why.reason, str(client.why)
    return "lost", ReasonCode.UNSPECIFIED_ERROR, "the connection was lost"


def disconnected(client: Session, presence: Presence) -> None:
    """Count, log and announce the end of a connection, unless its CONNACK was never written."""
    if client.taken and client.epoch:
        session(client.services.hooks, SESSION_TAKEN_OVER, client.client_id, client.epoch)
    if not client.greeted:
        return
    cause, reason, text = _end_of(client)
    client.services.counters.leave(cause)
    wanted = client.services.settings.log_connections or client.why is not None
    if wanted and admits(log, logging.INFO, "disconnected"):
        extra = frequent("disconnected", CONNECTIONS_PER_S, cause=cause, reason_code=f"0x{reason:02X}")
        log.info("%s from %s is disconnected: %s", client, client.connection.peer, text, extra=extra)
    presence.disconnected(client, reason, text)
    hooks = client.services.hooks
    chain = hooks.noticing(CLIENT_DISCONNECTED) if hooks.in_use else None
    if chain is not None:
        chain.emit(Disconnected(ClientView(client), reason, text))


# -- subscriptions ------------------------------------------------------------------------------------


async def ask_hooks_to_subscribe(client: Session, packet: Subscribe) -> tuple[Subscribe, dict[int, int]]:
    """Return a SUBSCRIBE packet after the hooks, and the reason codes of refused filters by index."""
    chain = client.services.hooks.deciding(CLIENT_SUBSCRIBE)
    if chain is None or not packet.packet_id:
        return packet, {}
    event = Subscribing(ClientView(client), packet.properties or {})
    try:
        wanted = await _ask(chain, event, packet.filters)
    except HookFailed:
        wanted = tuple(Refused(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR) for _ in packet.filters)
    refused = {place: int(one.reason) for place, one in enumerate(wanted) if isinstance(one, Refused)}
    pairs = zip(packet.filters, wanted, strict=True)
    filters = tuple(new if isinstance(new, Subscription) else old for old, new in pairs)
    return replace(packet, filters=filters), refused


async def ask_hooks_to_unsubscribe(client: Session, packet: Unsubscribe) -> Unsubscribe:
    """Return an UNSUBSCRIBE packet after the hooks."""
    chain = client.services.hooks.deciding(CLIENT_UNSUBSCRIBE)
    if chain is None:
        return packet
    return replace(packet, filters=await _ask(chain, Unsubscribing(ClientView(client)), packet.filters))


def subscribed(client: Session, granted: Iterable[tuple[str, int]]) -> None:
    """Emit the notices of granted subscriptions after SUBACK has been written."""
    hooks = client.services.hooks
    chain = hooks.noticing(SESSION_SUBSCRIBED) if hooks.in_use else None
    if chain is not None:
        view = ClientView(client)
        for topic_filter, code in granted:
            if code <= 2:
                chain.emit(Subscribed(view, topic_filter, code))


def unsubscribed(client: Session, filters: Iterable[str]) -> None:
    """Emit the notices of ended subscriptions after UNSUBACK has been written."""
    chain = client.services.hooks.noticing(SESSION_UNSUBSCRIBED)
    if chain is not None:
        view = ClientView(client)
        for topic_filter in filters:
            chain.emit(Unsubscribed(view, topic_filter))
