# SPDX-License-Identifier: Apache-2.0
"""File of users for SCRAM-SHA-256, which the gateway reads and ``mqtt-nats passwd`` writes.

One line per user, in PostgreSQL's form of verifiers; the name is normalized by SASLprep (RFC 4013)::

    user:SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>

The line without a name belongs to no user. Its key determines the salts of unknown users, so that every gateway with
the file answers for an unknown user with the same salt.
"""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scramp import ScramException, ScramMechanism
from scramp.utils import saslprep

from mqtt_nats.access.user_file import changing, read

MECHANISM: Final = ScramMechanism("SCRAM-SHA-256")

NOBODY: Final = ""
"""Name in the line that belongs to no user; no user can have this name (RFC 5802)."""

ITERATIONS: Final = 4096
"""Iterations of new entries: the minimum of RFC 7677, because the client, perhaps a small device, computes them."""

_SALT: Final = 16
"""Bytes of a new salt, as in PostgreSQL."""

_MARK: Final = ":SCRAM-SHA-256$"


@dataclass(frozen=True, slots=True)
class Verifier:
    """Data to verify a password by SCRAM; it does not suffice to log in."""

    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    def __str__(self) -> str:
        """Return the text of the entry in the file, behind the user's name."""
        salt, stored, server = (base64.b64encode(one).decode() for one in (self.salt, self.stored_key, self.server_key))
        return f"SCRAM-SHA-256${self.iterations}:{salt}${stored}:{server}"

    def __repr__(self) -> str:
        """Return a text without salt and keys."""
        return f"Verifier(iterations={self.iterations})"


def load(path: Path) -> dict[str, Verifier]:
    """Read the file of verifiers.

    Raises:
        StartupError: the file cannot be read, or a line is wrong.
    """
    return read(path, _parse)


def _parse(line: str) -> tuple[str, Verifier]:
    name, mark, rest = line.rpartition(_MARK)
    if not mark or rest.count("$") != 1:
        raise ValueError("expected user:SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>")
    if name != NOBODY and normalize(name) != name:
        raise ValueError("the user name is not in the form that SASLprep gives it")
    one, two = rest.split("$")
    count, _, salt = one.partition(":")
    stored, _, server = two.partition(":")
    number = int(count) if count.isascii() and count.isdecimal() and len(count) < 9 else 0
    if not ITERATIONS <= number <= 10_000_000:
        raise ValueError(f"iterations must be a number from {ITERATIONS} to 10000000")
    try:
        verifier = Verifier(number, *(base64.b64decode(part, validate=True) for part in (salt, stored, server)))
    except ValueError:
        raise ValueError("salt and keys must be in base64") from None
    if len(verifier.salt) < 12 or len(verifier.stored_key) != 32 or len(verifier.server_key) != 32:
        raise ValueError("the salt must be at least 12 bytes long, and the keys 32 bytes")
    return name, verifier


def normalize(name: str) -> str:
    """Return a user name in the normal form of SASLprep, in which names are compared.

    Raises:
        ValueError: the name is empty, or has characters that SASLprep does not allow.
    """
    try:
        found: str = saslprep(name)
    except ScramException:
        found = ""
    if not found:
        raise ValueError("a user name must not be empty, nor have control characters or others that SASLprep forbids")
    return found


def make(password: str) -> Verifier:
    """Return a verifier of a password with a new salt.

    Raises:
        ValueError: the password is empty, or has characters that SASLprep does not allow.
    """
    try:
        if not saslprep(password):
            raise ValueError("the password is empty")
        salt, stored, server, iterations = MECHANISM.make_auth_info(
            password, iteration_count=ITERATIONS, salt=secrets.token_bytes(_SALT)
        )
    except ScramException:
        raise ValueError("the password has control characters or others that SASLprep forbids") from None
    return Verifier(iterations, salt, stored, server)


def set_password(path: Path, name: str, password: str) -> bool:
    """Write the entry of a user, in a new file if none exists; return whether the user is new.

    Raises:
        StartupError: the file cannot be read or written.
        ValueError: name or password are not allowed.
    """
    name = normalize(name)
    verifier = make(password)
    with changing(path, load) as users:
        users.setdefault(NOBODY, make(secrets.token_hex()))
        new = name not in users
        users[name] = verifier
    return new


def delete_user(path: Path, name: str) -> bool:
    """Remove the entry of a user; return whether an entry existed.

    Raises:
        StartupError: the file cannot be read or written.
        ValueError: the name is not allowed.
    """
    name = normalize(name)
    with changing(path, load, must_exist=True) as users:
        return users.pop(name, None) is not None
