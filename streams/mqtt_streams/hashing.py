# SPDX-License-Identifier: Apache-2.0
"""Names derived from client ids, as nats-server derives them."""

from functools import lru_cache
from hashlib import sha256
from typing import Final

ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
HASH_LENGTH: Final = 8
SECOND_KEY_LENGTH: Final = 16
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


def second_key(client_id: str, user: str) -> str:
    """Where a session is kept when that of another client, or user, has the hash of its client id: 16 characters.

    `user`: whose session it is, "" = a client that has not proved who it is. No client id has U+0000 in it.
    """
    digest = sha256(f"{client_id}\0{user}".encode()).digest()
    return digest[:SECOND_KEY_LENGTH].translate(_MODULO_62).decode()


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


def registered_as(client_id: str, key: str) -> str:
    """The name by which gateways know a connected client: its id, or its session's second key after U+0000."""
    return client_id if key == name_hash(client_id) else f"\0{key}"


def held_token(client_id: str, key: str) -> str:
    """The subject token under which publishes at QoS 2 are held for a session: `subject_token`, or its second key."""
    return subject_token(client_id) if key == name_hash(client_id) else _PREFIX + key
