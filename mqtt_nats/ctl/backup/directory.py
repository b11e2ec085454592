# SPDX-License-Identifier: Apache-2.0
"""Directory of a backup: files that are complete or absent, and the manifest that says what they are.

The manifest is written last. A directory without a manifest is a backup that has not ended.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from mqtt_nats.base.errors import StartupError

MANIFEST: Final = "manifest.json"

FORMAT: Final = 1
"""Format of the directory. A higher one is of a later version of mqtt-nats, which may have changed anything."""

_PART: Final = ".part"
"""End of the name of a file that is being written."""

_PIECE: Final = 1024 * 1024
"""Bytes that are read at a time."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SavedFile(_Part):
    """A file of the directory: its name, its size in bytes and the SHA-256 of its content in hex."""

    name: str
    size: int
    sha256: str


class SavedState(_Part):
    """State of a stream at the moment of its snapshot."""

    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    consumers: int


class SavedStream(_Part):
    """A stream: its configuration and state, and its files.

    `answer`: the state as nats-server has worded it, for the restore. `least`: messages that its snapshot has at least:
    what is removed while the snapshot is written may be missing. `later`: records that were stored while the
    snapshot was written; None for a stream of messages that are never replaced. `records`: number of those.
    """

    name: str
    config: dict[str, Any]
    state: SavedState
    answer: dict[str, Any]
    snapshot: SavedFile
    least: int = 0
    later: SavedFile | None = None
    records: int = 0


class Manifest(_Part):
    """Content of a complete backup.

    `begun`, `ended`: RFC 3339. `paused`: whether no gateway served meanwhile. `account`: name of the NATS account.
    `plugins`: plugins that all gateways were to load (true) or not to load (false).
    """

    format: int
    mqtt_nats: str
    nats_server: str
    account: str
    begun: str
    ended: str
    paused: bool
    streams: tuple[SavedStream, ...]
    plugins: dict[str, bool]


class SafeFile:
    """File that is being written; `done` has it under its name, and complete on the disk."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(path.name + _PART)
        self._file: BinaryIO = os.fdopen(os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        self._sum, self._size = hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        """Append bytes. Raises OSError."""
        self._file.write(data)
        self._sum.update(data)
        self._size += len(data)

    def done(self) -> SavedFile:
        """Flush the file to the disk, read it again and give it its name. Raises OSError, StartupError."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        saved = SavedFile(name=self._path.name, size=self._size, sha256=self._sum.hexdigest())
        if _hash(self._part) != saved.sha256:
            raise StartupError(f"{self._part}: the disk returns other bytes than were written")
        os.replace(self._part, self._path)
        _flush(self._path.parent)
        return saved

    def close(self) -> None:
        """Close the file, complete or not."""
        self._file.close()


@contextmanager
def writing(directory: Path, name: str) -> Iterator[SafeFile]:
    """Write a file of the directory; the caller calls `done`. Raises StartupError for errors of the disk."""
    file = None
    try:
        file = SafeFile(directory / name)
        yield file
    except OSError as error:
        raise StartupError(f"{directory / name} cannot be written: {error.strerror or error}") from None
    finally:
        if file is not None:
            file.close()


def prepare(directory: Path) -> None:
    """Make the directory, which only its owner may read.

    Raises:
        StartupError: there is something in it, or it cannot be made.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise StartupError(f"{directory} is not empty: name a new directory, or remove what is in it")
        directory.chmod(0o700)
        _flush(directory.parent)
    except OSError as error:
        raise StartupError(f"{directory} cannot be used: {error.strerror or error}") from None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Complete the backup. Raises StartupError."""
    body = manifest.model_dump(mode="json")
    text = orjson.dumps({"manifest": body, "sha256": _hash_of(body)}, option=orjson.OPT_INDENT_2) + b"\n"
    with writing(directory, MANIFEST) as file:
        file.write(text)
        file.done()


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a backup.

    Raises:
        StartupError: there is no backup, it has not ended, it is of a later version, or the manifest is damaged.
    """
    path = directory / MANIFEST
    damaged = StartupError(f"{path} is damaged: use another backup")
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        if not directory.is_dir():
            raise StartupError(f"{directory}: there is no such directory") from None
        raise StartupError(
            f"{directory} has no {MANIFEST}: it is not a backup of mqtt-nats, or the backup has not ended"
        ) from None
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror or error}") from None
    except orjson.JSONDecodeError:
        raise damaged from None
    body = found.get("manifest") if isinstance(found, dict) else None
    if not isinstance(body, dict) or not isinstance(body.get("format"), int):
        raise damaged
    if body["format"] > FORMAT:
        version = body.get("mqtt_nats")
        raise StartupError(f"{directory} has the format of a later mqtt-nats ({version}): use that version")
    if found.get("sha256") != _hash_of(body):
        raise damaged
    try:
        return Manifest.model_validate(body)
    except ValidationError:
        raise damaged from None


def verify(directory: Path, files: list[SavedFile]) -> None:
    """Check size and content of files.

    Raises:
        StartupError: one line for each file that is missing, damaged or cannot be read.
    """
    problems = []
    for one in files:
        path = directory / one.name
        try:
            if (size := path.stat().st_size) != one.size:
                problems.append(f"{path} has {size:,} bytes in place of {one.size:,}: use another backup")
            elif _hash(path) != one.sha256:
                problems.append(f"{path} is damaged (SHA-256): use another backup")
        except FileNotFoundError:
            problems.append(f"{path} is missing: use another backup")
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror or error}")
    if problems:
        raise StartupError(*problems)


def pieces(path: Path, size: int) -> Iterator[bytes]:
    """Yield the content of a file in pieces of up to ``size`` bytes. Raises OSError."""
    with path.open("rb") as file:
        while piece := file.read(size):
            yield piece


def _hash(path: Path) -> str:
    found = hashlib.sha256()
    for piece in pieces(path, _PIECE):
        found.update(piece)
    return found.hexdigest()


def _hash_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _flush(directory: Path) -> None:
    """Flush the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
