# SPDX-License-Identifier: Apache-2.0
"""Notes in `$MQTT_shared` on sessions that outlive their connections, by the quota that a session counts for.

A note exists as long as its session. Its payload is the number of the session's consumers of `$MQTT_msgs`.
"""

from functools import lru_cache
from hashlib import sha256
from typing import Final, NamedTuple

from mqtt_streams import stored
from mqtt_streams.api import JetStream
from mqtt_streams.hashing import nuid
from mqtt_streams.pages import pages_of
from mqtt_streams.shared import STREAM

PREFIX: Final = "$MQTT.shared.quota."


@lru_cache(4096)
def quota_of(user: str, address: str) -> str:
    """Return the quota, 22 characters for subjects and records: a hash of the user, or of the address if user is ""."""
    return nuid(sha256(f"user {user}".encode() if user else f"address {address}".encode()).digest())


def note_subject(quota: str, key: str) -> str:
    """Return the subject of the note that a session counts for a quota."""
    return f"{PREFIX}{quota}.{key}"


class Totals(NamedTuple):
    """Number of sessions and of consumers in the notes of a quota."""

    sessions: int
    consumers: int
    oldest: dict[str, int]
    """Number of consumers in each of the oldest notes, by session key, oldest first."""


class QuotaStore:
    """Store of the notes. All methods raise ApiError, NoResponders, RequestTimeout."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def totals(self, quota: str, oldest: int) -> Totals:
        """Return the totals of the notes of a quota, in constant memory, and the ``oldest`` notes each alone.

        A note that is written again meanwhile may count twice.
        """
        sessions = consumers = 0
        found: dict[str, int] = {}
        async for page in pages_of(self._js, STREAM, note_subject(quota, "*"), newest=True):
            for message in page:
                digits = message.payload[:9]
                count = int(digits) if digits.isdigit() else 0
                sessions, consumers = sessions + 1, consumers + count
                if len(found) < oldest:
                    found[message.subject.rpartition(".")[2]] = count
        return Totals(sessions, consumers, found)

    async def forget(self, quota: str, key: str) -> bool:
        """Remove the note of a session; False when there was none."""
        return bool(await stored.purge(self._js, STREAM, note_subject(quota, key)))
