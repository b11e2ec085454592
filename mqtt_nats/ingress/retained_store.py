# SPDX-License-Identifier: Apache-2.0
"""Retained messages: stored, replaced, removed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending import PendingStore
from mqtt_nats.codec import QuotaExceeded
from mqtt_nats.ingress.retained_deferral import consider
from mqtt_streams.retained import retained_subject, set_block, tombstone_block

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.gateway.broker import Broker
    from mqtt_nats.ingress.publish import Extras
    from mqtt_nats.pubsub.routing_table import Route

log = logging.getLogger("mqtt_nats.broker")

ORPHANED: Final = b"Nats-TTL:60s\r\n"
"""Of a tombstone whose gateway dies before it removes it."""


def may_retain(client: Client, size: int, qos: int) -> bool:
    """Whether a payload of ``size`` bytes may be retained. What may not is passed on like any other message.

    Raises:
        QuotaExceeded: it may not, and its client can be told so in the acknowledgement.
    """
    most = client.broker.settings.max_retained_size
    if most is None or size <= most:
        return True
    if client.version == 5 and qos:
        raise QuotaExceeded(f"retained messages have at most {most} bytes")
    not_retained(client, f"it has {size} bytes, more than {most}")
    return False


def not_retained(client: Client, why: str) -> None:
    """A message was passed on, but is not retained, and its client cannot be told."""
    client.broker.not_retained += 1
    log.debug("%s: a message is not retained: %s", client, why)


def store_retained(
    client: Client,
    route: Route,
    payload: bytes,
    qos: int,
    operation: PendingStore,
    release: bytes,
    more: Extras | None = None,
) -> None:
    """Retain a message, or with an empty payload remove the retained message of the topic.

    [MQTT-3.3.1-5] [MQTT-3.3.1-7] [MQTT-3.3.1-10] [MQTT-3.3.1-11]; nobody else calls it [MQTT-3.3.1-12].
    [MQTT-3.3.1-5] [MQTT-3.3.1-6] [MQTT-3.3.1-7] [MQTT-3.3.1-8] (5.0)
    """
    known_by = b"Nats-Msg-Id:%b\r\n" % release if release else b""
    lines = client.sender_header
    if more is not None:
        lines += more.lines + more.ttl
    retain(client.broker, route, payload, qos, operation, lines, known_by)


def retain(
    broker: Broker, route: Route, payload: bytes, qos: int, operation: PendingStore, lines: bytes, known_by: bytes = b""
) -> None:
    """Retain a message with these header lines, or with an empty payload remove the retained message of the topic.

    Args:
        known_by: the header line by which a repetition is recognised, of a removal too: something newer may be there.
    """
    if payload:
        headers = set_block(route.topic, qos << 1 | 1, broker.identity, known_by + lines)
    else:
        headers = tombstone_block(route.topic, broker.identity, known_by + ORPHANED)
    target = b"HPUB %b " % retained_subject(route.subject).encode()
    if broker.unchecked or broker.withholding is not None:
        consider(broker, operation)
    broker.store.put(target, headers, payload, operation)
    broker.retaining.add(operation)


async def is_retained(broker: Broker, subject: str, payload: bytes, since_ns: int) -> bool:
    """Whether what was published at a time, or something newer, is retained; an empty payload leaves nothing.

    Args:
        since_ns: in nanoseconds, by nats-server's clock.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    found = await broker.retained.get(subject)
    return not payload if found is None else found.time_ns >= since_ns
