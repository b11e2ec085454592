# SPDX-License-Identifier: Apache-2.0
"""The cache of verified passwords: what is in it, and for how long."""

import pytest

from mqtt_nats.access.passwords import PasswordHash
from mqtt_nats.authenticators import verified_passwords
from mqtt_nats.authenticators.verified_passwords import LIFETIME, VerifiedPasswords

ANN, BOB = PasswordHash("$argon2id$ann"), PasswordHash("$argon2id$bob")


class Clock:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_only_the_same_password_of_the_same_hash_fits(clock: Clock) -> None:
    cache = VerifiedPasswords(clock)
    cache.add("ann", b"pencil", ANN)
    assert cache.fits("ann", b"pencil", ANN)
    assert not cache.fits("ann", b"pen", ANN)
    assert cache.fits("ann", b"pencil", ANN)  # a wrong password removes nothing
    assert not cache.fits("bob", b"pencil", ANN)
    assert not cache.fits("ann", b"pencil", BOB)  # another hash: another password, perhaps
    assert not cache.fits("ann", b"pencil", ANN)


def test_an_entry_ends(clock: Clock) -> None:
    """Log-ins by the cache do not prolong it."""
    cache = VerifiedPasswords(clock)
    cache.add("ann", b"pencil", ANN)
    clock.now += LIFETIME - 1
    assert cache.fits("ann", b"pencil", ANN)
    clock.now += 1
    assert not cache.fits("ann", b"pencil", ANN)
    assert len(cache) == 0


def test_the_cache_is_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_passwords, "ENTRIES_MOST", 3)
    cache = VerifiedPasswords(clock)
    for name in "abcad":
        cache.add(name, b"x", ANN)
    assert len(cache) == 3
    assert [name for name in "abcd" if cache.fits(name, b"x", ANN)] == ["a", "c", "d"]


def test_no_password_is_kept_and_equal_passwords_look_different(clock: Clock) -> None:
    cache, other = VerifiedPasswords(clock), VerifiedPasswords(clock)
    for one in (cache, other):
        one.add("ann", b"pencil", ANN)
        one.add("bob", b"pencil", BOB)
    digests = {entry.digest for one in (cache, other) for entry in one._entries.values()}
    assert len(digests) == 4
    assert b"pencil" not in b"".join(digests)
