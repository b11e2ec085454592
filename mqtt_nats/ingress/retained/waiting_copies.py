# SPDX-License-Identifier: Apache-2.0
"""New messages that wait while retained messages are sent to a subscription, and may be copies of these.

A message that is retained while a client subscribes has two copies: the retained one, and the one for subscribers. No
message of a topic may follow a newer one. So the client gets only one of the copies, and nothing older behind it. See
docs/internals/ingress.md#retained-messages-that-change.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import in_turn
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.messages.headers import identity
from mqtt_nats.messages.ids import precedes
from mqtt_nats.protocol.overlap import patterns_meet
from mqtt_nats.sessions.message_stream import mark
from mqtt_streams.messages import PREFIX as STORED_PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mqtt_nats.protocol.inflight import SubscriptionState
    from mqtt_nats.pubsub.backlog import Gate
    from mqtt_nats.sessions.session import Session
    from mqtt_streams.retained import RetainedMessage

RECENT_S: Final = 60.0
"""Seconds before the SUBSCRIBE within which a message was retained whose copy may still come.

The copies are stored in two streams, and one of these may be without a leader meanwhile.
"""

MOST_S: Final = 2.0
"""Most seconds that retained messages wait until their copies have come from the stream."""

STEP_S: Final = 0.002
STEP_MOST_S: Final = 0.05
"""Seconds between two looks whether the copies have come: the first pause, and the longest."""


async def let_copies_pass(client: Session) -> int:
    """Wait for copies of retained messages that core NATS brings; return the last sequence of the stream of messages.

    Raises:
        ApiError, NoResponders, RequestTimeout, TimeoutError: NATS does not answer.
    """
    nats = client.services.nats
    await client.services.nodes.fence_filters(client.filters)
    return await mark(nats).position(nats.inbox) if client.durable else 0


class WaitingCopies:
    """The waiting messages of one NATS subject of one subscription.

    `gates` and `source` of the methods are where messages wait: those of core NATS, and those of a consumer or the
    shared reader.
    """

    __slots__ = ("_alone", "_client", "_filter", "_late", "_new", "_position", "_since", "_subject")

    def __init__(self, client: Session, topic_filter: str, subject: str) -> None:
        self._client, self._filter, self._subject = client, topic_filter, subject
        self._since = int((natstime.now() - RECENT_S) * 1e9)
        self._new = False
        self._position = 0
        self._alone: bool | None = None
        self._late: dict[str, bytes] = {}
        """Id of the first message of a subject that the source has yet to bring, where the wait was too long."""

    @property
    def new(self) -> bool:
        """Whether the present page was read before the SUBACK of a new subscription."""
        return self._new

    def begin_anew(self, position: int) -> None:
        """Note that the next page is read before the SUBACK of a new subscription.

        Args:
            position: last sequence of the stream of messages, read before the page; 0 = not known.
        """
        self._new, self._position = True, position

    def pass_page(self) -> None:
        """Note that the following pages are read after SUBACK."""
        self._new = False

    def may_have(self, message: RetainedMessage) -> bool:
        """Whether a retained message is so new that its copy may come, too."""
        return message.time_ns > self._since and bool(message.headers)

    def replaced_by(
        self, message: RetainedMessage, key: bytes, gates: Sequence[Gate], source: SubscriptionState | None
    ) -> bool:
        """Whether a retained message is to be sent; False: its copy comes, with older messages that wait.

        A new subscription gets the retained message all the same if the copy waits, too. Then the copy is dropped, with
        the messages of its topic before it: all of them were published before SUBACK.

        Args:
            message: for which `may_have` holds.
            key: its topic as it stands in a PUBLISH packet.
            gates: see `WaitingCopies`.
            source: see `WaitingCopies`.
        """
        known = identity(message.headers)
        if not known:
            return True
        ids = [one for gate in gates for one in gate.ids(key)]
        own = [] if source is None else [one for one in source.backlog if one.body.key == key]
        side = self._client.consumers
        # Also those that wait for a place in the window, where a retained message goes first.
        stored = [] if side is None else [one.body for one in side.machine.queued if one.sequence > 0]
        waiting = ids + [identity(one.headers) for one in stored if one.key == key]
        if message.subject in self._late:
            waiting.append(self._late[message.subject])
        if not any(one == known or precedes(one, known) for one in waiting):
            return True
        last = max((one.sequence for one in own if identity(one.body.headers) == known), default=0)
        if not (last or known in ids) or not self._begins:
            return False
        for gate in gates:
            gate.discard_up_to(known)
        self._pass_over(source, {one.sequence for one in own if one.sequence <= last})
        return True

    async def come(
        self, page: Sequence[RetainedMessage], gates: Sequence[Gate], source: SubscriptionState | None, last: int
    ) -> None:
        """Wait until the copies of retained messages that were read have come from the stream, if they come at all.

        A consumer with a full window brings no more: a new subscription passes over what is older than the page. After
        `MOST_S`, and where nothing can be passed over, the stream tells which copies have yet to come.

        Args:
            page: the retained messages.
            gates: see `WaitingCopies`.
            source: see `WaitingCopies`.
            last: last sequence of the stream, read after the page, as of :func:`let_copies_pass`.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        if source is None:
            return
        self._late.clear()
        newest = {one.subject: identity(one.headers) for one in page if self.may_have(one)}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOST_S):
                wait = STEP_S
                while await self._comes_up_to(source, last) and not any(gate.ended for gate in gates):
                    if self._full(source) and not self._pass_over_older(source, newest):
                        break
                    await asyncio.sleep(wait)
                    wait = min(wait * 2, STEP_MOST_S)
                else:
                    return
        await in_turn([partial(self._look_ahead, source, subject) for subject in newest])

    async def _look_ahead(self, source: SubscriptionState, subject: str) -> None:
        """Note the first message of a subject that the source has yet to bring."""
        start = max(source.last + 1, source.start)
        found = await self._client.services.head.following(STORED_PREFIX + subject, start)
        if found is not None:
            self._late[subject] = identity(found.headers)

    async def _comes_up_to(self, source: SubscriptionState, last: int) -> bool:
        """Whether messages up to a stream sequence have yet to come."""
        if source.last >= last or not self._client.alive:
            return False
        start = max(source.last + 1, source.start)
        return not await self._client.services.head.beyond(STORED_PREFIX + self._subject, start, last)

    def _pass_over_older(self, source: SubscriptionState, newest: dict[str, bytes]) -> bool:
        """Pass over waiting messages that were stored before the page was read and are older; False: there are none.

        Args:
            newest: ids of the retained messages, by subject.
        """
        older = {
            one.sequence
            for one in source.backlog
            if one.sequence <= self._position
            and precedes(identity(one.body.headers), newest.get(one.body.subject, b""))
        }
        if not older or not self._begins:
            return False
        self._pass_over(source, older)
        return True

    def _full(self, source: SubscriptionState) -> bool:
        side = self._client.consumers
        windows = (
            ()
            if side is None
            else (one.consumer.max_ack_pending for one in side.bindings.values() if one.source is source)
        )
        return any(0 < window <= len(source.backlog) for window in windows)

    def _pass_over(self, source: SubscriptionState | None, sequences: set[int]) -> None:
        side = self._client.consumers
        if sequences and source is not None and side is not None:
            side.machine.pass_over_backlog(source, sequences)

    @property
    def _begins(self) -> bool:
        """Whether no subscription of the client had a right to the waiting messages before the page was read."""
        if not self._new:
            return False
        if self._alone is None:
            others = (found for found in self._client.filters if found.text != self._filter)
            subjects = (subject.decode() for found in others for subject in found.subjects)
            self._alone = not any(patterns_meet(self._subject, subject) for subject in subjects)
        return self._alone
