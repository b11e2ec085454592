# SPDX-License-Identifier: Apache-2.0
"""`$MQTT_timers`: timers in JetStream, which fire also while no gateway runs.

A timer is a scheduled message (nats-server ADR-51) on `$MQTT.timers.<kind>.<key>`. When due, nats-server replaces it by
a message on `$MQTT.timers.fired.<kind>.<key>`. Core subscribers do not receive that message: gateways take it from one
shared consumer. A timer for a time in the past fires at once; a second schedule for a subject replaces the first.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, NamedTuple

import orjson

from mqtt_streams import headers, stored
from mqtt_streams.api import ApiError, JetStream, NoResponders, RequestTimeout, call, publish
from mqtt_streams.consumers import ACK_WAIT_NS, is_paused, parse_ack

STREAM: Final = "$MQTT_timers"
PREFIX: Final = "$MQTT.timers."
FIRED_PREFIX: Final = "$MQTT.timers.fired."
CONSUMER: Final = "gateways"
EXPIRY: Final = "expiry"
"""Kind of the session expiry timer; its key is the key of the session."""
WILL: Final = "will"
"""Kind of the timer of a delayed will; its key is the will's gateway and the key of the session."""
MESSAGE: Final = "message"
"""Kind of a message that is published later; its key is the message's id."""

_NOTHING: Final = (404, 408, 409)

_FILL_NS: Final = 250_000_000
"""Nanoseconds after which a request for timers that have fired ends with those that it has got.

A consumer has at most 1,000 pending messages (nats-server's default) and shares them out among all requests. Requests
of several gateways together may be for more: without an end each would wait for the others, until AckWait.
"""

_TOO_MANY: Final = b"Exceeded MaxWaiting"
"""Text of nats-server's status: as many pull requests wait as the consumer allows (512, nats-server's default)."""


class OthersWait(Exception):
    """So many gateways wait for timers that no further one is needed."""


class FiredTimer(NamedTuple):
    """A fired timer; `epoch`: as scheduled, `seq`: stream sequence, `ack`: acknowledgement subject."""

    kind: str
    key: str
    epoch: int
    seq: int
    headers: bytes
    payload: bytes
    ack: str


def timer_subject(kind: str, key: str) -> str:
    """Return the subject on which a timer is scheduled; `key` may have several tokens, `kind` is one, not `fired`."""
    return f"{PREFIX}{kind}.{key}"


def schedule_block(kind: str, key: str, at: float | None, epoch: int, pairs: Iterable[tuple[str, str]] = ()) -> bytes:
    """Return the header block of a timer due at Unix time `at` (seconds; nats-server's resolution is 0.25 s).

    None: the timer never fires. It is the mark that the connection of a session that does not expire has ended.
    """
    if at is None:
        return headers.build(((headers.ROLLUP, "sub"), (headers.EPOCH, str(epoch)), *pairs))
    due = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return headers.build(
        (
            (headers.SCHEDULE, f"@at {due}"),
            (headers.SCHEDULE_TARGET, f"{FIRED_PREFIX}{kind}.{key}"),
            (headers.EPOCH, str(epoch)),
            *pairs,
        )
    )


class TimerStore:
    """Store that schedules, cancels and takes timers."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def schedule(
        self,
        kind: str,
        key: str,
        at: float | None,
        epoch: int,
        payload: bytes = b"",
        pairs: Iterable[tuple[str, str]] = (),
    ) -> int:
        """Set (or replace) a timer for Unix time `at` in seconds, None = never; return the schedule's sequence."""
        return await publish(self._js, timer_subject(kind, key), payload, schedule_block(kind, key, at, epoch, pairs))

    async def cancel(self, kind: str, key: str, epoch: int) -> bool:
        """Remove a timer; True = it will never fire, False = there was none or it has fired.

        A timer with a later epoch than `epoch` stays: a later connection has set it.
        """
        found = await stored.get_last(self._js, STREAM, timer_subject(kind, key))
        if found is None or (headers.get_int(found.headers, headers.EPOCH) or 0) > epoch:
            return False
        return await stored.remove(self._js, STREAM, found.subject, found.seq)

    async def scheduled(self, kind: str, key: str) -> int:
        """Return the epoch of a timer that is set, also of one that never fires; 0 = none, or it has fired."""
        found = await stored.get_last(self._js, STREAM, timer_subject(kind, key))
        return 0 if found is None else headers.get_int(found.headers, headers.EPOCH) or 0

    async def fired(self, kind: str, key: str) -> int:
        """Return the epoch of a timer that has fired and was not dealt with yet; 0 = none."""
        found = await stored.get_last(self._js, STREAM, f"{FIRED_PREFIX}{kind}.{key}")
        return 0 if found is None else headers.get_int(found.headers, headers.EPOCH) or 0

    async def ensure_consumer(self) -> bool:
        """Create the consumer that all gateways share; creating the consumer again is no error.

        Returns whether somebody has paused it.
        """
        config = {
            "durable_name": CONSUMER,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": ACK_WAIT_NS,
            "filter_subject": FIRED_PREFIX + ">",
            "replay_policy": "instant",
        }
        body = {"stream_name": STREAM, "config": config}
        answer = await call(self._js, f"CONSUMER.DURABLE.CREATE.{STREAM}.{CONSUMER}", body)
        return is_paused(answer)

    async def fetch(self, wait: float, most: int) -> list[FiredTimer]:
        """Take up to `most` fired timers; wait up to `wait` seconds for the first.

        A timer without `done` is redelivered after 30 s. Raises OthersWait, NoResponders, RequestTimeout, ApiError, but
        not after timers were taken.
        """
        found: list[FiredTimer] = []
        # The first request takes the timers that have fired; only without any does the second wait for one.
        fired = {"batch": most, "no_wait": True, "expires": min(_FILL_NS, int(wait * 1e9))}
        for body in (fired, {"batch": 1, "expires": int(wait * 1e9)}):
            subject = f"{self._js.api_prefix}.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER}"
            answers = self._js.stream(subject, orjson.dumps(body), timeout=wait + 5)
            left = body["batch"]
            try:
                async for reply in answers:
                    ack = parse_ack(reply.reply.encode())
                    if ack is None or not reply.subject.startswith(FIRED_PREFIX):
                        code = headers.status(reply.headers)
                        if _TOO_MANY in reply.headers and not found:
                            raise OthersWait
                        if code not in _NOTHING:
                            raise ApiError(code or 500, 0, "fetching a timer: unexpected answer")
                        break
                    left -= 1
                    if stored.is_answer(reply.headers, reply.payload):  # nobody has set this timer
                        await stored.delete(self._js, STREAM, ack.stream_seq)
                    else:
                        kind, _, key = reply.subject.removeprefix(FIRED_PREFIX).partition(".")
                        epoch = headers.get_int(reply.headers, headers.EPOCH) or 0
                        found.append(
                            FiredTimer(kind, key, epoch, ack.stream_seq, reply.headers, reply.payload, reply.reply)
                        )
                    if not left:
                        break
            except (ApiError, NoResponders, RequestTimeout):
                if not found:
                    raise
            finally:
                await answers.aclose()
            if found:
                break
        return found

    async def done(self, timer: FiredTimer) -> bool:
        """Remove a fired timer after it was dealt with; False when it was removed before.

        It is not redelivered: nats-server takes the removal of a pending message for its acknowledgement.
        """
        return await stored.delete(self._js, STREAM, timer.seq)
