# SPDX-License-Identifier: Apache-2.0
"""The gateway as a NATS micro service: `nats micro ls`, `info` and `stats` show it.

Subjects and documents conform to the NATS micro-service protocol: `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS`, also
followed by a name, or by a name and an id. The only endpoint is the request for the gateway's counters.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from mqtt_nats import __version__
from mqtt_streams.gateway_subjects import STATUS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.base.tasks import Tasks
    from mqtt_nats.messages.identity import Identity

NAME: Final = "mqtt-nats"

TYPE: Final = "io.nats.micro.v1."


class Statistics(NamedTuple):
    """Numbers of a gateway: its start, Unix time in seconds; connections; clients; messages received, sent, dropped."""

    since: float
    connections: int
    clients: int
    received: int
    sent: int
    dropped: int


class Service:
    """Micro service of one gateway: its subscriptions and statistics.

    Args:
        about: the registration of the gateway: its name and its addresses.
        statistics: returns numbers for ``nats micro stats``.
        snapshot: returns all counters of the gateway, with its start as ``since`` (Unix time in seconds).
    """

    def __init__(
        self,
        nats: NatsLinks,
        identity: Identity,
        tasks: Tasks,
        about: Mapping[str, Any],
        statistics: Callable[[], Statistics],
        snapshot: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        self._link, self._identity, self._tasks = nats.link, identity, tasks
        self._about, self._statistics, self._snapshot = about, statistics, snapshot
        self._requests = 0
        self._seconds = 0.0
        for subject in (b"$SRV.*", b"$SRV.*.%b" % NAME.encode(), b"$SRV.*.%b.*" % NAME.encode()):
            nats.reconnect.subscribe(subject, self._asked)
        nats.reconnect.subscribe(STATUS + b"*", self._status)

    def _asked(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        tokens = subject.decode("utf-8", "replace").split(".")
        if not reply or (len(tokens) == 4 and tokens[3] != self._identity.id):
            return
        answer = self.answer(tokens[1])
        if answer is not None:
            self._reply(reply, answer)

    def answer(self, verb: str) -> dict[str, Any] | None:
        """Return the answer to PING, INFO or STATS; None to any other verb."""
        status = STATUS.decode() + self._identity.id
        endpoint: dict[str, Any] = {"name": "status", "subject": status, "queue_group": ""}
        about = self._about
        found: dict[str, Any] = {
            "type": f"{TYPE}{verb.lower()}_response",
            "name": NAME,
            "id": self._identity.id,
            "version": __version__,
            "metadata": {"listen": ", ".join(about.get("listen", [])), "name": about.get("name", "")},
        }
        if verb == "PING":
            return found
        if verb == "INFO":
            return found | {"description": "MQTT gateway", "endpoints": [endpoint | {"metadata": None}]}
        if verb != "STATS":
            return None
        numbers = self._statistics()
        nanoseconds = int(self._seconds * 1e9)
        endpoint |= {
            "num_requests": self._requests,
            "num_errors": 0,
            "last_error": "",
            "processing_time": nanoseconds,
            "average_processing_time": nanoseconds // max(self._requests, 1),
            "data": {name: value for name, value in numbers._asdict().items() if name != "since"},
        }
        started = datetime.fromtimestamp(numbers.since, UTC).isoformat(timespec="milliseconds")
        return found | {"started": started.replace("+00:00", "Z"), "endpoints": [endpoint]}

    def _status(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if reply and subject[len(STATUS) :] == self._identity.id.encode():
            self._tasks.spawn(self._count(reply), "status")

    async def _count(self, reply: bytes) -> None:
        begun = time.monotonic()
        found = await self._snapshot()
        self._requests += 1
        self._seconds += time.monotonic() - begun
        self._reply(reply, found)

    def _reply(self, reply: bytes, answer: dict[str, Any]) -> None:
        body = orjson.dumps(answer)
        self._link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
        self._link.kick()
