# SPDX-License-Identifier: Apache-2.0
"""State of JetStream for metrics: streams, storage, dead gateways, and how long sessions have been absent."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base import server_clock as natstime
from mqtt_streams import headers, stored
from mqtt_streams.account import AccountStorage, account_storage
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call, has_leader
from mqtt_streams.definitions import EVERY
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pages import pages_of
from mqtt_streams.stored import StoredMessage
from mqtt_streams.timers import EXPIRY, timer_subject
from mqtt_streams.timers import STREAM as TIMERS
from mqtt_streams.wills import STREAM as WILLS
from mqtt_streams.wills import will_subject

if TYPE_CHECKING:
    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_streams.gateways import Entry

STATE_TIMEOUT: Final = 2.0
"""Seconds in which JetStream answers; what is not answered by then is missing, or counts as not available."""

DEAD_MOST: Final = 20
"""Maximum number of dead gateways whose wills are looked for."""


NS: Final = 1e9

STORAGE_S: Final = 60.0
"""Seconds for which an answer about the storage counts: each gateway wants it every few seconds."""

T = TypeVar("T")


class StreamState(NamedTuple):
    """State of a stream.

    `available`: it has a leader that answers; if not, all other values are 0. `behind`: number of replicas that are
    offline or not current. `lag`: operations by which the replica furthest behind is behind. `max_age`: seconds for
    which messages are kept, 0 = for ever.
    """

    available: bool
    messages: int = 0
    bytes: int = 0
    consumers: int = 0
    behind: int = 0
    lag: int = 0
    max_age: float = 0.0


class JetStreamState(NamedTuple):
    """State of JetStream in one account; None, and a stream that is missing: not known.

    `dead`: number of dead gateways whose clients no gateway has finished dealing with. `with_wills`: the number of them
    that have a will to be published. `absent`: seconds since the end of the connection of the session that has been
    absent longest, of those that expire; 0 = there is none.
    """

    streams: dict[str, StreamState]
    storage: AccountStorage | None = None
    dead: int | None = None
    with_wills: int | None = None
    absent: float | None = None

    @property
    def retention(self) -> float | None:
        """Seconds for which messages are kept for absent sessions; infinite = for ever."""
        found = self.streams.get(MESSAGES)
        return None if found is None or not found.available else found.max_age or math.inf


async def jetstream_state(nats: NatsLinks, gateways: Callable[[], Awaitable[list[Entry]]]) -> JetStreamState:
    """Return the state of JetStream in the account of ``nats``, as far as JetStream answers in `STATE_TIMEOUT` seconds.

    Args:
        gateways: returns all registered gateways.
    """
    if not nats.online.is_set():
        return JetStreamState({})
    inbox = nats.inbox
    streams, storage, others, absent = await asyncio.gather(
        _streams(inbox), _answered(_storage(inbox)), _answered(_dead(inbox, gateways)), _answered(_absent(inbox))
    )
    dead, with_wills = others if others is not None else (None, None)
    return JetStreamState(streams, storage, dead, with_wills, absent)


async def storage(nats: NatsLinks) -> AccountStorage | None:
    """Return the file storage of the account of ``nats``, as JetStream has told it in the last `STORAGE_S`.

    None: JetStream has not answered in `STATE_TIMEOUT` seconds.
    """
    now = time.monotonic()
    told = _told.get(nats.inbox)
    if told is not None and now < told[0] + STORAGE_S:
        return told[1]
    found = await _answered(_storage(nats.inbox)) if nats.online.is_set() else None
    if found is not None:
        _told[nats.inbox] = now, found
    return found


async def _answered(question: Awaitable[T]) -> T | None:
    try:
        async with asyncio.timeout(STATE_TIMEOUT):
            return await question
    except (ApiError, NoResponders, RequestTimeout, TimeoutError):
        return None


async def _streams(inbox: RequestInbox) -> dict[str, StreamState]:
    found = await asyncio.gather(*(_stream(inbox, name) for name in EVERY))
    return {name: one for name, one in zip(EVERY, found, strict=True) if one is not None}


async def _stream(inbox: RequestInbox, name: str) -> StreamState | None:
    """Return the state of a stream; None: there is no such stream."""
    try:
        async with asyncio.timeout(STATE_TIMEOUT):
            info = await call(inbox, f"STREAM.INFO.{name}")
    except ApiError as error:
        return None if error.err_code == STREAM_NOT_FOUND else StreamState(False)
    except (NoResponders, RequestTimeout, TimeoutError):
        return StreamState(False)
    return stream_state(info)


def stream_state(info: dict[str, Any]) -> StreamState:
    """Return the state of a stream from an answer to `$JS.API.STREAM.INFO`."""
    cluster = info.get("cluster") or {}
    followers = cluster.get("replicas") or []
    state = info["state"]
    return StreamState(
        has_leader(info),
        state["messages"],
        state["bytes"],
        state["consumer_count"],
        sum(bool(one.get("offline")) or not one.get("current") for one in followers),
        max((int(one.get("lag", 0)) for one in followers), default=0),
        info["config"].get("max_age", 0) / NS,
    )


async def _storage(inbox: RequestInbox) -> AccountStorage:
    return account_storage(await call(inbox, "INFO"))


async def _dead(inbox: RequestInbox, gateways: Callable[[], Awaitable[list[Entry]]]) -> tuple[int, int]:
    """Return the number of dead gateways, and how many of them have a will to be published."""
    dead = [one.identity for one in await gateways() if one.lapsed or one.reaper]
    looks = (stored.get_next(inbox, WILLS, will_subject(one, "*"), 1) for one in dead[:DEAD_MOST])
    wills = await asyncio.gather(*looks)
    return len(dead), sum(one is not None for one in wills)


_told: Final[WeakKeyDictionary[RequestInbox, tuple[float, AccountStorage]]] = WeakKeyDictionary()
"""The last answer about the storage, and its time (monotonic, in seconds)."""

_first: Final[WeakKeyDictionary[RequestInbox, int]] = WeakKeyDictionary()
"""Sequence, in `$MQTT_timers`, before which no session's timer has a schedule: timers never come back."""


async def _absent(inbox: RequestInbox) -> float:
    """Return for how many seconds the first session that expires has been absent.

    Its timer was set when its connection ended. The timer of a session that does not expire has no schedule. There may
    be a million of them: they are passed once.
    """
    async with aclosing(_session_timers(inbox)) as timers:
        async for one in timers:
            _first[inbox] = one.seq
            if headers.get(one.headers, headers.SCHEDULE) is not None:
                return max(natstime.now() - one.time_ns / NS, 0.0)
    return 0.0


async def _session_timers(inbox: RequestInbox) -> AsyncGenerator[StoredMessage, None]:
    """Yield the timers of sessions, oldest first; without those that are known to have no schedule."""
    subject = timer_subject(EXPIRY, "*")
    first = await stored.get_next(inbox, TIMERS, subject, _first.get(inbox, 1))
    if first is None:
        return
    yield first
    async with aclosing(pages_of(inbox, TIMERS, subject, {"seq": first.seq + 1})) as pages:
        async for page in pages:
            for one in page:
                yield one
