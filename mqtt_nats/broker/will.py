# SPDX-License-Identifier: Apache-2.0
"""Wills: checked at CONNECT, published when the connection ends without DISCONNECT."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mqtt_nats.backbone.store import TooLarge
from mqtt_nats.broker.operations import RetainedOp, WillOp
from mqtt_nats.broker.publishing import HEADERS, bare
from mqtt_nats.broker.retaining import store_retained
from mqtt_nats.codec import MqttError, PacketTooLarge, Will
from mqtt_nats.pubsub.message import Message

if TYPE_CHECKING:
    from mqtt_nats.broker.client import Client
    from mqtt_nats.pubsub.table import Route

log = logging.getLogger("mqtt_nats.broker")


def check_will(client: Client, will: Will) -> Route:
    """The route of a will that can be published.

    Raises:
        MqttError: its topic is not for clients, or NATS would not take the message.
    """
    topic = will.topic.encode()
    route = client.broker.table.route(len(topic).to_bytes(2, "big") + topic)
    size = len(will.payload) + HEADERS + len(client.sender_header) + len(route.hpub)
    if size > client.broker.store.max_payload:
        raise PacketTooLarge(f"nats-server takes messages of {client.broker.store.max_payload} bytes")
    return route


def publish_will(client: Client) -> None:
    """Publish the will: the connection ended without DISCONNECT [MQTT-3.1.2-8]."""
    will, client.will = client.will, None  # [MQTT-3.1.2-10]
    if will is None:  # [MQTT-3.1.2-12]
        return
    broker = client.broker
    try:
        route = check_will(client, will)
    except MqttError as error:
        log.error("the will of %r cannot be published: %s", client.client_id, error)
        return
    payload = will.payload
    try:
        if will.retain:  # [MQTT-3.1.2-16] [MQTT-3.1.2-17]
            parent = WillOp(will.topic)
            store_retained(client, route, payload, will.qos, RetainedOp(client, parent, not payload), b"")
        message = Message(route.key, payload, will.qos, client.client_id)
        if will.qos == 0:
            broker.link.out.append(b"%b%d\r\n%b\r\n" % (route.pub, len(payload), payload))
        else:
            headers = b"NATS/1.0\r\nNmqtt-Pub:%d\r\nNmqtt-Id:%b\r\n%b\r\n" % (
                will.qos,
                broker.next_id(),
                client.sender_header,
            )
            bare(client, route, headers, payload)
            broker.store.put(route.msgs, headers, payload, WillOp(will.topic))
    except TooLarge as error:
        log.error("the will of %r cannot be published: %s", client.client_id, error)
        return
    broker.fanout.local(route, message)
    broker.link.kick()
