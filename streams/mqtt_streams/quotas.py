# SPDX-License-Identifier: Apache-2.0
"""Which sessions outlive their connections, by the user for whom they count: small notes in `$MQTT_shared`.

A note is there for as long as its session. It has the number of the session's filters that have consumers.
"""

from hashlib import sha256
from typing import Final

from mqtt_streams import stored
from mqtt_streams.api import JetStream, publish
from mqtt_streams.hashing import nuid
from mqtt_streams.shared import STREAM

PREFIX: Final = "$MQTT.shared.quota."
_PAGE: Final = 1000
_PAGE_BYTES: Final = 1024 * 1024


def quota_of(user: str, address: str) -> str:
    """22 characters that stand for a user, or where that is "" for an address, in subjects and records."""
    return nuid(sha256(f"user {user}".encode() if user else f"address {address}".encode()).digest())


class QuotaStore:
    """Notes of sessions. All methods raise ApiError, NoResponders, RequestTimeout."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def sessions(self, quota: str) -> dict[str, int]:
        """The sessions that count for a quota, by key, oldest note first; and how many filters each has."""
        found: dict[str, int] = {}
        subject, start, more = f"{PREFIX}{quota}.*", 1, True
        while more:
            page, more = await stored.direct_page(
                self._js, STREAM, subject, {"seq": start}, messages=_PAGE, size=_PAGE_BYTES
            )
            for message in page:
                start = message.seq + 1
                digits = message.payload[:9]
                found[message.subject.rpartition(".")[2]] = int(digits) if digits.isdigit() else 0
        return found

    async def note(self, quota: str, key: str, filters: int) -> None:
        """A session counts, with as many filters."""
        await publish(self._js, f"{PREFIX}{quota}.{key}", b"%d" % filters)

    async def forget(self, quota: str, key: str) -> None:
        """A session counts no more."""
        await stored.purge(self._js, STREAM, f"{PREFIX}{quota}.{key}")
