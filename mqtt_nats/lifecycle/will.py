# SPDX-License-Identifier: Apache-2.0
"""Wills: stored at CONNECT, published once when the connection ends without DISCONNECT.

The stored will names its gateway and the epoch of its session, so that it can be published by whoever finds that
the connection, its gateway or the session has ended (docs/internals/rules.md#wills). At QoS 1 and 2 the message is
stored under the id ``will-<epoch>``, which makes a repetition harmless, and then the will is deleted. At QoS 0 there
is nothing that could recognise a repetition: whoever deletes the will publishes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import unquote

from mqtt_nats.backbone.pending import AwaitedStore, IgnoredStore, PendingStore, TooLarge, sequence
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
    """The route of a will that can be published.

    Raises:
        MqttError: its topic, or response topic, is not for clients, or NATS would not take the message.
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
    """The will of a client; None: the rules do not let a bridge tell the state of its connection, which is no error.

    A bridge of mosquitto has that will unless its configuration says otherwise, and would try to connect for ever.
    """
    guard, key = client.guarded, put_string(will.topic)
    if guard is None or not key.startswith(STATES, 2) or guard.may_publish(key, will.qos, will.retain):
        return will
    return None


async def keep_will(client: Client, will: Will) -> None:
    """Store the will of a client whose session has just been claimed [MQTT-3.1.2-8] (3.1.1), [MQTT-3.1.2-7] (5.0).

    Raises:
        ApiError: JetStream does not store it.
    """
    broker = client.broker
    route = check_will(client, will)
    properties = will.properties or {}
    lines = header_lines(properties)
    if "response_topic" in properties:
        lines += ANSWER_LINE  # else it had been refused
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
    """The store of a will, which may be stored after its connection has ended: nobody deals with it then."""

    __slots__ = ("client", "guard", "will")

    def __init__(self, client: Client, will: StoredWill) -> None:
        super().__init__()
        self.client = client
        self.will = will
        self.guard = client.guarded

    def stored(self, ack: bytes) -> None:
        """It is the connection's, if that is still there, and the rules have not changed meanwhile."""
        client, will = self.client, self.will
        client.will = will._replace(seq=sequence(ack))
        if not client.alive or (client.guarded is not self.guard and not may_leave(client, will)):
            drop_will(client)
        super().stored(ack)


def may_leave(client: Client, will: StoredWill) -> bool:
    """Whether the rules of now permit a stored will: its message, and answers on its response topic."""
    if client.guarded is None:
        return True
    topic = subject_to_topic(will.subject).encode()
    if not client.guarded.may_publish(len(topic).to_bytes(2) + topic, will.qos, will.retain):
        return False
    answers = get(START + will.lines + END, REPLY)
    return answers is None or may_answer(client, unquote(answers))


def drop_will(client: Client) -> Done | None:
    """The will is not to be published [MQTT-3.1.2-10] [MQTT-3.14.4-3] (3.1.1, 5.0).

    Returns:
        What to wait for before the client is let go: when it comes back at once, its will must not be found.
    """
    will, client.will = client.will, None
    if will is None:
        return None
    deleted = Done()
    _delete(client.broker, will, deleted)
    client.broker.link.kick()
    return deleted


def leave_will(client: Client) -> None:
    """The connection has ended without DISCONNECT: publish the will, now or when its delay is over."""
    will, client.will = client.will, None  # [MQTT-3.1.2-10] (3.1.1, 5.0)
    if will is None or not client.epoch:  # [MQTT-3.1.2-12] (3.1.1)
        return
    broker = client.broker
    if client.taken:
        broker.spawn(_taken(client, will), f"will of {client.client_id}")
    elif will.delay and client.durable and client.expiry != 0:
        # [MQTT-3.1.3-9] (5.0); the session may end before that
        delay = will.delay if client.expiry is None else min(will.delay, client.expiry)
        broker.late_wills[client] = will, natstime.now() + delay
    else:
        done = None
        if not client.durable:
            done = broker.last_wills[client] = Done()
        if client in broker.unchecked or not broker.online.is_set() or will.gateway != broker.identity:
            look = broker.spawn(_publish_if_there(broker, will, done), f"will of {client.client_id}")
            broker.farewells.add(look)
            look.add_done_callback(broker.farewells.discard)
        else:
            publish_will(broker, will, done)


def leave_late_will(client: Client) -> None:
    """Set the timer of a will that has a delay, once no job of its client writes the session record any more."""
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
    """Have a will published at Unix time ``at``, unless the session record is not that of ``epoch`` any more."""
    key = f"{will.gateway}.{will.client_hash}"
    headers = schedule_block(WILL, key, at, epoch)
    broker.store.put(b"HPUB %b " % timer_subject(WILL, key).encode(), headers, b"", TimerOp(will))
    broker.link.kick()


async def _taken(client: Client, will: StoredWill) -> None:
    """Somebody has claimed the session: a gateway deals with the will, nats-server's own listener does not know it."""
    broker = client.broker
    while True:
        try:
            found = await broker.sessions.load(client.hash, client.client_id)
            break
        except NewerRecord:
            return  # a gateway's: it has found the will's name in the record that it has replaced
        except PoisonedRecord:
            found = None
            break
        except (ApiError, NoResponders, RequestTimeout):
            await asyncio.sleep(PAUSE)
            await broker.online.wait()
    if found is None or found[0].v5 is None:
        await _publish_if_there(broker, will, None)


async def _publish_if_there(broker: Broker, will: StoredWill, done: Done | None) -> None:
    """Publish a will unless somebody has dealt with it while NATS was away from here, or this gateway passed for dead.

    Its message may have been published so long ago that nobody recognises a repetition.
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
    """Deal with the wills of a session that has been claimed, or has ended.

    Args:
        epoch: of the claim: a will that is not older is a later connection's, and this gateway is late.
        continued: the session goes on: a will whose delay is not over is not published [MQTT-3.1.3-9] (5.0). The delay
            is over when its timer has fired, although nobody may have looked yet.

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
    """The delay of a will is over: publish it, unless the session was claimed since: then its owner deals with it."""
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
    """Publish a will, and wait until it is stored."""
    done = Done()
    publish_will(broker, will, done)
    await done.event.wait()


def publish_will(broker: Broker, will: StoredWill, then: Done | None = None) -> None:
    """Publish a will that nobody else has published."""
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
        operation.left = 0
    if not operation.left:
        operation.end()


class Done(PendingStore):
    """Something that is waited for; its failure is the end of it too."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def stored(self, ack: bytes) -> None:
        """Done."""
        self.event.set()

    def failed(self, error: ApiError) -> None:
        """Done with."""
        self.event.set()


class WillOp(PendingStore):
    """The stores of a will; then the stored will is deleted."""

    __slots__ = ("broker", "left", "then", "will")

    def __init__(self, broker: Broker, will: StoredWill, then: Done | None) -> None:
        self.broker = broker
        self.will = will
        self.then = then
        self.left = 0

    def stored(self, ack: bytes) -> None:
        """One of them is done."""
        self.left -= 1
        if self.left == 0:
            self.end()

    def failed(self, error: ApiError) -> None:
        """Nobody is left to be told but the operator."""
        log.error("the will on %r was not stored: %s", subject_to_topic(self.will.subject), error)
        self.stored(b"")

    def end(self) -> None:
        """The will has been published."""
        if self.will.qos:
            _delete(self.broker, self.will, self.then or IgnoredStore())
            self.broker.link.kick()
        elif self.then is not None:
            self.then.event.set()


class ZeroOp(PendingStore):
    """The deletion of a stored will at QoS 0: who has deleted it publishes it."""

    __slots__ = ("broker", "then", "will")

    def __init__(self, broker: Broker, will: StoredWill, then: Done | None) -> None:
        self.broker = broker
        self.will = will
        self.then = then

    def stored(self, ack: bytes) -> None:
        """Nobody else has."""
        _publish(self.broker, self.will, self.then)
        self.broker.link.kick()
        self.broker.round.start()

    def failed(self, error: ApiError) -> None:
        """Somebody else has, or wants to."""
        if self.then is not None:
            self.then.event.set()


class TimerOp(PendingStore):
    """The store of the timer of a delayed will."""

    __slots__ = ("will",)

    def __init__(self, will: StoredWill) -> None:
        self.will = will

    def stored(self, ack: bytes) -> None:
        """The will is published in time."""

    def failed(self, error: ApiError) -> None:
        """It is published when the session ends, or goes on elsewhere."""
        log.error("the will on %r may come late: %s", subject_to_topic(self.will.subject), error)
