# SPDX-License-Identifier: Apache-2.0
"""A disk that can lose its power: what was not flushed to it is gone (Linux, as root)."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

EXT4_IOC_SHUTDOWN: Final = 0x8004587D
"""linux/fs/ext4/ext4.h; xfs has the same number."""

NO_LOG_FLUSH: Final = 2
"""The journal is not written either: as when the power is cut."""

DISK_BYTES: Final = 1024 * 1024 * 1024
"""Of the image, which takes only what is written."""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


class PowerDisk:
    """A file system in a file, mounted at ``place``.

    Args:
        image: the file; it is made.
        place: an empty directory.
        kind: `ext4` or `xfs`.
    """

    def __init__(self, image: Path, place: Path, kind: str = "ext4") -> None:
        self._image = image
        self._place = place
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        _run(f"mkfs.{kind}", "-q", str(image))
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self._place))

    def cut(self) -> None:
        """Cut the power: nothing that is in memory gets to the disk, and nothing is written any more."""
        descriptor = os.open(self._place, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def restore(self) -> None:
        """Power is back; whoever had files open must have ended."""
        _run("umount", str(self._place))
        self._mount()

    def discard(self) -> None:
        """Take it away."""
        _run("umount", "--lazy", str(self._place))


def power_obstacle(directory: Path, kind: str = "ext4") -> str:
    """Why no power can be cut here from a file system of a kind; empty when it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "cutting the power of a disk needs Linux and root"
    missing = [name for name in (f"mkfs.{kind}", "mount", "umount") if shutil.which(name) is None]
    if missing:
        return f"the command {missing[0]} is not installed"
    place = directory / "trial"
    place.mkdir(parents=True)
    try:
        disk = PowerDisk(directory / "trial.img", place, kind)
        disk.cut()
        disk.discard()
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        return f"no disk whose power can be cut: {str(said).strip()}"
    return ""
