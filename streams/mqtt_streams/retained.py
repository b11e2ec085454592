# SPDX-License-Identifier: Apache-2.0
"""`$MQTT_rmsgs`: the retained message of each topic, in nats-server's format.

A retained message is removed by a tombstone (RFlags -1, empty body), because nats-server's listeners keep copies in
memory and see nothing else; who wrote the tombstone deletes it.
"""

from base64 import b64decode
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

import orjson

from mqtt_streams import headers, stored
from mqtt_streams.api import ApiError, JetStream, Reply, call
from mqtt_streams.subjects import readable_topic, starts_with_wildcard, visible_to_wildcard

STREAM: Final = "$MQTT_rmsgs"
PREFIX: Final = "$MQTT.rmsgs."
PAGE_MESSAGES: Final = 256
PAGE_BYTES: Final = 4 * 1024 * 1024
"""Bounds of one page of `matching`, so that memory does not grow with the number of retained messages."""

_TOMBSTONE: Final = "-1"


class RetainedMessage(NamedTuple):
    """A retained message; `subject` without prefix, `headers` the raw block, `time_ns` the store time since 1970."""

    subject: str
    qos: int
    payload: bytes
    headers: bytes
    seq: int
    time_ns: int


def retained_subject(subject: str) -> str:
    """Where the retained message of `subject` is stored."""
    return PREFIX + subject


def set_block(topic: str, flags: int, origin: str, lines: bytes = b"") -> bytes:
    """Header block of a retained message.

    `flags`: flags nibble of the PUBLISH (1, 3, 5 for QoS 0, 1, 2); `origin`: this gateway's 8-character id; `lines`:
    further ready header lines (`Name:value` CR LF, repeated).
    """
    return b"NATS/1.0\r\nNmqtt-RTopic:%b\r\nNmqtt-RFlags:%x\r\nNmqtt-ROrigin:%b\r\n%b\r\n" % (
        readable_topic(topic).encode(),
        flags,
        origin.encode(),
        lines,
    )


def tombstone_block(topic: str, origin: str) -> bytes:
    """Header block of the record that clears a topic; its payload is empty."""
    return b"NATS/1.0\r\nNmqtt-RTopic:%b\r\nNmqtt-RFlags:-1\r\nNmqtt-ROrigin:%b\r\n\r\n" % (
        readable_topic(topic).encode(),
        origin.encode(),
    )


def parse(subject: str, block: bytes, payload: bytes, seq: int, time_ns: int) -> RetainedMessage | None:
    """Read a stored record (`subject` with prefix); None for a tombstone, an expiry marker or anything unusable."""
    bare = subject.removeprefix(PREFIX)
    flags = headers.get(block, headers.R_FLAGS)
    if not payload or flags == _TOMBSTONE or headers.get(block, headers.MARKER_REASON) is not None:
        return None
    if flags is None:
        return _parse_json(bare, block, payload, seq, time_ns)
    if len(flags) != 1 or flags not in "0123456789abcdefABCDEF":
        return None
    qos = int(flags, 16) >> 1 & 3
    return None if qos == 3 else RetainedMessage(bare, qos, payload, block, seq, time_ns)


def _parse_json(subject: str, block: bytes, payload: bytes, seq: int, time_ns: int) -> RetainedMessage | None:
    """The body of nats-server before 2.11: everything in one JSON object."""
    try:
        body = orjson.loads(payload)
        flags = body.get("flags", 0)
        message = b64decode(body["msg"], validate=True)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(flags, int) or isinstance(flags, bool) or not 0 <= flags < 15 or not message:
        return None
    qos = flags >> 1 & 3
    return None if qos == 3 else RetainedMessage(subject, qos, message, block, seq, time_ns)


def _from_direct(reply: Reply) -> tuple[str, int, int] | None:
    """Subject, sequence and store time that the server put on a direct get's answer."""
    subject = headers.get_last(reply.headers, headers.STREAM_SUBJECT)
    seq = headers.get_last(reply.headers, headers.STREAM_SEQUENCE)
    time = headers.get_last(reply.headers, headers.STREAM_TIME)
    if subject is None or seq is None or time is None:
        return None
    return subject, int(seq), stored.time_ns(time)


class RetainedStore:
    """Reads retained messages by direct get; needs `allow_direct` on the stream."""

    def __init__(self, js: JetStream) -> None:
        self._js = js
        self._get = f"{js.api_prefix}.DIRECT.GET.{STREAM}"

    async def get(self, subject: str) -> RetainedMessage | None:
        """The retained message of one subject (no wildcards)."""
        reply = await self._js.request(self._get, orjson.dumps({"last_by_subj": PREFIX + subject}))
        where = _from_direct(reply)
        if where is None:
            _raise_unless(reply, 404)
            return None
        return parse(where[0], reply.headers, reply.payload, where[1], where[2])

    async def matching(self, filter_subject: str, start_seq: int = 0) -> AsyncIterator[list[RetainedMessage]]:
        """Pages of the retained messages that match, oldest first, from stream sequence `start_seq` on.

        Ends at what was the newest message when it began, so it ends also while messages are being retained. A page is
        fetched only when the caller asks for it. Subjects hidden from wildcards are left out.
        """
        if "*" not in filter_subject and ">" not in filter_subject:
            message = await self.get(filter_subject)
            if message is not None and message.seq >= start_seq:
                yield [message]
            return
        everything = starts_with_wildcard(filter_subject)
        last_seq = (await call(self._js, f"STREAM.INFO.{STREAM}"))["state"]["last_seq"]
        seq = max(start_seq, 1)
        while seq <= last_seq:
            page: list[RetainedMessage] = []
            received = 0
            pending: str | None = None
            body = {
                "next_by_subj": PREFIX + filter_subject,
                "seq": seq,
                "batch": PAGE_MESSAGES,
                "max_bytes": PAGE_BYTES,
            }
            answers = self._js.stream(self._get, orjson.dumps(body))
            try:
                async for reply in answers:
                    where = _from_direct(reply)
                    if where is None:
                        _raise_unless(reply, 204, 404)
                        pending = headers.get_last(reply.headers, headers.NUM_PENDING)
                        break
                    received += 1
                    seq = where[1] + 1
                    message = parse(where[0], reply.headers, reply.payload, where[1], where[2])
                    if (
                        message is not None
                        and message.seq <= last_seq
                        and (not everything or visible_to_wildcard(message.subject))
                    ):
                        page.append(message)
            finally:
                await answers.aclose()
            if page:
                yield page
            if received == 0 or pending == "0":
                return

    async def delete_tombstone(self, seq: int) -> bool:
        """Remove the tombstone written with this sequence; False when it was replaced meanwhile."""
        return await stored.delete(self._js, STREAM, seq)


def _raise_unless(reply: Reply, *expected: int) -> None:
    code = headers.status(reply.headers)
    if code not in expected:
        line = reply.headers[9:].partition(b"\r")[0].decode(errors="replace")
        raise ApiError(code or 500, 0, f"direct get: {line or 'unexpected answer'}")
