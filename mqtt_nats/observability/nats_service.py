# SPDX-License-Identifier: Apache-2.0
"""The gateway as a NATS micro service: `nats micro ls`, `info` and `stats` show it.

Subjects and documents conform to the NATS micro-service protocol: `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS`, also
followed by a name, or by a name and an id. The only endpoint is the request for the gateway's counters.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import orjson

from mqtt_nats import __version__
from mqtt_nats.observability.counters import snapshot
from mqtt_streams.gateway_subjects import STATUS

if TYPE_CHECKING:
    from mqtt_nats.gateway.broker import Broker

NAME: Final = "mqtt-nats"

TYPE: Final = "io.nats.micro.v1."


class Service:
    """Micro service of one gateway: its subscriptions and statistics."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._requests = 0
        self._seconds = 0.0
        for subject in (b"$SRV.*", b"$SRV.*.%b" % NAME.encode(), b"$SRV.*.%b.*" % NAME.encode()):
            broker.reconnect.subscribe(subject, self._asked)
        broker.reconnect.subscribe(STATUS + b"*", self._status)

    def _asked(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        tokens = subject.decode("utf-8", "replace").split(".")
        if not reply or (len(tokens) == 4 and tokens[3] != self._broker.identity):
            return
        answer = self.answer(tokens[1])
        if answer is not None:
            self._reply(reply, answer)

    def answer(self, verb: str) -> dict[str, Any] | None:
        """Return the answer to PING, INFO or STATS; None to any other verb."""
        broker = self._broker
        status = STATUS.decode() + broker.identity
        endpoint: dict[str, Any] = {"name": "status", "subject": status, "queue_group": ""}
        about = broker.lease.info
        found: dict[str, Any] = {
            "type": f"{TYPE}{verb.lower()}_response",
            "name": NAME,
            "id": broker.identity,
            "version": __version__,
            "metadata": {"listen": ", ".join(about.get("listen", [])), "name": about.get("name", "")},
        }
        if verb == "PING":
            return found
        if verb == "INFO":
            return found | {"description": "MQTT gateway", "endpoints": [endpoint | {"metadata": None}]}
        if verb != "STATS":
            return None
        nanoseconds = int(self._seconds * 1e9)
        endpoint |= {
            "num_requests": self._requests,
            "num_errors": 0,
            "last_error": "",
            "processing_time": nanoseconds,
            "average_processing_time": nanoseconds // max(self._requests, 1),
            "data": {
                "connections": len(broker.connections),
                "clients": len(broker.clients),
                "received": sum(broker.counters.received),
                "sent": sum(broker.counters.sent),
                "dropped": sum(broker.counters.drops(broker).values()),
            },
        }
        started = datetime.fromtimestamp(broker.counters.since, UTC).isoformat(timespec="milliseconds")
        return found | {"started": started.replace("+00:00", "Z"), "endpoints": [endpoint]}

    def _status(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if reply and subject[len(STATUS) :] == self._broker.identity.encode():
            self._broker.spawn(self._count(reply), "status")

    async def _count(self, reply: bytes) -> None:
        begun = time.monotonic()
        found = await snapshot(self._broker)
        self._requests += 1
        self._seconds += time.monotonic() - begun
        self._reply(reply, found)

    def _reply(self, reply: bytes, answer: dict[str, Any]) -> None:
        body = orjson.dumps(answer)
        self._broker.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
        self._broker.link.kick()
