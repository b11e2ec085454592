# SPDX-License-Identifier: Apache-2.0
"""Scheduled messages: JetStream keeps them until they are due, then any gateway publishes them.

A scheduled message is a timer of ``$MQTT_timers`` that has all data of the message, so any gateway can publish it.
Above QoS 0 it is published under an id by which ``$MQTT_msgs`` recognises a repetition, then the timer is removed. At
QoS 0 the gateway that has removed the timer publishes the message.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mqtt_nats.backbone.pending_stores import CountedStore, TooLarge
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.ingress.publish_properties import aged, restored
from mqtt_nats.ingress.retained.ops import RetainedOp
from mqtt_nats.ingress.retained.store import is_retained, retain, tombstone_subject
from mqtt_nats.ingress.server_publish import Awaited, LoggedStore, inject, sender_line
from mqtt_streams import headers as block
from mqtt_streams.consumers import parse_ack
from mqtt_streams.qos2 import release_stored
from mqtt_streams.timers import MESSAGE, FiredTimer, schedule_block, timer_subject

if TYPE_CHECKING:
    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.ingress.interceptors import Taken
    from mqtt_nats.ingress.publish import Ingress
    from mqtt_nats.ingress.publish_properties import Extras
    from mqtt_nats.pubsub.data_path import Path
    from mqtt_nats.pubsub.routing_table import Route

log = logging.getLogger("mqtt_nats.broker")

REDELIVERED = 1


def release_of(identity: str) -> bytes:
    """Return the id by which the stream recognises a repetition of a scheduled message above QoS 0."""
    return b"q2-later-%b" % identity.encode()


def schedule(path: Path, taken: Taken, at: float, operation: CountedStore) -> None:
    """Have a message published at Unix time ``at``; another call for the same message moves its timer.

    Raises:
        TooLarge: NATS would not take the timer.
    """
    pairs = [(block.PUB, str(taken.qos)), (block.SUBJECT, taken.route.origin)]
    if taken.retain:
        pairs.append((block.RETAIN, "1"))
    key = taken.identity.decode()
    lines = taken.sender + (taken.more.recorded if taken.more is not None else b"")
    headers = schedule_block(MESSAGE, key, at, 0, pairs)[: -len(block.END)] + lines + block.END
    operation.expect()
    path.store.put(b"HPUB %b " % timer_subject(MESSAGE, key).encode(), headers, taken.payload, operation)


async def message_due(ingress: Ingress, timer: FiredTimer) -> None:
    """Publish a message that is due, and remove its timer."""
    timers = ingress.services.streams.timers
    qos = block.get_int(timer.headers, block.PUB)
    subject = block.get(timer.headers, block.SUBJECT)
    route = None if subject is None else ingress.services.path.table.route_to(subject.encode())
    if qos is None or qos > 2 or route is None:
        log.error("a scheduled message names no topic, or no QoS: removed")
        await timers.done(timer)
        return
    release = release_of(timer.key)
    lines = [line + b"\r\n" for line in timer.headers.split(b"\r\n")[1:] if line]
    sender = b"".join(sender_line(line) for line in lines)
    kept = b"".join(line for line in lines if not line.startswith(b"Nmqtt-Retain:"))
    more = restored(block.START + kept + block.END, natstime.now())
    if more is not None:
        more = ingress.replying.addressed(more, timer.headers)
    retained = block.get(timer.headers, block.RETAIN) is not None
    if qos:
        if await _published(ingress.services.nats, timer, route.subject, release):
            if retained:
                await _retain_again(ingress, timer, route, qos, sender, more, release)
        else:
            operation = Awaited()
            try:
                inject(ingress, route, timer.payload, qos, retained, sender, more, release, operation)
            except TooLarge as error:
                log.error("a scheduled message on %r cannot be published: %s", route.topic, error)
            else:
                _send(ingress.services.path)
                await operation.done
        await timers.done(timer)
    elif await timers.done(timer):
        try:
            inject(ingress, route, timer.payload, 0, retained, sender, more, release, LoggedStore(route.topic))
        except TooLarge as error:
            log.error("a scheduled message on %r cannot be published: %s", route.topic, error)
        _send(ingress.services.path)


async def _published(nats: NatsLinks, timer: FiredTimer, subject: str, release: bytes) -> bool:
    """Whether a redelivered timer's message has been published already, by any gateway."""
    ack = parse_ack(timer.ack.encode())
    if ack is None or ack.delivered <= REDELIVERED:
        return False
    return await release_stored(nats.inbox, subject, release.decode(), ack.timestamp_ns)


async def _retain_again(
    ingress: Ingress, timer: FiredTimer, route: Route, qos: int, sender: bytes, more: Extras | None, release: bytes
) -> None:
    """Retain a message that was published before, unless it, or a newer message, is retained.

    The gateway that published it may have died before it stored the retained copy: the copy was withheld, or its
    stream had no leader.
    """
    ack = parse_ack(timer.ack.encode())
    due = 0 if ack is None else ack.timestamp_ns
    if more is not None and more.expiry >= 0:
        more = aged(more._replace(born=due / 1e9), natstime.now())
        if more is None:
            return
    if await is_retained(ingress.services.streams, route.subject, timer.payload, due):
        return
    operation = Awaited(1)
    parent = RetainedOp(ingress.retained, operation, tombstone_subject(route, timer.payload))
    lines = sender if more is None else sender + more.lines + more.ttl
    try:
        retain(ingress.retained, route, timer.payload, qos, parent, lines, b"Nats-Msg-Id:%b\r\n" % release)
    except TooLarge as error:
        log.error("a scheduled message on %r cannot be retained: %s", route.topic, error)
        return
    _send(ingress.services.path)
    await operation.done


def _send(path: Path) -> None:
    path.link.kick()
    path.round.start()
