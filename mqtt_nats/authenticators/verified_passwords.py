# SPDX-License-Identifier: Apache-2.0
"""Cache of passwords that were verified a short time ago: a client that reconnects costs no long computation."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from time import monotonic
from typing import Final, NamedTuple

from mqtt_nats.access.passwords import PasswordHash

LIFETIME: Final = 300.0
"""Seconds for which a verified password counts without another computation."""

ENTRIES_MOST: Final = 10_000
"""Most users in the cache; one more drops the oldest entry."""


class _Entry(NamedTuple):
    hash: PasswordHash
    salt: bytes
    digest: bytes
    expires: float


class VerifiedPasswords:
    """Digests of verified passwords by user, one for each user. The cache has no password.

    A digest is BLAKE2b of the password, with a random salt for each entry and a random key of the process. Without the
    memory of the process nobody can try passwords against a digest. A wrong password is never in the cache.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
        self._entries: dict[str, _Entry] = {}  # the oldest entry first

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, user: str, password: bytes, found: PasswordHash) -> None:
        """Remember that the password fits ``found``, the user's present hash."""
        self._entries.pop(user, None)
        if len(self._entries) >= ENTRIES_MOST:
            del self._entries[next(iter(self._entries))]
        salt = secrets.token_bytes(hashlib.blake2b.SALT_SIZE)
        self._entries[user] = _Entry(found, salt, self._digest(password, salt), self._clock() + LIFETIME)

    def fits(self, user: str, password: bytes, found: PasswordHash) -> bool:
        """Whether the password was verified against ``found``, the user's present hash, within `LIFETIME`."""
        entry = self._entries.get(user)
        if entry is None:
            return False
        if entry.hash != found or self._clock() >= entry.expires:
            del self._entries[user]
            return False
        return hmac.compare_digest(self._digest(password, entry.salt), entry.digest)

    def _digest(self, password: bytes, salt: bytes) -> bytes:
        return hashlib.blake2b(password, key=self._key, salt=salt).digest()
