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
from mqtt_nats.backbone.retry import PAUSE
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.codec import NotAuthorized, PacketTooLarge, QuotaExceeded, Will
from mqtt_nats.codec.wire import put_string
from mqtt_nats.ingress.publish import ANSWER_LINE, HEADERS, STATES, checked, may_answer, restored, route_for
from mqtt_nats.ingress.server_publish import inject, sender_line
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.headers import END, REPLY, START, get
from mqtt_streams.properties import header_lines
from mqtt_streams.sessions import NewerRecord, PoisonedRecord
from mqtt_streams.subjects import subject_to_topic
from mqtt_streams.timers import WILL, FiredTimer, schedule_block, timer_subject
from mqtt_streams.wills import StoredWill, will_block, will_subject

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.gateway.broker import Broker
    from mqtt_nats.pubsub.routing_table import Route

log = logging.getLogger("mqtt_nats.broker")


def check_will(client: Client, will: Will) -> Route:
    """Check that a will can be published; returns its route.

    Raises:
        MqttError: the topic or response topic is not permitted, or NATS would not take the message.
    """
    broker = client.broker
    properties = will.properties or {}
    lines = header_lines(properties)
    if "response_topic" in properties:
        broker.table.route(put_string(properties["response_topic"]))
        if not may_answer(client, properties["response_topic"]):
            raise NotAuthorized("the will's response topic is not permitted")
    route = route_for(client, put_string(will.topic))
    if client.guarded is not None and not client.guarded.may_publish(route.asked, will.qos, will.retain):
        raise NotAuthorized("the will is not permitted")
    most = broker.settings.max_retained_size
    if will.retain and most is not None and len(will.payload) > most:
        raise QuotaExceeded(f"retained messages have at most {most} bytes")
    size = len(will.payload) + checked(HEADERS + len(client.sender_header) + len(lines) + 2 * len(route.hpub))
    if size > broker.store.max_payload:
        raise PacketTooLarge(f"nats-server takes messages of {broker.store.max_payload} bytes")
    return route


def permitted_will(client: Client, will: Will) -> Will | None:
    """Return the will of a client; None: the rules do not permit the will for the state of a bridge, which is no error.

    A bridge of mosquitto has that will by default, and would try to connect for ever if it were refused.
    """
    guard, key = client.guarded, put_string(will.topic)
    if guard is None or not key.startswith(STATES, 2) or guard.may_publish(key, will.qos, will.retain):
        return will
    return None


async def keep_will(client: Client, will: Will) -> None:
    """Store the will of a client whose session has just been claimed [MQTT-3.1.2-8] (3.1.1), [MQTT-3.1.2-7] (5.0).

    Raises:
        ApiError: JetStream does not store the will.
    """
    broker = client.broker
    route = check_will(client, will)
    properties = will.properties or {}
    lines = header_lines(properties)
    if "response_topic" in properties:
        lines += ANSWER_LINE  # `check_will` refuses a response topic that is not permitted
    found = StoredWill(
        broker.identity,
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
    broker.store.put(b"HPUB %b " % will_subject(found.gateway, client.hash).encode(), headers, will.payload, operation)
    broker.link.kick()
    await operation.done


class KeepOp(AwaitedStore):
    """The store of a will; a will that is stored after the end of its connection is removed here."""

    __slots__ = ("client", "guard", "will")

    def __init__(self, client: Client, will: StoredWill) -> None:
        super().__init__()
        self.client = client
        self.will = will
        self.guard = client.guarded

    def stored(self, ack: bytes) -> None:
        """Keep the stored will, or remove it if the connection has ended or changed rules do not permit it."""
        client, will = self.client, self.will
        client.keep_will(will._replace(seq=sequence(ack)))
        if not client.alive or (client.guarded is not self.guard and not may_leave(client, will)):
            drop_will(client)
        super().stored(ack)


def may_leave(client: Client, will: StoredWill) -> bool:
    """Whether the present rules permit a stored will: its message, and answers on its response topic."""
    if client.guarded is None:
        return True
    topic = subject_to_topic(will.subject).encode()
    if not client.guarded.may_publish(len(topic).to_bytes(2) + topic, will.qos, will.retain):
        return False
    answers = get(START + will.lines + END, REPLY)
    return answers is None or may_answer(client, unquote(answers))


def drop_will(client: Client) -> Done | None:
    """Remove the will without its publication [MQTT-3.1.2-10] [MQTT-3.14.4-3] (3.1.1, 5.0).

    Returns:
        The deletion, to wait for before the connection is closed: the client's next connection must not find the will.
    """
    will = client.take_will()
    if will is None:
        return None
    deleted = Done()
    _delete(client.broker, will, deleted)
    client.broker.link.kick()
    return deleted


def leave_will(client: Client) -> None:
    """Publish the will of a connection that has ended without DISCONNECT, at once or after its delay."""
    will = client.take_will()  # [MQTT-3.1.2-10] (3.1.1, 5.0)
    if will is None or not client.epoch:  # [MQTT-3.1.2-12] (3.1.1)
        return
    broker = client.broker
    if client.taken:
        broker.spawn(_taken(client, will), f"will of {client.client_id}")
    elif will.delay and client.durable and client.expiry != 0:
        # [MQTT-3.1.3-9] (5.0); the session may expire before the delay is over
        delay = will.delay if client.expiry is None else min(will.delay, client.expiry)
        broker.late_wills[client] = will, natstime.now() + delay
    else:
        done = None
        if not client.durable:
            done = broker.last_wills[client] = Done()
        if client in broker.unchecked or not broker.online.is_set() or will.gateway != broker.identity:
            look = broker.spawn(_publish_if_there(broker, will, done), f"will of {client.client_id}")
            broker.tasks.await_at_end(look)
        else:
            publish_will(broker, will, done)


def leave_late_will(client: Client) -> None:
    """Set the timer of a delayed will, after the client's last job: a later write of the record would make it void."""
    broker = client.broker
    late = broker.late_wills.pop(client, None)
    if late is None:
        return
    will, at = late
    if client.taken:
        broker.spawn(_taken(client, will), f"will of {client.client_id}")
    else:
        delay_will(broker, will, client.epoch, at)


def delay_will(broker: Broker, will: StoredWill, epoch: int, at: float) -> None:
    """Have a will published at Unix time ``at``, unless the session record has been written after ``epoch``."""
    key = f"{will.gateway}.{will.client_hash}"
    headers = schedule_block(WILL, key, at, epoch)
    broker.store.put(b"HPUB %b " % timer_subject(WILL, key).encode(), headers, b"", TimerOp(will))
    broker.link.kick()


async def _taken(client: Client, will: StoredWill) -> None:
    """Publish the will of a moved session unless a gateway owns it: nats-server's listener ignores gateways' wills."""
    broker = client.broker
    while True:
        try:
            found = await broker.sessions.load(client.hash, client.client_id)
            break
        except NewerRecord:
            return  # a gateway's record: the record that it has replaced has named the will
        except PoisonedRecord:
            found = None
            break
        except (ApiError, NoResponders, RequestTimeout):
            await asyncio.sleep(PAUSE)
            await broker.online.wait()
    if found is None or found[0].v5 is None:
        await _publish_if_there(broker, will, None)


async def _publish_if_there(broker: Broker, will: StoredWill, done: Done | None) -> None:
    """Publish a will if it is still stored: another gateway may have published it while this one had no NATS.

    This gateway may also have passed for dead. The message may be so old that a repetition would not be recognised.
    """
    while True:
        await broker.online.wait()
        try:
            found = await broker.wills.load(will.gateway, will.client_hash)
            break
        except (ApiError, NoResponders, RequestTimeout):
            await asyncio.sleep(PAUSE)
    if found is not None and found.seq == will.seq:
        publish_will(broker, will, done)
    elif done is not None:
        done.event.set()


async def settle_wills(
    broker: Broker, client_hash: str, gateways: Iterable[str], epoch: int, *, continued: bool
) -> None:
    """Publish or delete the wills of a session that has been claimed or has ended.

    Args:
        epoch: epoch of the claim: a will that is not older belongs to a later connection and is left alone.
        continued: the session goes on: a will whose delay is not over is not published [MQTT-3.1.3-9] (5.0). The delay
            is over when its timer has fired, although no gateway may have handled it yet.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    for gateway in gateways:
        will = await broker.wills.load(gateway, client_hash)
        if will is None or will.epoch >= epoch:
            continue
        due = False
        if will.delay:
            key = f"{gateway}.{client_hash}"
            cancelled = await broker.timers.cancel(WILL, key, epoch)
            due = not cancelled and will.epoch <= await broker.timers.fired(WILL, key)
        if continued and will.delay and not due:
            await broker.wills.delete(will.seq)
        else:
            await published(broker, will)


async def will_due(broker: Broker, timer: FiredTimer) -> None:
    """Publish a will whose delay is over, unless the session was claimed since: then its owner deals with the will."""
    gateway, _, client_hash = timer.key.partition(".")
    will = await broker.wills.load(gateway, client_hash)
    if will is None:
        return
    try:
        found = await broker.sessions.load(client_hash)
        present = timer.epoch if found is None else found[1]
    except NewerRecord as error:
        present = error.seq
    except PoisonedRecord:
        present = timer.epoch
    if present == timer.epoch:
        await published(broker, will)


# -- publishing -------------------------------------------------------------------------------------


async def published(broker: Broker, will: StoredWill) -> None:
    """Publish a will, and wait until that is done."""
    done = Done()
    publish_will(broker, will, done)
    await done.event.wait()


def publish_will(broker: Broker, will: StoredWill, then: Done | None = None) -> None:
    """Publish a will that no gateway has published yet; ``then`` ends when that is done."""
    if will.qos == 0:
        _delete(broker, will, ZeroOp(broker, will, then))
    else:
        _publish(broker, will, then)
    broker.link.kick()


def _delete(broker: Broker, will: StoredWill, operation: PendingStore) -> None:
    broker.store.call(broker.delete_will, b'{"seq":%d,"no_erase":true}' % will.seq, operation)


def _publish(broker: Broker, will: StoredWill, then: Done | None) -> None:
    route = broker.table.route_to(will.subject.encode())
    more = restored(b"%b%b%b" % (START, will.lines, END), natstime.now())
    if more is not None:
        more = broker.replying.addressed(more, START + will.lines)
    operation = WillOp(broker, will, then)
    try:
        if route is None:
            raise TooLarge("its subject names no topic")
        sender = sender_line(will.lines)
        inject(broker, route, will.payload, will.qos, will.retain, sender, more, will.release, operation)
    except TooLarge as error:
        log.error("the will on %r cannot be published: %s", subject_to_topic(will.subject), error)
        operation.end()
        return
    if not operation.left:
        operation.end()


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

    __slots__ = ("broker", "then", "will")

    def __init__(self, broker: Broker, will: StoredWill, then: Done | None) -> None:
        super().__init__()
        self.broker = broker
        self.will = will
        self.then = then

    def stored(self, ack: bytes) -> None:
        """Count a finished store; the last one ends the operation."""
        self.left -= 1
        if self.left == 0:
            self.end()

    def waits(self) -> bool:
        """Return True: nobody would publish the will later."""
        return True

    def outlasts(self) -> bool:
        """Return True: the client has gone and does not repeat the will."""
        return True

    def failed(self, error: ApiError) -> None:
        """Log that a store is refused, and count it as finished: the client has gone."""
        log.error("the will on %r was not stored: %s", subject_to_topic(self.will.subject), error)
        self.stored(b"")

    def end(self) -> None:
        """Delete the stored will, which has been published; at QoS 0 it is deleted already."""
        if self.will.qos:
            _delete(self.broker, self.will, self.then or IgnoredStore())
            self.broker.link.kick()
        elif self.then is not None:
            self.then.event.set()


class ZeroOp(PendingStore):
    """The deletion of a stored will at QoS 0: the gateway that has deleted the will publishes it."""

    __slots__ = ("broker", "then", "will")

    def __init__(self, broker: Broker, will: StoredWill, then: Done | None) -> None:
        self.broker = broker
        self.will = will
        self.then = then

    def stored(self, ack: bytes) -> None:
        """Publish the will: this gateway has deleted it."""
        _publish(self.broker, self.will, self.then)
        self.broker.link.kick()
        self.broker.round.start()

    def failed(self, error: ApiError) -> None:
        """End without a publication: another gateway has deleted the will, or the deletion is refused."""
        if self.then is not None:
            self.then.event.set()


class TimerOp(PendingStore):
    """The store of the timer of a delayed will."""

    __slots__ = ("will",)

    def __init__(self, will: StoredWill) -> None:
        self.will = will

    def stored(self, ack: bytes) -> None:
        """Nothing to do: the will is published in time."""

    def failed(self, error: ApiError) -> None:
        """Log the error: without a timer the will is published when the session ends or is claimed."""
        log.error("the will on %r may come late: %s", subject_to_topic(self.will.subject), error)
