# SPDX-License-Identifier: Apache-2.0
"""Names derived from client ids, as nats-server derives them."""

from functools import lru_cache
from hashlib import sha256
from typing import Final

ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
HASH_LENGTH: Final = 8
NUID_LENGTH: Final = 22
MAX_PLAIN_BYTES: Final = 200
"""Longest client id that is used as a subject token as it is."""

_PREFIX: Final = "="
_MODULO_62: Final = "".join(ALPHABET[byte % 62] for byte in range(256)).encode()
_NOT_PLAIN: Final = frozenset(".*>\x7f") | frozenset(map(chr, range(0x21)))


@lru_cache(1024)
def name_hash(name: str) -> str:
    """nats-server's 8-character hash of a client id or server name: eight bytes of SHA-256, each modulo 62.

    The last ones are kept, since a connection asks for its own several times.
    """
    return sha256(name.encode()).digest()[:HASH_LENGTH].translate(_MODULO_62).decode()


def consumer_name(client_hash: str, nuid: str) -> str:
    """Durable name of a subscription's consumer."""
    return f"{client_hash}_{nuid}"


def nuid(entropy: bytes) -> str:
    """22 base-62 characters out of (at least) 17 random bytes."""
    value = int.from_bytes(entropy, "big")
    digits = []
    for _ in range(NUID_LENGTH):
        value, digit = divmod(value, 62)
        digits.append(ALPHABET[digit])
    return "".join(digits)


def subject_token(client_id: str) -> str:
    """One subject token for any client id: itself when it is one plain token, else `=` and its hash.

    [MQTT-3.1.3-5] (3.1.1, 5.0)

    Ids that start with `=` are hashed too, so that nobody can name another client's token.
    """
    if (
        not client_id
        or client_id.startswith(_PREFIX)
        or len(client_id.encode()) > MAX_PLAIN_BYTES
        or not _NOT_PLAIN.isdisjoint(client_id)
    ):
        return _PREFIX + name_hash(client_id)
    return client_id
