# SPDX-License-Identifier: Apache-2.0
"""Quotas: the sessions and consumers that a user, or an address of anonymous clients, may have in the cluster.

Each session that outlives its connection has a note in `$MQTT_shared` under its quota. A gateway reads the notes of a
quota when one of its clients needs more, counts its own changes, and reads the notes again now and then, since other
gateways write notes too. See docs/internals/sessions.md#quotas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.backbone.pending_stores import IgnoredStore
from mqtt_nats.base.bucket import Buckets, depth
from mqtt_nats.base.logs import log_failure, once
from mqtt_nats.codec import QuotaExceeded
from mqtt_streams.quotas import note_subject
from mqtt_streams.sessions import PoisonedRecord

if TYPE_CHECKING:
    from mqtt_nats.backbone.acked_publisher import AckedPublisher
    from mqtt_nats.base.limit_settings import ClientLimits
    from mqtt_streams.quotas import QuotaStore
    from mqtt_streams.sessions import SessionRecord, SessionStore

log = logging.getLogger("mqtt_nats.broker")

READ_AGAIN_S: Final = 60.0
"""Seconds after which the notes of a quota are read again, when a client needs more sessions or consumers."""
READ_FULL_S: Final = 5.0
"""Seconds after which the notes of a quota that is used up are read again."""
QUOTAS_MAX: Final = 10_000
"""Largest number of quotas whose use is remembered; the least recently used one is forgotten first."""
NAME_MAX: Final = 64
"""Characters of a user name that are logged."""
STALE_MAX: Final = 20
"""Largest number of notes that are checked for a missing session in each read of a quota that is used up."""


def holder(user: str | None, address: str) -> str:
    """Return the user or address in whose quota the sessions of a client count, for the log."""
    return f"user {user[:NAME_MAX]!r}" if user else f"anonymous clients of {address}"


class Reserved(NamedTuple):
    """Consumers that a SUBSCRIBE packet may create and that no session record names yet."""

    quota: str
    consumers: int


class Use:
    """Use of a quota, as far as this gateway knows: sessions and consumers."""

    __slots__ = ("consumers", "read", "sessions")

    def __init__(self, sessions: int, consumers: int, read: float) -> None:
        self.sessions = sessions
        self.consumers = consumers
        self.read = read
        """Loop time in seconds at which the notes were read."""

    def add(self, sessions: int, consumers: int) -> None:
        """Add sessions and consumers that this gateway has created (positive) or removed (negative)."""
        self.sessions = max(0, self.sessions + sessions)
        self.consumers = max(0, self.consumers + consumers)


class Quotas:
    """The quotas of one account.

    Args:
        counted: called with the name of the setting that has refused a session or consumers.
    """

    def __init__(
        self,
        settings: ClientLimits,
        notes: QuotaStore,
        sessions: SessionStore,
        store: AckedPublisher,
        counted: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._notes = notes
        self._sessions = sessions
        self._store = store
        self._counted = counted
        self._uses: dict[str, Use] = {}
        self._noted: dict[str, tuple[str, int]] = {}
        """Quota and number of consumers in the note of each session that is connected here, by session key."""
        self._reserved: dict[str, Reserved] = {}
        """Reserved consumers by session key."""
        self._starts: dict[str, float] = {}
        """Loop time in seconds at which the reserved consumers may be created, by session key."""
        self.consumers = 0
        """Number of consumers of all sessions that are connected here, reserved ones included."""
        self._reading = asyncio.Lock()
        rate = settings.consumer_rate
        self._paces = Buckets(rate, depth(rate, settings.rate_burst)) if rate else None

    # -- sessions ---------------------------------------------------------------------------------

    async def admit(self, quota: str, who: str) -> None:
        """Count a new session that outlives its connection, before its record is written.

        Args:
            who: the user or address, for the log.

        Raises:
            QuotaExceeded: the quota has as many sessions as permitted.
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        most = self._settings.max_sessions
        use = await self._use(quota, lambda use: most is not None and use.sessions >= most)
        if most is not None and use.sessions >= most:
            self._count_refusal("max_sessions", who)
            raise QuotaExceeded(f"max_sessions: more than {most} sessions of one user or address")
        use.add(1, 0)

    def claimed(self, record: SessionRecord) -> None:
        """Note a session that goes on here or is replaced by a new one, before the record of the claim is written."""
        if record.v5 is not None and record.v5.quota:
            self._note(record.key, record.v5.quota, len(record.cons))

    def written(self, record: SessionRecord) -> None:
        """Store the note of a session whose record was written, where its number of consumers has changed."""
        if record.v5 is None or not record.v5.quota:
            return
        quota, count = record.v5.quota, len(record.cons)
        self._release(record.key)
        known = self._noted.get(record.key)
        if known == (quota, count):
            return
        self._note(record.key, quota, count)
        if quota in self._uses:
            self._uses[quota].add(0, count - (known[1] if known is not None and known[0] == quota else 0))
        target = b"HPUB %b " % note_subject(quota, record.key).encode()
        self._store.put(target, b"NATS/1.0\r\n\r\n", b"%d" % count, IgnoredStore())

    def left(self, key: str) -> None:
        """Forget the note and the reservation of a session whose connection has ended; its stored note stays."""
        if key in self._reserved:
            self._release(key)
        self._starts.pop(key, None)
        self.consumers -= self._noted.pop(key, ("", 0))[1]

    def _note(self, key: str, quota: str, count: int) -> None:
        self.consumers += count - self._noted.get(key, ("", 0))[1]
        self._noted[key] = quota, count

    def _release(self, key: str) -> None:
        one = self._reserved.pop(key, None)
        if one is not None:
            self.consumers -= one.consumers
            if one.quota in self._uses:
                self._uses[one.quota].add(0, -one.consumers)

    async def forget(self, record: SessionRecord) -> None:
        """Remove the note of a session that has ended; its record is removed or names another quota.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        if record.v5 is None or not record.v5.quota:
            return
        quota, count = record.v5.quota, len(record.cons)
        if record.clean:  # an ended session: `draining` has its consumers, and the uncounted consumer of PUBRELs
            count = max(0, len(record.v5.draining) - 1)
        if await self._notes.forget(quota, record.key) and quota in self._uses:
            self._uses[quota].add(-1, -count)

    # -- consumers --------------------------------------------------------------------------------

    async def reserve(self, key: str, quota: str, who: str, wanted: int) -> int:
        """Return how many of ``wanted`` consumers a session may create; they count until its record is written.

        Args:
            key: session key.
            who: the user or address, for the log.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        self._release(key)
        return self._reserve(await self._use(quota, self._full(wanted)), key, quota, who, wanted)

    def reserve_known(self, key: str, quota: str, who: str, wanted: int) -> int | None:
        """Do the same as :meth:`reserve` without a wait; None: the notes have to be read first."""
        self._release(key)
        use = self._known(quota, self._full(wanted))
        return None if use is None else self._reserve(use, key, quota, who, wanted)

    def _full(self, wanted: int) -> Callable[[Use], bool]:
        """Return a function that tells whether a quota has no room for ``wanted`` consumers."""
        most = self._settings.max_durable_consumers
        return lambda use: most is not None and use.consumers + wanted > most

    def _reserve(self, use: Use, key: str, quota: str, who: str, wanted: int) -> int:
        most, here = self._settings.max_durable_consumers, self._settings.max_durable_consumers_per_gateway
        room, start = wanted, 0.0
        if here is not None and here - self.consumers < room:
            room = max(0, here - self.consumers)
            self._count_refusal("max_durable_consumers_per_gateway", "this gateway")
        if most is not None and most - use.consumers < room:
            room = max(0, most - use.consumers)
            self._count_refusal("max_durable_consumers", who)
        if room and self._paces is not None:
            now = self._now()
            pace = self._paces.of(quota, now)
            if pace.level(now) + room > pace.depth + pace.rate * self._settings.rate_pause:
                self._count_refusal("consumer_rate", who)
                return 0
            start = now + pace.pour(room, now)
        self._reserved[key] = Reserved(quota, room)
        self.consumers += room
        use.add(0, room)
        self._starts[key] = start
        return room

    async def pace(self, key: str) -> None:
        """Wait until the consumers that were reserved for a session may be created."""
        await asyncio.sleep(self._starts.pop(key, 0.0) - self._now())

    # -- what is used -----------------------------------------------------------------------------

    async def _use(self, quota: str, full: Callable[[Use], bool]) -> Use:
        """Return the use of a quota; its notes are read where they were not read lately."""
        if (use := self._known(quota, full)) is not None:
            return use
        async with self._reading:  # clients of the same quota that come meanwhile wait for these notes
            if (use := self._known(quota, full)) is not None:
                return use
            found = await self._notes.sessions(quota)
            if full(Use(len(found), sum(found.values()), 0.0)):
                for key in await self._stale(quota, list(found)[:STALE_MAX]):
                    await self._notes.forget(quota, key)
                    del found[key]
            reserved = sum(one.consumers for one in self._reserved.values() if one.quota == quota)
            if len(self._uses) >= QUOTAS_MAX:
                del self._uses[next(iter(self._uses))]
            use = self._uses[quota] = Use(len(found), sum(found.values()) + reserved, self._now())
            return use

    def _known(self, quota: str, full: Callable[[Use], bool]) -> Use | None:
        """Return the use of a quota, now the most recently used one; None: its notes have to be read."""
        use = self._uses.get(quota)
        if use is None or self._now() - use.read > (READ_FULL_S if full(use) else READ_AGAIN_S):
            return None
        self._uses[quota] = self._uses.pop(quota)
        return use

    async def _stale(self, quota: str, keys: list[str]) -> list[str]:
        """Return the keys of sessions that do not exist any more: their gateway did not remove the notes."""
        found = []
        for key in keys:
            try:
                one = None if key in self._noted else await self._sessions.load(key)
            except PoisonedRecord:
                continue
            gone = one is None or (one[0].v5 is not None and one[0].v5.quota != quota)
            if gone and key not in self._noted:
                found.append(key)
        return found

    def _count_refusal(self, limit: str, who: str) -> None:
        """Count a refusal by a limit; it is logged once in a while for each user or address."""
        self._counted(limit)
        text = "limit %s is reached by %s: further requests are refused"
        log_failure(log, logging.WARNING, "quota", text, limit, who, extra=once(f"{limit} {who}"))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
