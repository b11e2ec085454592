# SPDX-License-Identifier: Apache-2.0
"""Store barrier: whether messages that any gateway has published so far are stored, or never will be.

The live copy of a message leaves before its store. So a gateway that was without NATS, and has missed live copies, has
to look for the stored ones when the stores of that time have ended, wherever they were begun. It asks all gateways;
each answers at once, and once more when its stores have ended. A gateway that is without NATS itself does not answer:
it sends its live copies again when it is back. See docs/internals/pubsub.md#gaps.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import SharedRequest
from mqtt_nats.backbone.inbox import NO_RESPONDERS
from mqtt_streams.api import RequestTimeout
from mqtt_streams.gateway_subjects import SETTLE, new_inbox

if TYPE_CHECKING:
    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.base.tasks import Tasks

UNKNOWN_GATEWAYS_WAIT_S: Final = 0.1
"""Seconds for which answers are awaited from gateways that are not known."""

QUESTION_REPEAT_S: Final = 0.25
"""Seconds after which the question is repeated for known gateways that have not answered: they may be connecting."""

LISTEN: Final = 3.0
"""Seconds after which a known gateway that has not answered counts as gone."""

BARRIER_TIMEOUT: Final = 5.0
"""Maximum seconds for the stores under way; then the caller has to ask again."""

STORES_POLL_S: Final = 0.02
"""Seconds between two looks at the stores under way."""

GATEWAY_SIGN_S: Final = 1.0
"""Seconds after which a gateway says again that its stores have not ended."""

GATEWAY_SILENT_S: Final = 3.0
"""Seconds without such a sign after which a gateway counts as gone."""

REMEMBERED_MOST: Final = 1000
"""Maximum number of gateways that are remembered, and of questions that are being answered; others are dropped."""

ENDED: Final = b"+"
WAITS: Final = b"-"


class Question:
    """A question to all gateways.

    Args:
        missing: known gateways, of which none has answered.
        now: loop time in seconds.
    """

    def __init__(self, missing: set[bytes], now: float) -> None:
        self.missing = missing
        self.begun = self._asked = now
        self.alone = False
        """Whether no other gateway has heard the question when it was asked last."""
        self.waiting: dict[bytes, float] = {}
        """Gateways whose stores have not ended, with the loop time of their last sign in seconds."""
        self.changed = asyncio.Event()

    def answered(self, gateway: bytes, ended: bool, now: float) -> None:
        """Note an answer."""
        self.missing.discard(gateway)
        if ended:
            self.waiting.pop(gateway, None)
        elif len(self.waiting) < REMEMBERED_MOST:
            self.waiting[gateway] = now
        self.changed.set()

    def unheard(self) -> None:
        """Note that nobody has heard the question."""
        self.alone = True
        self.changed.set()

    def repeat(self, now: float) -> bool:
        """Return whether the question has to be asked again, for gateways that were not connected."""
        due = bool(self.missing) and now - self._asked >= QUESTION_REPEAT_S
        if due:
            self._asked, self.alone = now, False
        return due

    def give_up(self, now: float) -> set[bytes]:
        """Pass over gateways that say nothing; return those that have not answered at all."""
        self.waiting = {one: heard for one, heard in self.waiting.items() if now - heard < GATEWAY_SILENT_S}
        gone: set[bytes] = set()
        if now - self.begun >= LISTEN:
            gone, self.missing = self.missing, gone
        return gone

    def complete(self, now: float) -> bool:
        """Whether every gateway has answered that its stores have ended."""
        return not self.missing and not self.waiting and (self.alone or now - self.begun >= UNKNOWN_GATEWAYS_WAIT_S)


class StoreBarrier:
    """Asks the other gateways for their stores under way, and answers their questions."""

    def __init__(self, nats: NatsLinks, tasks: Tasks) -> None:
        self._nats, self._tasks = nats, tasks
        self._token = secrets.token_hex(8).encode()
        self.known: set[bytes] = set()
        """Tokens of gateways that have asked or answered, except those that do not answer any more."""
        self.dropped = 0
        """Number of questions that were not answered, since too many were open."""
        self._questions: dict[bytes, Question] = {}
        self._asked_here: dict[bytes, int] = {}
        """Token of the last store when a question came, as a number, by reply subject."""
        self._shared = SharedRequest(self._ask)
        self._count = 0
        self._prefix = new_inbox()
        self._sids = {
            subject: nats.link.subscribe_raw(subject, handler)
            for subject, handler in ((self._prefix + b"*", self._answered), (SETTLE, self._asked))
        }
        nats.link.call_on_wire(self._connected)

    def _connected(self, up: bool) -> None:
        """Be there for questions before anything else is sent, and tell the other gateways so."""
        if up:
            for subject, sid in self._sids.items():
                self._nats.link.renew(sid, subject)
            self._nats.publish(SETTLE, self._token)

    async def introduce(self) -> None:
        """Ask once, so that the gateways know each other."""
        try:
            await self.settled()
        except RequestTimeout:
            return

    async def settled(self) -> None:
        """Wait until all stores that were begun before the call have ended, here and at the other gateways.

        Raises:
            RequestTimeout: some have not ended in `BARRIER_TIMEOUT` seconds, or the connection was lost.
        """
        await self._shared.answer()

    async def _ask(self) -> None:
        nats, loop = self._nats, asyncio.get_running_loop()
        wire, newest = nats.link.wire, nats.store.count
        self._count += 1
        number = b"%x" % self._count
        question = self._questions[number] = Question(set(self.known), loop.time())
        nats.publish(SETTLE, self._token, self._prefix + number)
        try:
            while not question.complete(now := loop.time()) or self._under_way(newest):
                if now - question.begun > BARRIER_TIMEOUT:
                    raise RequestTimeout(f"{len(question.waiting)} other gateways are storing messages")
                if question.repeat(now):
                    nats.publish(SETTLE, self._token, self._prefix + number)
                question.changed.clear()
                try:
                    async with asyncio.timeout(STORES_POLL_S):
                        await question.changed.wait()
                except TimeoutError:
                    self.known -= question.give_up(loop.time())
        finally:
            del self._questions[number]
        if nats.link.wire is not wire or wire is None:
            raise RequestTimeout("the connection to NATS was lost")

    def _under_way(self, newest: int) -> bool:
        """Whether a message is being stored whose token is at most ``newest``."""
        return 0 < self._nats.store.oldest_message() <= newest

    def _answered(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        question = self._questions.get(subject[len(self._prefix) :])
        if headers.startswith(NO_RESPONDERS):
            if question is not None:
                question.unheard()
        elif payload[:1] in (ENDED, WAITS) and self._note(payload[1:]) and question is not None:
            question.answered(payload[1:], payload[:1] == ENDED, asyncio.get_running_loop().time())

    def _note(self, gateway: bytes) -> bool:
        """Remember a gateway; return whether there is room."""
        if gateway not in self.known and len(self.known) < REMEMBERED_MOST and len(gateway) <= 64:
            self.known.add(gateway)
        return gateway in self.known

    def _asked(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if payload == self._token:
            return
        self._note(payload)
        if not reply:
            return
        newest = self._nats.store.count
        if not self._under_way(newest):
            self._nats.publish(reply, ENDED + self._token)
            return
        if len(self._asked_here) >= REMEMBERED_MOST:
            self.dropped += 1
            return
        self._nats.publish(reply, WAITS + self._token)
        self._asked_here[reply] = newest
        if len(self._asked_here) == 1:
            self._tasks.spawn(self._tell(), "stores under way")

    async def _tell(self) -> None:
        """Answer the open questions when the stores have ended."""
        loop = asyncio.get_running_loop()
        told = loop.time()
        while self._asked_here:
            await asyncio.sleep(STORES_POLL_S)
            oldest = self._nats.store.oldest_message()
            for reply, newest in list(self._asked_here.items()):
                if not 0 < oldest <= newest:
                    del self._asked_here[reply]
                    self._nats.publish(reply, ENDED + self._token)
            if loop.time() - told > GATEWAY_SIGN_S:
                told = loop.time()
                for reply in self._asked_here:
                    self._nats.publish(reply, WAITS + self._token)
