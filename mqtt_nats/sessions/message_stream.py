# SPDX-License-Identifier: Apache-2.0
"""The stream of messages ``$MQTT_msgs``: its certain last sequence, and whether it was replaced.

A leader of a replicated stream that has just been elected has every confirmed message, but may count some of them only
after its first own decision with the replicas. So it is given a decision that changes nothing.
See docs/internals/sessions.md#reads-and-writes-of-records.

A stream that was created anew, or restored from a backup, has other messages under the known sequences, and packet
identifiers follow from sequences. See docs/internals/sessions.md#replaced-streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.backbone.batch import SharedRequest, parts
from mqtt_nats.backbone.connect import Phase
from mqtt_nats.backbone.pending_stores import TRANSIENT, AwaitedStore
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.sessions.removals import Removals
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.error_codes import WRONG_LAST_SEQUENCE_TEXT
from mqtt_streams.generations import GenerationStore, Lower
from mqtt_streams.generations import Mark as Generation
from mqtt_streams.messages import PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.stored import NO_SEQUENCE, StoredMessage, delete, get_next

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.backbone.inbox import RequestInbox
    from mqtt_nats.base.tasks import Tasks
    from mqtt_nats.messages.identity import Identity
    from mqtt_nats.sessions.services import Registry
    from mqtt_nats.sessions.session import Session

log = logging.getLogger("mqtt_nats.broker")

PLACE: Final = b"NATS/1.0\r\nNats-Expected-Last-Sequence:%d\r\n\r\n" % ((1 << 63) - 1)
"""Headers of a message that is to follow an impossible sequence: JetStream refuses it, and names the last sequence."""


SEQUENCE_NOT_NAMED: Final = -1
"""Result of a mark whose refusal names no sequence."""

QUESTIONS_MOST: Final = 32
"""Maximum number of requests under way that look for missed messages: JetStream answers other requests after them."""

ADVISORIES: Final = f"$JS.EVENT.ADVISORY.STREAM.*.{MESSAGES}".encode()


class Mark(AwaitedStore):
    """A mark in the stream, between the messages that this gateway stored before and those that it stores afterwards.

    The mark is a store that is always refused: JetStream handles stores of one connection in their order, but requests
    in any order.
    """

    def failed(self, error: ApiError) -> None:
        """Take the last sequence from the refusal."""
        found = WRONG_LAST_SEQUENCE_TEXT.search(error.description)
        if not self.done.done():
            self.done.set_result(int(found[1]) if found is not None else SEQUENCE_NOT_NAMED)

    async def position(self, inbox: RequestInbox) -> int:
        """Return the stream sequence of the last message before the mark.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not say.
        """
        found = await asyncio.shield(self.done)
        if found == SEQUENCE_NOT_NAMED:
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
        self._shared = SharedRequest(self._look)
        self._questions = asyncio.Semaphore(QUESTIONS_MOST)
        self.replicated = True
        """Whether the stream has more than one replica, as far as is known."""

    async def state(self) -> dict[str, Any]:
        """Return the state of the stream at some time after the call.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        return await self._shared.answer()

    async def _look(self) -> dict[str, Any]:
        inbox = self._inbox
        if self.replicated:
            try:
                await delete(inbox, MESSAGES, NO_SEQUENCE)
            except ApiError as error:
                if error.err_code in TRANSIENT:
                    raise  # any other error: the stream denies deletes, so its leader cannot be made to decide
        info = await call(inbox, f"STREAM.INFO.{MESSAGES}")
        self.replicated = int(info["config"].get("num_replicas", 1)) > 1
        state: dict[str, Any] = info["state"]
        return state

    async def following(self, subject: str, start: int) -> StoredMessage | None:
        """Return the first message of ``subject`` from sequence ``start`` on; None without one.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        found = await get_next(self._inbox, MESSAGES, subject, start)
        if found is None and self.replicated:  # a new leader may not count all messages yet
            await self.state()
            found = await get_next(self._inbox, MESSAGES, subject, start)
        return found

    async def beyond(self, subject: str, start: int, since: int) -> bool:
        """Whether there is no message of ``subject`` from sequence ``start`` up to ``since``."""
        found = await self.following(subject, start)
        return found is None or found.seq > since

    async def nothing_left(self, subjects: Sequence[str], position: int, since: int) -> bool:
        """Whether no message of ``subjects`` is stored after sequence ``position`` up to ``since``.

        All sessions of a gateway may call this at once; at most `QUESTIONS_MOST` requests are under way at a time.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """

        async def none_left(subject: str) -> bool:
            async with self._questions:
                return await self.beyond(subject, position + 1, since)

        for some in parts(subjects if position < since else []):
            if not all(await asyncio.gather(*map(none_left, some))):
                return False
        return True


READERS_PART: Final = 4
"""This part of the consumers that JetStream allows, at least `READERS_LEAST`, is left to readers."""

READERS_LEAST: Final = 2


class StreamIdentity:
    """The identity of the ``$MQTT_msgs`` that the gateway knows."""

    def __init__(self, nats: NatsLinks, identity: Identity, tasks: Tasks, registry: Registry[Session]) -> None:
        self.id = ""
        """Id of the stream's mark; empty until the first check."""
        self.floor = 0
        """Stream sequence up to which the messages are those of the stream before; 0 = none."""
        self.removals = Removals()
        self._generation = Generation("", "", 0, 0)
        self.consumers = 0
        """Number of consumers of the stream: as of the last check, with what gateways may have decided on since."""
        self._gateways = 1.0
        self._identity, self._tasks, self._registry = identity, tasks, registry
        self._store = GenerationStore(nats.inbox, natstime.elapsed)
        self._replaced: list[Callable[[], None]] = []
        nats.reconnect.subscribe(ADVISORIES, self._advised)
        nats.reconnect.register(Phase.REQUESTS, self._begin_look)

    @property
    def has_leader(self) -> bool:
        """Whether the stream had a leader when it was last checked."""
        return self._store.has_leader

    @property
    def replicas(self) -> int:
        """Number of replicas of the stream when it was last checked."""
        return self._store.replicas

    @property
    def crowded(self) -> bool:
        """Whether JetStream allows few more consumers of the stream: readers need these."""
        allowed = int(self._store.info.get("config", {}).get("max_consumers", 0))
        return 0 < allowed < self.consumers + max(allowed // READERS_PART, READERS_LEAST)

    def count_consumers(self, number: int) -> None:
        """Count consumers that this gateway creates, or with a negative number removes, until the next check.

        Every other gateway is taken to create as many meanwhile, so that all together do not pass a bound by much; that
        they remove as many is not, or there would seem to be room that there is not.
        """
        self.consumers += round(number * self._gateways) if number > 0 else number

    def share(self, gateways: float) -> None:
        """Note an estimate of how many gateways use the stream, this one included."""
        self._gateways = gateways

    def call_on_replaced(self, replaced: Callable[[], None]) -> None:
        """Call ``replaced`` when the stream was replaced, before the connections of durable sessions end."""
        self._replaced.append(replaced)

    def _advised(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        self._begin_look()

    def _begin_look(self) -> None:
        self._tasks.spawn(self._look(), "generation")

    async def _look(self) -> None:
        try:
            await self.check()
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("stream %s: %s", MESSAGES, error)

    async def check(self) -> None:
        """Check whether the stream was replaced; end the connections of durable sessions that count in the former one.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        try:
            mark = await self._store.look(self._identity.new_nuid())
        except Lower as error:
            log.debug("%s", error)
            mark = await self._store.look(self._identity.new_nuid(), error.last)
        if mark is None:
            return
        self.consumers = self._store.consumers
        natstime.learn(*self._store.heard)
        self.removals.check_removals(self._store.info, natstime.now())
        known, self._generation = self._generation, mark
        if mark.id == self.id:
            return
        self.id, self.floor = mark.id, mark.floor
        if not known.id or (mark.created == known.created and mark.floor >= known.last):
            return  # in the second case somebody has removed the mark: all that is known here is still there
        for replaced in self._replaced:
            replaced()
        log.error("stream %s was replaced: its messages up to sequence %d are older ones", MESSAGES, mark.floor)
        for client in list(self._registry.clients.values()):
            v5 = client.record.v5 if client.record is not None else None
            if client.consumers is None and v5 is not None:
                v5.count_anew(mark.floor)
            elif v5 is not None and v5.generation != mark.id:
                client.end_connection(MqttError("stream $MQTT_msgs was replaced", ReasonCode.SERVER_BUSY))
