# SPDX-License-Identifier: Apache-2.0
"""`$MQTT_timers`: deadlines kept by JetStream, so that they hold while no gateway runs.

A timer is a scheduled message (nats-server ADR-51) on `$MQTT.timers.<kind>.<key>`; when due, the server replaces it by
a message on `$MQTT.timers.fired.<kind>.<key>`. Core subscribers do not see that one: gateways take it from one shared
consumer. A time that has passed fires at once; a second schedule for a subject replaces the first.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, NamedTuple

import orjson

from mqtt_streams import headers, stored
from mqtt_streams.api import ApiError, JetStream, call, publish
from mqtt_streams.consumers import ACK_WAIT_NS, parse_ack

STREAM: Final = "$MQTT_timers"
PREFIX: Final = "$MQTT.timers."
FIRED_PREFIX: Final = "$MQTT.timers.fired."
CONSUMER: Final = "gateways"
EXPIRY: Final = "expiry"
"""Kind of the session expiry timer; its key is the client's hash."""
WILL: Final = "will"
"""Kind of the timer of a delayed will; its key is the gateway under which the will is stored and the client's hash."""
MESSAGE: Final = "message"
"""Kind of a message that is to be published later; its key is the message's own id."""

_NOTHING: Final = (404, 408, 409)


class FiredTimer(NamedTuple):
    """A due timer; `epoch` as scheduled, `seq` its stream sequence, `ack` its acknowledgement subject."""

    kind: str
    key: str
    epoch: int
    seq: int
    headers: bytes
    payload: bytes
    ack: str


def timer_subject(kind: str, key: str) -> str:
    """Where a timer is scheduled; `key` may have several tokens, `kind` is one and not `fired`."""
    return f"{PREFIX}{kind}.{key}"


def schedule_block(kind: str, key: str, at: float, epoch: int, pairs: Iterable[tuple[str, str]] = ()) -> bytes:
    """Header block of a timer due at Unix time `at` (seconds; the server's resolution is 0.25 s)."""
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
    """Schedules, cancels and takes timers."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def schedule(
        self,
        kind: str,
        key: str,
        at: float,
        epoch: int,
        payload: bytes = b"",
        pairs: Iterable[tuple[str, str]] = (),
    ) -> int:
        """Set (or replace) a timer for Unix time `at` in seconds; returns the schedule's sequence."""
        return await publish(self._js, timer_subject(kind, key), payload, schedule_block(kind, key, at, epoch, pairs))

    async def cancel(self, kind: str, key: str, epoch: int) -> bool:
        """Remove a timer; True = it will never fire, False = there was none or it has fired.

        One of a later epoch than `epoch` is left alone: whoever removes this one is late.
        """
        found = await stored.get_last(self._js, STREAM, timer_subject(kind, key))
        if found is None or (headers.get_int(found.headers, headers.EPOCH) or 0) > epoch:
            return False
        return await stored.delete(self._js, STREAM, found.seq)

    async def fired(self, kind: str, key: str) -> int:
        """The epoch of a timer that has fired and was not dealt with yet; 0 = there is none."""
        found = await stored.get_last(self._js, STREAM, f"{FIRED_PREFIX}{kind}.{key}")
        return 0 if found is None else headers.get_int(found.headers, headers.EPOCH) or 0

    async def ensure_consumer(self) -> None:
        """Create the consumer that all gateways share; creating it again is no error."""
        config = {
            "durable_name": CONSUMER,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": ACK_WAIT_NS,
            "filter_subject": FIRED_PREFIX + ">",
            "replay_policy": "instant",
        }
        body = {"stream_name": STREAM, "config": config}
        await call(self._js, f"CONSUMER.DURABLE.CREATE.{STREAM}.{CONSUMER}", body)

    async def fetch(self, wait: float, most: int) -> list[FiredTimer]:
        """Take up to `most` due timers, waiting up to `wait` seconds for the first.

        Another gateway gets those that are not `done` 30 s later. Raises NoResponders, RequestTimeout, ApiError.
        """
        found: list[FiredTimer] = []
        # Those that are due already come at once; only for the first one is waited.
        for body in ({"batch": most, "no_wait": True}, {"batch": 1, "expires": int(wait * 1e9)}):
            subject = f"{self._js.api_prefix}.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER}"
            answers = self._js.stream(subject, orjson.dumps(body), timeout=wait + 5)
            try:
                async for reply in answers:
                    ack = parse_ack(reply.reply.encode())
                    if ack is None or not reply.subject.startswith(FIRED_PREFIX):
                        code = headers.status(reply.headers)
                        if code not in _NOTHING:
                            raise ApiError(code or 500, 0, "fetching a timer: unexpected answer")
                        break
                    kind, _, key = reply.subject.removeprefix(FIRED_PREFIX).partition(".")
                    epoch = headers.get_int(reply.headers, headers.EPOCH) or 0
                    found.append(
                        FiredTimer(kind, key, epoch, ack.stream_seq, reply.headers, reply.payload, reply.reply)
                    )
                    if len(found) >= body["batch"]:
                        break
            finally:
                await answers.aclose()
            if found:
                break
        return found

    async def done(self, timer: FiredTimer) -> bool:
        """Remove a timer that has been dealt with (do that first: nobody gets it again); False when it was gone."""
        removed = await stored.delete(self._js, STREAM, timer.seq)
        await self._js.request(timer.ack, b"+ACK")
        return removed
