# SPDX-License-Identifier: Apache-2.0
"""Generations of `$MQTT_msgs`: a stream that was made anew or restored from a backup reuses lower sequences.

A mark in `$MQTT_shared` has the stream's last known sequence and time of creation. A stream with a lower last sequence
or another time of creation has replaced the former one: the mark gets a new id and the last sequence from the backup.
"""

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import orjson

from mqtt_streams import stored
from mqtt_streams.api import ApiError, JetStream, NoLeader, call, has_leader, publish
from mqtt_streams.error_codes import STREAM_NOT_FOUND, WRONG_LAST_SEQUENCE
from mqtt_streams.headers import EXPECTED_LAST_SUBJECT_SEQUENCE, REPLACES, REPLACING
from mqtt_streams.messages import PREFIX as MESSAGE_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.shared import STREAM

SUBJECT: Final = "$MQTT.shared.generation"

_ROUNDS: Final = 20

_SKEW: Final = 1_000_000_000
"""Nanoseconds by which the clocks of the leaders of two streams may differ."""


class Lower(Exception):
    """The stream's last sequence is lower than before. Look again with `last`: a new leader may not count all messages.

    `last`: last sequence of the stream.
    """

    def __init__(self, last: int) -> None:
        super().__init__(f"stream {MESSAGES} ends at sequence {last}, and did not before")
        self.last = last


class Mark(NamedTuple):
    """Last known state of `$MQTT_msgs`.

    `id`: identity of the stream until it is replaced. `created`: time of creation as nats-server's text. `last`: last
    sequence. `floor`: sequence up to which the messages, with their sequences, are those of the former stream.
    """

    id: str
    created: str
    last: int
    floor: int


class GenerationStore:
    """Store that reads and writes the mark. `clock`: seconds of a clock that is never set."""

    def __init__(self, js: JetStream, clock: Callable[[], float] = time.monotonic) -> None:
        self._js = js
        self._clock = clock
        self._seen = Mark("", "", 0, 0)
        self._written = 0
        """Store time of the mark that was read last, nanoseconds since 1970; 0 = there was none."""
        self.info: dict[str, Any] = {}
        """The last answer about the stream."""
        self.has_leader = False
        """Whether the stream had a leader in the answer to the last request; False while there is none."""
        self.consumers = 0
        """Number of consumers of the stream in the last answer."""
        self.replicas = 1
        """Number of replicas of the stream in the last answer."""
        self.heard = 0.0, 0.0, 0.0
        """Unix time in seconds of nats-server's clock in its last answer, and `clock` before and after that request."""

    async def look(self, new_id: str, lower: int | None = None) -> Mark | None:
        """Compare the stream with the mark and return the new mark, None without a stream. `new_id`: for a new stream.

        `lower`: last sequence with which a former call has raised Lower, else None. With it, the leader of the stream
        makes a decision before. Raises Lower, ApiError, NoResponders, RequestTimeout, and NoLeader where the answer of
        a replica differs from the mark.
        """
        for _ in range(_ROUNDS):
            # The mark is read before the stream: an unreplaced stream then ends at the mark's sequence or later.
            message = await stored.get_last(self._js, STREAM, SUBJECT)
            known = _mark(message.payload) if message is not None else None
            if known is None and self._seen.id:
                known = self._seen  # somebody has removed the mark, as with its stream, or has overwritten it
            self.has_leader = False
            asked = self._clock()
            try:
                if lower is None:
                    info = await call(self._js, f"STREAM.INFO.{MESSAGES}")
                else:
                    info = await stored.settled_info(self._js, MESSAGES)
            except ApiError as error:
                if error.err_code == STREAM_NOT_FOUND:
                    return None
                raise
            self.heard = stored.time_ns(info["ts"]) / 1e9, asked, self._clock()
            self.has_leader = has_leader(info)
            self.consumers, self.replicas = info["state"]["consumer_count"], info["config"]["num_replicas"]
            last, created = int(info["state"]["last_seq"]), str(info.get("created", ""))
            since = message.time_ns if message is not None else self._written
            if known is None:
                mark = Mark(new_id, created, last, last)
            elif not self.has_leader and (known.created != created or last < self._last(known)):
                raise NoLeader(f"stream {MESSAGES} has no leader")  # any replica answers, and may lack messages
            elif known.created != created or await self._is_lower(known, since, last, lower):
                mark = Mark(new_id, created, last, await self._floor(since, last))
            elif await self._was_restored(known, since - _SKEW, last):
                mark = Mark(new_id, created, last, await self._floor(since - _SKEW, last))
            else:
                mark = known._replace(last=max(last, known.last))
            unchanged = mark == known and message is not None
            written = unchanged or await self._write(mark, message.seq if message is not None else 0)
            if written or (known is not None and mark.id == known.id):  # or another gateway has updated the mark
                self._seen, self._written = mark, since
                self.info = info
                return mark
        raise ApiError(503, 0, "too many gateways write the mark of the stream at once")

    async def replace(self, new_id: str) -> None:
        """Write the mark of a stream that is known to have been restored: all its messages are of the former stream.

        Raises ApiError, NoResponders, RequestTimeout.
        """
        info = await call(self._js, f"STREAM.INFO.{MESSAGES}")
        last = int(info["state"]["last_seq"])
        mark = Mark(new_id, str(info.get("created", "")), last, last)
        await publish(self._js, SUBJECT, orjson.dumps(mark._asdict()), REPLACING)

    def _last(self, known: Mark) -> int:
        """Return the highest last sequence that the stream of a mark is known to have had."""
        return max(known.last, self._seen.last if self._seen.id == known.id else 0)

    async def _is_lower(self, known: Mark, since: int, last: int, lower: int | None) -> bool:
        """Whether the stream's last sequence went back; messages stored since are newer than the mark (`since`)."""
        if lower is None:
            if last < self._last(known):
                raise Lower(last)
            return False
        if last <= lower:
            return True
        message = await stored.get_sequence(self._js, MESSAGES, lower + 1)
        return message is not None and message.time_ns > since

    async def _floor(self, since: int, last: int) -> int:
        """Return the sequence of the last message from the backup: one stored before `since`, the time of the mark."""
        start = {"start_time": stored.rfc3339(since)}
        page, _ = await stored.direct_page(self._js, MESSAGES, f"{MESSAGE_PREFIX}>", start, messages=1, size=1)
        return page[0].seq - 1 if page else last

    async def _was_restored(self, known: Mark, since: int, last: int) -> bool:
        """Whether the first message above the mark is older than it: the mark was set before the restore had ended."""
        if not known.floor == known.last < last:
            return False
        start = {"seq": known.floor + 1}
        page, _ = await stored.direct_page(self._js, MESSAGES, f"{MESSAGE_PREFIX}>", start, messages=1, size=1)
        return bool(page) and page[0].time_ns < since

    async def _write(self, mark: Mark, expected: int) -> bool:
        block = b"NATS/1.0\r\n%b%b:%d\r\n\r\n" % (REPLACES, EXPECTED_LAST_SUBJECT_SEQUENCE.encode(), expected)
        try:
            await publish(self._js, SUBJECT, orjson.dumps(mark._asdict()), block)
        except ApiError as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                return False  # another gateway has written the mark
            raise
        return True


def _mark(payload: bytes) -> Mark | None:
    try:
        found = orjson.loads(payload)
        return Mark(str(found["id"]), str(found["created"]), int(found["last"]), int(found["floor"]))
    except (ValueError, KeyError, TypeError):
        return None
