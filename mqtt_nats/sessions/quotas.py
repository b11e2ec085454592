# SPDX-License-Identifier: Apache-2.0
"""Quotas: the sessions and consumers that a user, or an address of anonymous clients, may have in the cluster.

Each session that outlives its connection has a note in `$MQTT_shared` under its quota. A gateway reads the notes of a
quota when one of its clients needs more, counts its own changes, and reads the notes again now and then, since other
gateways write notes too. While a quota has much room, clients do not wait for that.
See docs/internals/sessions.md#quotas.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.backbone.pending_stores import IgnoredStore
from mqtt_nats.base.bucket import Buckets, depth
from mqtt_nats.base.logs import log_failure, once
from mqtt_nats.base.tasks import rooted
from mqtt_nats.codec import QuotaExceeded
from mqtt_streams.headers import REPLACING
from mqtt_streams.quotas import note_subject
from mqtt_streams.sessions import PoisonedRecord

if TYPE_CHECKING:
    from mqtt_nats.backbone.acked_publisher import AckedPublisher
    from mqtt_nats.base.limit_settings import ClientLimits
    from mqtt_streams.quotas import QuotaStore
    from mqtt_streams.sessions import SessionRecord, SessionStore

log = logging.getLogger("mqtt_nats.broker")

CLAIMS_WAITING_MOST: Final = 16
"""Most claims of a user or address that keep their places among all claims while they wait for the same notes."""
BEGINNING_S: Final = 4.0
"""Most seconds for which a new session waits for `session_rate`: clients do not wait much longer for CONNACK."""
READ_AGAIN_S: Final = 60.0
"""Seconds after which the notes of a quota are read again, when a client needs more sessions or consumers."""
READ_FULL_S: Final = 5.0
"""Seconds after which the notes of a quota that is used up are read again."""
PAUSE_RATIO: Final = 20
"""Smallest ratio of the time between two readings of the notes of a quota to the time that a reading takes."""
ROOM_MIN: Final = 1000
"""Sessions, or consumers, for which a quota must have room while clients do not wait for its notes to be read again."""
ROOM_RATIO: Final = 8
"""Largest ratio of what is used to that room: a quota of which more is used has little room."""
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
    """Consumers that a SUBSCRIBE packet may create; no note has them yet."""

    quota: str
    consumers: int


class Place(NamedTuple):
    """Place of a session that CONNECT packets begin; no note has it yet."""

    quota: str
    key: str


class Use:
    """Use of a quota, as far as this gateway knows: sessions and consumers."""

    __slots__ = ("consumers", "read", "sessions", "took")

    def __init__(self, sessions: int, consumers: int, read: float, took: float = 0.0) -> None:
        self.sessions = sessions
        self.consumers = consumers
        self.read = read
        """Loop time in seconds at which the notes were read."""
        self.took = took
        """Seconds that it took to read the notes."""

    def add(self, sessions: int, consumers: int) -> None:
        """Add sessions and consumers that this gateway has created (positive) or removed (negative)."""
        self.sessions = max(0, self.sessions + sessions)
        self.consumers = max(0, self.consumers + consumers)

    def expected(self) -> Use:
        """Return the largest use that others may have made of this one since the notes were read."""
        sessions, consumers = (one + max(one // ROOM_RATIO, ROOM_MIN) for one in (self.sessions, self.consumers))
        return Use(sessions, consumers, self.read)


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
        self._places: dict[Place, set[object]] = {}
        """Claims by the place that they have together: of several claims of one session one succeeds."""
        self._claims: dict[object, Place] = {}
        """The place of each claim."""
        self._reserved: dict[str, Reserved] = {}
        """Consumers that are in no note yet, by session key."""
        self._starts: dict[str, float] = {}
        """Loop time in seconds at which the reserved consumers may be created, by session key."""
        self.consumers = 0
        """Number of consumers of all sessions that are connected here, reserved ones included."""
        self._readings: dict[str, asyncio.Task[Use]] = {}
        """Notes that are being read, by quota; a client that does not wait any longer does not stop that."""
        self._waiting: Counter[str] = Counter()
        """Number of clients that wait for the notes of a quota, by quota."""
        self._noted_meanwhile: dict[str, Use] = {}
        """Growth of a quota's notes since their reading began, by quota; the reading may have missed it."""
        rate = settings.consumer_rate
        self._paces = Buckets(rate, depth(rate, settings.rate_burst)) if rate else None
        rate = settings.session_rate
        self._beginnings = Buckets(rate, depth(rate, settings.rate_burst)) if rate else None

    # -- sessions ---------------------------------------------------------------------------------

    async def admit(
        self, claim: object, key: str, quota: str, who: str, crowded: Callable[[], None] = lambda: None
    ) -> None:
        """Count a new session that outlives its connection, before its record is written.

        Args:
            claim: who claims the session, with one place at a time: until :meth:`store_note` or :meth:`give_back`.
            key: session key.
            who: the user or address, for the log.
            crowded: called where the claim waits for the rate of new sessions, or for notes for which
                `CLAIMS_WAITING_MOST` others wait already.

        Raises:
            QuotaExceeded: the quota has as many sessions as permitted, or too many are begun in a short time.
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        self.give_back(claim)
        place, most = Place(quota, key), self._settings.max_sessions
        if place not in self._places:
            await self._wait_for_rate(quota, who, crowded)
            use = await self._use(quota, lambda use: most is not None and use.sessions >= most, crowded)
            if place not in self._places:  # else another claim of the session has been admitted meanwhile
                if most is not None and use.sessions >= most:
                    self._count_refusal("max_sessions", who)
                    raise QuotaExceeded(f"max_sessions: more than {most} sessions of one user or address")
                use.add(1, 0)
        self._places.setdefault(place, set()).add(claim)
        self._claims[claim] = place

    async def _wait_for_rate(self, quota: str, who: str, crowded: Callable[[], None]) -> None:
        """Wait until the rate of new sessions allows one more.

        Raises:
            QuotaExceeded: that would take longer than `BEGINNING_S`.
        """
        if self._beginnings is None:
            return
        now = self._now()
        bucket = self._beginnings.of(quota, now)
        if bucket.level(now) + 1 > bucket.depth + bucket.rate * BEGINNING_S:
            self._count_refusal("session_rate", who)
            raise QuotaExceeded("session_rate: too many new sessions of one user or address in a short time")
        if wait := bucket.pour(1, now):
            crowded()
            await asyncio.sleep(wait)

    def give_back(self, claim: object) -> None:
        """End the part of a claim in the place of its session, if it has one: the claim has not begun the session."""
        place = self._claims.pop(claim, None)
        if place is None:
            return
        claims = self._places[place]
        claims.remove(claim)
        if not claims:
            self._take(place)

    def settle(self, claim: object, record: SessionRecord) -> None:
        """Store the note of a session that a claim has begun, as is found out after its client was refused."""
        place = self._claims.get(claim)
        if place is not None:
            self._put(place, len(record.cons), self._take(place))

    def _take(self, place: Place) -> int:
        """End the place of a session that has a note from now on, or is not begun; return the number of sessions."""
        claims = self._places.pop(place, None)
        if claims is None:
            return 0
        for claim in claims:
            del self._claims[claim]
        if place.quota in self._uses:
            self._uses[place.quota].add(-1, 0)
        return 1

    def note_claim(self, record: SessionRecord) -> None:
        """Note a session that goes on here or is replaced by a new one, before the record of the claim is written."""
        if record.v5 is not None and record.v5.quota:
            self._note(record.key, record.v5.quota, len(record.cons))

    def store_note(self, record: SessionRecord) -> None:
        """Store the note of a session whose record was written, if it is new or its number of consumers has changed."""
        if record.v5 is None or not record.v5.quota:
            self.forget_session(record.key)  # the one that it has replaced here may have been noted
            return
        quota, count = record.v5.quota, len(record.cons)
        place = Place(quota, record.key)
        begun = self._take(place)
        self._release(record.key)
        known = self._noted.get(record.key)
        if known == (quota, count) and not begun:
            return
        self._note(record.key, quota, count)
        self._put(place, count, begun, known[1] if known is not None and known[0] == quota else 0)

    def _put(self, place: Place, count: int, begun: int, before: int = 0) -> None:
        """Store the note of a session with ``count`` consumers, of which ``before`` have counted so far."""
        more = count - before
        if place.quota in self._uses:
            self._uses[place.quota].add(begun, more)
        if place.quota in self._noted_meanwhile:
            self._noted_meanwhile[place.quota].add(begun, max(0, more))
        target = b"HPUB %b " % note_subject(*place).encode()
        self._store.put(target, REPLACING, b"%d" % count, IgnoredStore())

    def forget_session(self, key: str) -> None:
        """Forget note and reserved consumers of a session that nobody has or claims here; its stored note stays."""
        self._release(key)
        self._starts.pop(key, None)
        self.consumers -= self._noted.pop(key, ("", 0))[1]

    def _note(self, key: str, quota: str, count: int) -> None:
        self.consumers += count - self._noted.get(key, ("", 0))[1]
        self._noted[key] = quota, count

    def _release(self, key: str) -> None:
        """End the reservation of a session's consumers, if there is one."""
        one = self._reserved.pop(key, None)
        if one is None:
            return
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

    async def _use(self, quota: str, full: Callable[[Use], bool], crowded: Callable[[], None] = lambda: None) -> Use:
        """Return the use of a quota; its notes are read where they were not read lately. ``crowded``: see `admit`."""
        if (use := self._known(quota, full)) is not None:
            return use
        reading = self._read_once(quota, full)
        if self._waiting[quota] >= CLAIMS_WAITING_MOST:
            crowded()
        self._waiting[quota] += 1
        try:
            return await asyncio.shield(reading)
        finally:
            self._waiting[quota] -= 1
            if not self._waiting[quota]:
                del self._waiting[quota]

    def _known(self, quota: str, full: Callable[[Use], bool]) -> Use | None:
        """Return the use of a quota, now the most recently used one; None: the client has to wait for its notes.

        The notes of a quota with much room are read again while its clients go on with what is known.
        """
        use = self._uses.get(quota)
        if use is None:
            return None
        if self._now() - use.read > max(READ_FULL_S if full(use) else READ_AGAIN_S, use.took * PAUSE_RATIO):
            if full(use.expected()):
                return None
            self._read_once(quota, full)
        self._uses[quota] = self._uses.pop(quota)
        return use

    def _read_once(self, quota: str, full: Callable[[Use], bool]) -> asyncio.Task[Use]:
        """Return the task that reads the notes of a quota; clients that come meanwhile share it."""
        task = self._readings.get(quota)
        if task is None:
            self._noted_meanwhile[quota] = Use(0, 0, 0.0)
            reading = rooted(self._read(quota, full))
            task = self._readings[quota] = asyncio.get_running_loop().create_task(reading, name="notes of a quota")
            task.add_done_callback(partial(self._have_read, quota))
        return task

    def _have_read(self, quota: str, task: asyncio.Task[Use]) -> None:
        del self._readings[quota], self._noted_meanwhile[quota]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._uses.pop(quota, None)  # the next client waits for the notes
            log.debug("the notes of a quota were not read: %s", error)

    async def _read(self, quota: str, full: Callable[[Use], bool]) -> Use:
        """Read the notes of a quota, and return its use."""
        begun = self._now()
        found = await self._notes.totals(quota, STALE_MAX)
        sessions, consumers = found.sessions, found.consumers
        if full(Use(sessions, consumers, 0.0)):
            for key in await self._stale(quota, list(found.oldest)):
                await self._notes.forget(quota, key)
                sessions, consumers = sessions - 1, consumers - found.oldest[key]
        sessions += sum(1 for place in self._places if place.quota == quota)
        consumers += sum(one.consumers for one in self._reserved.values() if one.quota == quota)
        noted = self._noted_meanwhile[quota]
        sessions, consumers = sessions + noted.sessions, consumers + noted.consumers
        if quota not in self._uses and len(self._uses) >= QUOTAS_MAX:
            del self._uses[next(iter(self._uses))]
        now = self._now()
        use = self._uses[quota] = Use(sessions, consumers, now, now - begun)
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
