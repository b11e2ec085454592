# SPDX-License-Identifier: Apache-2.0
"""File with one line per user; a change replaces the whole file."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mqtt_nats.base.errors import StartupError

E = TypeVar("E")


def read(path: Path, parse: Callable[[str], tuple[str, E]]) -> dict[str, E]:
    """Return the entries of the file by user; ``parse`` splits a line and raises ValueError.

    Raises:
        StartupError: the file cannot be read, or a line is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise StartupError(f"cannot read the users in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartupError(f"the file of users {path} is not UTF-8 text") from None
    if not lines[-1]:
        lines.pop()
    users: dict[str, E] = {}
    where: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            name, entry = parse(line)
        except ValueError as error:
            raise StartupError(f"{path}, line {number}: {error}") from None
        if name in users:  # the name is not shown: where a line end is missing, it contains a hash
            raise StartupError(f"{path}, line {number}: the user of line {where[name]} is repeated")
        users[name], where[name] = entry, number
    return users


@contextmanager
def changing(
    path: Path, load: Callable[[Path], dict[str, E]], *, must_exist: bool = False, private: bool = True
) -> Iterator[dict[str, E]]:
    """Yield the entries for a change; at the end the changed entries replace the file. A lock excludes other changes.

    Args:
        private: only the owner may read the new file; False: it has the group and the permissions of the former one.

    Raises:
        StartupError: the file cannot be read or written.
    """
    path = path.resolve()  # a symbolic link stays a link: its target is replaced
    try:
        directory = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise StartupError(f"cannot write the users to {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            raise StartupError(f"cannot lock {path.parent} to write the users: {error.strerror}") from None
        users = load(path) if must_exist or path.exists() else {}
        before = dict(users)
        yield users
        if users != before:
            try:
                _write(path, "".join(f"{name}:{entry}\n" for name, entry in users.items()), private=private)
                os.fsync(directory)
            except OSError as error:
                raise StartupError(f"cannot write the users to {path}: {error.strerror}") from None
    finally:
        os.close(directory)


def _write(path: Path, text: str, *, private: bool) -> None:
    """Replace a file by one that only its owner may read, or (``private`` False) with the same group and permissions.

    As root the file keeps its owner.

    Raises:
        OSError: the file cannot be written, or its group cannot be kept: others might not be able to read it.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            if path.exists():
                former = path.stat()
                if os.geteuid() == 0:
                    os.fchown(handle, former.st_uid, former.st_gid)
                elif not private and former.st_gid != os.fstat(handle).st_gid:
                    os.fchown(handle, -1, former.st_gid)
                if not private:
                    os.fchmod(handle, stat.S_IMODE(former.st_mode))
            file.write(text)
            file.flush()
            os.fsync(handle)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
