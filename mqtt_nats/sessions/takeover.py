# SPDX-License-Identifier: Apache-2.0
"""Hears who claims the sessions of this gateway's clients: the acknowledgements of all writes to session records.

One subscription for all of them: one for each client would take more of every nats-server of a cluster than the
signals for the clients of other gateways take of this one. See docs/internals/rules.md#takeover-signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

import orjson

from mqtt_streams.hashing import SECOND_KEY_LENGTH

if TYPE_CHECKING:
    from mqtt_nats.backbone.link import NatsConnection
    from mqtt_nats.client.client import Client
    from mqtt_nats.gateway.broker import Broker

log = logging.getLogger("mqtt_nats.broker")

SIGNALS: Final = b"$MQTT.JSA.*.SP.*.*"
"""``$MQTT.JSA.<gateway>.SP.<hash of the client id>.<any>``: where a write is acknowledged."""

TURN: Final = 5.0
"""Seconds for which a connection waits until what an earlier one has sent is done."""


class Claims:
    """The connections that have claimed a session, or are about to."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._clients: dict[str, tuple[Client, ...]] = {}
        """By the client's hash: more than one while a session is taken over."""
        self._served: dict[str, asyncio.Event] = {}
        """By the client's hash: set when an earlier connection has nothing left to be done."""
        self._own: set[bytes] = set()
        """The ids that this gateway has had."""
        self.second_keys = True
        """Sessions may have second keys; where that is known not to be so nobody looks for one."""
        self._second_writes = 0
        """Writes to such sessions that were heard of."""
        self.named()
        self._sid = broker.link.subscribe_raw(SIGNALS, self._heard)

    def named(self) -> None:
        """The gateway has another id."""
        self._own.add(self._broker.identity.encode())

    def renew(self, link: NatsConnection) -> None:
        """Subscribe again after a reconnect."""
        link.renew(self._sid, SIGNALS)
        self.second_keys = True  # what was written meanwhile was not heard

    async def look_for_second_keys(self) -> bool:
        """Whether any session has its second key. Raises ApiError, NoResponders, RequestTimeout."""
        if self.second_keys:
            writes = self._second_writes
            found = await self._broker.sessions.any_second()
            self.second_keys = found or writes != self._second_writes
        return self.second_keys

    def listen(self, client: Client) -> None:
        """A client's session is about to be claimed."""
        self._clients[client.hash] = (*self._clients.get(client.hash, ()), client)

    async def turn(self, client: Client) -> None:
        """Wait until what earlier connections of a client have sent is done: to be taken over would drop it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TURN):
                while self._unserved(client):
                    event = self._served.setdefault(client.hash, asyncio.Event())
                    await event.wait()

    def _unserved(self, client: Client) -> bool:
        clients = self._clients.get(client.hash, ())
        earlier = clients[: clients.index(client)] if client in clients else ()
        return any(one.unserved and one.user == client.user and one.left for one in earlier)

    def overtaken(self, client: Client) -> bool:
        """Whether a later connection of the client has claimed the session here."""
        clients = self._clients.get(client.hash, ())
        later = clients[clients.index(client) + 1 :] if client in clients else ()
        return any(one.epoch for one in later)

    def served(self, client_hash: str) -> None:
        """What a connection of this client has sent is done, or nobody will do it."""
        event = self._served.pop(client_hash, None)
        if event is not None:
            event.set()

    def leave(self, client: Client) -> None:
        """A connection has ended."""
        self.served(client.hash)
        left = tuple(one for one in self._clients.get(client.hash, ()) if one is not client)
        if left:
            self._clients[client.hash] = left
        else:
            self._clients.pop(client.hash, None)

    def _heard(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        tokens = subject.split(b".")
        if len(tokens[4]) == SECOND_KEY_LENGTH:
            self.second_keys = True
            self._second_writes += 1
        if tokens[2] in self._own:
            self._broker.inbox.literal(subject, headers, payload)
            return
        clients = self._clients.get(tokens[4].decode("utf-8", "replace"))
        if clients is None:
            return
        try:
            ack = orjson.loads(payload)
            if "error" in ack or ack.get("domain", "") != self._broker.domain:
                return
            sequence = int(ack["seq"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        for client in clients:
            client.foreign = max(client.foreign, sequence)
            if client.epoch and sequence > client.epoch:
                log.info("%s: the session was taken over", client)
                client.taken_over()  # [MQTT-3.1.4-2] (3.1.1), [MQTT-3.1.4-3] (5.0)
