# SPDX-License-Identifier: Apache-2.0
"""CONNECT: authentication, the claim of the session, and the resume of an earlier session.

A session has one owner in the whole cluster: the connection that wrote the session's record last. The stream
sequence of that write is the epoch. The write is conditional on the record that was read. Its acknowledgement also
reaches the former owner, in a gateway or in nats-server's own listener, and tells it that the session has moved.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.base import server_clock as natstime
from mqtt_nats.base.logs import about, log_failure
from mqtt_nats.base.networks import household
from mqtt_nats.client.authentication import authenticate, hand_over
from mqtt_nats.client.authorization import denied_subscriptions, identify
from mqtt_nats.client.negotiation import (
    check_greeting,
    connack_error,
    keep_alive,
    session_expiry,
    welcome,
)
from mqtt_nats.client.subscribe import withdraw
from mqtt_nats.codec import (
    Connack,
    Connect,
    InvalidClientId,
    MqttError,
    Properties,
    QosNotSupported,
    ReasonCode,
    connack_code,
    encode,
)
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.resume import attach_idle, is_large, resubscribe, resume
from mqtt_nats.hooks.points import SESSION_CREATED, SESSION_DISCARDED, SESSION_RESUMED
from mqtt_nats.hooks.session_notices import session
from mqtt_nats.lifecycle.claim import Claim, find_session, forget_second, has_expired, leave_claimed, user_of
from mqtt_nats.lifecycle.connection_hooks import admit, ask_hooks_about_will, connected
from mqtt_nats.lifecycle.will import check_will, keep_will, permitted_will, settle_wills
from mqtt_nats.protocol.transient_sender import TransientSender
from mqtt_nats.sessions.quotas import holder
from mqtt_nats.sessions.record import discard_session, leftovers, save_record, unfinished
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.hashing import name_hash, registered_as
from mqtt_streams.quotas import quota_of
from mqtt_streams.sessions import (
    FIRST,
    V5,
    V5_CONSUMERLESS,
    V5_PLAIN,
    V5_SECOND,
    Conflict,
    SessionRecord,
)
from mqtt_streams.timers import EXPIRY

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding

log = logging.getLogger("mqtt_nats.broker")

# Attempts to claim a session. Of n concurrent claims of one session the last needs n attempts.
CLAIM_ROUNDS: Final = 20

RESOLUTION: Final = 0.01
"""Resolution, in seconds, of the time at which the last bytes of a client came."""

NO_FORMER: Final = V5()
"""Part of the former session's record where there is no former session; it is only read."""


async def handle_connect(client: Client, connect: Connect) -> None:
    """Answer a CONNECT packet."""
    try:
        present, granted = await _open(client, connect)
    except MqttError as error:
        refuse(client, error)
        return
    except (RequestTimeout, NoResponders, ApiError, TimeoutError) as error:
        ids = about(client=connect.client_id, connection=client.connection.number)
        text = "client %r cannot be served: %s"
        log_failure(log, logging.WARNING, "connect", text, connect.client_id, error, extra=ids)
        refuse(client, MqttError(str(error), ReasonCode.SERVER_UNAVAILABLE))
        return
    if not client.alive:
        return
    # [MQTT-3.1.4-4] [MQTT-3.2.0-1] [MQTT-3.2.2-1] [MQTT-3.2.2-2] [MQTT-3.2.2-3] (3.1.1)
    # [MQTT-3.1.4-5] [MQTT-3.2.0-1] [MQTT-3.2.0-2] [MQTT-3.2.2-2] [MQTT-3.2.2-3] (5.0)
    client.outlet.write(welcome(client, connect, present, granted))
    client.greet()
    idle: list[ConsumerBinding] = []
    try:
        if client.durable_side is not None and present:
            # CONNACK leaves when all subscriptions are live: the client may rely on that, as after SUBACK.
            client.outlet.clog()
            denied = denied_subscriptions(client)
            gates = await resubscribe(client, denied)
            client.outlet.unclog()
            if is_large(client):
                client.resuming()
            idle = await resume(client, client.durable_side, denied, partial(withdraw, client), gates)
    except (RequestTimeout, NoResponders, ApiError, TimeoutError) as error:
        log_failure(log, logging.WARNING, "resume", "%s: its session cannot be resumed: %s", client, error)
        client.end(MqttError(str(error), ReasonCode.SERVER_UNAVAILABLE))
        return
    finally:
        # Also on failure: hooks get the end of a connection only after its beginning.
        connected(client, client.account.presence, present)
    client.opened()
    if client.durable_side is not None and idle:
        await attach_idle(client, client.durable_side, idle)
    if client.durable_side is not None:
        client.delivery.feed.soon(client)


def refuse(client: Client, error: MqttError) -> None:
    """Answer CONNECT with a return code or reason code and close the connection.

    [MQTT-3.1.3-9] [MQTT-3.2.2-4] [MQTT-3.2.2-5] (3.1.1), [MQTT-3.1.3-8] [MQTT-3.1.4-2] [MQTT-4.13.2-1] (5.0)
    """
    client.services.counters.refuse(error.reason.name.lower())
    if client.version == 5:
        client.outlet.write(connack_error(error, client.terms))
    else:
        client.outlet.write(encode(Connack(False, connack_code(error.reason)), 4))
    client.end(error)


async def _open(client: Client, connect: Connect) -> tuple[bool, Properties | None]:
    """Authenticate the client and claim its session; returns Session Present and properties for CONNACK."""
    settings = client.connection.settings
    if client.services.registry.closing:
        raise MqttError("the gateway is shutting down", ReasonCode.SERVER_SHUTTING_DOWN)
    if not connect.client_id and not connect.clean_start and connect.protocol_level != 5:  # [MQTT-3.1.3-8]
        raise InvalidClientId("an empty client id needs a clean session")
    # [MQTT-3.1.3-6] (3.1.1, 5.0) [MQTT-3.1.3-7] (5.0)
    client_id = connect.client_id or f"auto-{client.services.identity.new_nuid()}"
    if client.connection.surplus:
        raise MqttError("too many connections in a short time", ReasonCode.CONNECTION_RATE_EXCEEDED)
    if not client.account.banning.quiet:
        await client.account.banning.admit(client, client_id, known=False)
    if client.services.hooks.in_use:
        await admit(client, connect, client_id)
    granted = await authenticate(client, connect, client_id)
    if client.granted.tenant is not None:
        await hand_over(client, client_id)
    if not client.account.banning.quiet:
        await client.account.banning.admit(client, client_id, known=True)
    client.name(client_id)  # [MQTT-3.1.3-2] (3.1.1, 5.0)
    client.keep_at(name_hash(client_id))
    identify(client)
    client.connection.expect_packets(float(keep_alive(connect, settings)))
    client.negotiate(session_expiry(connect, settings), bridge=connect.bridge)
    check_greeting(client, connect, granted)
    if connect.will is not None:
        if connect.will.qos > settings.max_qos:  # [MQTT-3.2.2-12] (5.0)
            raise QosNotSupported(f"the QoS of the will is above {settings.max_qos}")
        connect = replace(connect, will=await ask_hooks_about_will(client, connect.will))
    if connect.will is not None:
        connect = replace(connect, will=permitted_will(client, connect.will))
    if connect.will is not None:
        check_will(client, connect.will)
    earlier = client.account.claims.listen(client)
    if not client.account.lease.lasts():
        await client.account.lease.confirmed(client)
    if earlier:
        await client.account.claims.turn(client)
    present = await _claim(client, connect)
    if connect.will is not None:
        await keep_will(client, connect.will)
    return present, granted


async def _move(client: Client, key: str, had: V5) -> None:
    """Change the key of the client's session; the registration says first which records the gateway writes.

    Args:
        key: of the session, second or the same.
        had: the former session's part of the record.

    Raises:
        TimeoutError: the registration of the gateway is not written in time.
    """
    if had.consumerless:
        await client.account.lease.writes(V5_CONSUMERLESS)
    elif key != name_hash(client.client_id):
        await client.account.lease.writes(V5_SECOND)
    if key != client.hash:
        client.account.claims.leave(client)
        client.keep_at(key)
        client.account.claims.listen(client)


async def _claim(client: Client, connect: Connect) -> bool:
    """Claim the session for this connection; returns whether an earlier session goes on.

    [MQTT-3.1.4-3] (3.1.1), [MQTT-3.1.4-4] (5.0)
    """
    key, known, expected = Claim(client.hash, None, 0)
    looked = client.expiry != 0 or not connect.clean_start
    if looked:
        key, known, expected = await find_session(client, client.account.claims, connect)
    for _ in range(CLAIM_ROUNDS):
        had = known.v5 if known is not None and known.v5 is not None else NO_FORMER
        if key != client.hash or had.consumerless:
            await _move(client, key, had)
        wills, quota = had.wills, had.quota
        written = known.time_ns if known is not None else 0
        present = _prepare(client, connect, known, known is not None and await has_expired(client, known, expected))
        await _count(client, known, quota, present=present)
        if client.durable_side is not None and client.record is not None and client.record.v5 is not None:
            client.record.v5.follow(expected)
            if present:
                client.record.v5.begin_at(expected)
        if known is not None and _is_elsewhere(client, known):
            raise MqttError("the client has closed its connection", ReasonCode.UNSPECIFIED_ERROR)
        try:
            await save_record(client, expected)
        except Conflict:
            looked = True
            key, known, expected = await find_session(client, client.account.claims, connect)
            continue
        except (RequestTimeout, NoResponders, ApiError, TimeoutError):
            work = leave_claimed(client, client.account.wills, expected, continued=present)
            client.services.tasks.spawn(work, f"claim of {client.client_id}")
            raise
        if not looked and client.account.claims.second_keys:
            client.services.tasks.spawn(
                forget_second(client, client.account.claims, client.account.wills), f"second key of {client.client_id}"
            )
        try:
            await _succeed(client, known, expected, wills, written if present else 0, continued=present)
        except BaseException:  # any failure: nothing else sets the session's deadline and deals with its earlier wills
            client.give_up()
            work = leave_claimed(client, client.account.wills, expected, continued=present)
            client.services.tasks.spawn(work, f"claim of {client.client_id}")
            raise
        assert client.record is not None
        assert client.record.v5 is not None
        client.record.v5.name_wills([client.services.identity.id] if connect.will is not None else [])
        return present
    raise MqttError("too many connections claim this session at once", ReasonCode.SERVER_BUSY)


async def _succeed(
    client: Client, known: SessionRecord | None, expected: int, wills: list[str], until: int, *, continued: bool
) -> None:
    """End the former connection after the claim is stored, and settle the former session and its wills.

    Args:
        known: the record that the claim has replaced; ``expected`` is its sequence.
        wills: gateways under which wills of the session may be stored.
        until: as in `discard_session`.
        continued: the session goes on.

    Raises:
        MqttError: the session was claimed again.
        ApiError, NoResponders, RequestTimeout: JetStream refuses a request or does not answer.
    """
    _take_over(client)
    if known is not None and not continued and (known.v5 is None or known.v5.kind == "durable"):
        session(client.services.hooks, SESSION_DISCARDED, client.client_id, expected)
    session(client.services.hooks, SESSION_RESUMED if continued else SESSION_CREATED, client.client_id, client.epoch)
    if known is not None and (not continued or unfinished(known)):
        await discard_session(client.services, known, client.epoch, until)
        await _count_no_more(client, known)
        await _forget_leftovers(client)
    elif continued and client.durable:
        # [MQTT-4.1.0-2] (3.1.1), [MQTT-4.1.0-1] (5.0)
        await client.services.streams.timers.cancel(EXPIRY, client.hash, client.epoch)
    if wills:
        await settle_wills(client.account.wills, client.hash, wills, client.epoch, continued=continued)


def _take_over(client: Client) -> None:
    """End this gateway's connection that had the session [MQTT-3.1.4-2] (3.1.1), [MQTT-3.1.4-3] (5.0).

    Raises:
        MqttError: another connection has claimed the session after this one.
    """
    clients, name = client.services.registry.clients, registered_as(client.client_id, client.hash)
    former = clients.get(name)
    if client.foreign > client.epoch or (former not in (None, client) and former.epoch > client.epoch):
        raise MqttError("another connection has claimed the session", ReasonCode.SESSION_TAKEN_OVER)
    clients[name] = client
    if former is not None and former is not client:
        former.taken_over()


def _is_elsewhere(client: Client, known: SessionRecord) -> bool:
    """Whether the client has closed this connection and may have claimed the session by a later one."""
    connection = client.connection
    if not connection.hung_up:
        return False
    if known.v5 is not None and known.v5.owner == client.services.identity.id:
        return client.account.claims.overtaken(client)
    return known.time_ns / 1e9 > natstime.now() - connection.silence - RESOLUTION


async def _forget_leftovers(client: Client) -> None:
    """Remove the former session's consumers and groups from the record: they are deleted, and left."""
    record = client.record
    assert record is not None
    assert record.v5 is not None
    if record.v5.draining or record.v5.leaving:
        record.v5.forget_draining([one.name for one in record.v5.draining])
        record.v5.forget_leaving()
        try:
            await save_record(client, client.epoch)
        except Conflict:
            raise MqttError("another connection has claimed the session", ReasonCode.SESSION_TAKEN_OVER) from None


def _quota(client: Client) -> str:
    """Return the quota in which new sessions of a client count."""
    return quota_of(user_of(client), household(client.connection.host))


async def _count(client: Client, known: SessionRecord | None, quota: str, *, present: bool) -> None:
    """Count a session that is about to be claimed in its quota.

    Args:
        quota: the quota in which the session ``known`` has counted.

    Raises:
        QuotaExceeded: the user, or the address, has too many sessions.
    """
    quotas, record = client.services.quotas, client.record
    assert record is not None
    assert record.v5 is not None
    if known is not None and quota == record.v5.quota:
        quotas.claimed(known)
    elif record.v5.quota and not present:
        await quotas.admit(record.v5.quota, holder(client.user, client.connection.host))


async def _count_no_more(client: Client, known: SessionRecord) -> None:
    """Remove the former session from its quota, unless the new session counts there in its place."""
    record = client.record
    if known.v5 is not None and record is not None and record.v5 is not None and known.v5.quota != record.v5.quota:
        await client.services.quotas.forget(known)


def _new_record(client: Client, v5: V5, *, clean: bool = False) -> SessionRecord:
    """Return the record of a new session of the client's user, under the session's key."""
    version = V5_PLAIN if client.hash == name_hash(client.client_id) else V5_SECOND
    v5.begin(version, user_of(client), "" if clean else _quota(client))
    return SessionRecord(client.client_id, clean=clean, v5=v5, key=client.hash)


def _may_continue(client: Client, known: SessionRecord) -> bool:
    """Whether a session outlives its connections and belongs to the client's user or to no known user."""
    v5 = known.v5
    own = v5 is None or (v5.kind == "durable" and v5.expiry != 0 and v5.user in (None, user_of(client)))
    return own and not known.clean


def _name_position(client: Client, v5: V5, *, continued: bool) -> None:
    """Name a position where one may be stored; a session that has consumers keeps them until it becomes live."""
    feed = client.delivery.feed
    if feed.allowed:
        consumerless = feed.consumerless and not continued
        v5.name_position(v5.pos or client.services.identity.new_nuid(), consumerless=consumerless)


def _prepare(client: Client, connect: Connect, known: SessionRecord | None, expired: bool = False) -> bool:
    """Set the record that claims the session; returns whether it continues the session ``known``.

    [MQTT-3.1.2-4] [MQTT-3.1.2-6] (3.1.1), [MQTT-3.1.2-4] [MQTT-3.1.2-5] [MQTT-3.1.2-6] (5.0). A durable session
    stays durable; it ends with its connection where its session expiry interval is now 0.
    """
    settings = client.connection.settings
    left = leftovers(known) if known is not None else []
    had = known.v5 if known is not None and known.v5 is not None else NO_FORMER
    # The record names the former owner's will until that is dealt with: the end of the session has to find the will.
    wills = list(had.wills)
    if connect.will is not None and client.services.identity.id not in wills:
        wills.append(client.services.identity.id)
    continued = known is not None and not (connect.clean_start or expired) and _may_continue(client, known)
    if not continued and client.expiry == 0:
        record = _new_record(client, V5("regular", 0, draining=left, wills=wills, leaving=had.groups), clean=True)
        client.begin_session(record, durable=False)
        client.deliver_by(
            TransientSender(
                min(settings.max_inflight, client.terms.receive_maximum),  # [MQTT-3.3.4-9] [MQTT-4.9.0-1] (5.0)
                settings.max_queued,
                client.outlet.write,
                settings.max_outbound_bytes,
                client.version,
                client.outlet.round.holding,
            )
        )
        return False
    if continued:
        assert known is not None
        record, v5 = known, known.upgrade()
        v5.belong(user_of(client), _quota(client))
        v5.expire_after(client.expiry)
        v5.name_wills(wills)
    else:
        v5 = V5("durable", client.expiry, draining=left, wills=wills, leaving=had.groups, first=FIRST)
        v5.count_in(client.services.stream.id)
        record = _new_record(client, v5)
        v5 = record.upgrade()
    _name_position(client, v5, continued=continued)
    client.begin_session(record, durable=True)
    side = DurableDelivery(client, had.former)
    client.deliver_by(side)
    if continued:
        side.point_anew()
    else:
        side.begin()
    return continued
