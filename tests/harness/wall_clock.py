# SPDX-License-Identifier: Apache-2.0
"""Steps the real-time clock that one running process sees; its monotonic clock goes on as it was.

Programs ask the kernel's vDSO what time it is. A copy of that page that is this process's own gets another
``clock_gettime``: the system call, and a number of seconds added where the clock is `CLOCK_REALTIME`. Go programs ask
there too; libfaketime does not reach them, since they are linked statically.
"""

from __future__ import annotations

import platform
import struct
from pathlib import Path
from typing import Final

# mov eax, 228; syscall; test edi, edi; jnz end; add qword [rsi], <seconds>; end: ret
_CODE: Final = bytes.fromhex("b8e4000000 0f05 85ff 7507 488106")
_RETURN: Final = b"\xc3"
_SYMBOLS: Final = (b"__vdso_clock_gettime", b"clock_gettime")
_DYNSYM: Final = 11


def obstacle() -> str:
    """Why clocks of processes cannot be stepped here; empty when they can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "the clock of a process can be stepped on Linux with x86-64 only"
    return ""


def step(pid: int, seconds: int) -> None:
    """Have a process see the real time plus ``seconds``, whatever it was before.

    Raises:
        OSError: the process is not ours to change.
    """
    start, size = _vdso(pid)
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        image = memory.read(size)
        code = _CODE + struct.pack("<i", seconds) + _RETURN
        for offset in _functions(image):
            memory.seek(start + offset)
            memory.write(code)


def _vdso(pid: int) -> tuple[int, int]:
    """Where the vDSO of a process is, and its size."""
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="ascii", errors="replace").splitlines():
        if line.endswith("[vdso]"):
            first, _, last = line.split()[0].partition("-")
            return int(first, 16), int(last, 16) - int(first, 16)
    raise OSError(f"process {pid} has no vDSO")


def _functions(image: bytes) -> set[int]:
    """Offsets of ``clock_gettime`` in an ELF image (64 bits, little-endian)."""
    table, entry, count = *struct.unpack_from("<Q", image, 40), *struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, table + number * entry) for number in range(count)]
    found = set()
    for section in sections:
        if section[1] != _DYNSYM:
            continue
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 24):
            name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", image, at)
            end = image.index(b"\0", names + name)
            if image[names + name : end] in _SYMBOLS:
                found.add(value)
    if not found:
        raise OSError("the vDSO has no clock_gettime")
    return found
