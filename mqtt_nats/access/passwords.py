# SPDX-License-Identifier: Apache-2.0
"""File of users with hashed passwords (Argon2id, RFC 9106), against which passwords of CONNECT are verified.

One line per user::

    user:$argon2id$v=19$m=<KiB>,t=<passes>,p=<lanes>$<salt>$<hash>

A user of a tenant has another colon and the tenant's name at the end of the line.
The password of an unknown user is verified against a hash that no password fits, with the cost parameters of most
users, so that the time does not show whether the user exists.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from argon2 import Parameters, PasswordHasher, Type, extract_parameters
from argon2.exceptions import Argon2Error, InvalidHashError
from argon2.low_level import ARGON2_VERSION, verify_secret

from mqtt_nats.access.user_file import changing, read

# The minimum that OWASP recommends: some 20 ms and 19 MiB. No more, since many clients may connect at the same time.
HASHER: Final = PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1, hash_len=32, salt_len=16)

# Highest cost parameters of a line: 1 GiB, 100 passes, 64 lanes.
MEMORY_MOST: Final = 1024 * 1024
TIME_MOST: Final = 100
LANES_MOST: Final = 64

NAME_MOST: Final = 1024  # bytes

_MARK: Final = ":$argon2id$"

_TENANT: Final = re.compile(r"[\w.-]{1,64}")


@dataclass(frozen=True, slots=True)
class PasswordHash:
    """Hash of a user's password, and the user's tenant (None: no tenant)."""

    text: str = field(repr=False)
    tenant: str | None = None

    def __str__(self) -> str:
        """Return the text of the entry in the file, behind the user's name."""
        return self.text if self.tenant is None else f"{self.text}:{self.tenant}"

    def fits(self, password: bytes) -> bool:
        """Whether the hash is the password's hash. Slow, but releases the GIL."""
        try:
            return verify_secret(self.text.encode(), password, Type.ID)
        except Argon2Error:
            return False


class PasswordUsers:
    """Users of a password file; verifies passwords of unknown users at the same cost."""

    def __init__(self, users: Mapping[str, PasswordHash]) -> None:
        self._users = dict(users)
        costs = Counter(_costs(one) for one in self._users.values())
        self._nobody = _nobody(costs.most_common(1)[0][0] if costs else (2, 19 * 1024, 1))

    def find(self, name: str) -> PasswordHash | None:
        """Return the hash of a user; None for an unknown user."""
        return self._users.get(name)

    def verify(self, name: str, password: bytes) -> PasswordHash | None:
        """Return the user's hash if the password fits, else None; takes the same time for an unknown user."""
        found = self._users.get(name)
        fits = (found or self._nobody).fits(password)
        return found if fits else None


def load(path: Path) -> dict[str, PasswordHash]:
    """Read the password file.

    Raises:
        StartupError: the file cannot be read, or a line is wrong.
    """
    return read(path, _parse)


def _parse(line: str) -> tuple[str, PasswordHash]:
    name, mark, rest = line.rpartition(_MARK)
    if not mark:
        raise ValueError("expected user:$argon2id$v=19$m=<KiB>,t=<passes>,p=<lanes>$<salt>$<hash>, as passwd writes it")
    check_name(name)
    rest, colon, tenant = rest.partition(":")
    text = mark[1:] + rest
    try:
        found = extract_parameters(text)
        parts = [base64.b64decode(part + "=" * (-len(part) % 4), validate=True) for part in rest.split("$")[-2:]]
    except (InvalidHashError, ValueError):
        raise ValueError("the hash of the password is not one of Argon2id") from None
    if found.version != ARGON2_VERSION or not 8 <= len(parts[0]) <= 64 or not 16 <= len(parts[1]) <= 128:
        raise ValueError("the hash must be of version 19, have a salt of 8 to 64 bytes and itself 16 to 128 bytes")
    if not 1 <= found.time_cost <= TIME_MOST or not 1 <= found.parallelism <= LANES_MOST:
        raise ValueError(f"t must be from 1 to {TIME_MOST}, and p from 1 to {LANES_MOST}")
    if not 8 * found.parallelism <= found.memory_cost <= MEMORY_MOST:
        raise ValueError(f"m must be from 8 * p to {MEMORY_MOST}")
    return name, PasswordHash(text, check_tenant(tenant) if colon else None)


def _costs(one: PasswordHash) -> tuple[int, int, int]:
    found: Parameters = extract_parameters(one.text)
    return found.time_cost, found.memory_cost, found.parallelism


def _nobody(costs: tuple[int, int, int]) -> PasswordHash:
    """Return a random hash, to which no password is known, with these cost parameters."""
    passes, memory, lanes = costs
    salt, digest = (base64.b64encode(secrets.token_bytes(size)).decode().rstrip("=") for size in (16, 32))
    return PasswordHash(f"$argon2id$v={ARGON2_VERSION}$m={memory},t={passes},p={lanes}${salt}${digest}")


def check_name(name: str) -> str:
    """Return a user name that is allowed in the file.

    Raises:
        ValueError: the name is not allowed.
    """
    if not name or not name.isprintable() or len(name.encode()) > NAME_MOST:
        raise ValueError(f"a user name must have 1 to {NAME_MOST} bytes, and no control characters")
    return name


def check_tenant(name: str) -> str:
    """Return a tenant's name that is allowed in the file.

    Raises:
        ValueError: the name is not allowed.
    """
    if not _TENANT.fullmatch(name):
        raise ValueError("the name of a tenant must have 1 to 64 letters, digits, dots, dashes and underscores")
    return name


def set_password(path: Path, name: str, password: str, tenant: str | None = None) -> bool:
    """Write the entry of a user, in a new file if none exists; return whether the user is new.

    Args:
        tenant: tenant of the user; None: the tenant of the present entry stays.

    Raises:
        StartupError: the file cannot be read or written.
        ValueError: name, password or tenant are not allowed.
    """
    check_name(name)
    if not password:
        raise ValueError("the password is empty")
    if len(password.encode()) > 65535:
        raise ValueError("the password has more than 65535 bytes, which CONNECT cannot carry")
    if tenant is not None:
        check_tenant(tenant)
    made = HASHER.hash(password)
    with changing(path, load) as users:
        new = name not in users
        users[name] = PasswordHash(made, tenant if tenant is not None or new else users[name].tenant)
    return new


def delete_user(path: Path, name: str) -> bool:
    """Remove the entry of a user; return whether an entry existed.

    Raises:
        StartupError: the file cannot be read or written.
        ValueError: the name is not allowed.
    """
    check_name(name)
    with changing(path, load, must_exist=True) as users:
        return users.pop(name, None) is not None
