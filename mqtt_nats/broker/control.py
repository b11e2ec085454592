# SPDX-License-Identifier: Apache-2.0
"""What a gateway answers to ``mqtt-nats ctl``: requests over NATS, on subjects that MQTT clients cannot reach."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import orjson

from mqtt_nats.broker.reporting import COUNTERS, reported

if TYPE_CHECKING:
    from mqtt_nats.backbone.link import Link
    from mqtt_nats.broker.context import Broker
    from mqtt_nats.broker.leases import Lease

WHO: Final = b"$MQTT.gateways.who"
"""Every gateway answers with what it is."""

PLUGINS: Final = b"$MQTT.gateways.plugins"
"""Every gateway that is meant does something with a plugin, and tells what it has then."""

RELOAD: Final = b"$MQTT.gateways.reload"
"""Every gateway that is meant reads its files again, and tells what is wrong with them."""

LOOK: Final = b"$MQTT.gateways.look"
"""Every gateway looks at once for gateways whose lease has lapsed."""


class Control:
    """The subscriptions of one gateway."""

    def __init__(self, broker: Broker, lease: Lease) -> None:
        self._broker = broker
        self._lease = lease
        subscribe = broker.link.subscribe_raw
        self._sids = [(subscribe(WHO, self._who), WHO), (subscribe(LOOK, self._look), LOOK)]
        self._sids.append((subscribe(PLUGINS, self._plugins), PLUGINS))
        self._sids.append((subscribe(COUNTERS, partial(reported, broker)), COUNTERS))

    def renew(self, link: Link) -> None:
        """Subscribe again after a reconnect."""
        for sid, subject in self._sids:
            link.renew(sid, subject)

    def _who(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if reply:
            body = orjson.dumps(self.state())
            self._broker.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
            self._broker.link.kick()

    def _plugins(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        plugins = self._broker.plugins
        if reply and plugins is not None:
            self._broker.spawn(self._answer(reply, plugins.asked(payload)), "plugins")

    async def _answer(self, reply: bytes, work: Coroutine[Any, Any, dict[str, Any] | None]) -> None:
        found = await work
        if found is not None:
            body = orjson.dumps({"id": self._broker.identity, **found})
            self._broker.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
            self._broker.link.kick()

    def _look(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        self._lease.wake.set()

    def state(self) -> dict[str, Any]:
        """What the gateway is, and what it has."""
        broker = self._broker
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            **self._lease.info,
            "id": broker.identity,
            "time": time.time(),
            "lease": self._lease.ttl,
            "connections": len(broker.connections),
            "durable": sum(client.durable_side is not None for client in broker.clients.values()),
            "server": broker.link._server_info.get("server_name", ""),
            "cluster": broker.link._server_info.get("cluster", ""),
            "draining": broker.closing,
            "passed_over": broker.passed_over,
            "not_retained": broker.not_retained,
            "obstacle": broker.readiness.reason,
            "memory": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            "tasks": len(asyncio.all_tasks()),
            "cpu": usage.ru_utime + usage.ru_stime,
        }
