# SPDX-License-Identifier: Apache-2.0
"""How many sessions and consumers a user, or an address of anonymous clients, may have in the cluster.

Each session that outlives its connection is noted in `$MQTT_shared` under its quota. A gateway reads the notes of a
quota when one of its clients asks for more, adds what it does itself, and reads them again now and then, since other
gateways write there too. See docs/internals/rules.md#quotas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.log_throttle import Complaints
from mqtt_nats.backbone.pending import Silent
from mqtt_nats.base.bucket import Buckets, depth
from mqtt_nats.codec import QuotaExceeded
from mqtt_streams.quotas import note_subject

if TYPE_CHECKING:
    from mqtt_nats.backbone.acked_publisher import Store
    from mqtt_nats.base.limit_settings import ClientLimits
    from mqtt_streams.quotas import QuotaStore
    from mqtt_streams.sessions import SessionRecord, SessionStore

log = logging.getLogger("mqtt_nats.broker")

READ_AGAIN_S: Final = 60.0
"""Seconds after which the notes of a quota are read again, when somebody asks for more."""
READ_FULL_S: Final = 5.0
"""The same for a quota that is used up."""
QUOTAS_MAX: Final = 10_000
"""Quotas whose use is known; the one that was asked for least recently makes room."""
NAME_MAX: Final = 64
"""Characters of a user name that are logged."""
STALE_MAX: Final = 20
"""Notes of a quota that is used up of which it is checked, each time, whether there is still a session."""


def holder(user: str | None, address: str) -> str:
    """For whom the sessions of a client count, as the log has it."""
    return f"user {user[:NAME_MAX]!r}" if user else f"anonymous clients of {address}"


class Use:
    """What a quota has, as far as this gateway knows."""

    __slots__ = ("consumers", "read", "sessions")

    def __init__(self, sessions: int, consumers: int, read: float) -> None:
        self.sessions = sessions
        self.consumers = consumers
        self.read = read
        """Time of the loop when the notes were read."""

    def add(self, sessions: int, consumers: int) -> None:
        """This gateway has made more, or less."""
        self.sessions = max(0, self.sessions + sessions)
        self.consumers = max(0, self.consumers + consumers)


class Quotas:
    """The quotas of one account.

    Args:
        counted: is told the setting that has refused something.
    """

    def __init__(
        self,
        settings: ClientLimits,
        notes: QuotaStore,
        sessions: SessionStore,
        store: Store,
        counted: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._notes = notes
        self._sessions = sessions
        self._store = store
        self._counted = counted
        self._uses: dict[str, Use] = {}
        self._noted: dict[str, tuple[str, int]] = {}
        """Quota and consumers in the note of each session that is connected here, by key."""
        self.consumers = 0
        """Consumers of all these sessions."""
        self._complaints = Complaints()
        rate = settings.consumer_rate
        self._paces = Buckets(rate, depth(rate, settings.rate_burst)) if rate else None

    # -- sessions ---------------------------------------------------------------------------------

    async def admit(self, quota: str, who: str) -> None:
        """A session is about to begin that outlives its connection.

        Args:
            who: the user or address, for the log.

        Raises:
            QuotaExceeded: there are as many as there may be.
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        most = self._settings.max_sessions
        use = await self._use(quota, lambda use: most is not None and use.sessions >= most)
        if most is not None and use.sessions >= most:
            self._refuse("max_sessions", who)
            raise QuotaExceeded(f"more than {most} sessions of one user or address")
        use.add(1, 0)

    def claimed(self, record: SessionRecord) -> None:
        """A session that there was goes on here, or another one takes its place; before its record is written."""
        if record.v5 is not None and record.v5.quota:
            self._note(record.key, record.v5.quota, len(record.cons))

    def written(self, record: SessionRecord) -> None:
        """A record was written: note how many consumers it has, where that has changed."""
        if record.v5 is None or not record.v5.quota:
            return
        quota, count = record.v5.quota, len(record.cons)
        known = self._noted.get(record.key)
        if known == (quota, count):
            return
        self._note(record.key, quota, count)
        if quota in self._uses:
            self._uses[quota].add(0, count - (known[1] if known is not None and known[0] == quota else 0))
        target = b"HPUB %b " % note_subject(quota, record.key).encode()
        self._store.put(target, b"NATS/1.0\r\n\r\n", b"%d" % count, Silent())

    def left(self, key: str) -> None:
        """The connection of a session has ended."""
        self.consumers -= self._noted.pop(key, ("", 0))[1]

    def _note(self, key: str, quota: str, count: int) -> None:
        self.left(key)
        self._noted[key] = quota, count
        self.consumers += count

    async def forget(self, record: SessionRecord) -> None:
        """A session has ended, and its record is removed or names another quota.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        if record.v5 is None or not record.v5.quota:
            return
        quota, count = record.v5.quota, len(record.cons)
        if record.clean:  # it has ended, and names what it has left, the consumer of PUBRELs with it
            count = max(0, len(record.v5.draining) - 1)
        if await self._notes.forget(quota, record.key) and quota in self._uses:
            self._uses[quota].add(-1, -count)

    # -- consumers --------------------------------------------------------------------------------

    async def room(self, quota: str, who: str, wanted: int) -> int:
        """How many of ``wanted`` consumers may be made for a quota.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        most, here = self._settings.max_durable_consumers, self._settings.max_durable_consumers_per_gateway
        room = wanted
        if here is not None and here - self.consumers < room:
            room = max(0, here - self.consumers)
            self._refuse("max_durable_consumers_per_gateway", "this gateway")
        if most is not None and room:
            use = await self._use(quota, lambda use: use.consumers + room > most)
            if most - use.consumers < room:
                room = max(0, most - use.consumers)
                self._refuse("max_durable_consumers", who)
        if room and self._paces is not None:
            level = self._paces.of(quota, self._now()).level(self._now())
            if level + room > self._paces.depth + self._paces.rate * self._settings.rate_pause:
                room = 0
                self._refuse("consumer_rate", who)
        return room

    async def pace(self, quota: str, count: int) -> None:
        """Wait until ``count`` consumers may be made."""
        if self._paces is not None and count:
            await asyncio.sleep(self._paces.of(quota, self._now()).pour(count, self._now()))

    # -- what is used -----------------------------------------------------------------------------

    async def _use(self, quota: str, full: Callable[[Use], bool]) -> Use:
        """The use of a quota; its notes are read where they were not read lately."""
        use = self._uses.pop(quota, None)
        now = self._now()
        if use is None or now - use.read > (READ_FULL_S if full(use) else READ_AGAIN_S):
            found = await self._notes.sessions(quota)
            if full(Use(len(found), sum(found.values()), now)):
                for key in await self._stale(quota, list(found)[:STALE_MAX]):
                    await self._notes.forget(quota, key)
                    del found[key]
            use = Use(len(found), sum(found.values()), now)
            if len(self._uses) >= QUOTAS_MAX:
                del self._uses[next(iter(self._uses))]
        self._uses[quota] = use
        return use

    async def _stale(self, quota: str, keys: list[str]) -> list[str]:
        """Which of these sessions are not there any more: a gateway that does not know of notes has ended them."""
        return [key for key in keys if key not in self._noted and not await self._sessions.has(key)]

    def _refuse(self, limit: str, who: str) -> None:
        self._counted(limit)
        if self._complaints.new(f"{limit} {who}"):
            log.warning("%s is reached by %s: more is refused, which is said once a minute at most", limit, who)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
