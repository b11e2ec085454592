# SPDX-License-Identifier: Apache-2.0
"""Pending stores: publishes that JetStream must acknowledge, with callbacks for their end, and reasons of refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Final

from mypy_extensions import mypyc_attr

from mqtt_nats.backbone.frames import MESSAGE, RETAINED_COPY, frame_group, stream_of
from mqtt_streams.api import ApiError
from mqtt_streams.error_codes import (
    INSUFFICIENT_RESOURCES,
    MAXIMUM_BYTES_TEXT,
    MAXIMUM_PER_SUBJECT_TEXT,
    MESSAGE_TOO_LARGE,
    NO_STORAGE,
    STORE_FAILED,
    WRONG_LAST_SEQUENCE,
)
from mqtt_streams.error_codes import TRANSIENT as TRANSIENT

# Above these limits the gateway stops reading from publishers until half of them is acknowledged.
MAX_PENDING = 32_768
MAX_PENDING_BYTES = 128 * 1024 * 1024

FULL: Final = "JetStream storage is full"

FULL_MOST: Final = 30.0
"""Seconds for which stores wait for room while so many wait that publishers are not read from; then they fail."""

LEADER_SILENT_S: Final = 0.05
"""Seconds without an answer to a message after which no further one is sent; longer than a turn of the event loop."""

LEADER_SILENT_MOST_S: Final = 1.0
"""Seconds after which messages are sent all the same: no leader has gone, and a message was lost on its way."""

REASONS: Final = ("storage_full", "stream_limit", "too_large", "not_permitted", "other")
"""Names of the reasons: the values of a metric's label."""

_CODES: Final = {STORE_FAILED: "stream_limit", MESSAGE_TOO_LARGE: "too_large"}
"""Reasons by JetStream's error code."""

_STATUS: Final = {403: "not_permitted", 413: "too_large"}
"""Reasons by the status of errors that have no code of JetStream."""

STALE = ApiError(408, 0, "the time limit for the store has passed")
"""Error of a store that is not sent again because it is too late."""


OVERTAKEN = ApiError(
    503, INSUFFICIENT_RESOURCES, "there was no room for the message, and a later one of its publisher is stored"
)
"""Error of a store that has waited for room, and would now be stored out of order."""

ANYBODY: Final = object()
"""Publisher of all stores on a subject of which only the last one matters, whoever has published it."""


class TooLarge(ValueError):
    """Error: the message with its headers exceeds the server's ``max_payload``."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PendingStore:
    """Publish that JetStream must acknowledge; subclasses implement the callbacks for its end."""

    __slots__ = ("begun", "born", "frame")

    frame: bytes
    begun: float
    """Loop time in seconds of the first attempt; 0 = not sent yet."""
    born: float
    """Loop time in seconds of the last attempt; 0 = not sent yet, or withheld."""
    optional = False
    """Whether the frame acknowledges a consumer's delivery, which is settled when the consumer is gone."""

    def begin(self, frame: bytes) -> None:
        """Take the frame, which is not sent yet."""
        self.frame = frame
        self.begun = self.born = 0.0

    def send(self, frame: bytes, now: float) -> None:
        """Take the frame, which is sent at ``now``, loop time in seconds."""
        self.frame = frame
        self.begun = self.born = now

    def attempt(self, now: float) -> None:
        """Note an attempt to send the frame at ``now``, loop time in seconds."""
        self.born = now
        self.begun = self.begun or now

    def probe(self, now: float) -> None:
        """Note that the frame is sent as a probe at ``now``, loop time in seconds."""
        self.begun = self.begun or now

    def begin_anew(self, now: float) -> None:
        """Take the attempt at ``now`` for the first one: the message was not stored before."""
        self.begun = now

    def wait(self) -> None:
        """Note that no answer is expected: the frame is withheld."""
        self.born = 0.0

    def excuse(self, seconds: float) -> None:
        """Extend the time for an answer, if one is expected."""
        if self.born:
            self.born += seconds

    def stored(self, ack: bytes) -> None:
        """Handle success: JetStream has stored the message; ``ack`` is its PubAck (JSON)."""
        raise AssertionError("an operation without an end")

    def failed(self, error: ApiError) -> None:
        """Handle failure: JetStream has refused the message for good, or the store is `STALE`."""
        raise AssertionError("an operation without an end")

    def explains(self) -> bool:
        """Return whether the failure is reported to the waiting client, and nothing else depends on the store."""
        return False

    def waits(self) -> bool:
        """Return whether the store waits for room while JetStream's storage is full; otherwise it fails at once."""
        return False

    def publisher(self) -> object | None:
        """Return the client whose messages on a topic must be stored in their order, or `ANYBODY`; None = no order."""
        return None

    def stale(self) -> bool:
        """Return whether it is too late to send the message again; an earlier attempt may have stored it."""
        return False


@mypyc_attr(allow_interpreted_subclasses=True)
class CountedStore(PendingStore):
    """Stores of one message that end together."""

    __slots__ = ("remaining",)

    def __init__(self, remaining: int = 0) -> None:
        self.remaining = remaining
        """Number of stores that have not ended."""

    def expect(self, stores: int = 1) -> None:
        """Add stores to those that have to end."""
        self.remaining += stores


@mypyc_attr(allow_interpreted_subclasses=True)
class AwaitedStore(PendingStore):
    """Pending store whose end a coroutine awaits in ``done``."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def stored(self, ack: bytes) -> None:
        """Set the stream sequence as the result of ``done``."""
        if not self.done.done():
            self.done.set_result(sequence(ack))

    def failed(self, error: ApiError) -> None:
        """Set the error in ``done``."""
        if not self.done.done():
            self.done.set_exception(error)


@mypyc_attr(allow_interpreted_subclasses=True)
class IgnoredStore(PendingStore):
    """Pending store whose end has no effect."""

    __slots__ = ()

    def stored(self, ack: bytes) -> None:
        """Do nothing."""

    def failed(self, error: ApiError) -> None:
        """Do nothing."""


def sequence(ack: bytes) -> int:
    """Return the stream sequence in a PubAck."""
    start = ack.find(b'"seq":') + 6
    end = start
    size = len(ack)
    while end < size and (48 <= ack[end] <= 57 or ack[end] == 32):
        end += 1
    return int(ack[start:end])


_NONE: Final[dict[bytes, PendingStore]] = {}


class PendingStores:
    """The stores of one connection to NATS that have not ended, in the order of their first attempts.

    ``on_pressure(True)`` asks for no further stores, ``on_pressure(False)`` allows them again.
    """

    def __init__(self, on_pressure: Callable[[bool], None]) -> None:
        self.on_pressure = on_pressure
        self.pending: dict[bytes, PendingStore] = {}
        """Stores by the token of their reply subject."""
        self.overtaking = Overtaking(self.pending)
        self.silences = (Silence(), Silence())
        """Silence of the stream of messages, and of the stream of retained copies: each has its leader."""
        self.replicated = False
        """Whether these streams have replicas. Others change no leader, so no message waits for an answer."""
        self.bytes = 0
        self.on_timed: Callable[[float], None] | None = None
        """``on_timed(seconds)``: called with the duration of a store; one store at a time is measured."""
        self._timed: PendingStore | None = None
        self._timed_from = 0.0
        self._withheld: set[PendingStore] = set()
        self._pressed = False
        self._empty = asyncio.Event()

    @property
    def pressed(self) -> bool:
        """Whether too many stores wait for JetStream."""
        return self._pressed

    def call_on_timed(self, timed: Callable[[float], None]) -> None:
        """Call ``timed`` with the duration of a store in seconds; one store at a time is measured."""
        self.on_timed = timed

    def oldest_message(self) -> int:
        """Return the token of the oldest message that is being stored, as a number; 0 = none."""
        for token, op in self.pending.items():
            if op.frame.startswith(MESSAGE):
                return int(token, 16)
        return 0

    def acknowledged_by(self, token: bytes) -> bytes:
        """Return the subject of a pending acknowledgement; empty when the acknowledgement has ended."""
        op = self.pending.get(token)
        return op.frame.split(b" ", 2)[1] if op is not None else b""

    def assume(self, token: bytes) -> None:
        """End an acknowledgement as successful: its consumer is gone."""
        op = self.pending.get(token)
        if op is not None:
            self._end(token, op)
            op.stored(b"")

    def withhold(self, op: PendingStore) -> None:
        """Do not send an operation, or send it again, before :meth:`let_go`."""
        self._withheld.add(op)

    async def drained(self) -> None:
        """Wait until every store is acknowledged or refused."""
        while self.pending:
            self._empty.clear()
            await self._empty.wait()

    def excuse(self, seconds: float) -> None:
        """Extend all time-outs by the seconds for which the process stood still and could not read answers."""
        for op in self.pending.values():
            op.excuse(seconds)

    def _of(self, group: bytes | None) -> list[tuple[bytes, PendingStore]]:
        """Return the pending stores of a group, or all (None), with tokens and in order."""
        return [item for item in self.pending.items() if group is None or frame_group(item[1].frame) == group]

    def _probe_of(self, stream: bytes) -> bytes:
        """Return the token of the oldest store whose answer can tell that a stream stores again, or empty bytes."""
        for token, op in self.pending.items():
            if stream_of(op.frame) == stream and not (op.optional or op in self._withheld or op.stale()):
                return token
        return b""

    def _room_probe_of(self, group: bytes, before: bytes) -> bytes:
        """Return the token of the next store that may find room, or empty bytes; ``before``: the last probe.

        Publishers and subjects take turns, each with its oldest store: one that is too large does not keep the others
        waiting.
        """
        first = b""
        found: set[tuple[object, bytes]] = set()
        for token, op in self.pending.items():
            if frame_group(op.frame) != group or not op.waits() or op in self._withheld or op.stale():
                continue
            key = op.publisher() or op, op.frame.split(b" ", 2)[1]
            if key in found:
                continue
            found.add(key)
            if not before or _number(token) > _number(before):
                return token
            first = first or token
        return first

    def _silence_of(self, op: PendingStore) -> Silence | None:
        """Return the silence of an operation's stream; None = the order of its stores does not matter."""
        if op.frame.startswith(MESSAGE):
            return self.silences[0]
        return self.silences[1] if op.frame.startswith(RETAINED_COPY) else None

    def _holds(self, token: bytes, op: PendingStore) -> bool:
        """Return whether a store that is about to be sent has to wait, since its stream is silent."""
        if not self.replicated:
            return False
        silence = self._silence_of(op)
        return silence is not None and silence.holds(token, op)

    def _released_by(self, op: PendingStore) -> dict[bytes, PendingStore]:
        """Return the stores that have waited for an answer of a stream that has answered ``op``, in order."""
        if not self.replicated:
            return _NONE
        silence = self._silence_of(op)
        return _NONE if silence is None else silence.take_held()

    def _overdue(self) -> dict[bytes, PendingStore]:
        """Return the stores that have waited for an answer for too long, in order."""
        return {token: op for one in self.silences if one.overdue() for token, op in one.take_held().items()}

    def _end_silences(self) -> None:
        """Note that nothing is sent now: what has waited is sent with the other stores."""
        for one in self.silences:
            one.take_held()

    def _end(self, token: bytes, op: PendingStore) -> None:
        """Remove a store that has ended."""
        del self.pending[token]
        if self._withheld:
            self._withheld.discard(op)
        if op is self._timed:
            self._timed = None
            if self.on_timed is not None:
                self.on_timed(perf_counter() - self._timed_from)
        self.bytes -= len(op.frame)
        if not self.pending:
            self._empty.set()
        if self._pressed:
            self._relieve()

    def _press(self) -> None:
        """Ask for no further stores when too many wait."""
        if (self.bytes > MAX_PENDING_BYTES or len(self.pending) > MAX_PENDING) and not self._pressed:
            self._pressed = True
            self.on_pressure(True)

    def _relieve(self) -> None:
        """Allow further stores when few enough wait."""
        if self._pressed and self.bytes < MAX_PENDING_BYTES // 2 and len(self.pending) < MAX_PENDING // 2:
            self._pressed = False
            self.on_pressure(False)


class Silence:
    """Messages that are not sent, since their stream has not answered earlier ones for a moment.

    A leader that steps down drops messages without an answer. The next leader would store what follows before the
    dropped ones are sent again. See docs/internals/backbone.md#elections.
    """

    def __init__(self) -> None:
        self._asked = 0.0
        """Time in seconds (`monotonic`) of the first message since the last answer; 0 = none."""
        self._held: dict[bytes, PendingStore] = {}

    def holds(self, token: bytes, op: PendingStore) -> bool:
        """Return whether a message that is about to be sent has to wait; :meth:`take_held` returns it then."""
        now = monotonic()
        self._asked = self._asked or now
        if not self._held and now - self._asked < LEADER_SILENT_S:
            return False
        self._held[token] = op
        return True

    def overdue(self) -> bool:
        """Return whether messages have waited for `LEADER_SILENT_MOST_S`: the earlier one may be lost."""
        return bool(self._held) and monotonic() - self._asked > LEADER_SILENT_MOST_S

    def take_held(self) -> dict[bytes, PendingStore]:
        """Note an answer, or that nothing is sent at all now; return the messages that have waited, in order."""
        self._asked = 0.0
        if not self._held:
            return self._held
        held, self._held = self._held, {}
        return held


class Overtaking:
    """Stores that wait for room, refused or not sent at all, so that no later one takes their place.

    A smaller message of the same publisher on the same subject may have been under way, and may find room. Then the
    store that waits comes too late.
    """

    def __init__(self, pending: dict[bytes, PendingStore]) -> None:
        self._pending = pending
        self.waiting: dict[tuple[object, bytes], dict[bytes, PendingStore]] = {}
        """Stores by token, by publisher and subject."""

    def waits(self, token: bytes, op: PendingStore) -> None:
        """Note that a store waits for room."""
        publisher = op.publisher()
        if publisher is not None:
            self.waiting.setdefault((publisher, op.frame.split(b" ", 2)[1]), {})[token] = op

    def prune(self) -> None:
        """Forget the stores that have ended."""
        for key, waiting in list(self.waiting.items()):
            left = {token: op for token, op in waiting.items() if token in self._pending}
            if left:
                self.waiting[key] = left
            else:
                del self.waiting[key]

    def overtaken(self, token: bytes, op: PendingStore) -> list[tuple[bytes, PendingStore]]:
        """Return the waiting stores before which ``op`` should not have been stored; ``op`` has ended."""
        key = op.publisher(), op.frame.split(b" ", 2)[1]
        waiting = self.waiting.get(key)
        if waiting is None:
            return []
        waiting.pop(token, None)
        number = int(token, 16)
        found = [(earlier, waiting[earlier]) for earlier in sorted(waiting, key=_number) if _number(earlier) < number]
        for earlier, _ in found:
            del waiting[earlier]
        if not waiting:
            del self.waiting[key]
        return [(earlier, one) for earlier, one in found if earlier in self._pending]


def _number(token: bytes) -> int:
    """Return the place of a store in the order of all stores."""
    return int(token, 16)


class Refusals:
    """Number of stores that JetStream has refused, by reason; and whether stores wait for room.

    In a cluster a leader without room steps down: then there is no room, although nobody answers.
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys(REASONS, 0)
        self._no_room: ApiError | None = None
        """The last refusal of a store that waits for room; None = no store waits."""
        self._since = 0.0
        """Loop time in seconds since which stores wait for room."""

    def count(self, error: ApiError) -> None:
        """Count a refusal, unless it is a part of the gateways' own protocol."""
        reason = reason_of(error)
        if reason:
            self.counts[reason] += 1

    def no_room(self, error: ApiError, now: float) -> None:
        """Count the refusal of a store that waits for room, at loop time ``now``."""
        self.count(error)
        if self._no_room is None:
            self._since = now
        self._no_room = error

    def room(self) -> None:
        """Note that a store that has waited is stored, or that none waits any more."""
        self._no_room = None

    @property
    def last(self) -> ApiError | None:
        """The last refusal of a store that waits for room; None while none waits."""
        return self._no_room

    @property
    def full(self) -> str:
        """Reason for which the storage is full, in one line; empty while no store waits for room."""
        return "" if self._no_room is None else f"{FULL}: {self._no_room}"

    def exhausted(self, now: float) -> ApiError | None:
        """Return the error with which stores that wait have to fail, every `FULL_MOST` seconds; else None."""
        if self._no_room is None or now - self._since < FULL_MOST:
            return None
        self._since = now
        return self._no_room


def lacks_room(error: ApiError) -> bool:
    """Whether JetStream refuses a store since its storage, or that of the stream, is full.

    A number of messages, such as `max_retained`, is a rule and not a want of room: what is above it is refused at once.
    """
    return error.err_code in NO_STORAGE or error.description == MAXIMUM_BYTES_TEXT


def reason_of(error: ApiError) -> str:
    """Return which of `REASONS` an error is; empty for a refusal that is part of the gateways' own protocol."""
    if error.err_code in NO_STORAGE:
        return "storage_full"
    # The packet identifier of a held publish is in use: the code is that of other limits, too.
    if error.err_code in WRONG_LAST_SEQUENCE or error.description == MAXIMUM_PER_SUBJECT_TEXT:
        return ""
    return _CODES.get(error.err_code) or _STATUS.get(error.code, "other")
