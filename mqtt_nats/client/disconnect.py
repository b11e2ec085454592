# SPDX-License-Identifier: Apache-2.0
"""The end of a connection, and of a session."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.backbone.batch import in_turn
from mqtt_nats.backbone.pending_stores import IgnoredStore
from mqtt_nats.backbone.retry import retry_in_background
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.client.connect import bounded_expiry, refuse
from mqtt_nats.codec import Disconnect, MqttError, Properties, ProtocolError, ReasonCode, UseAnotherServer, encode
from mqtt_nats.delivery.position_handover import leave_position
from mqtt_nats.delivery.pubrels import note
from mqtt_nats.hooks.points import SESSION_TERMINATED
from mqtt_nats.hooks.session_notices import session
from mqtt_nats.ingress.retained.replay import drop_gates
from mqtt_nats.lifecycle.connection_hooks import disconnected
from mqtt_nats.lifecycle.deadline import set_deadline
from mqtt_nats.lifecycle.will import Done, drop_will, set_late_will_timer
from mqtt_nats.sessions.groups.subscribe import detach, leave_at_end
from mqtt_nats.sessions.record import claimed, save_record, stored_part
from mqtt_nats.sessions.session import State
from mqtt_nats.transport.connection import CLOCK_STEP
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import NOT_CHANGED, ConsumerRef, backstop, update_consumer
from mqtt_streams.hashing import registered_as
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.qos2 import held_up_to
from mqtt_streams.sessions import Conflict
from mqtt_streams.stored import up_to

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.messages.terms import Terms
    from mqtt_nats.sessions.services import Registry

log = logging.getLogger("mqtt_nats.broker")

_DISCONNECT_INSTEAD: Final = {
    ReasonCode.UNSUPPORTED_PROTOCOL_VERSION: ReasonCode.PROTOCOL_ERROR,
    ReasonCode.CLIENT_IDENTIFIER_NOT_VALID: ReasonCode.PROTOCOL_ERROR,
    ReasonCode.BAD_USER_NAME_OR_PASSWORD: ReasonCode.NOT_AUTHORIZED,
    ReasonCode.SERVER_UNAVAILABLE: ReasonCode.SERVER_BUSY,
    ReasonCode.BANNED: ReasonCode.NOT_AUTHORIZED,
    ReasonCode.PACKET_IDENTIFIER_IN_USE: ReasonCode.PROTOCOL_ERROR,
    ReasonCode.PACKET_IDENTIFIER_NOT_FOUND: ReasonCode.PROTOCOL_ERROR,
}


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


def handle_disconnect(client: Client, packet: Disconnect) -> None:
    """Handle DISCONNECT.

    Raises:
        ProtocolError: it sets an expiry interval where CONNECT has set 0 (section 3.14.2.2.2).
    """
    expiry = (packet.properties or {}).get("session_expiry_interval", -1)
    record = client.record
    if not client.connection.settings.durable_sessions:
        expiry = -1  # CONNACK has told the client that its session ends with the connection
    if expiry > 0 and not client.expiry and client.expiry is not None:
        raise ProtocolError("DISCONNECT sets a session expiry interval, and CONNECT has set 0")
    client.hear_disconnect()
    changed = expiry >= 0 and client.durable and record is not None and record.v5 is not None
    if changed:
        assert record is not None
        assert record.v5 is not None
        client.expire_after(bounded_expiry(expiry, client.connection.settings))
        record.v5.expire_after(client.expiry)
    # [MQTT-3.14.4-3] (3.1.1, 5.0), [MQTT-3.1.2-8] [MQTT-3.1.2-10] (5.0)
    dropped = drop_will(client) if packet.reason == ReasonCode.SUCCESS else None
    if changed or dropped is not None or client.busy:  # jobs of earlier packets come first
        client.do(_leave(client, changed, dropped))
    else:
        client.close()


async def _leave(client: Client, changed: bool, dropped: Done | None) -> None:
    """Close the connection when the changes that DISCONNECT asks for are stored.

    Args:
        changed: DISCONNECT has changed the session expiry interval.
        dropped: the removal of the will; None = there is nothing to remove.
    """
    side = client.durable_side
    try:
        if dropped is not None:
            await dropped.event.wait()
        if changed:
            await save_record(client, client.epoch)
            if side is not None:
                await renew_backstops(side)
    except Conflict:
        client.taken_over()
        return
    except (ApiError, NoResponders, RequestTimeout) as error:
        log.warning("%s: its session expiry interval was not stored: %s", client, error)
    client.close()


async def renew_backstops(side: DurableDelivery) -> None:
    """Let the dormant consumers live as long as the session, whose expiry interval has changed."""
    record, v5 = claimed(side.client.record)
    threshold = backstop(v5.expiry)
    for key, consumer in record.cons.items():
        record.cons[key] = replace(consumer, inactive_threshold=threshold)
    there = {name for name, one in side.bindings.items() if not one.removed}
    consumers = [one for one in record.cons.values() if one.durable_name in there]
    await in_turn([partial(_renew, side, one) for one in consumers])


async def _renew(side: DurableDelivery, consumer: ConsumerRef) -> None:
    try:
        await update_consumer(side.client.services.nats.inbox, MESSAGES, consumer)
    except NOT_CHANGED as error:
        log.debug("consumer %s: %s", consumer.durable_name, error)  # it is put right when the session is resumed


def fall_silent(client: Client) -> None:
    """Stop the deliveries to a closed connection: messages that still come do not count as sent."""
    side = client.durable_side
    if side is None or not side.machine.begun:
        return
    if side.position_writer is not None:
        side.position_writer.look_back()
    side.machine.close()


def leave(client: Client) -> None:
    """Forget a client's state in this gateway and leave its session; the last step of a client."""
    client.services.registry.leave(client)
    client.services.registry.unchecked.discard(client)
    client.services.unrecorded.pop(client, None)
    others = client.account.claims.leave(client)
    client.path.table.leave(client)
    detach(client)
    if client.ended_shares is not None:
        client.ended_shares.take_acknowledged()  # while the sender knows what is in flight
    client.receipts.clear()
    client.release_memory()
    side = client.durable_side
    if client.regular_side is not None and client.regular_side.waiting:
        waiting = client.regular_side.waiting
        client.services.counters.drop("session ended", waiting)
        log.info("%s: its session has ended, and %d queued messages with it", client, waiting)
        client.regular_side.close()
    drop_gates(client)
    if side is not None:
        leave_position(client, side)
        side.detach()
        if client.epoch and not client.taken:
            note(client, side)
        if side.close():
            client.end_delivery()
    name = registered_as(client.client_id, client.hash)
    if client.services.registry.clients.get(name) is client:
        del client.services.registry.clients[name]
    if not others:
        client.services.quotas.forget_session(client.hash)
    disconnected(client, client.account.presence)
    will = client.account.wills.last.pop(client, None)
    set_late_will_timer(client.account.wills, client)
    if client.epoch and not client.taken:
        _close_session(client, will)


def _close_session(client: Client, will: Done | None) -> None:
    """End a session whose connection has ended, or set its deadline [MQTT-4.1.0-2] (5.0).

    Args:
        will: the publication of the will; None = there is no will, or the session goes on.
    """
    _, v5 = claimed(client.record)
    if not client.durable:
        session(client.services.hooks, SESSION_TERMINATED, client.client_id, client.epoch)
        held = client.qos2 is not None and client.qos2.newest
        if will is None and not held and not v5.groups:
            _delete_record(client)
        else:
            _take_leave(client, _end(client, will), f"end of the session of {client.client_id}")
    else:
        end = None if client.expiry is None else natstime.now() + client.expiry
        if client.ended_shares is not None and client.ended_shares.unwritten:
            _take_leave(client, _save_and_wait(client, end), f"record of {client.client_id}")
        else:
            set_deadline(client, end)
    client.path.link.kick()


async def _save_and_wait(client: Client, end: float | None) -> None:
    """Write the record of a session whose connection has ended, then set its deadline ``end``, as `set_deadline`."""
    try:
        await retry_in_background(client.services.nats.online, partial(_save_once, client, set()))
    except Conflict:
        return  # the session goes on elsewhere
    except ApiError as error:  # the messages come once more
        log.warning("%s: its record was not written at the end of its connection: %s", client, error)
    set_deadline(client, end)
    client.path.link.kick()


async def _save_once(client: Client, nonces: set[str]) -> None:
    """Write the session record; an earlier attempt, or a write that the end has cancelled, may be stored, also late.

    Args:
        nonces: of the writes of this connection whose outcome is not known; one is added.

    Raises:
        Conflict: another connection has claimed the session.
        ApiError, NoResponders, RequestTimeout: JetStream does not do it.
    """
    _, v5 = claimed(client.record)
    while True:
        nonces.add(v5.nonce)
        present, sequence = await stored_part(client)
        own = present is not None and present.nonce in nonces
        if own:
            client.claim(sequence)
        try:
            await save_record(client, client.epoch)
        except Conflict:
            if not own:
                raise
        else:
            return


def _take_leave(client: Client, work: Coroutine[Any, Any, None], name: str) -> None:
    client.services.tasks.await_at_end(client.services.tasks.spawn(work, name))


async def _end(client: Client, will: Done | None) -> None:
    """End a session: its record goes last, since other gateways find the will and held publishes by the record.

    Each of these is in a stream of its own, and one of the streams may have no leader.
    """
    if will is not None:
        await will.event.wait()
    if client.qos2 is not None and client.qos2.newest:
        removed = Done()
        # Only up to this sequence: a new session of the same client may have held publishes already.
        client.path.store.call(
            client.services.streams.purge_held, held_up_to(client.token, client.qos2.newest), removed
        )
        client.path.link.kick()
        await removed.event.wait()
    if claimed(client.record)[1].groups and not await leave_at_end(client):
        set_deadline(client, natstime.now())  # a timer is handled again and again until the session is removed
    else:
        _delete_record(client)
    client.path.link.kick()


def _delete_record(client: Client) -> None:
    """Remove the session record up to its sequence: a newer record under the subject stays."""
    streams = client.services.streams
    request = up_to(streams.sessions.subject(client.hash), client.epoch)
    client.path.store.call(streams.purge_sessions, request, IgnoredStore())


def end_silent(registry: Registry[Client], now: float) -> None:
    """End connections whose keep alive or connect timeout has passed at ``now`` (loop time in seconds)."""
    for client in registry.checks.due(now):
        connection = client.connection
        timeout = connection.settings.connect_timeout
        if connection.expired(now, timeout) and client.alive:
            if connection.decoder.version:
                client.end_connection(MqttError("keep alive timeout", ReasonCode.KEEP_ALIVE_TIMEOUT))
            else:
                client.end_connection(MqttError("no CONNECT within connect_timeout", ReasonCode.KEEP_ALIVE_TIMEOUT))
            if client.version != 5:  # a 5.0 client gets DISCONNECT first
                connection.abort()
        elif client.unanswered and now - client.unanswered_since > timeout + CLOCK_STEP:
            # Nothing is read from such a client, so the gateway would not notice that the client has gone.
            refuse(client, MqttError("NATS does not answer", ReasonCode.SERVER_UNAVAILABLE))
        if client in registry.connections and (again := _next_check(client, now)) < inf:
            registry.checks.put(client, again)


def _next_check(client: Client, now: float) -> float:
    """Return the loop time in seconds until which nothing ends a silent connection; infinite = no keep alive."""
    connection = client.connection
    if client.state is not State.LIVE or connection.holds:
        return now
    return connection.silent_until
