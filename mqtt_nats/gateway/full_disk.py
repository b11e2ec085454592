# SPDX-License-Identifier: Apache-2.0
"""Whether the disk of the embedded nats-server has been full, and has room again.

nats-server 2.15.1 stores nothing more in a stream whose file could not be written, also when there is room again: it
must be restarted. Its log says that a file could not be written. Where the log is on the full disk that line can be
missing, so the free bytes of the disk are looked at too. See docs/internals/rules.md#full-disks.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from mqtt_nats.lifecycle.readiness import NO_SPACE

FULL_BYTES: Final = 1024 * 1024
"""A disk with fewer free bytes is full: a block of a stream does not fit."""

ROOM_BYTES: Final = 64 * 1024 * 1024
"""Free bytes with which nats-server is started again; of a small disk a twentieth is enough."""

LOG_BYTES_MOST: Final = 1024 * 1024
"""Of the log that are read at a time; nats-server writes a line for each message that it cannot store."""

log = logging.getLogger("mqtt_nats.gateway")


class FullDisk:
    """The disk of a data directory.

    Args:
        data: the directory in which nats-server keeps its store.
        log_file: to which nats-server writes its log.
    """

    def __init__(self, data: Path, log_file: Path) -> None:
        self._data = data
        self._log_file = log_file
        self._read = 0
        """Bytes of the log that have been read."""
        self.full = False
        """A file could not be written since nats-server was started."""

    def look(self) -> bool:
        """Whether nats-server is to be restarted: the disk was full, and has room."""
        room, total = self._room()
        if not self.full and (room < FULL_BYTES or self._has_failed()):
            self.full = True
            log.error(
                "JetStream storage is full: the disk of %s has %d KiB left. Nothing is stored until there is room; "
                "then nats-server is restarted",
                self._data,
                room // 1024,
            )
        return self.full and room >= min(ROOM_BYTES, total // 20)

    def restarted(self) -> None:
        """nats-server runs anew, and writes its files."""
        self.full = False
        self._read = self._log_size()
        log.warning("JetStream storage has room again: nats-server was restarted")

    def _room(self) -> tuple[int, int]:
        """Bytes that nats-server may still write to the disk, and the size of the disk."""
        try:
            found = os.statvfs(self._data)
        except OSError:  # the directory is gone: nats-server says more
            return FULL_BYTES, 0
        free = found.f_bavail if os.geteuid() else found.f_bfree
        return free * found.f_frsize, found.f_blocks * found.f_frsize

    def _has_failed(self) -> bool:
        """Whether the log has a failed write that was not seen before."""
        size = self._log_size()
        if size <= self._read:
            return False
        begin = max(self._read, size - LOG_BYTES_MOST)
        self._read = size
        try:
            with self._log_file.open("rb") as file:
                file.seek(begin)
                return NO_SPACE.encode() in file.read(size - begin)
        except OSError:
            return False

    def _log_size(self) -> int:
        try:
            return self._log_file.stat().st_size
        except OSError:
            return 0
