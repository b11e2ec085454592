# SPDX-License-Identifier: Apache-2.0
"""Limits of waiting messages: unread bytes of clients that do not read, and the backlog of absent clients.

A client whose socket takes no bytes is *clogged*; after ``stall_time`` its session is *stalled*: no reader brings it
messages, and those that the client has not read are fetched again when it reads. See
docs/internals/delivery.md#clients-that-do-not-read and #too-much-for-an-absent-client.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.base.logs import once
from mqtt_nats.codec import MqttError, QuotaExceeded, ReasonCode
from mqtt_nats.delivery.backlog_limit import limit_backlog
from mqtt_nats.delivery.draining import release_waiting
from mqtt_nats.delivery.position_recovery import end_shared_delivery, fetch_in_flight, limit_in_flight
from mqtt_nats.ingress.retained.replay import pages_of
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.groups.subscribe import acknowledged as ask_again
from mqtt_nats.transport.connection import Hold
from mqtt_streams.consumers import BACKSTOP_S

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import DeliveryServices, Receiver

log = logging.getLogger("mqtt_nats.broker")

POSTPONED_MOST: Final = 100
"""SUBSCRIBE and UNSUBSCRIBE packets that wait until a client reads; with more, the gateway does not read from it."""

LONGEST: Final = BACKSTOP_S / 2
"""Most seconds for which a session is stalled: nats-server removes consumers that are not used for long."""

LOOK_MOST: Final = 50_000
"""Packets that are examined in one turn of the event loop, so that other clients do not wait."""


class SlowClient:
    """A stalled session: no message is sent to its client."""

    __slots__ = ("postponed", "since", "waking")

    def __init__(self) -> None:
        self.since = monotonic()
        self.waking = False
        """Whether the client reads again, and its messages are being fetched."""
        self.postponed: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """Jobs that change subscriptions. They wait, since the client reads no answer."""

    def wake(self) -> None:
        """Note that the client reads again."""
        self.waking = True


def watch(delivery: DeliveryServices) -> None:
    """Begin to bound the bytes that wait for clients that do not read (`max_unread_bytes`)."""
    loop = asyncio.get_running_loop()
    begun = False

    def overfull() -> None:
        nonlocal begun
        if not begun:
            begun = True
            loop.call_soon(relieve_once)

    def relieve_once() -> None:
        nonlocal begun
        begun = False
        relieve(delivery)

    delivery.services.path.round.bound(delivery.services.settings.max_unread_bytes, overfull)


def look_after(delivery: DeliveryServices) -> None:
    """Find sessions that stall, and those whose clients read again. Called every `CLOCK_STEP` seconds."""
    now = monotonic()
    patience = delivery.services.settings.stall_time
    queued = looked = 0
    for client in _concerned(delivery):
        side = client.durable_side
        if side is None:
            continue
        write_buffer = client.write_buffer
        stall = side.stall
        asleep = stall is not None and not stall.waking
        try:
            if stall is not None and asleep and now - stall.since > LONGEST:
                client.end_connection(QuotaExceeded("the client has not read for too long"))
            elif write_buffer.clogged:
                if now - write_buffer.since > patience and looked < LOOK_MOST and stall is None:
                    looked += len(write_buffer.chunks)
                    stall_session(client, side)
            elif stall is not None and asleep:
                machine = side.machine
                if len(machine.inflight) + machine.released <= machine.limit // 2 or now - stall.since > patience:
                    stall.wake()
                    client.do(_wake(client, side, stall))
        except Exception:
            _fail(client)
        queued += _queued(side)
    if queued + delivery.services.path.round.held > delivery.services.settings.max_unread_bytes:
        relieve(delivery)


def _concerned(delivery: DeliveryServices) -> list[Receiver]:
    """Return the connected clients that do not read, whose session is stalled, or for which messages wait."""
    connections, waiting = delivery.registry.connections, delivery.waiting
    for side in list(waiting):
        machine, client = side.machine, side.client
        busy = side.stall is not None or machine.crowd or machine.others
        if not busy or client.durable_side is not side or client not in connections:
            waiting.discard(side)
    found = [side.client for side in waiting]
    if clogged := delivery.services.path.round.clogged:
        found += [one for one in connections if one.write_buffer in clogged and one.durable_side not in waiting]
    return found


def _fail(client: Receiver) -> None:
    """Log the present exception, an error of the gateway, and end the session: the clock of all sessions goes on."""
    if client.alive:
        log.exception("%s: the state of its delivery is wrong", client)
        client.end_connection(MqttError("internal error", ReasonCode.UNSPECIFIED_ERROR))


def stall_session(client: Receiver, side: DurableDelivery) -> None:
    """Stall a session: leave the messages that its client has not read to JetStream."""
    machine = side.machine
    if side.stalled or not machine.open:  # `not open`: the session is being resumed, or its connection ends
        return
    log.info("%s does not read: its messages wait in JetStream", client)
    end_shared_delivery(side)
    side.begin_stall(SlowClient())
    if client.write_buffer.clogged and machine.inflight:
        _take_back(client, side)
    machine.stop_sending()


def _take_back(client: Receiver, side: DurableDelivery) -> None:
    """Take PUBLISH packets of messages that are fetched again out of the client's write buffer."""
    machine = side.machine
    write_buffer = client.write_buffer
    first = 0
    if client.outgoing is not None:
        # A packet that has to be sent may use a topic alias that a packet before it sets: keep all before it.
        for number, data in enumerate(write_buffer.chunks):
            identifier = publish_id(data)
            if identifier and not machine.recallable(identifier):
                first = number + 1
        client.outgoing.forget()
    numbers = itertools.count()

    def keep(data: bytes) -> bool:
        if next(numbers) < first:
            return True
        identifier = publish_id(data)
        return not (identifier and machine.recall(identifier))

    write_buffer.sift(keep)


def publish_id(data: bytes) -> int:
    """Return the packet identifier of a PUBLISH packet at QoS 1 or 2; 0 for every other packet."""
    if data[0] >> 4 != 3 or not data[0] & 6:
        return 0
    pos = 1
    while data[pos] & 128:
        pos += 1
    pos += 1
    pos += 2 + int.from_bytes(data[pos : pos + 2], "big")
    return int.from_bytes(data[pos : pos + 2], "big")


def _queued(side: DurableDelivery | None) -> int:
    """Return the bytes of messages that wait for a place in the window of a durable session's client."""
    return sum(one.body.size for one in side.machine.queued) if side is not None else 0


def _held(client: Receiver) -> int:
    """Return the bytes that wait for a client outside of JetStream: unread, behind acknowledgements, or retained."""
    regular = client.regular_side.waiting_bytes if client.regular_side is not None else 0
    gates = sum(gate.waiting_bytes for last in (client.gates or {}).values() for gate in last.chain())
    return client.write_buffer.held + regular + gates + pages_of(client)


def postponed(client: Receiver, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Postpone a job until a stalled session goes on; False when the job can be done now."""
    stall = client.durable_side.stall if client.durable_side is not None else None
    if stall is None:
        return False
    stall.postponed.append(work)
    if len(stall.postponed) > POSTPONED_MOST:
        client.connection.hold(Hold.JOBS)
    return True


async def _wake(client: Receiver, side: DurableDelivery, stall: SlowClient) -> None:
    """Wake a stalled session: fetch the messages that were given up, and go on from its position."""
    position_writer = side.position_writer
    if position_writer is not None:
        if not await position_writer.flush():
            position_writer.end_if_moved()
            return
        for one in side.bindings.values():  # until `go_on`: NATS may be lost meanwhile, and the session may move
            one.source.hold(SubscriptionState.RETURNING)
        await retry_until_answered(client, partial(fetch_in_flight, client, side))
        await limit_backlog(client, side)
    if not client.alive:
        return
    side.end_stall()
    log.info("%s reads again", client)
    limit_in_flight(side)
    side.machine.go_on()
    client.delivery.feed.go_on(client, side)
    for one in [one for one in side.bindings.values() if one.source.whole]:
        release_waiting(side, one)  # the messages that others wait for may not be stored any more
    ask_again(client)
    client.connection.release(Hold.JOBS)
    for work in stall.postponed:
        client.do(work())


def relieve(delivery: DeliveryServices) -> None:
    """Reduce unread bytes: stall sessions, drop QoS 0 messages, end connections if need be; largest clients first."""
    most = delivery.services.settings.max_unread_bytes
    goal = most // 2
    loads = [(_held(client) + _queued(client.durable_side), client) for client in delivery.registry.connections]
    loads = sorted((one for one in loads if one[0]), key=lambda one: one[0], reverse=True)
    total = sum(load for load, _ in loads)
    if total <= most:
        return
    text = "%d bytes wait for clients that do not read (max_unread_bytes): the longest queues are emptied"
    log.warning(text, total, extra=once("max_unread_bytes"))
    for load, client in loads:
        if total <= goal:
            return
        if client.durable_side is not None:
            try:
                stall_session(client, client.durable_side)
            except Exception:
                _fail(client)
        if client.write_buffer.clogged:
            client.write_buffer.lose()
        total -= load - _held(client) - _queued(client.durable_side)
    unread = delivery.services.path.round.held
    for held, client in sorted(((_held(one), one) for _, one in loads), key=lambda one: one[0], reverse=True):
        if unread <= most:
            return
        unread -= held
        client.end_connection(QuotaExceeded("the client does not take its messages, and max_unread_bytes is exceeded"))
