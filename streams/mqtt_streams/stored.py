# SPDX-License-Identifier: Apache-2.0
"""Reading and removing of stored messages.

Single messages come from the stream's leader. A direct get is cheaper, but a replica that lags may answer it.
"""

import re
from base64 import b64decode
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from mqtt_streams import headers
from mqtt_streams.api import ApiError, JetStream, NoLeader, NoResponders, Reply, RequestTimeout, call, has_leader
from mqtt_streams.error_codes import MESSAGE_GONE, NO_MESSAGE_FOUND, STREAM_NOT_FOUND

T = TypeVar("T")


NO_SEQUENCE: Final = 1 << 62
"""A stream sequence that no message has."""

_PAGE: Final = 8 * 1024 * 1024
_NO_HEADERS: Final = len(b"NATS/1.0")
_EPOCH: Final = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


class StoredMessage(NamedTuple):
    """A stored message of a stream; `headers` is the raw block (b"" for none), `time_ns` the store time since 1970.

    Bytes of a subject that are no UTF-8 are surrogates in an answer to a direct get.
    """

    subject: str
    seq: int
    time_ns: int
    headers: bytes
    payload: bytes

    @property
    def is_answer(self) -> bool:
        """Whether nobody has written this record: see :func:`is_answer`."""
        return is_answer(self.headers, self.payload)


_ANSWERS: Final = (b'{"type":"io.nats.jetstream.api.', b'{"stream":')
"""Beginnings of answers without headers: those of the API, and acknowledgements of stores."""


_NO_RECORD: Final = b"NATS/1.0 404 No Record\r\n\r\n"
"""Headers of the empty record of a subject that has answers only."""


def is_answer(block: bytes, payload: bytes) -> bool:
    """Whether a message with these headers is an answer of nats-server to a request.

    nats-server sends an answer to whatever reply subject the request names, and does not ask whether the requester may
    publish there. So a NATS user who may only read one stream writes records of others, and chooses what they say: an
    answer to a direct get is a copy of a stored message, with the header `Nats-Stream`. An answer without a message has
    a status, other answers are JSON without headers. No record of a gateway, of nats-server's
    listener or of a backup is like that.
    """
    if not block:
        return payload.startswith(_ANSWERS)
    return b"\r\nNats-Stream:" in block or headers.status(block) is not None


@lru_cache(maxsize=64)
def _seconds(whole: str) -> int:
    """Return nanoseconds since 1970 of a time in whole seconds; cached, as messages of one page share few seconds."""
    seconds = datetime.fromisoformat(whole + "+00:00") - _EPOCH
    return (seconds.days * 86400 + seconds.seconds) * 1_000_000_000


def time_ns(text: str) -> int:
    """Return nanoseconds since 1970 of an RFC 3339 UTC time with up to nine decimals; raises ValueError."""
    if len(text) == 30 and text[19] == ".":  # fast path: most times have nine decimals
        return _seconds(text[:19]) + int(text[20:29])
    whole, _, fraction = text.removesuffix("Z").partition(".")
    return _seconds(whole) + int(fraction[:9].ljust(9, "0"))


def rfc3339(nanoseconds: int) -> str:
    """Return nanoseconds since 1970 as RFC 3339 UTC time, the inverse of `time_ns`."""
    seconds, fraction = divmod(nanoseconds, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{fraction:09d}Z"


def message_of(answer: dict[str, Any]) -> StoredMessage:
    """Return the message in the answer to STREAM.MSG.GET."""
    raw = answer["message"]
    return StoredMessage(
        raw["subject"],
        raw["seq"],
        time_ns(raw["time"]),
        b64decode(raw.get("hdrs") or ""),
        b64decode(raw.get("data") or ""),
    )


async def _get(js: JetStream, stream: str, body: dict[str, Any]) -> StoredMessage | None:
    try:
        return message_of(await call(js, f"STREAM.MSG.GET.{stream}", body))
    except ApiError as error:
        if error.err_code == NO_MESSAGE_FOUND:
            return None
        raise


async def get_last(js: JetStream, stream: str, subject: str) -> StoredMessage | None:
    """Return the newest record of a subject (wildcards allowed), None without one; see `is_answer`.

    A record behind which there are answers counts as the last one, with their sequence: so it can be replaced. Of a
    subject that has answers only, there is an empty one, which is an answer too.
    """
    last = await _get(js, stream, {"last_by_subj": subject})
    if last is None or not last.is_answer:
        return last
    found = last._replace(headers=_NO_RECORD, payload=b"")
    async for one in scan(js, stream, subject):
        if one.seq < last.seq and not one.is_answer:
            found = one
    return found._replace(seq=last.seq) if found.subject == last.subject else found


async def get_sequence(js: JetStream, stream: str, seq: int) -> StoredMessage | None:
    """Return the message with this stream sequence, None when it is removed."""
    return await _get(js, stream, {"seq": seq})


async def get_next(js: JetStream, stream: str, subject: str, start_seq: int) -> StoredMessage | None:
    """Return the first message of a subject (wildcards allowed) from a sequence on, None without one."""
    return await _get(js, stream, {"next_by_subj": subject, "seq": start_seq})


async def scan(js: JetStream, stream: str, subject: str, start_seq: int = 1) -> AsyncGenerator[StoredMessage, None]:
    """Yield all messages of a subject (wildcards allowed) in sequence order; for few messages: one request each."""
    while (message := await get_next(js, stream, subject, start_seq)) is not None:
        yield message
        start_seq = message.seq + 1


def records_in(state: Mapping[str, Any]) -> int:
    """Return the number of records in a stream, from the `state` in an answer to `STREAM.INFO`.

    It may be lower than that of the messages: see `remove`.
    """
    return int(state.get("num_subjects", 0))


async def several(js: JetStream, stream: str, subject: str, state: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Return the number of messages of each subject (`subject` may have wildcards) that has more than one.

    Of a stream of records; mostly there is none, and one request tells so. None without the stream. `state`: of an
    answer to `STREAM.INFO`.
    """
    try:
        state = state or (await call(js, f"STREAM.INFO.{stream}"))["state"]
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return {}
        raise
    found: dict[str, int] = {}
    offset, total = 0, state["messages"] - records_in(state)
    while offset < total:
        info = await call(js, f"STREAM.INFO.{stream}", {"subjects_filter": subject, "offset": offset})
        page = info["state"].get("subjects") or {}
        found |= {name: count for name, count in page.items() if count > 1}
        offset, total = offset + len(page), int(info.get("total", 0)) if page else 0
    return found


def newest(messages: Iterable[StoredMessage]) -> list[StoredMessage]:
    """Return the last record of each subject, in the order of the stream, which `messages` must have; no answers."""
    found: dict[str, StoredMessage] = {}
    for message in messages:
        if not message.is_answer:
            found.pop(message.subject, None)
            found[message.subject] = message
    return list(found.values())


async def usable(js: JetStream, stream: str, subject: str, parse: Callable[[StoredMessage], T | None]) -> list[T]:
    """Return the records of a subject (wildcards allowed) in sequence order; those that `parse` refuses are removed."""
    found = []
    for message in newest([message async for message in scan(js, stream, subject)]):
        record = parse(message)
        if record is None:
            await remove(js, stream, message.subject, message.seq)
        else:
            found.append(record)
    return found


async def all_of(js: JetStream, stream: str, subject: str) -> list[StoredMessage]:
    """Return all records of a subject (wildcards allowed) in sequence order, as the leader has them; no answers.

    It needs `allow_direct` for speed: any replica may send several in one page. The page counts if the leader has as
    many and the same last message.
    """
    return [message for message in await _all(js, stream, subject) if not message.is_answer]


async def _all(js: JetStream, stream: str, subject: str) -> list[StoredMessage]:
    first = await _get(js, stream, {"next_by_subj": subject, "seq": 1})
    last = await _get(js, stream, {"last_by_subj": subject}) if first is not None else None
    if first is None or last is None:
        return []
    if first.seq == last.seq:
        return [first]
    info = await call(js, f"STREAM.INFO.{stream}", {"subjects_filter": subject})
    count = sum((info["state"].get("subjects") or {}).values())
    if info["config"].get("allow_direct"):
        try:
            page, _ = await direct_page(js, stream, subject, {"seq": first.seq}, messages=count, size=_PAGE)
        except (ApiError, NoResponders, RequestTimeout):
            page = []
        if page and len(page) == count and page[-1].seq == last.seq:
            return page
    return [message async for message in scan(js, stream, subject, first.seq)]


_ADDED: Final = re.compile(
    rb"\r\nNats-Stream:[^\r]*\r\nNats-Subject: ?([^ \t\r]+)"
    rb"\r\nNats-Sequence: ?(\d+)\r\nNats-Time-Stamp: ?([^ \t\r]+)\r\n"
)
"""Headers that nats-server adds to a message in the answer to a direct get, in the present order."""


def _from_direct(reply: Reply) -> StoredMessage | None:
    """Return the message in the answer to a direct get; None for an answer without a message."""
    block = reply.headers
    at = block.rfind(b"\r\nNats-Stream:")  # the last one is nats-server's: the publisher may have set others before it
    added = _ADDED.match(block, at) if at >= 0 else None
    if added is not None and block.find(b"\r\nNats-Subject:", added.end() - 2) < 0:
        name, number, stamp = added.groups()
        own = block[:at] + b"\r\n\r\n" if at > _NO_HEADERS else b""
        return StoredMessage(
            name.decode(errors="surrogateescape"), int(number), time_ns(stamp.decode()), own, reply.payload
        )
    subject = headers.get_last(reply.headers, headers.STREAM_SUBJECT, "surrogateescape")
    seq = headers.get_last(reply.headers, headers.STREAM_SEQUENCE)
    time = headers.get_last(reply.headers, headers.STREAM_TIME)
    if subject is None or seq is None or time is None:
        return None
    at = block.rfind(b"\r\nNats-Stream:")  # nats-server's, so that it does not count for the publisher's
    own = block if at < 0 else block[:at] + block[block.find(b"\r\n", at + 2) :]
    return StoredMessage(subject, int(seq), time_ns(time), own, reply.payload)


def _expect(reply: Reply, *codes: int) -> None:
    code = headers.status(reply.headers)
    if code not in codes:
        line = reply.headers[9:].partition(b"\r")[0].decode(errors="replace")
        raise ApiError(code or 500, 0, f"direct get: {line or 'unexpected answer'}")


async def direct_get_last(js: JetStream, stream: str, subject: str) -> StoredMessage | None:
    """Return the newest record of a subject by direct get, None without one; see `get_last` for answers."""
    body = orjson.dumps({"last_by_subj": subject})
    reply = await js.request(f"{js.api_prefix}.DIRECT.GET.{stream}", body)
    message = _from_direct(reply)
    if message is None:
        _expect(reply, 404)
    return await get_last(js, stream, subject) if message is not None and message.is_answer else message


async def direct_get(js: JetStream, stream: str, seq: int) -> StoredMessage | None:
    """Return the message with this stream sequence by direct get, None when the replica that answers has none."""
    reply = await js.request(f"{js.api_prefix}.DIRECT.GET.{stream}", orjson.dumps({"seq": seq}))
    message = _from_direct(reply)
    if message is None:
        _expect(reply, 404)
    return message


async def direct_page(
    js: JetStream, stream: str, subject: str, start: dict[str, Any], *, messages: int, size: int
) -> tuple[list[StoredMessage], bool]:
    """Return up to `messages` messages, about `size` bytes, of a subject (with wildcards), and whether more may follow.

    `start`: `{"seq": n}` or `{"start_time": <RFC 3339>}`.
    """
    page: list[StoredMessage] = []
    body = orjson.dumps({"next_by_subj": subject, "batch": messages, "max_bytes": size} | start)
    answers = js.stream(f"{js.api_prefix}.DIRECT.GET.{stream}", body)
    try:
        async for reply in answers:
            message = _from_direct(reply)
            if message is None:
                _expect(reply, 204, 404)
                return page, bool(page) and headers.get_last(reply.headers, headers.NUM_PENDING) != "0"
            page.append(message)
    finally:
        await answers.aclose()
    return page, bool(page)


async def count_from(js: JetStream, stream: str, subject: str, start_seq: int) -> int:
    """Return the number of messages of a subject (wildcards allowed) from a sequence on, by direct get."""
    body = orjson.dumps({"next_by_subj": subject, "seq": start_seq, "batch": 1})
    answers = js.stream(f"{js.api_prefix}.DIRECT.GET.{stream}", body)
    try:
        async for reply in answers:
            if _from_direct(reply) is None:
                _expect(reply, 204, 404)
                break
            return int(headers.get_last(reply.headers, headers.NUM_PENDING) or 0) + 1
    finally:
        await answers.aclose()
    return 0


async def subjects_of(js: JetStream, stream: str, pattern: str) -> tuple[list[str], int] | None:
    """Return the subjects of messages (`pattern` may have wildcards), and how many consumers the stream has.

    The leader answers. None: there are more subjects than nats-server names in one answer (100,000).
    """
    info = await call(js, f"STREAM.INFO.{stream}", {"subjects_filter": pattern})
    subjects = list(info["state"].get("subjects") or ())
    return None if len(subjects) < info.get("total", 0) else (subjects, info["state"].get("consumer_count", 0))


async def delete(js: JetStream, stream: str, seq: int) -> bool:
    """Remove one message by sequence; False when it was removed before.

    For messages that have not replaced another: see `remove`.
    """
    try:
        await call(js, f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
    except ApiError as error:
        if error.err_code in MESSAGE_GONE:
            return False
        raise
    return True


async def settled_info(js: JetStream, stream: str) -> dict[str, Any]:
    """Return `STREAM.INFO` after a decision of its leader with the other replicas.

    Without a leader any replica answers, and may lack messages that the majority has stored. A new leader may not count
    all of them before its first decision: the removal of a message that does not exist is one.

    Raises ApiError, NoResponders, RequestTimeout, and NoLeader where removals are denied and no leader is there.
    """
    info = await call(js, f"STREAM.INFO.{stream}")
    if int(info["config"].get("num_replicas", 1)) > 1:
        try:
            await delete(js, stream, NO_SEQUENCE)
        except ApiError:  # somebody has denied removals
            if not has_leader(info):
                raise NoLeader(f"stream {stream} has no leader") from None
        info = await call(js, f"STREAM.INFO.{stream}")
    return info


async def remove(js: JetStream, stream: str, subject: str, seq: int) -> bool:
    """Remove the record of a subject that has this sequence; False when it was removed or replaced before.

    Former records of the subject go with it: they are there if nats-server was killed between the store of a record
    and the removal of the one before.
    """
    return bool(await purge(js, stream, subject, seq))


def up_to(subject: str, seq: int) -> bytes:
    """Return the body of the request `STREAM.PURGE` that removes the messages of a subject up to a sequence."""
    return orjson.dumps({"filter": subject, "seq": seq + 1})


async def purge(js: JetStream, stream: str, subject: str, up_to: int | None = None) -> int:
    """Remove the messages of a subject (wildcards allowed) and return their number.

    `up_to`: sequence of the last message to remove; None = all.
    """
    body: dict[str, Any] = {"filter": subject}
    if up_to is not None:
        body["seq"] = up_to + 1
    return int((await call(js, f"STREAM.PURGE.{stream}", body)).get("purged", 0))
