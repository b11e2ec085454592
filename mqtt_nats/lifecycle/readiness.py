# SPDX-License-Identifier: Apache-2.0
"""Readiness: whether JetStream stores messages, which a connection to NATS does not tell.

On the minority side of a partitioned cluster the connection stays and core NATS goes on, but JetStream stores nothing.
See docs/internals/lifecycle.md#readiness.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import FULL, lacks_room
from mqtt_streams import stored
from mqtt_streams.api import ApiError, NoLeader, NoResponders, RequestTimeout, call, has_leader
from mqtt_streams.gateways import PREFIX
from mqtt_streams.gateways import STREAM as GATEWAYS
from mqtt_streams.messages import STREAM as MESSAGES

if TYPE_CHECKING:
    from mqtt_nats.backbone.acked_publisher import AckedPublisher
    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.lifecycle.lease import Lease

log = logging.getLogger("mqtt_nats.gateway")

PROBE: Final = f"{PREFIX}probe"
"""A key that is never written: its removal changes nothing, but needs the agreement of a majority."""

ANSWER_COUNTS_S: Final = 5.0
"""Seconds for which an answer counts, and with `READINESS_CHECK_S` those before a probe: a lease in time needs none."""

READINESS_CHECK_S: Final = 1.0
"""Seconds between two looks, and between two probes after one without an answer."""


NO_SPACE: Final = "no space left on device"
"""Go's text of ENOSPC, in errors and in the log of nats-server."""


class Readiness:
    """Probe of JetStream that runs now and then, and logs why the gateway is not ready, and when it is ready again.

    Attributes:
        reason: why the gateway is not ready at present; empty = it is ready.
    """

    def __init__(self, nats: NatsLinks, lease: Lease) -> None:
        self._nats, self._lease = nats, lease
        self._answer = ""
        self._warned = False
        """Whether a warning was logged since the gateway was ready."""
        self.reason = ""

    async def watch_jetstream(self) -> None:
        """Look at JetStream again and again, for as long as the gateway runs."""
        loop = asyncio.get_running_loop()
        answered = -math.inf
        while True:
            proven = max(answered, self._lease.proven)
            if self._nats.store.outages or loop.time() > proven + ANSWER_COUNTS_S + READINESS_CHECK_S:
                self._judge()  # the answer may take as long as an election
                begun = loop.time()
                self._answer = await self._ask()
                answered = begun if not self._answer else -math.inf
            else:
                self._answer = ""
            self._judge()
            await asyncio.sleep(READINESS_CHECK_S)

    async def _ask(self) -> str:
        nats = self._nats
        if not nats.online.is_set():
            return ""
        try:
            # A leader that is cut off still answers queries for a while, but carries out no change.
            await stored.purge(nats.inbox, GATEWAYS, PROBE)
            for stream in nats.store.outages:
                await stored.purge(nats.inbox, stream, PROBE)
            info = await call(nats.inbox, f"STREAM.INFO.{MESSAGES}")
        except NoLeader:
            return "JetStream has no leader: that takes a majority of its nats-servers"
        except NoResponders:
            return "JetStream is not there"
        except RequestTimeout:
            return "JetStream does not answer"
        except ApiError as error:
            return explain(error)
        return "" if has_leader(info) else f"stream {MESSAGES} has no leader"

    def _judge(self) -> None:
        stored = self._answer or _outages(self._nats.store)
        lease = self._lease.obstacle
        reason = (stored or lease) if self._nats.online.is_set() else "not connected to NATS"
        if reason and reason != self.reason:
            what = "new clients are refused" if reason == lease else "publishes are not acknowledged"
            # A lost connection to NATS and streams that do not store are warnings of their own already.
            known = not self._nats.online.is_set() or (reason != lease and bool(self._nats.store.outages))
            self._warned = self._warned or not known
            log.log(logging.INFO if known else logging.WARNING, "not ready: %s; %s", reason, what)
        elif self.reason and not reason:
            log.log(logging.WARNING if self._warned else logging.INFO, "ready again")
            self._warned = False
        self.reason = reason


def explain(error: ApiError | NoResponders | RequestTimeout) -> str:
    """Return in one line why JetStream stores nothing; for a full disk also what has to be done."""
    said = " ".join(str(error).split())
    if isinstance(error, NoResponders) and not isinstance(error, NoLeader):
        return f"no server answers, on {said}"
    if NO_SPACE in said:
        return f"{FULL}: no space left on the disk; restart nats-server when there is room"
    return f"{FULL}: {said}" if isinstance(error, ApiError) and lacks_room(error) else said


def _outages(store: AckedPublisher) -> str:
    if store.full:
        return store.full
    return f"JetStream does not store to {', '.join(store.outages)}" if store.outages else ""
