# SPDX-License-Identifier: Apache-2.0
"""Names and subject tokens derived from client ids; the hash is nats-server's."""

from functools import lru_cache
from hashlib import sha256
from typing import Final

ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
HASH_LENGTH: Final = 8
SECOND_KEY_LENGTH: Final = 16
NUID_LENGTH: Final = 22
MAX_PLAIN_BYTES: Final = 200
"""Longest client id, in bytes, that is used as a subject token without hashing."""

_PREFIX: Final = "="
_MODULO_62: Final = "".join(ALPHABET[byte % 62] for byte in range(256)).encode()
_NOT_PLAIN: Final = frozenset(".*>\x7f") | frozenset(map(chr, range(0x21)))


@lru_cache(1024)
def name_hash(name: str) -> str:
    """Return nats-server's 8-character hash of a client id or server name: eight bytes of SHA-256, each modulo 62.

    Results are cached, since a connection needs the hash of its client id several times.
    """
    return sha256(name.encode()).digest()[:HASH_LENGTH].translate(_MODULO_62).decode()


def second_key(client_id: str, user: str) -> str:
    """Return the 16-character key of a session whose first key is taken by another client id or user.

    `user`: authenticated user of the session, "" = anonymous. The separator U+0000 is in no client id.
    """
    digest = sha256(f"{client_id}\0{user}".encode()).digest()
    return digest[:SECOND_KEY_LENGTH].translate(_MODULO_62).decode()


def consumer_name(client_hash: str, nuid: str) -> str:
    """Return the durable name of a subscription's consumer."""
    return f"{client_hash}_{nuid}"


def nuid(entropy: bytes) -> str:
    """Return 22 base-62 characters made of at least 17 random bytes."""
    value = int.from_bytes(entropy, "big")
    digits = []
    for _ in range(NUID_LENGTH):
        value, digit = divmod(value, 62)
        digits.append(ALPHABET[digit])
    return "".join(digits)


def subject_token(client_id: str) -> str:
    """Return the subject token of any client id: the client id when it is one plain token, else `=` and its hash.

    [MQTT-3.1.3-5] (3.1.1, 5.0)

    Client ids that start with `=` are hashed too, so that no client id equals another client's token.
    """
    if (
        not client_id
        or client_id.startswith(_PREFIX)
        or len(client_id.encode()) > MAX_PLAIN_BYTES
        or not _NOT_PLAIN.isdisjoint(client_id)
    ):
        return _PREFIX + name_hash(client_id)
    return client_id


def registered_as(client_id: str, key: str) -> str:
    """Return a connected client's name in the gateways' registries: its id, or U+0000 and its session's second key."""
    # By the length of the key: the hash of the client id may have left the cache before the connection ends.
    return client_id if len(key) != SECOND_KEY_LENGTH else f"\0{key}"


def held_token(client_id: str, key: str) -> str:
    """Return the subject token of a session's held QoS 2 publishes: `subject_token`, or `=` and its second key."""
    return subject_token(client_id) if key == name_hash(client_id) else _PREFIX + key
