# SPDX-License-Identifier: Apache-2.0
"""What JetStream may have heard or not.

Acknowledgements to consumers that nobody was there to take: "no responders" has two meanings. The consumer is gone, and
with it whatever it had pending; or it has no leader for the moment, and what is not acknowledged would come again. A
look at the consumer tells them apart. See docs/internals/rules.md#confirmations.

A leader that stores, and does not answer requests: see docs/internals/rules.md#silent-leaders.

Messages that were sent before an outage and not acknowledged: see docs/internals/rules.md#repeated-stores.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.consumers import consumer_info, parse_ack
from mqtt_streams.repeats import find_ids

if TYPE_CHECKING:
    from mqtt_nats.backbone.inbox import RequestInbox
    from mqtt_nats.gateway.broker import Broker

log = logging.getLogger("mqtt_nats.broker")

STREAM_NOT_FOUND: Final = 10059

PAUSE: Final = 0.25
"""Seconds between two attempts."""

CATCH_UP: Final = 5.0
"""Seconds in which a replica has caught up; what is missing at the end of the stream then was removed."""


class DoubtfulStores:
    """What is to be sent again once its consumer has a leader; one look for all that wait for the same consumer."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._waiting: dict[tuple[str, str], dict[bytes, None]] = {}

    def absent(self, token: bytes) -> None:
        """Nobody has taken the acknowledgement of this token of the store."""
        store = self._broker.store
        ack = parse_ack(store.acknowledged_by(token))
        if ack is None:
            store.assume(token)
            return
        key = ack.stream, ack.consumer
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = {token: None}
            self._broker.spawn(self._look(key), f"consumer {ack.consumer}")
        else:
            waiting[token] = None

    async def _look(self, key: tuple[str, str]) -> None:
        broker = self._broker
        there = True
        while True:
            await broker.online.wait()
            try:
                there = await consumer_info(broker.inbox, *key) is not None
                break
            except ApiError as error:
                if error.err_code == STREAM_NOT_FOUND:
                    there = False
                    break
            except (NoResponders, RequestTimeout):
                pass
            await asyncio.sleep(PAUSE)
        if there:
            await asyncio.sleep(PAUSE)
        for token in self._waiting.pop(key):
            if there:
                broker.store.repeat(token)
            else:
                broker.store.assume(token)
        broker.round.start()

    def silent(self, stream: str) -> None:
        """A request to a stream is not answered, again and again."""
        self._broker.spawn(self._step_down(stream), f"leader of {stream}")

    async def _step_down(self, stream: str) -> None:
        """Have another of its servers lead the stream, unless it has no leader at all, or no other server."""
        inbox = self._broker.inbox
        try:
            info = await call(inbox, f"STREAM.INFO.{stream}")
            leader = (info.get("cluster") or {}).get("leader")
            if leader and info["config"]["num_replicas"] > 1:
                log.warning("%s, the leader of stream %s, does not answer requests: it is to hand over", leader, stream)
                await call(inbox, f"STREAM.LEADER.STEPDOWN.{stream}")
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("the leader of stream %s stays: %s", stream, error)


async def find_stored(inbox: RequestInbox, since: float, ids: set[bytes]) -> dict[bytes, int]:
    """Which messages of these ids the stream has, with their sequences; none was stored before Unix time ``since``.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CATCH_UP
    while True:
        found, complete = await find_ids(inbox, since, ids)
        if complete or loop.time() > deadline:
            log.info("%d of %d messages without an acknowledgement were stored", len(found), len(ids))
            return found
        await asyncio.sleep(PAUSE)
