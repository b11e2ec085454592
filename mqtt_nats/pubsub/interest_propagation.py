# SPDX-License-Identifier: Apache-2.0
"""Interest propagation: whether each nats-server on which gateways publish knows a subscription.

Theory of operation. A PONG tells that the own server has a subscription. In a cluster the other servers learn of the
subscription a moment later; messages published on them until then are missed. A request that follows the subscription
takes the same route in the same order, so when a gateway on another server has answered the request, that server
knows the subscription, too. One gateway per server answers: the gateways of a server form a queue group on a subject
of the server. One gateway of a server announces the server every few seconds: who hears the announcement does not
announce the same server. A gateway that connects asks which servers there are, and one gateway of each server answers.
A server from which no answer comes is not asked until a gateway announces it again.

See docs/internals/client.md#suback.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.backbone.inbox import NO_RESPONDERS
from mqtt_streams.gateway_subjects import ECHO, HERE, new_inbox

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.backbone.link import NatsConnection
    from mqtt_nats.pubsub.subscribers import Filter

log = logging.getLogger("mqtt_nats.broker")

SERVERS_TIMEOUT: Final = 5.0
"""Maximum seconds to wait for the answers of servers.

Where no gateway is left, nats-server says so at once. Silence is that of a process which is slow, or stands still.
"""

ANNOUNCEMENT_PAUSE_LEAST_S: Final = 5.0
"""Least seconds between two announcements of a server; at most twice as many."""

LATE_TIMES_POWER: Final = 10.0
"""How much more likely late times of an announcement are than early ones, as power of e. Of up to e^10 gateways few are
early, and the others hear them in time."""

SERVERS_REMEMBERED_MOST: Final = 1000
"""Maximum number of servers that are remembered."""


class _Echo:
    """Request to all servers, for all subscriptions that were made in one turn of the event loop."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.missing: set[bytes] = set()
        self._timer: asyncio.TimerHandle | None = None

    def send_to(self, nodes: set[bytes], timer: asyncio.TimerHandle) -> None:
        """Note the servers whose answer is missing, and the timer after which they are given up."""
        self.missing, self._timer = nodes, timer

    def release_waiting(self) -> None:
        """Let those go on that wait for the answers."""
        if self._timer is not None:
            self._timer.cancel()
        self.done.set_result(None)


class Nodes:
    """Servers of other gateways, as one gateway knows them."""

    def __init__(self, nats: NatsLinks) -> None:
        self._nats = nats
        self.others: set[bytes] = set()
        """Ids of servers on which gateways publish, without the own server."""
        self._prefixes: dict[NatsConnection, bytes] = {}
        self._sids: dict[NatsConnection, bytes] = {}
        self._coming: dict[NatsConnection, _Echo] = {}
        self._open: dict[bytes, _Echo] = {}
        self._count = 0
        self._announced = 0.0
        """Loop time in seconds at which this gateway announces its server, unless another gateway does before."""
        for link in (nats.link, nats.wild, nats.shared):
            self._prefixes[link] = prefix = new_inbox()
            self._sids[link] = link.subscribe_raw(prefix + b">", self._answered)
        self._here_sid = nats.link.subscribe_raw(HERE, self._heard)
        self._echo_sid = nats.link.subscribe_raw(ECHO + server_id(nats.link), self._asked, b"echo")
        self._answer_sid = nats.link.subscribe_raw(HERE, self._answer, server_id(nats.link))
        self._inquire()
        nats.reconnect.register(Phase.REQUESTS, partial(self.renew, nats.link))

    def renew(self, link: NatsConnection) -> None:
        """Subscribe again after a reconnect, maybe to another server."""
        link.renew(self._sids[link], self._prefixes[link] + b">")
        if link is self._nats.link:
            link.renew(self._here_sid, HERE)
            for sid in (self._echo_sid, self._answer_sid):
                link.unsubscribe_raw(sid)
            self._echo_sid = link.subscribe_raw(ECHO + server_id(link), self._asked, b"echo")
            self._answer_sid = link.subscribe_raw(HERE, self._answer, server_id(link))
            self._inquire()

    def tick(self, now: float) -> None:
        """Announce this gateway's server if it is time; called about once a second with loop time in seconds."""
        if now >= self._announced:
            self._postpone(now)
            self._nats.publish(HERE, server_id(self._nats.link))

    def _postpone(self, now: float) -> None:
        """Announce this gateway's server later: at a random time, so that one of its gateways is the first."""
        self._announced = now + time_to_announcement()

    async def fence(self, link: NatsConnection) -> None:
        """Return when every server on which a gateway publishes knows what ``link`` has subscribed so far.

        Raises:
            TimeoutError: the server of ``link`` does not answer.
        """
        if not self._missing(link):
            await link.fence()
            return
        echo = self._coming.get(link)
        if echo is None:
            echo = self._coming[link] = _Echo()
            asyncio.get_running_loop().call_soon(self._ask, link)
        await link.fence()
        await asyncio.wait([echo.done])

    async def fence_filters(self, filters: Iterable[Filter]) -> None:
        """Wait until NATS has taken subscriptions, on every server from which messages may come.

        Raises:
            TimeoutError: NATS does not answer.
        """
        nats = self._nats
        await self.fence(nats.link)
        if any(found.link is nats.wild for found in filters):
            await self.fence(nats.wild)

    async def fence_wild(self, filters: Iterable[Filter]) -> None:
        """Wait until NATS has taken the subscriptions on the connection for wildcards, if there are any.

        Raises:
            TimeoutError: NATS does not answer.
        """
        if any(found.link is self._nats.wild for found in filters):
            await self._nats.wild.fence()

    def _missing(self, link: NatsConnection) -> set[bytes]:
        return {*self.others, server_id(self._nats.link)} - {server_id(link)}

    def _ask(self, link: NatsConnection) -> None:
        echo = self._coming.pop(link)
        self._count += 1
        number = b"%x" % self._count
        timer = asyncio.get_running_loop().call_later(SERVERS_TIMEOUT, self._give_up, number)
        echo.send_to(self._missing(link), timer)
        for node in echo.missing:
            link.out.append(b"PUB %b%b %b%b.%b 0\r\n\r\n" % (ECHO, node, self._prefixes[link], number, node))
        link.kick()
        self._open[number] = echo
        if not echo.missing:
            self._end(number, echo)

    def _give_up(self, number: bytes) -> None:
        echo = self._open.get(number)
        if echo is not None:
            log.info("no gateway answers from %d nats-servers", len(echo.missing))
            self.others -= echo.missing
            self._end(number, echo)

    def _end(self, number: bytes, echo: _Echo) -> None:
        del self._open[number]
        echo.release_waiting()

    def _answered(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        *_, number, node = subject.split(b".")
        if node == b"here":
            self._note(payload)
            return
        if headers.startswith(NO_RESPONDERS):
            self.others.discard(node)  # the last gateway of that server has gone
        else:
            self._note(node)  # the answer may come after the wait
        echo = self._open.get(number)
        if echo is not None:
            echo.missing.discard(node)
            if not echo.missing:
                self._end(number, echo)

    def _asked(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if reply:
            self._nats.publish(reply, b"")

    def _heard(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if payload == server_id(self._nats.link):
            self._postpone(asyncio.get_running_loop().time())
        self._note(payload)

    def _answer(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Tell a gateway that has connected of this server; of the gateways of a server one is asked."""
        if reply:
            self._nats.publish(reply, server_id(self._nats.link))

    def _note(self, node: bytes) -> None:
        if is_server_id(node) and len(self.others) < SERVERS_REMEMBERED_MOST and node != server_id(self._nats.link):
            self.others.add(node)

    def _inquire(self) -> None:
        """Announce this gateway's server, and ask for the others."""
        link = self._nats.link
        own, reply = server_id(link), self._prefixes[link] + b"here"
        link.out.append(b"PUB %b %b %d\r\n%b\r\n" % (HERE, reply, len(own), own))
        link.kick()


def time_to_announcement() -> float:
    """Return a random time, `ANNOUNCEMENT_PAUSE_LEAST_S` to twice that; the least of many is far from the next."""
    return ANNOUNCEMENT_PAUSE_LEAST_S * (
        1 + math.log1p(random.random() * math.expm1(LATE_TIMES_POWER)) / LATE_TIMES_POWER
    )


def server_id(link: NatsConnection) -> bytes:
    """Return the id of the server to which a link is, or was last, connected."""
    return str(link.server.get("server_id", "")).encode()


def is_server_id(text: bytes) -> bool:
    """Return whether a text may be the id of a nats-server."""
    return text.isalnum() and len(text) <= 64
