# SPDX-License-Identifier: Apache-2.0
"""File of users with hashed passwords (Argon2id, RFC 9106), against which passwords of CONNECT are verified.

One line per user::

    user:$argon2id$v=19$m=<KiB>,t=<passes>,p=<lanes>$<salt>$<hash>

A user of a tenant has another colon and the tenant's name at the end of the line. Lines of `mosquitto_passwd` are
accepted as well: ``$7$<iterations>$<salt>$<hash>`` (PBKDF2 with SHA-512) and ``$6$<salt>$<hash>`` (SHA-512). Hashes of
EMQX are written ``$digest$<sha256|sha512>,<prefix|suffix>$<salt>$<hash>``, with the place of the salt. Both in base64.
The password of an unknown user is verified against a hash that no password fits, with the scheme and the cost of most
users, so that the time does not show whether the user exists.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from argon2 import Type, extract_parameters
from argon2.exceptions import Argon2Error, InvalidHashError
from argon2.low_level import ARGON2_VERSION, hash_secret, verify_secret

from mqtt_nats.access.settings import DEVICE_COST, Cost
from mqtt_nats.access.user_file import changing, read

NAME_MOST: Final = 1024  # bytes

PBKDF2_MOST: Final = 1_000_000
"""Most iterations of PBKDF2 in a line: half a second."""

SALT_MOST: Final = 256
"""Most bytes of the salt of another broker."""

DIGESTS: Final = {
    f"{name},{place}": size for name, size in (("sha256", 32), ("sha512", 64)) for place in ("prefix", "suffix")
}
"""Bytes of the hash by algorithm and place of the salt, as they are written behind ``$digest$``."""

_TENANT: Final = re.compile(r"[\w.-]{1,64}")

_LINE: Final = re.compile(r"(?P<name>.*):(?P<text>\$(?:argon2id|7|6|digest)\$[^:]*)(?P<tenant>:.*)?")

_SALT_BYTES: Final = 16
_HASH_BYTES: Final = 32


def hash_password(password: bytes, cost: Cost, salt: bytes | None = None) -> str:
    """Return the Argon2id hash of a password as in the file; the salt is random unless it is given."""
    salt = secrets.token_bytes(_SALT_BYTES) if salt is None else salt
    made = hash_secret(password, salt, cost.passes, cost.memory, cost.lanes, _HASH_BYTES, Type.ID)
    return made.decode()


@dataclass(frozen=True, slots=True)
class PasswordHash:
    """Hash of a user's password, and the user's tenant (None: no tenant)."""

    text: str = field(repr=False)
    tenant: str | None = None

    def __str__(self) -> str:
        """Return the text of the entry in the file, behind the user's name."""
        return self.text if self.tenant is None else f"{self.text}:{self.tenant}"

    def fits(self, password: bytes) -> bool:
        """Whether ``password`` has this hash. The computation is slow, and does not hold the GIL."""
        if self.foreign:
            *parameters, digest = self.text.split("$")[1:]
            return hmac.compare_digest(_foreign_digest(parameters, password), _decoded(digest))
        try:
            return verify_secret(self.text.encode(), password, Type.ID)
        except Argon2Error:
            return False

    @property
    def foreign(self) -> bool:
        """Whether another broker has made the hash by a scheme of its own, which Argon2id replaces."""
        return not self.text.startswith("$argon2id$")

    @property
    def scheme(self) -> str:
        """The text before salt and hash: what decides how long it takes to verify a password."""
        return self.text.rsplit("$", 2)[0]

    def replaced(self, password: bytes, cost: Cost) -> PasswordHash:
        """Return the Argon2id hash of the same password and tenant.

        The salt is derived from this hash, whose salt is random: gateways that share a file make the same replacement.
        """
        salt = hashlib.sha256(self.text.encode()).digest()[:_SALT_BYTES]
        return PasswordHash(hash_password(password, cost, salt), self.tenant)


def _foreign_digest(parameters: list[str], password: bytes) -> bytes:
    """Return another broker's digest of a password; ``parameters`` are the parts of the line before the hash."""
    match parameters:
        case ["7", iterations, salt]:
            return hashlib.pbkdf2_hmac("sha512", password, _decoded(salt), int(iterations))
        case ["6", salt]:
            return hashlib.sha512(password + _decoded(salt)).digest()
        case ["digest", how, salt]:
            algorithm, _, place = how.partition(",")
            salted = _decoded(salt) + password if place == "prefix" else password + _decoded(salt)
            return hashlib.new(algorithm, salted).digest()
    raise AssertionError(parameters)  # the line was checked when it was read


class PasswordUsers:
    """Users of a password file; verifies passwords of unknown users at the same cost."""

    def __init__(self, users: Mapping[str, PasswordHash]) -> None:
        self._users = dict(users)
        self._schemes = Counter(one.scheme for one in self._users.values())
        self._nobody = self._unknown_user()

    def _unknown_user(self) -> PasswordHash:
        """Return a hash for unknown users, of the scheme and cost that most users have."""
        common = self._schemes.most_common(1)
        return _nobody(common[0][0] if common else f"$argon2id$v=19${DEVICE_COST}")

    def find(self, name: str) -> PasswordHash | None:
        """Return the hash of a user; None for an unknown user."""
        return self._users.get(name)

    def replace(self, name: str, old: PasswordHash, new: PasswordHash) -> None:
        """Put ``new`` in the place of ``old``, unless the user has another hash by now."""
        if self._users.get(name) == old:
            self._users[name] = new
            self._schemes.subtract([old.scheme])
            self._schemes.update([new.scheme])
            if self._schemes.most_common(1)[0][0] != self._nobody.scheme:
                self._nobody = self._unknown_user()

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


def check_entry(line: str) -> tuple[str, str]:
    """Return user and hash of a line of a password file; raises ValueError for a line that the gateway refuses."""
    name, found = _parse(line)
    return name, str(found)


def _parse(line: str) -> tuple[str, PasswordHash]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ValueError(
            "expected user:$argon2id$v=19$m=<KiB>,t=<passes>,p=<lanes>$<salt>$<hash>, as passwd writes it, or a line "
            "of mosquitto_passwd ($7$ or $6$)"
        )
    name, text, tenant = found["name"], found["text"], found["tenant"]
    check_name(name)
    (_check_argon2 if text.startswith("$argon2id$") else _check_foreign)(text)
    return name, PasswordHash(text, None if tenant is None else check_tenant(tenant[1:]))


def _check_argon2(text: str) -> None:
    try:
        found = extract_parameters(text)
        parts = [_decoded(part) for part in text.split("$")[-2:]]
    except (InvalidHashError, ValueError):
        raise ValueError("the hash of the password is not one of Argon2id") from None
    if found.version != ARGON2_VERSION or not 8 <= len(parts[0]) <= 64 or not 16 <= len(parts[1]) <= 128:
        raise ValueError("the hash must be of version 19, have a salt of 8 to 64 bytes and itself 16 to 128 bytes")
    if text.split("$")[3] != f"m={found.memory_cost},t={found.time_cost},p={found.parallelism}":
        raise ValueError("the parameters of the hash must be m, t and p, in this order and nothing else")
    Cost(found.memory_cost, found.time_cost, found.parallelism)


def _check_foreign(text: str) -> None:
    *parameters, salt, digest = text.split("$")[1:]
    try:
        sizes = len(_decoded(salt)), len(_decoded(digest))
    except ValueError:
        sizes = -1, -1
    match parameters:
        case ["7", iterations]:
            if not (iterations.isascii() and iterations.isdecimal()):
                raise ValueError("the iterations of $7$ must be a number")
            if not 1 <= int(iterations[:10]) <= PBKDF2_MOST:
                raise ValueError(f"the iterations of $7$ must be from 1 to {PBKDF2_MOST}")
            size = 64
        case ["6"]:
            size = 64
        case ["digest", how] if how in DIGESTS:
            size = DIGESTS[how]
        case _:
            size = -1
    if size < 0 or not 0 <= sizes[0] <= SALT_MOST or sizes[1] != size:
        raise ValueError("the hash must be $7$<iterations>$<salt>$<hash>, $6$<salt>$<hash> or $digest$... in base64")


def _decoded(text: str) -> bytes:
    """Return base64 with or without padding as bytes; raises ValueError."""
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def _nobody(scheme: str) -> PasswordHash:
    """Return a random hash of a scheme and cost, to which no password is known."""
    size = DIGESTS.get(scheme.rpartition("$")[2], _HASH_BYTES if scheme.startswith("$argon2id$") else 64)
    salt, digest = (base64.b64encode(secrets.token_bytes(one)).decode().rstrip("=") for one in (_SALT_BYTES, size))
    return PasswordHash(f"{scheme}${salt}${digest}")


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


def set_password(path: Path, name: str, password: str, tenant: str | None = None, cost: Cost | None = None) -> bool:
    """Write the entry of a user, in a new file if none exists; return whether the user is new.

    Args:
        tenant: tenant of the user; None: the tenant of the present entry stays.
        cost: cost of the new hash; None: `DEVICE_COST`.

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
    made = hash_password(password.encode(), cost or DEVICE_COST)
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


def replace_hashes(path: Path, changes: Mapping[str, tuple[PasswordHash, PasswordHash]]) -> None:
    """Write other hashes of the same passwords; an entry that has changed meanwhile stays as it is.

    Args:
        changes: the hash in the file and its replacement, by user.

    Raises:
        StartupError: the file cannot be read or written.
    """
    with changing(path, load, must_exist=True, private=False) as users:
        users.update({name: new for name, (old, new) in changes.items() if users.get(name) == old})
