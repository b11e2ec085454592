# SPDX-License-Identifier: Apache-2.0
"""Head of the stream of messages: its certain last sequence, also after the election of a leader.

A leader of a replicated stream that has just been elected has every confirmed message, but may count some of them only
after its first own decision with the replicas. So it is given a decision that changes nothing.
See docs/internals/sessions.md#reads-and-writes-of-records.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.backbone.batch import parts
from mqtt_nats.backbone.pending_stores import TRANSIENT, AwaitedStore
from mqtt_streams.api import ApiError, call
from mqtt_streams.messages import PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.stored import delete, get_next

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.backbone.inbox import RequestInbox

PLACE: Final = b"NATS/1.0\r\nNats-Expected-Last-Sequence:%d\r\n\r\n" % ((1 << 63) - 1)
"""Headers of a message that is to follow an impossible sequence: JetStream refuses it, and names the last sequence."""

LAST_SEQUENCE: Final = re.compile(r"wrong last sequence: (\d+)")

UNKNOWN: Final = -1
"""Result of a mark whose refusal names no sequence."""

NONE: Final = 1 << 62
"""A sequence that no message has."""


class Mark(AwaitedStore):
    """A mark in the stream, between the messages that this gateway stored before and those that it stores afterwards.

    The mark is a store that is always refused: JetStream handles stores of one connection in their order, but requests
    in any order.
    """

    def failed(self, error: ApiError) -> None:
        """Take the last sequence from the refusal."""
        found = LAST_SEQUENCE.search(error.description)
        if not self.done.done():
            self.done.set_result(int(found[1]) if found is not None else UNKNOWN)

    async def position(self, inbox: RequestInbox) -> int:
        """Return the stream sequence of the last message before the mark.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not say.
        """
        found = await asyncio.shield(self.done)
        if found == UNKNOWN:
            info = await call(inbox, f"STREAM.INFO.{MESSAGES}")
            found = int(info["state"]["last_seq"])
        return found


def mark(nats: NatsLinks) -> Mark:
    """Set a mark at the present head of the stream of messages."""
    asked = Mark()
    nats.store.put(b"HPUB %b.mark " % PREFIX.encode().rstrip(b"."), PLACE, b"", asked)
    nats.link.kick()
    return asked


class StreamHead:
    """Reader of the stream's state; callers at the same time share one request."""

    def __init__(self, inbox: RequestInbox) -> None:
        self._inbox = inbox
        self._lock = asyncio.Lock()
        self._begun = 0
        self._ended = 0
        self._state: dict[str, Any] = {}
        self.replicated = True
        """Whether the stream has more than one replica, as far as is known."""

    async def state(self) -> dict[str, Any]:
        """Return the state of the stream at some time after the call.

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
        inbox = self._inbox
        if self.replicated:
            try:
                await delete(inbox, MESSAGES, NONE)
            except ApiError as error:
                if error.err_code in TRANSIENT:
                    raise  # any other error: the stream denies deletes, so its leader cannot be made to decide
        info = await call(inbox, f"STREAM.INFO.{MESSAGES}")
        self.replicated = int(info["config"].get("num_replicas", 1)) > 1
        state: dict[str, Any] = info["state"]
        return state

    async def beyond(self, subject: str, start: int, since: int) -> bool:
        """Whether there is no message of ``subject`` from sequence ``start`` up to ``since``."""
        found = await get_next(self._inbox, MESSAGES, subject, start)
        if found is None and self.replicated:  # a new leader may not count all messages yet
            await self.state()
            found = await get_next(self._inbox, MESSAGES, subject, start)
        return found is None or found.seq > since

    async def nothing_left(self, subjects: Sequence[str], position: int, since: int) -> bool:
        """Whether no message of ``subjects`` is stored after sequence ``position`` up to ``since``."""
        for some in parts(subjects if position < since else []):
            if not all(await asyncio.gather(*(self.beyond(one, position + 1, since) for one in some))):
                return False
        return True
