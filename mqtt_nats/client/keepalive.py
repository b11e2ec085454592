# SPDX-License-Identifier: Apache-2.0
"""Clients of which nothing was heard in time, and those to whom NATS gives no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqtt_nats.client.connect import refuse
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.transport.connection import CLOCK_STEP

if TYPE_CHECKING:
    from mqtt_nats.gateway.broker import Broker


def end_silent(broker: Broker, now: float) -> None:
    """End the connections whose time is up at ``now`` (loop time)."""
    known, timeout = broker.settings, broker.settings.connect_timeout
    for client in list(broker.connections):
        connection = client.connection
        if connection.settings is not known:  # not asked each: twice a second, for every connection
            known, timeout = connection.settings, connection.settings.connect_timeout
        if client.alive and connection.expired(now, timeout):
            client.end(MqttError("nothing came in time", ReasonCode.KEEP_ALIVE_TIMEOUT))
            if client.version != 5:  # else it is told why
                connection.abort()
        elif client.unanswered and now - connection.opened > timeout + CLOCK_STEP:
            # Nothing is read from it meanwhile, so that it is not noticed when it gives up.
            refuse(client, MqttError("NATS does not answer", ReasonCode.SERVER_UNAVAILABLE))
