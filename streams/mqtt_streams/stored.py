# SPDX-License-Identifier: Apache-2.0
"""Reading and removing single stored messages, by the stream's leader (a direct get can be stale)."""

from base64 import b64decode
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Final, NamedTuple

from mqtt_streams.api import ApiError, JetStream, call

NO_MESSAGE_FOUND: Final = 10037
SEQUENCE_NOT_FOUND: Final = 10043
_EPOCH: Final = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


class StoredMessage(NamedTuple):
    """One message of a stream; `headers` is the raw block (b"" for none), `time_ns` the store time since 1970."""

    subject: str
    seq: int
    time_ns: int
    headers: bytes
    payload: bytes


def time_ns(text: str) -> int:
    """Nanoseconds since 1970 of an RFC 3339 UTC time with up to nine decimals; raises ValueError."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    seconds = datetime.fromisoformat(whole + "+00:00") - _EPOCH
    return (seconds.days * 86400 + seconds.seconds) * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))


def _message(answer: dict[str, Any]) -> StoredMessage:
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
        return _message(await call(js, f"STREAM.MSG.GET.{stream}", body))
    except ApiError as error:
        if error.err_code == NO_MESSAGE_FOUND:
            return None
        raise


async def get_last(js: JetStream, stream: str, subject: str) -> StoredMessage | None:
    """The newest message of a subject."""
    return await _get(js, stream, {"last_by_subj": subject})


async def get_sequence(js: JetStream, stream: str, seq: int) -> StoredMessage | None:
    """The message with this stream sequence, None when it is gone."""
    return await _get(js, stream, {"seq": seq})


async def scan(js: JetStream, stream: str, subject: str, start_seq: int = 1) -> AsyncIterator[StoredMessage]:
    """All messages of a subject (wildcards allowed) in sequence order; for small sets, one request each."""
    while (message := await _get(js, stream, {"next_by_subj": subject, "seq": start_seq})) is not None:
        yield message
        start_seq = message.seq + 1


async def delete(js: JetStream, stream: str, seq: int) -> bool:
    """Remove one message by sequence; False when it was gone already."""
    try:
        await call(js, f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
    except ApiError as error:
        if error.err_code in (NO_MESSAGE_FOUND, SEQUENCE_NOT_FOUND, 10057):
            return False
        raise
    return True


async def purge(js: JetStream, stream: str, subject: str) -> int:
    """Remove all messages of a subject (wildcards allowed) and return how many there were."""
    return int((await call(js, f"STREAM.PURGE.{stream}", {"filter": subject})).get("purged", 0))
