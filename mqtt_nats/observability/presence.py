# SPDX-License-Identifier: Apache-2.0
"""Presence: an event for each connection that begins or ends, on a NATS subject and a `$SYS` topic.

The gateway of a connection publishes its end, also when another gateway has taken the session over. For connections
that ended with a dead gateway, the gateway that deals with its clients publishes the end, if the session record still
names the dead gateway: a client that has connected elsewhere has an event there already, with a higher epoch.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from mqtt_nats.codec import ReasonCode
from mqtt_nats.observability.presence_events import Change, event, milliseconds, places, shortened
from mqtt_nats.observability.sys_topics import spread_under

if TYPE_CHECKING:
    from mqtt_nats.messages.identity import Identity
    from mqtt_nats.pubsub.data_path import Path
    from mqtt_nats.transport.connection import Connection

EVENTS_WAITING_MOST: Final = 10_000
"""Most events that wait while NATS is not connected; beyond it the oldest is dropped."""

GATEWAY_LOST: Final = "the gateway was lost"


class PresentClient(Protocol):
    """A connected client, as far as events show it: a session."""

    client_id: str
    version: int
    epoch: int
    connection: Connection

    @property
    def user(self) -> str | None:
        """Authenticated user; None = anonymous."""

    @property
    def expiry(self) -> int | None:
        """Session expiry interval in seconds; None = the session does not expire."""


class Presence:
    """Publisher of the presence events of one gateway.

    Args:
        wanted: whether events are published.
    """

    def __init__(self, path: Path, identity: Identity, *, wanted: bool) -> None:
        self._path, self._identity = path, identity
        self._wanted = wanted
        self._waiting: deque[tuple[Change, str, str, bytes]] = deque(maxlen=EVENTS_WAITING_MOST)
        self._since: dict[PresentClient, int] = {}
        """Time of the `connected` event by client, in milliseconds since 1970."""
        self._former: set[PresentClient] = set()
        """Connections from before `renamed`: the gateway that considered this one dead publishes their ends."""

    def renamed(self) -> None:
        """Note that the gateway was considered dead and has a new id, so that it does not publish the former ends."""
        self._former = set(self._since)

    def connected(self, client: PresentClient, present: bool) -> None:
        """Publish that a connection has been accepted."""
        if self._wanted:
            at = time.time()
            self._since[client] = milliseconds(at)
            more = {
                "session_present": present,
                "keepalive": int(client.connection.keepalive),
                "expiry_interval": client.expiry,
            }
            self._tell("connected", client, at, more)

    def disconnected(self, client: PresentClient, reason: ReasonCode, text: str) -> None:
        """Publish that a connection has ended, if its beginning was published under the present id."""
        since = self._since.pop(client, None)
        if since is None:
            return
        at = time.time()
        if client in self._former:
            self._former.discard(client)
            return
        more = {
            "reason": reason.name.lower() if reason else "normal_disconnection",
            "reason_code": int(reason),
            "reason_text": shortened(text),
            "connected_at": since,
        }
        self._tell("disconnected", client, at, more)

    def _tell(self, change: Change, client: PresentClient, at: float, more: dict[str, Any]) -> None:
        connection = client.connection
        about = {
            "connection": connection.number,
            "username": shortened(client.user) if client.user else client.user,
            "ipaddress": connection.host,
            "proto_name": "MQTT",
            "proto_ver": client.version,
        }
        self._publish(change, self._identity.id, client.client_id, client.epoch, at, about | more)

    def lost(self, gateway: str, client_id: str, epoch: int) -> None:
        """Publish that a connection has ended with its dead gateway."""
        if self._wanted:
            reason = ReasonCode.UNSPECIFIED_ERROR
            more = {"reason": "gateway_lost", "reason_code": int(reason), "reason_text": GATEWAY_LOST}
            self._publish("disconnected", gateway, client_id, epoch, time.time(), more)

    def _publish(
        self, change: Change, gateway: str, client_id: str, epoch: int, at: float, more: dict[str, Any]
    ) -> None:
        body = event(change, gateway, client_id, epoch, at, more)
        self._waiting.append((change, gateway, client_id, body))
        self.flush()

    def flush(self) -> None:
        """Publish the waiting events if NATS is connected."""
        link = self._path.link
        if link.wire is None or not link.online:
            return
        while self._waiting:
            change, gateway, client_id, body = self._waiting.popleft()
            where = places(change, gateway, client_id)
            link.out.append(b"PUB %b %d\r\n%b\r\n" % (where.subject.encode(), len(body), body))
            spread_under(self._path, where.topic, where.inner.encode(), body, abroad=True)
        link.kick()
