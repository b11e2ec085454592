# SPDX-License-Identifier: Apache-2.0
"""Retained messages: stored, replaced, removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqtt_nats.backbone.store import Op
from mqtt_streams.retained import retained_subject, set_block, tombstone_block

if TYPE_CHECKING:
    from mqtt_nats.broker.client import Client
    from mqtt_nats.broker.context import Broker
    from mqtt_nats.broker.publishing import Extras
    from mqtt_nats.pubsub.table import Route


def store_retained(
    client: Client, route: Route, payload: bytes, qos: int, operation: Op, release: bytes, more: Extras | None = None
) -> None:
    """Retain a message, or with an empty payload remove the retained message of the topic.

    [MQTT-3.3.1-5] [MQTT-3.3.1-7] [MQTT-3.3.1-10] [MQTT-3.3.1-11]; nobody else calls it [MQTT-3.3.1-12].
    [MQTT-3.3.1-5] [MQTT-3.3.1-6] [MQTT-3.3.1-7] [MQTT-3.3.1-8] (5.0)
    """
    lines = client.sender_header + (b"Nats-Msg-Id:%b\r\n" % release if release else b"")
    if more is not None:
        lines += more.lines + more.ttl
    retain(client.broker, route, payload, qos, operation, lines)


def retain(broker: Broker, route: Route, payload: bytes, qos: int, operation: Op, lines: bytes) -> None:
    """Retain a message with these header lines, or with an empty payload remove the retained message of the topic."""
    if payload:
        headers = set_block(route.topic, qos << 1 | 1, broker.identity, lines)
    else:
        headers = tombstone_block(route.topic, broker.identity)
    target = b"HPUB %b " % retained_subject(route.subject).encode()
    broker.store.put(target, headers, payload, operation)
    broker.retaining.add(operation)
