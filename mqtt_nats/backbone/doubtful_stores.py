# SPDX-License-Identifier: Apache-2.0
"""Doubtful stores: acknowledgements, requests and messages that JetStream may or may not have received.

Acknowledgements answered with "no responders": either the consumer is gone, and with it whatever it had pending; or
the consumer has no leader for the moment, and would deliver unacknowledged messages again. A request for the
consumer's state tells these cases apart. See docs/internals/backbone.md#confirmations.

Requests to a leader that stores, and does not answer requests: see docs/internals/backbone.md#silent-leaders.

Messages that were sent before an outage and not acknowledged: see docs/internals/backbone.md#repeated-stores.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.consumers import consumer_info, parse_ack
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.repeats import find_stored_keys

if TYPE_CHECKING:
    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.backbone.inbox import RequestInbox
    from mqtt_nats.base.tasks import Tasks

log = logging.getLogger("mqtt_nats.broker")


DOUBTFUL_RETRY_S: Final = 0.25
"""Seconds between two attempts."""

REPLICA_CATCH_UP_S: Final = 5.0
"""Maximum seconds until a replica has caught up; messages missing at the stream's end after that were removed."""


class Flushing(Protocol):
    """The round in which the bytes for clients leave."""

    def start(self) -> None:
        """Have the collected bytes leave at the end of the turn."""


class DoubtfulStores:
    """Acknowledgements that wait until their consumer has a leader; one check per consumer."""

    def __init__(self, nats: NatsLinks, tasks: Tasks, round_: Flushing) -> None:
        self._nats, self._tasks, self._round = nats, tasks, round_
        self._waiting: dict[tuple[str, str], dict[bytes, None]] = {}

    def absent(self, token: bytes) -> None:
        """Check the consumer of an acknowledgement, given by its token, that got "no responders"."""
        store = self._nats.store
        ack = parse_ack(store.acknowledged_by(token))
        if ack is None:
            store.assume(token)
            return
        key = ack.stream, ack.consumer
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = {token: None}
            self._tasks.spawn(self._look(key), f"consumer {ack.consumer}")
        else:
            waiting[token] = None

    async def _look(self, key: tuple[str, str]) -> None:
        nats = self._nats
        there = True
        while True:
            await nats.online.wait()
            try:
                there = await consumer_info(nats.inbox, *key) is not None
                break
            except ApiError as error:
                if error.err_code == STREAM_NOT_FOUND:
                    there = False
                    break
            except (NoResponders, RequestTimeout):
                pass
            await asyncio.sleep(DOUBTFUL_RETRY_S)
        if there:
            await asyncio.sleep(DOUBTFUL_RETRY_S)
        for token in self._waiting.pop(key):
            if there:
                nats.store.repeat(token)
            else:
                nats.store.assume(token)
        self._round.start()

    def silent(self, stream: str) -> None:
        """Replace the leader of a stream that does not answer requests again and again."""
        self._tasks.spawn(self._step_down(stream), f"leader of {stream}")

    async def _step_down(self, stream: str) -> None:
        """Have another server lead the stream, unless the stream has no leader, or a single replica."""
        inbox = self._nats.inbox
        try:
            info = await call(inbox, f"STREAM.INFO.{stream}")
            leader = (info.get("cluster") or {}).get("leader")
            if leader and info["config"]["num_replicas"] > 1:
                log.warning(
                    "%s, the leader of stream %s, does not answer requests: a new leader is requested", leader, stream
                )
                await call(inbox, f"STREAM.LEADER.STEPDOWN.{stream}")
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("the leader of stream %s stays: %s", stream, error)


async def find_stored(inbox: RequestInbox, keys: set[bytes], since: float, after: int = 0) -> dict[bytes, int]:
    """Return the sequences of stored messages by key; for the arguments see :func:`find_stored_keys`.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + REPLICA_CATCH_UP_S
    while True:
        found, complete = await find_stored_keys(inbox, keys, since, after)
        if complete or loop.time() > deadline:
            log.info("%d of %d messages without an acknowledgement were stored", len(found), len(keys))
            return found
        await asyncio.sleep(DOUBTFUL_RETRY_S)
