# SPDX-License-Identifier: Apache-2.0
"""Which sessions outlive their connections, by the user for whom they count: small notes in `$MQTT_shared`.

A note is there for as long as its session. Its payload is the number of the session's consumers of `$MQTT_msgs`.
"""

from hashlib import sha256
from typing import Final

from mqtt_streams import stored
from mqtt_streams.api import JetStream
from mqtt_streams.hashing import nuid
from mqtt_streams.shared import STREAM

PREFIX: Final = "$MQTT.shared.quota."
_PAGE: Final = 1000
_PAGE_BYTES: Final = 1024 * 1024


def quota_of(user: str, address: str) -> str:
    """22 characters that stand for a user, or where that is "" for an address, in subjects and records."""
    return nuid(sha256(f"user {user}".encode() if user else f"address {address}".encode()).digest())


def note_subject(quota: str, key: str) -> str:
    """Where it is noted that a session counts for a quota."""
    return f"{PREFIX}{quota}.{key}"


class QuotaStore:
    """Notes of sessions. All methods raise ApiError, NoResponders, RequestTimeout."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def sessions(self, quota: str) -> dict[str, int]:
        """The sessions that count for a quota, by key, oldest note first; and how many consumers each has."""
        found: dict[str, int] = {}
        subject, start, more = note_subject(quota, "*"), 1, True
        while more:
            page, more = await stored.direct_page(
                self._js, STREAM, subject, {"seq": start}, messages=_PAGE, size=_PAGE_BYTES
            )
            for message in page:
                start = message.seq + 1
                digits = message.payload[:9]
                found[message.subject.rpartition(".")[2]] = int(digits) if digits.isdigit() else 0
        return found

    async def forget(self, quota: str, key: str) -> bool:
        """A session counts no more; False when it did not."""
        return bool(await stored.purge(self._js, STREAM, note_subject(quota, key)))
