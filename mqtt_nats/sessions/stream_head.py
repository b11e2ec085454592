# SPDX-License-Identifier: Apache-2.0
"""How far the stream of messages is, for sure.

The leader of a stream with replicas that has just been elected has every message that was confirmed, but may count
some of them only once it has decided something of its own. So it is given something to decide that changes nothing.
See docs/internals/rules.md#reads-and-writes-of-records.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.backbone.acked_publisher import TRANSIENT
from mqtt_nats.backbone.batch import parts
from mqtt_streams.api import ApiError, call
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.stored import delete, get_next

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mqtt_nats.gateway.broker import Broker

NONE: Final = 1 << 62
"""A sequence that no message has."""


class Latest:
    """Looks at the stream, once for all who ask at the same time."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = asyncio.Lock()
        self._begun = 0
        self._ended = 0
        self._state: dict[str, Any] = {}
        self.replicated = True
        """Whether the stream has more than one replica, as far as is known."""

    async def state(self) -> dict[str, Any]:
        """The state of the stream at some time after the call.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        wanted = self._begun + 1
        while self._ended < wanted:
            async with self._lock:
                if self._ended < wanted:
                    self._begun += 1
                    turn = self._begun
                    self._state = await self._look()
                    self._ended = turn
        return self._state

    async def _look(self) -> dict[str, Any]:
        inbox = self._broker.inbox
        if self.replicated:
            try:
                await delete(inbox, MESSAGES, NONE)
            except ApiError as error:
                if error.err_code in TRANSIENT:
                    raise  # else it may not be asked, where nothing may be deleted
        info = await call(inbox, f"STREAM.INFO.{MESSAGES}")
        self.replicated = int(info["config"].get("num_replicas", 1)) > 1
        state: dict[str, Any] = info["state"]
        return state


async def beyond(broker: Broker, subject: str, start: int, since: int) -> bool:
    """Whether there is no message of ``subject`` from sequence ``start`` up to ``since``."""
    found = await get_next(broker.inbox, MESSAGES, subject, start)
    if found is None and broker.latest.replicated:  # a new leader may not count all of it yet
        await broker.latest.state()
        found = await get_next(broker.inbox, MESSAGES, subject, start)
    return found is None or found.seq > since


async def nothing_left(broker: Broker, subjects: Sequence[str], position: int, since: int) -> bool:
    """Whether nothing of ``subjects`` is to come between two sequences."""
    for some in parts(subjects if position < since else []):
        if not all(await asyncio.gather(*(beyond(broker, one, position + 1, since) for one in some))):
            return False
    return True
