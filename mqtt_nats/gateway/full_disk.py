# SPDX-License-Identifier: Apache-2.0
"""Full disk: whether the disk of the embedded nats-server was full, and has room again.

nats-server 2.15.1 stores nothing more in a stream whose file could not be written, also when there is room again: it
must be restarted. The log of nats-server says that a file could not be written. If the log is on the full disk that
line can be missing, so the free bytes of the disk are checked, too. See docs/internals/gateway.md#full-disks.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from mqtt_nats.lifecycle.readiness import NO_SPACE

FULL_BYTES: Final = 1024 * 1024
"""Number of free bytes below which a disk is full: a block of a stream does not fit."""

ROOM_BYTES: Final = 64 * 1024 * 1024
"""Number of free bytes from which nats-server is restarted; on a small disk a twentieth of its size."""

LOG_BYTES_MOST: Final = 1024 * 1024
"""Maximum bytes of the log read at a time; nats-server writes a line for each message that it cannot store."""

log = logging.getLogger("mqtt_nats.gateway")


class FullDisk:
    """Disk of a data directory.

    Args:
        data: the directory in which nats-server keeps its store.
        log_file: file to which nats-server writes its log.
    """

    def __init__(self, data: Path, log_file: Path) -> None:
        self._data = data
        self._log_file = log_file
        self._read = 0
        """Number of bytes of the log that have been read."""
        self.full = False
        """Whether the disk was full since nats-server was started."""

    def check_disk(self) -> bool:
        """Return whether nats-server has to be restarted: the disk was full, and has room again."""
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
        """Reset the state after nats-server was restarted."""
        self.full = False
        self._read = self._log_size()
        log.warning("JetStream storage has room again: nats-server was restarted")

    def _room(self) -> tuple[int, int]:
        """Return the bytes that nats-server may still write to the disk, and the size of the disk in bytes."""
        try:
            found = os.statvfs(self._data)
        except OSError:  # the directory is gone: nats-server reports that
            return FULL_BYTES, 0
        free = found.f_bavail if os.geteuid() else found.f_bfree
        return free * found.f_frsize, found.f_blocks * found.f_frsize

    def _has_failed(self) -> bool:
        """Return whether the unread part of the log has a failed write."""
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
