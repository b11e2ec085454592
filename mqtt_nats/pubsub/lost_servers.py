# SPDX-License-Identifier: Apache-2.0
"""Loss of a nats-server: live copies that it had not passed on are missing at gateways on other nats-servers.

The publisher's gateway has lost its connection, the others have not. So a gateway that connects to another nats-server
names the former one, before its live copies. If no gateway answers there any more, the others read what is
stored, as after a gap of their own. See docs/internals/pubsub.md#gaps.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.messages.live_copies import IDS_REMEMBERED_S
from mqtt_nats.pubsub.backfill import GAP_BEFORE_S
from mqtt_nats.pubsub.interest_propagation import is_server_id, server_id
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.gateway_subjects import ECHO, LOST

if TYPE_CHECKING:
    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.backbone.link import Handler, NatsConnection
    from mqtt_nats.base.tasks import Tasks
    from mqtt_nats.pubsub.backfill import Gaps

ONE_LOSS_S: Final = 10.0
"""Seconds in which a nats-server is lost once, for the gateways that name it and for a connection that had it."""

ANSWER_WAIT_S: Final = 1.0
"""Seconds after which a server counts as lost from which no gateway answers: then messages are read that have come."""

SERVERS_NOTED_MOST: Final = 16
"""Maximum number of nats-servers that are lost in `ONE_LOSS_S` for each connection; others are not looked at."""


class LostServers:
    """Lost nats-servers, as the gateways of a cluster name them."""

    def __init__(self, nats: NatsLinks, gaps: Gaps, tasks: Tasks) -> None:
        self._nats, self._gaps, self._tasks = nats, gaps, tasks
        self._left: dict[bytes, int] = {}
        """Lost servers, with their Unix time in seconds when they were last heard, until they are certainly named."""
        self._noted: dict[NatsConnection, dict[bytes, float]] = {nats.link: {}, nats.wild: {}}
        """Loop times in seconds at which servers were lost, or named as lost, by connection."""
        self._sids = {link: link.subscribe_raw(LOST, self._named(link)) for link in self._noted}
        for link in self._noted:
            link.call_on_wire(partial(self._changed, link))
        nats.reconnect.register(Phase.REQUESTS, partial(self.renew, nats.link))
        nats.reconnect.register(Phase.SESSIONS, self._left.clear)  # nats-server has handled what was sent before

    def renew(self, link: NatsConnection) -> None:
        """Subscribe again after a reconnect."""
        link.renew(self._sids[link], LOST)

    def _changed(self, link: NatsConnection, up: bool) -> None:
        server = server_id(link)
        if not up:
            self._note(link, server)
            if link is self._nats.link and len(self._left) < SERVERS_NOTED_MOST:
                self._left.setdefault(server, int(natstime.converted(link.heard)))
        elif link is self._nats.link:
            self._left.pop(server, None)  # it was not lost
            for one, heard in self._left.items():
                self._nats.publish(LOST, b"%b %d" % (one, heard))

    def _note(self, link: NatsConnection, server: bytes) -> bool:
        """Note that a server is lost for a connection; False: it was noted already, or there is no room."""
        now = asyncio.get_running_loop().time()
        noted = {one: at for one, at in self._noted[link].items() if now - at < ONE_LOSS_S}
        self._noted[link] = noted
        if server in noted or len(noted) >= SERVERS_NOTED_MOST:
            return False
        noted[server] = now
        return True

    def _named(self, link: NatsConnection) -> Handler:
        def named(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
            server, _, heard = payload.partition(b" ")
            usable = is_server_id(server) and heard.isdigit() and len(heard) <= 12
            if not usable or server == server_id(link) or not self._note(link, server):
                return
            # Earlier messages have come long ago, and their ids may be forgotten.
            since = max(float(heard), natstime.now() - IDS_REMEMBERED_S + GAP_BEFORE_S)
            self._tasks.spawn(self._gaps.suspect(link, since, partial(self._is_lost, server)), "a lost nats-server")

        return named

    async def _is_lost(self, server: bytes) -> bool:
        """Whether no gateway answers on a server; one that does has had everything from there."""
        try:
            await self._nats.inbox.request((ECHO + server).decode(), b"", timeout=ANSWER_WAIT_S)
        except (ApiError, NoResponders, RequestTimeout):
            return True
        for noted in self._noted.values():  # it may be lost soon
            noted.pop(server, None)
        return False
