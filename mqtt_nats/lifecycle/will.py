# SPDX-License-Identifier: Apache-2.0
"""Wills: stored at CONNECT, published once when the connection ends without DISCONNECT.

The stored will names its gateway and the epoch of its session, so that any gateway that finds the end of the
connection, of its gateway or of the session can publish it (docs/internals/lifecycle.md#wills). At QoS 1 and 2 the
message is stored under the id ``will-<epoch>``, which makes a repetition harmless, and then the will is deleted. At QoS
0 a repetition could not be recognised: the gateway that has deleted the will publishes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import unquote

from mqtt_nats.backbone.pending_stores import AwaitedStore, CountedStore, IgnoredStore, PendingStore, TooLarge, sequence
from mqtt_nats.backbone.retry import RETRY_PAUSE_S
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.codec import NotAuthorized, PacketTooLarge, QosNotSupported, QuotaExceeded, Will
from mqtt_nats.codec.wire import put_string
from mqtt_nats.ingress.publish import HEADERS, STATES, checked, route_for
from mqtt_nats.ingress.publish_properties import ANSWER_LINE, may_answer, restored
from mqtt_nats.ingress.server_publish import inject, sender_line
from mqtt_nats.lifecycle.connection_hooks import ask_hooks_about_will
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, decode
from mqtt_streams.headers import END, REPLY, START, get
from mqtt_streams.properties import header_lines
from mqtt_streams.sessions import NewerRecord, PoisonedRecord
from mqtt_streams.stored import up_to
from mqtt_streams.subjects import subject_to_topic
from mqtt_streams.timers import WILL, FiredTimer, schedule_block, timer_subject
from mqtt_streams.wills import StoredWill, will_block, will_subject

if TYPE_CHECKING:
    from mqtt_nats.ingress.publish import Ingress, Publisher
    from mqtt_nats.pubsub.routing_table import Route
    from mqtt_nats.sessions.services import Services
    from mqtt_nats.sessions.session import Session
    from mqtt_nats.sessions.takeover import Claims

log = logging.getLogger("mqtt_nats.broker")


async def admit_will(client: Publisher, will: Will) -> Will | None:
    """Return the will of a CONNECT as hooks and rules let the gateway store it; None: the client has no will.

    Raises:
        MqttError: the QoS is not supported, a hook refuses the will, or it cannot be published.
    """
    most = client.connection.settings.max_qos
    if will.qos > most:  # [MQTT-3.2.2-12] (5.0)
        raise QosNotSupported(f"the QoS of the will is above {most}")
    changed = await ask_hooks_about_will(client, will)
    if changed is None or not _is_permitted(client, changed):
        return None
    _check(client, changed)
    return changed


def _check(client: Publisher, will: Will) -> Route:
    """Check that a will can be published; returns its route.

    Raises:
        MqttError: the topic or response topic is not permitted, or NATS would not take the message.
    """
    properties = will.properties or {}
    lines = header_lines(properties)
    if "response_topic" in properties:
        client.path.table.route(put_string(properties["response_topic"]))
        if not may_answer(client, properties["response_topic"]):
            raise NotAuthorized("the will's response topic is not permitted")
    route = route_for(client, put_string(will.topic))
    if client.guarded is not None and not client.guarded.may_publish(route.asked, will.qos, will.retain):
        raise NotAuthorized("the will is not permitted")
    most = client.services.settings.max_retained_size
    if will.retain and most is not None and len(will.payload) > most:
        raise PacketTooLarge(f"retained messages have at most {most} bytes")
    try:
        size = len(will.payload) + checked(HEADERS + len(client.sender_header) + len(lines) + 2 * len(route.hpub))
    except QuotaExceeded as error:  # a refusal that does not pass
        raise PacketTooLarge(str(error)) from None
    if size > client.path.store.max_payload:
        raise PacketTooLarge(f"nats-server takes messages of {client.path.store.max_payload} bytes")
    return route


def _is_permitted(client: Publisher, will: Will) -> bool:
    """Whether the rules permit a will for the state of a bridge; True for any other will, which `_check` may refuse.

    A bridge of mosquitto has that will by default, and would try to connect for ever if it were refused.
    """
    guard, key = client.guarded, put_string(will.topic)
    return guard is None or not key.startswith(STATES, 2) or guard.may_publish(key, will.qos, will.retain)


async def keep_will(client: Publisher, will: Will) -> None:
    """Store the will of a client whose session has just been claimed [MQTT-3.1.2-8] (3.1.1), [MQTT-3.1.2-7] (5.0).

    Raises:
        ApiError: JetStream does not store the will.
    """
    route = _check(client, will)
    properties = will.properties or {}
    lines = header_lines(properties)
    if "response_topic" in properties:
        lines += ANSWER_LINE  # `_check` refuses a response topic that is not permitted
    found = StoredWill(
        client.services.identity.id,
        client.hash,
        0,
        client.epoch,
        properties.get("will_delay_interval", 0),
        will.qos,
        will.retain,
        route.origin,
        client.sender_header + lines,  # [MQTT-3.1.3-10] (5.0)
        will.payload,
    )
    subject = route.origin.encode()
    headers = will_block(subject, found.qos, found.retain, found.epoch, found.delay, found.lines)
    operation = KeepOp(client, found)
    client.path.store.put(
        b"HPUB %b " % will_subject(found.gateway, client.hash).encode(), headers, will.payload, operation
    )
    client.path.link.kick()
    await operation.done


class KeepOp(AwaitedStore):
    """The store of a will; a will that is stored after the end of its connection is removed here."""

    __slots__ = ("client", "guard", "will")

    def __init__(self, client: Publisher, will: StoredWill) -> None:
        super().__init__()
        self.client = client
        self.will = will
        self.guard = client.guarded

    def stored(self, ack: bytes) -> None:
        """Keep the stored will, or remove it if the connection has ended or changed rules do not permit it."""
        client, will = self.client, self.will
        client.keep_will(will._replace(seq=sequence(ack)))
        if not client.alive or (client.guarded is not self.guard and not may_publish(client, will)):
            drop_will(client)
        super().stored(ack)


def may_publish(client: Publisher, will: StoredWill) -> bool:
    """Whether the present rules permit a stored will: its message, and answers on its response topic."""
    if client.guarded is None:
        return True
    topic = subject_to_topic(will.subject).encode()
    if not client.guarded.may_publish(len(topic).to_bytes(2) + topic, will.qos, will.retain):
        return False
    answers = get(START + will.lines + END, REPLY)
    return answers is None or may_answer(client, unquote(answers))


def drop_will(client: Publisher) -> Done | None:
    """Remove the will without its publication [MQTT-3.1.2-10] [MQTT-3.14.4-3] (3.1.1, 5.0).

    Returns:
        The deletion, to wait for before the connection is closed: the client's next connection must not find the will.
    """
    will = client.take_will()
    if will is None:
        return None
    deleted = Done()
    _delete(client.services, will, deleted)
    client.path.link.kick()
    return deleted


def publish_or_delay_will(wills: Wills, client: Publisher) -> None:
    """Publish the will of a connection that has ended without DISCONNECT, at once or after its delay."""
    will = client.take_will()  # [MQTT-3.1.2-10] (3.1.1, 5.0)
    if will is None or not client.epoch:  # [MQTT-3.1.2-12] (3.1.1)
        return
    if client.taken:
        wills.services.tasks.spawn(_publish_unless_owned(wills, client, will), f"will of {client.client_id}")
    elif will.delay and client.durable and client.expiry != 0:
        # [MQTT-3.1.3-9] (5.0); the session may expire before the delay is over
        delay = will.delay if client.expiry is None else min(will.delay, client.expiry)
        wills.late[client] = will, natstime.now() + delay
    else:
        done = None
        if not client.durable:
            done = wills.last[client] = Done()
        if (
            client in wills.services.registry.unchecked
            or not wills.services.nats.online.is_set()
            or will.gateway != wills.services.identity.id
        ):
            look = wills.services.tasks.spawn(_publish_if_there(wills, will, done), f"will of {client.client_id}")
            wills.services.tasks.await_at_end(look)
        else:
            publish_will(wills, will, done)


def set_late_will_timer(wills: Wills, client: Publisher) -> None:
    """Set the timer of a delayed will, after the client's last job: a later write of the record would make it void."""
    late = wills.late.pop(client, None)
    if late is None:
        return
    will, at = late
    if client.taken:
        wills.services.tasks.spawn(_publish_unless_owned(wills, client, will), f"will of {client.client_id}")
    else:
        set_will_timer(wills.services, will, client.epoch, at)


def set_will_timer(services: Services, will: StoredWill, epoch: int, at: float) -> None:
    """Set the timer by which a will is published at Unix time ``at``, unless its session is claimed after ``epoch``."""
    key = f"{will.gateway}.{will.client_hash}"
    headers = schedule_block(WILL, key, at, epoch)
    services.nats.store.put(b"HPUB %b " % timer_subject(WILL, key).encode(), headers, b"", TimerOp(will))
    services.nats.link.kick()


async def _publish_unless_owned(wills: Wills, client: Publisher, will: StoredWill) -> None:
    """Publish the will of a moved session unless a gateway owns it: nats-server's listener ignores gateways' wills."""
    while True:
        try:
            found = await wills.services.streams.sessions.load(client.hash, client.client_id)
            break
        except NewerRecord:
            return  # a gateway's record: the record that it has replaced has named the will
        except PoisonedRecord:
            found = None
            break
        except (ApiError, NoResponders, RequestTimeout):
            await asyncio.sleep(RETRY_PAUSE_S)
            await wills.services.nats.online.wait()
    if found is None or found[0].v5 is None:
        await _publish_if_there(wills, will, None)


async def _publish_if_there(wills: Wills, will: StoredWill, done: Done | None) -> None:
    """Publish a will if it is still stored: another gateway may have published it while this one had no NATS.

    The others may also have taken over the lease of this gateway. The message may be so old that JetStream would not
    recognise the repetition.
    """
    while True:
        await wills.services.nats.online.wait()
        try:
            found = await wills.services.streams.wills.load(will.gateway, will.client_hash)
            break
        except (ApiError, NoResponders, RequestTimeout):
            await asyncio.sleep(RETRY_PAUSE_S)
    if found is not None and found.seq == will.seq:
        publish_will(wills, will, done)
    elif done is not None:
        done.event.set()


async def settle_wills(wills: Wills, client_hash: str, gateways: Iterable[str], epoch: int, *, continued: bool) -> None:
    """Publish or delete the wills of a session that has been claimed or has ended.

    Args:
        epoch: epoch of the claim: a will that is not older belongs to a later connection and is left alone.
        continued: the session goes on: a will whose delay is not over is not published [MQTT-3.1.3-9] (5.0). The delay
            is over when its timer has fired, although no gateway may have handled it yet.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    for gateway in gateways:
        will = await wills.services.streams.wills.load(gateway, client_hash)
        if will is None or will.epoch >= epoch:
            continue
        due = False
        if will.delay:
            key = f"{gateway}.{client_hash}"
            cancelled = await wills.services.streams.timers.cancel(WILL, key, epoch)
            due = not cancelled and will.epoch <= await wills.services.streams.timers.fired(WILL, key)
        if continued and will.delay and not due:
            await wills.services.streams.wills.delete(will)
        else:
            await publish_and_wait(wills, will)


async def reset_will_timers(wills: Wills, client: Session, gateways: Iterable[str]) -> None:
    """Set the delays of a session's wills anew from now, as at the end of a connection; publish wills without one.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    for gateway in gateways:
        will = await wills.services.streams.wills.load(gateway, client.hash)
        if will is None or will.epoch >= client.epoch:
            continue
        if will.delay and client.expiry != 0:
            delay = will.delay if client.expiry is None else min(will.delay, client.expiry)
            set_will_timer(wills.services, will, client.epoch, natstime.now() + delay)
        else:
            await settle_wills(wills, client.hash, [gateway], client.epoch, continued=False)


async def will_due(wills: Wills, timer: FiredTimer) -> None:
    """Publish a will whose delay is over, unless the session was claimed since: then its owner deals with the will."""
    gateway, _, client_hash = timer.key.partition(".")
    will = await wills.services.streams.wills.load(gateway, client_hash)
    if will is None:
        return
    try:
        found = await wills.services.streams.sessions.load(client_hash)
        present = timer.epoch if found is None else found[1]
    except NewerRecord as error:
        present = error.seq
    except PoisonedRecord:
        present = timer.epoch
    if present == timer.epoch:
        await publish_and_wait(wills, will)


# -- publishing -------------------------------------------------------------------------------------


async def publish_and_wait(wills: Wills, will: StoredWill) -> None:
    """Publish a will, and wait until that is done."""
    done = Done()
    publish_will(wills, will, done)
    await done.event.wait()


def publish_will(wills: Wills, will: StoredWill, then: Done | None = None) -> None:
    """Publish a will that no gateway has published yet; ``then`` ends when that is done."""
    if will.qos == 0:
        _delete(wills.services, will, ZeroOp(wills, will, then))
    else:
        _publish(wills, will, then)
    wills.services.nats.link.kick()


def _delete(services: Services, will: StoredWill, operation: PendingStore) -> None:
    request = up_to(will_subject(will.gateway, will.client_hash), will.seq)
    services.nats.store.call(services.streams.purge_wills, request, operation)


def _publish(wills: Wills, will: StoredWill, then: Done | None) -> None:
    route = wills.services.path.table.route_to(will.subject.encode())
    more = restored(b"%b%b%b" % (START, will.lines, END), natstime.now())
    if more is not None:
        more = wills.ingress.replying.addressed(more, START + will.lines)
    operation = WillOp(wills, will, then)
    try:
        if route is None:
            raise TooLarge("its subject names no topic")
        sender = sender_line(will.lines)
        inject(wills.ingress, route, will.payload, will.qos, will.retain, sender, more, will.release, operation)
    except TooLarge as error:
        log.error("the will on %r cannot be published: %s", subject_to_topic(will.subject), error)
        operation.delete_stored_will()
        return
    if not operation.remaining:
        operation.delete_stored_will()


class Wills:
    """The wills of one account that are being published, or wait for the last job of their client."""

    def __init__(self, ingress: Ingress, claims: Claims) -> None:
        self.ingress, self.services, self.claims = ingress, ingress.services, claims
        self.last: dict[Session, Done] = {}
        """Wills that are being published, by client, of sessions that end with their connection."""
        self.late: dict[Session, tuple[StoredWill, float]] = {}
        """Delayed wills with their due Unix time in seconds, by client, of clients whose last job has not ended."""


class Done(PendingStore):
    """An operation whose end, success or failure, a coroutine awaits (``event``)."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def stored(self, ack: bytes) -> None:
        """Set the event."""
        self.event.set()

    def failed(self, error: ApiError) -> None:
        """Set the event: a failure is an end, too."""
        self.event.set()


class WillOp(CountedStore):
    """The stores of a will's message; after the last one the stored will is deleted."""

    __slots__ = ("then", "will", "wills")

    def __init__(self, wills: Wills, will: StoredWill, then: Done | None) -> None:
        super().__init__()
        self.wills = wills
        self.will = will
        self.then = then

    def stored(self, ack: bytes) -> None:
        """Count a finished store; the last one ends the operation."""
        self.remaining -= 1
        if self.remaining == 0:
            self.delete_stored_will()

    def waits(self) -> bool:
        """Return True: nobody would publish the will later."""
        return True

    def failed(self, error: ApiError) -> None:
        """Log that a store is refused, and count it as finished: the client has gone."""
        log.error("the will on %r was not stored: %s", subject_to_topic(self.will.subject), error)
        self.stored(b"")

    def delete_stored_will(self) -> None:
        """Delete the stored will, which has been published; at QoS 0 it is deleted already."""
        if self.will.qos:
            _delete(self.wills.services, self.will, self.then or IgnoredStore())
            self.wills.services.path.link.kick()
        elif self.then is not None:
            self.then.event.set()


class ZeroOp(PendingStore):
    """The deletion of a stored will at QoS 0: the gateway that has deleted the will publishes it."""

    __slots__ = ("then", "will", "wills")

    def __init__(self, wills: Wills, will: StoredWill, then: Done | None) -> None:
        self.wills = wills
        self.will = will
        self.then = then

    def stored(self, ack: bytes) -> None:
        """Publish the will if this gateway has deleted it; JetStream answers how many records it has removed."""
        if not decode(ack)["purged"]:
            self._end()
            return
        _publish(self.wills, self.will, self.then)
        self.wills.services.path.link.kick()
        self.wills.services.path.round.start()

    def failed(self, error: ApiError) -> None:
        """End without a publication: the deletion is refused."""
        self._end()

    def _end(self) -> None:
        if self.then is not None:
            self.then.event.set()


class TimerOp(PendingStore):
    """The store of the timer of a delayed will."""

    __slots__ = ("will",)

    def __init__(self, will: StoredWill) -> None:
        self.will = will

    def stored(self, ack: bytes) -> None:
        """Do nothing: the timer is stored, and the will is published in time."""

    def failed(self, error: ApiError) -> None:
        """Log the error: without a timer the will is published when the session ends or is claimed."""
        log.error("the will on %r may come late: %s", subject_to_topic(self.will.subject), error)
