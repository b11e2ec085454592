# SPDX-License-Identifier: Apache-2.0
"""Publisher of messages that JetStream must acknowledge, with many in flight at a time.

Each publish is a :class:`PendingStore`. Its frame is kept until the PubAck has come, and is sent again when its stream
had no leader or the connection was lost: in the order of the first attempts, before new frames. A stream without a
leader delays no other stream. A store that JetStream refuses ends its own operation only.

The stream recognises a repeated message by its id (``Nats-Msg-Id``), but not for ever, and most messages of a stream
without replicas have none. A message that the stream would not recognise is looked for before it is sent again; see
docs/internals/backbone.md#repeated-stores.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from time import perf_counter

from mqtt_nats.backbone.frames import (
    ACKNOWLEDGEMENT,
    COMMON,
    MESSAGE,
    MESSAGES,
    REQUEST,
    STORE,
    error_of,
    frame_group,
    group_of,
    has_id,
    message_key,
    size_of,
    stream_of,
    subject_of,
)
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.backbone.pending_stores import (
    FULL,
    FULL_MOST,
    OVERTAKEN,
    STALE,
    TRANSIENT,
    PendingStore,
    PendingStores,
    Refusals,
    TooLarge,
    lacks_room,
    sequence,
)
from mqtt_nats.backbone.stream_outage import SILENCES, StreamOutage
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.base.logs import once, spoken
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.error_codes import STREAM_MISMATCH
from mqtt_streams.gateway_subjects import new_inbox

log = logging.getLogger("mqtt_nats.nats")

# Seconds without an answer to a store after which its stream is taken to have no leader.
ACK_TIMEOUT = 5.0

FENCE = b"NATS/1.0\r\nNats-Expected-Stream:-\r\n\r\n"
"""Headers of a message that a stream answers with `STREAM_MISMATCH`, in its turn, and does not store."""

STORED_HERE = b'{"stream":"%b",' % MESSAGES
"""First bytes of a PubAck of the stream of messages."""

SEQUENCES_KEPT = 16
"""Number of sequences that are kept, one a second: more than the seconds for which a store has no answer."""


Find = Callable[[set[bytes], float, int], Awaitable[Mapping[bytes, int]]]
"""``await find(keys, since, after)``: returns the sequences of stored messages by :func:`message_key`.

None of the messages was stored before ``since`` (Unix time in seconds), or when the stream had the sequence ``after``
(0 = not known).
"""


class AckedPublisher(PendingStores):
    """Publisher with the pending stores of one connection to NATS; ``on_pressure``: see :class:`PendingStores`."""

    def __init__(self, link: NatsConnection, on_pressure: Callable[[bool], None]) -> None:
        super().__init__(on_pressure)
        self.link = link
        self.prefix = new_inbox()
        self.now = asyncio.get_running_loop().time()
        self.max_payload = link.max_payload
        self.resent = 0
        self.refusals = Refusals()
        self.attempt = 0
        """Counter that grows whenever a pending frame may be sent again."""
        self.unheard = False
        """Whether a store had no responders: its stream has no leader, or is gone. The reader of the flag resets it."""
        self.on_absent: Callable[[bytes], None] = self.assume
        """``on_absent(token)``: an acknowledgement had no responders: its consumer is gone, or has no leader.

        The callee calls :meth:`assume` or :meth:`repeat`.
        """
        self.trusted = 60.0
        """Seconds for which a stream certainly recognises a message by its id."""
        self.find: Find | None = None
        self.on_silent: Callable[[str], None] | None = None
        """``on_silent(stream)``: called when the stream again and again does not answer a request."""
        self._length = len(self.prefix)
        self._count = 0
        self._offline = False
        self._outages: dict[bytes, StreamOutage] = {}
        """Outages by group of streams; see :func:`group_of`."""
        self._in_outage = False
        """Whether the connection is down or an outage is under way."""
        self._lost = 0.0
        """Loop time in seconds since which no messages are sent."""
        self._uneven = 0.0
        """Loop time in seconds until which pending frames may not be in the order of their last attempts."""
        self._answer = b""
        """The last PubAck that has come."""
        self._marks: deque[tuple[float, int]] = deque(maxlen=SEQUENCES_KEPT)
        """Loop times in seconds, with a sequence that the stream of messages had by then; none during an outage."""
        self._fences: dict[bytes, asyncio.Future[ApiError | None]] = {}
        """Fences without an answer, by token."""
        self._sid = link.subscribe_raw(self.prefix + b"*", self._arrived)

    @property
    def outages(self) -> list[str]:
        """Names of the streams that do not store."""
        return [outage.stream.decode(errors="replace") for outage in self._outages.values()]

    @property
    def count(self) -> int:
        """Number of stores and requests so far: the token of the last one, as a number."""
        return self._count

    @property
    def full(self) -> str:
        """Reason for which JetStream's storage is full, in one line; empty while no store waits for room."""
        return self.refusals.full

    def consult(
        self,
        *,
        absent: Callable[[bytes], None],
        silent: Callable[[str], None],
        find: Find,
    ) -> None:
        """Set whom to ask about stores in doubt: see :attr:`on_absent`, :attr:`on_silent` and :attr:`find`."""
        self.on_absent, self.on_silent, self.find = absent, silent, find

    def trust(self, seconds: float, replicas: int) -> None:
        """Set for how long the stream of messages certainly recognises an id, and its number of replicas."""
        self.trusted = seconds
        self.replicated = replicas > 1
        for silence in () if self.replicated else self.silences:
            self._send_held(silence.take_held())

    def forget_unheard(self) -> None:
        """Reset `unheard`: the state of the streams is being requested."""
        self.unheard = False

    def put(self, target: bytes, headers: bytes, payload: bytes, op: PendingStore) -> None:
        """Store a message; ``target`` is ``b"HPUB <subject> "``.

        Raises:
            TooLarge: headers and payload exceed ``max_payload``; nothing has been sent.
        """
        size = len(headers)
        total = size + len(payload)
        if total > self.max_payload:
            raise TooLarge(f"{total} bytes with headers, the nats-server takes {self.max_payload}")
        self._count = count = self._count + 1
        token = b"%x" % count
        if self._timed is None:
            self._timed, self._timed_from = op, perf_counter()
        self._send(token, b"%b%b%b %d %d\r\n%b%b\r\n" % (target, self.prefix, token, size, total, headers, payload), op)

    def call(self, subject: bytes, body: bytes, op: PendingStore) -> None:
        """Send a request that must be answered: a JetStream API call, or an acknowledgement to be confirmed."""
        self._count = count = self._count + 1
        token = b"%x" % count
        self._send(token, b"PUB %b %b%b %d\r\n%b\r\n" % (subject, self.prefix, token, len(body), body), op)

    def _send(self, token: bytes, data: bytes, op: PendingStore) -> None:
        self.pending[token] = op
        self.bytes += len(data)
        if not (self._in_outage or self._withheld or self.replicated):
            op.send(data, self.now)
            self.link.out.append(data)
        else:
            self._send_or_hold(token, data, op)
        self._press()

    def _send_or_hold(self, token: bytes, data: bytes, op: PendingStore) -> None:
        """Send a frame, unless it has to wait: for its stream, for room, or for the stores before it."""
        op.begin(data)
        waits = (self._in_outage and self._waits(op)) or (self._withheld and op in self._withheld)
        if waits or self._holds(token, op):
            if self._timed is op:
                self._timed = None
            if self._in_outage and self.full and op.waits():
                self.overtaking.waits(token, op)
        else:
            op.attempt(self.now)
            self.link.out.append(data)

    def _waits(self, op: PendingStore) -> bool:
        outage = self._outages.get(frame_group(op.frame)) if self._outages else None
        return self._offline or (outage is not None and (not outage.full or op.waits()))

    def _arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        token = subject[self._length :]
        op = self.pending.get(token)
        if op is None:
            fence = self._fences.get(token) if self._fences else None
            if fence is not None and not fence.done():
                fence.set_result(error_of(payload))
            return
        if headers or b'"error"' in payload:
            error = error_of(payload)
            if error is None and op.optional and op.frame.startswith(ACKNOWLEDGEMENT):
                self.on_absent(token)
                return
            if error is None or error.err_code in TRANSIENT or (lacks_room(error) and op.waits()):
                self._repeat_later(token, op, error)
                return
            self._fail(token, op, error)
        else:
            self._answer = payload
            self._end(token, op)
            op.stored(payload)
            if self.overtaking.waiting:
                for earlier, one in self.overtaking.overtaken(token, op):
                    self._fail(earlier, one, OVERTAKEN)
        if self._in_outage:
            group = frame_group(op.frame)
            outage = self._outages.get(group)
            if outage is not None and token == outage.probed and self.link.online:
                if b'"error"' not in payload:
                    self.refusals.room()
                self._resume(group)
        if self.replicated:
            self._send_held(self._released_by(op))

    def _send_held(self, held: dict[bytes, PendingStore]) -> None:
        """Send the stores that have waited for an answer to an earlier one."""
        for token, op in held.items():
            if self.pending.get(token) is op and not (op.born or op in self._withheld or self._waits(op)):
                self._attempt(op)

    def _repeat_later(self, token: bytes, op: PendingStore, error: ApiError | None) -> None:
        """Keep a store that has no leader, or no room; there is a bound where publishers are not read from."""
        if op.frame.startswith(MESSAGE) and not has_id(op.frame):
            op.begin_anew(0.0)  # the only attempt is answered: the message is not stored
        group = frame_group(op.frame)
        outage = self._outages.get(group)
        if outage is not None:
            outage.refused(token)
        full = error is not None and lacks_room(error)
        if error is not None and full:
            self.refusals.no_room(error, self.now)
            self.overtaking.waits(token, op)
        bounded = self._pressed and outage is not None and op.waits()
        no_room = self.refusals.exhausted(self.now) if bounded else None
        if no_room is not None:
            self._give_up(no_room)
        elif full:
            self.note_outage(stream_of(op.frame), f"{FULL}: {error}", full=True)
        else:
            self.unheard = self.unheard or error is None
            reason = "no server answers" if error is None else str(error)
            self.note_outage(stream_of(op.frame), f"{reason}, on {subject_of(op.frame)}")

    def _give_up(self, error: ApiError) -> None:
        """Fail stores that wait for room: so many wait that publishers are not read from."""
        waiting = [(token, op) for group in self._outages for token, op in self._of(group) if op.waits()]
        log.warning("%s for %g s: %d stores are refused", FULL, FULL_MOST, len(waiting), extra=once(FULL))
        self.refusals.room()  # none waits any more; the next one that is refused waits as long again
        for token, op in waiting:
            self._end(token, op)
            op.failed(error)
        for group in list(self._outages):
            self._resume(group)

    def _fail(self, token: bytes, op: PendingStore, error: ApiError) -> None:
        """End an operation that is refused; requests, such as removals, are not counted."""
        if op.frame.startswith(STORE):
            self.refusals.count(error)
        self._end(token, op)
        op.failed(error)

    def repeat(self, token: bytes) -> None:
        """Send an acknowledgement again: its consumer exists."""
        op = self.pending.get(token)
        if op is not None and not self._waits(op):
            self._attempt(op)

    def denied(self, subject: bytes) -> None:
        """Fail the pending stores on ``subject``: NATS permissions do not allow it, so no PubAck will come."""
        starts = (b"HPUB %b " % subject, b"PUB %b " % subject)
        refused = [(token, op) for token, op in self.pending.items() if op.frame.startswith(starts)]
        error = ApiError(403, 0, f"NATS permissions do not allow publishing to {subject.decode(errors='replace')}")
        for token, op in refused:
            self._fail(token, op, error)
            self._send_held(self._released_by(op))

    # -- no connection, no leader -------------------------------------------------------------

    def offline(self) -> None:
        """Stop sending after the connection was lost; pending frames are kept."""
        if not self._offline and MESSAGES not in self._outages:
            self._lost = self.now
        self._offline = self._in_outage = True
        self._end_silences()
        self.attempt += 1
        self.refusals.room()
        self._end_outages()

    def _end_outages(self) -> None:
        for outage in self._outages.values():
            outage.cancel_probes()
        self._outages.clear()

    def online(self) -> None:
        """Subscribe the inbox on a new connection, then send all unacknowledged frames again, in order."""
        former, self.max_payload = self.max_payload, self.link.max_payload
        self.link.renew(self._sid, self.prefix + b"*")
        if self.max_payload < former:
            self._refuse_larger()
        self._end_outages()
        self._offline = False
        self._resume(None)

    def _refuse_larger(self) -> None:
        """Fail stores larger than the server's new limit: the server would end the connection for each of them."""
        most = self.max_payload
        larger = [
            (token, op) for token, op in self.pending.items() if len(op.frame) > most and size_of(op.frame) > most
        ]
        for token, op in larger:
            self._fail(token, op, ApiError(413, 0, f"larger than max_payload of the present nats-server, {most} bytes"))

    def note_outage(self, stream: bytes, reason: str, *, full: bool = False) -> None:
        """Send a group nothing while one of its streams does not store; later probe with its oldest frame.

        With ``full`` only stores that wait for room are not sent. See docs/internals/backbone.md#no-leader.
        """
        if self._offline:
            return
        group = group_of(stream)
        outage = self._outages.get(group)
        had_no_leader = outage is not None and not outage.full
        if outage is None:
            outage = self._add_outage(group, stream, full=full)
        elif not full and outage.full:
            self._stop(group)
        if outage.note_full(full):
            log.warning("JetStream does not store: %s; publishes wait for room", reason, extra=once(reason))
        for _, op in self._of(group) if full and had_no_leader and outage.looking is None else ():
            if not self._waits(op) and op not in self._withheld:  # it needs no room
                self._send_again(op)
        if not full:
            self._tell(outage, group, reason)
        outage.later(self._probe)

    def lacking_room(self, stream: bytes) -> ApiError | None:
        """Return the last refusal for want of room if a store to ``stream`` waits for room; None = none waits."""
        outage = self._outages.get(group_of(stream))
        return self.refusals.last if outage is not None and outage.full else None

    @property
    def warned(self) -> bool:
        """Whether the log has a warning of a present outage."""
        return any(one.warned for one in self._outages.values())

    def _tell(self, outage: StreamOutage, group: bytes, reason: str) -> None:
        """Log an outage: one warning however many groups it concerns; further groups and reasons are details."""
        warned = self.warned
        if outage.begin_telling(warned=not warned):
            text = "JetStream does not store: %s; %d publishes wait"
            level = logging.INFO if warned else logging.WARNING
            log.log(level, text, reason, len(self._of(group)), extra=spoken(reason))
        else:
            log.info("JetStream still does not store: %s", reason, extra=once(reason))

    def _add_outage(self, group: bytes, stream: bytes, *, full: bool = False) -> StreamOutage:
        outage = self._outages[group] = StreamOutage(stream)
        if group == MESSAGES:
            self._lost = self.now
        self._in_outage = True
        self.attempt += 1
        if not full:
            self._stop(group)
        if self._timed is not None and frame_group(self._timed.frame) == group:
            self._timed = None
        return outage

    def _stop(self, group: bytes) -> None:
        """Write nothing more to a group, which might overtake a frame that the former leader has dropped."""
        if group == MESSAGES:
            self._end_silences()
        self.link.withdraw(op.frame for _, op in self._of(group))

    def elected(self, stream: str) -> None:
        """Handle the election of a stream's leader: the former one may have lost the stores that are not acknowledged.

        Nothing new is sent before they are sent again. See docs/internals/backbone.md#elections.
        """
        name = stream.encode()
        group = group_of(name)
        outage = self._outages.get(group)
        if outage is None and not self._offline:
            if not any(stream_of(op.frame) == name and not op.optional for op in self.pending.values()):
                return
            outage = self._add_outage(group, name)
        elif outage is not None and outage.full:
            self._stop(group)
            outage.note_full(False)
        if outage is not None and outage.looking is None:
            outage.elected(self._probe)

    def _probe(self, outage: StreamOutage) -> None:
        if not self.link.online:
            return
        late = self.pending.get(outage.probed)
        if outage.unanswered and late is not None:
            reason = f"no answer for {outage.patience:g} s, on {subject_of(late.frame)}"
            log.info("JetStream still does not store: %s", reason, extra=once(reason))
            silences = outage.count_silence()
            if REQUEST.match(late.frame) and self.on_silent is not None and silences % SILENCES == 2:
                self.on_silent(outage.stream.decode())
        group = group_of(outage.stream)
        token = self._room_probe_of(group, outage.probed) if outage.full else self._probe_of(outage.stream)
        if not token:
            self.refusals.room()
        if not token or (group == MESSAGES and self._doubtful()):
            self._resume(group)
            return
        op = self.pending[token]
        op.probe(self.now)
        self.link.out.append(op.frame)
        self.link.kick()
        outage.note_probe(token, self._probe)

    def _resume(self, group: bytes | None) -> None:
        """Send the unacknowledged frames of a group, or all (None), again in order, and allow new publishes."""
        outage = None if group is None else self._outages.pop(group)
        if outage is not None:
            outage.cancel_probes()
            self._uneven = self.now + 2 * ACK_TIMEOUT
        doubtful = self._doubtful() if group is None or group == MESSAGES else []
        if doubtful:
            self._outages[MESSAGES] = looking = outage or StreamOutage(MESSAGES)
            self.attempt += 1
            looking.begin_looking(
                MESSAGES,
                asyncio.get_running_loop().create_task(self._look(looking, doubtful), name="unconfirmed stores"),
            )
        waited, self._in_outage = self._in_outage, bool(self._outages)
        all_wait = outage is None or not outage.full
        again = [(token, op) for token, op in self._of(group) if not self._waits(op) and (all_wait or op.waits())]
        if waited and not doubtful:
            where = f" to {outage.stream.decode()}" if outage is not None else ""
            extra = once(where) if outage is not None and outage.full else None
            level = logging.WARNING if outage is not None and outage.warned else logging.INFO
            log.log(level, "JetStream stores again%s; %d publishes are sent again", where, len(again), extra=extra)
        stale = []
        for token, op in again:
            if op.stale():
                stale.append((token, op))
            elif op in self._withheld:
                op.wait()
            else:
                self._send_again(op)
        for token, op in stale:
            self._end(token, op)
            op.failed(STALE)
        self.link.kick()
        self._relieve()

    def _attempt(self, op: PendingStore) -> None:
        op.attempt(self.now)
        self.link.out.append(op.frame)
        self.link.kick()

    def _send_again(self, op: PendingStore) -> None:
        self._attempt(op)
        self.resent += 1

    def let_go(self, dropped: set[PendingStore]) -> None:
        """Send the withheld operations in the order of arrival; ``dropped`` ones are removed without a callback."""
        withheld, self._withheld = self._withheld, set()
        for token, op in list(self.pending.items()) if withheld else ():
            if op not in withheld:
                continue
            if op in dropped:
                self._end(token, op)
            elif not (self._waits(op) or self._holds(token, op)):
                self._send_again(op)
        self.link.kick()

    def _doubtful(self) -> list[tuple[bytes, bytes, PendingStore]]:
        """Return key, token and operation of messages that may be stored, and that the stream may not recognise.

        The retained copy of a message has the same id as the copy for subscribers: the search tells nothing about it.
        A repeated retained copy takes the place of the same message on its topic.
        """
        if self.find is None:
            return []
        old = self.now - self.trusted
        found = []
        for token, op in self.pending.items():
            if not op.frame.startswith(MESSAGE) or not (op.begun or self._lost < old):
                continue
            key = message_key(op.frame)
            if not key or not (op.begun or key.startswith(COMMON)):
                continue
            if not has_id(op.frame) or (op.begun or self._lost) < old:
                found.append((key, token, op))
        return found

    async def _look(self, outage: StreamOutage, doubtful: list[tuple[bytes, bytes, PendingStore]]) -> None:
        """End the operations whose messages are stored already; the rest may be sent again."""
        assert self.find is not None
        begun = min(op.begun or self._lost for _, _, op in doubtful)
        after = max((last for at, last in self._marks if at <= begun), default=0)
        try:
            await self._fence(doubtful[0][2].frame)
            left = {key for key, token, _ in doubtful if token in self.pending}
            stored = await self.find(left, natstime.now() - (self.now - begun), after) if left else {}
        except Exception as error:
            if not isinstance(error, ApiError | NoResponders | RequestTimeout):
                log.exception("unconfirmed stores cannot be checked")
            outage.end_looking()
            self.note_outage(MESSAGES, f"{str(error) or type(error).__name__}, when asked what is stored already")
            return
        outage.end_looking()
        for key, token, op in doubtful:
            if key not in stored:
                # Without an id nothing was sent; else the stream recognises repetitions of what is sent from now on.
                op.begin_anew(self.now if has_id(op.frame) else 0.0)
            elif token in self.pending:
                self._end(token, op)
                op.stored(b'{"seq":%d}' % stored[key])
        self._probe(outage)  # the stream has answered questions, which does not tell that it stores

    async def _fence(self, frame: bytes) -> None:
        """Wait until the stream of ``frame`` has handled what was sent to it on this connection before.

        Whatever has no answer by then gets none: it was lost on its way, or its answer was.

        Raises:
            ApiError, NoResponders, RequestTimeout: the stream does not store, or does not answer.
        """
        self._count = count = self._count + 1
        token = b"%x" % count
        fence = self._fences[token] = asyncio.get_running_loop().create_future()
        target, size = frame[: frame.index(b" ", len(STORE)) + 1], len(FENCE)
        self.link.out.append(b"%b%b%b %d %d\r\n%b\r\n" % (target, self.prefix, token, size, size, FENCE))
        self.link.kick()
        try:
            async with asyncio.timeout(ACK_TIMEOUT):
                error = await fence
        except TimeoutError:
            raise RequestTimeout(f"no answer for {ACK_TIMEOUT:g} s, on {subject_of(frame)}") from None
        finally:
            del self._fences[token]
        if error is None:
            raise NoResponders(subject_of(frame))
        if error.err_code != STREAM_MISMATCH:
            raise error

    def _mark(self) -> None:
        """Note a sequence that the stream of messages has."""
        if self._answer.startswith(STORED_HERE) and not self._offline and MESSAGES not in self._outages:
            last = sequence(self._answer)
            if not self._marks or self._marks[-1][1] != last:
                self._marks.append((self.now, last))

    def tick(self, now: float) -> None:
        """Check time-outs; called about once a second with loop time in seconds."""
        self.now = now
        self._mark()
        self.overtaking.prune()
        self._send_held(self._overdue())
        if not self.pending or self._offline:
            return
        for op in self.pending.values():
            if not op.born:  # the operation is withheld, or was not sent yet
                continue
            if now - op.born > ACK_TIMEOUT:
                if self._waits(op):
                    continue
                if not op.optional:
                    self.note_outage(stream_of(op.frame), f"no answer for {ACK_TIMEOUT:g} s, on {subject_of(op.frame)}")
                    continue
                # The consumer went away before it could answer; a repetition now gets "no responders".
                self._attempt(op)
            elif not op.optional and now > self._uneven:
                break
