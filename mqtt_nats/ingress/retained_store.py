# SPDX-License-Identifier: Apache-2.0
"""Retained messages: how they are stored, replaced and removed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import PendingStore
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
"""TTL of a tombstone, in case its gateway dies before it removes the tombstone."""


def may_retain(client: Client, size: int, qos: int) -> bool:
    """Whether a payload of ``size`` bytes may be retained; otherwise the message is published without RETAIN.

    Raises:
        QuotaExceeded: it may not be retained, and its acknowledgement can have a reason code.
    """
    most = client.broker.settings.max_retained_size
    if most is None or size <= most:
        return True
    if client.version == 5 and qos:
        raise QuotaExceeded(f"retained messages have at most {most} bytes")
    not_retained(client, f"it has {size} bytes, more than {most}")
    return False


def not_retained(client: Client, why: str) -> None:
    """Count a message that is published but not retained, without a reason code for its client."""
    client.broker.count_not_retained()
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

    [MQTT-3.3.1-5] [MQTT-3.3.1-7] [MQTT-3.3.1-10] [MQTT-3.3.1-11]; called for RETAIN publishes only [MQTT-3.3.1-12].
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
        known_by: header line by which the stream recognises a repetition, also of a removal: a late repetition would
            remove a newer message.
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
    """Whether a message, or a newer one of its subject, is retained; an empty payload leaves nothing retained.

    Args:
        since_ns: time of the message in nanoseconds since 1970, by nats-server's clock.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    found = await broker.retained.get(subject)
    return not payload if found is None else found.time_ns >= since_ns
