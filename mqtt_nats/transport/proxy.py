# SPDX-License-Identifier: Apache-2.0
"""Reader of PROXY protocol headers, versions 1 and 2, by which a proxy names its client's address.

The header comes before all other bytes, also before TLS. The reader says how many bytes of the header are certain to
follow, so that the caller reads no byte behind the header.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from typing import Final

SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
"""First bytes of a version 2 header."""

LINE: Final = b"PROXY "
"""First bytes of a version 1 header."""

LINE_MOST: Final = 107
"""Maximum length in bytes of a version 1 header, as specified."""

FIELDS_MOST: Final = 2048
"""Maximum number of bytes after the first 16 of a version 2 header: addresses and further fields."""

_LOCAL: Final = 0x20
_PROXY: Final = 0x21
_FAMILIES: Final = {0x11: 4, 0x21: 16}
"""Bytes of a TCP client's address, by the byte for family and protocol."""
_OTHERS: Final = {0x00: 0, 0x12: 12, 0x22: 36, 0x31: 216, 0x32: 216}
"""Bytes of addresses that are not of a TCP client, by the byte for family and protocol."""


class BadHeader(Exception):
    """Error: the received bytes are no PROXY protocol header, or one that is too long."""


class NoHeader(Exception):
    """Error: the connection ends before its header is complete, or its client is refused."""


class HeaderReader:
    """Incremental reader of one header."""

    def __init__(self) -> None:
        self.need = len(SIGNATURE)
        """Number of header bytes that are certain to follow; 0 = the header is complete."""
        self.source: tuple[str, int] | None = None
        """Address and port of the client; None = use the connection's, as for a health check by the proxy itself."""
        self._data = b""

    def feed(self, data: bytes) -> None:
        """Parse the next bytes, at most `need`.

        Raises:
            BadHeader: the bytes are no header.
        """
        self._data = found = self._data + data
        self.need -= len(data)
        if self.need:
            return
        if found.startswith(SIGNATURE):
            self._second(found)
        elif found.startswith(LINE):
            self._first(found)
        else:
            raise BadHeader("no header of the PROXY protocol")

    def _first(self, line: bytes) -> None:
        if not line.endswith(b"\r\n"):
            if b"\n" in line or len(line) >= LINE_MOST:
                raise BadHeader("a line that does not end")
            self.need = 1 if line.endswith(b"\r") else min(2, LINE_MOST - len(line))
            return
        parts = line[:-2].split(b" ")
        if parts[1] == b"UNKNOWN":
            return
        if len(parts) != 6 or parts[1] not in (b"TCP4", b"TCP6"):
            raise BadHeader("a line that does not name two addresses")
        kind = IPv4Address if parts[1] == b"TCP4" else IPv6Address
        try:
            source, _ = (str(kind(part.decode("ascii"))) for part in parts[2:4])
        except ValueError:
            raise BadHeader("a line without addresses") from None
        port, _ = map(_port, parts[4:])
        self.source = source, port

    def _second(self, found: bytes) -> None:
        if len(found) < 16:
            self.need = 16 - len(found)
            return
        command, family, size = found[12], found[13], int.from_bytes(found[14:16], "big")
        if command not in (_LOCAL, _PROXY):
            raise BadHeader(f"version and command {command:#04x}")
        if size > FIELDS_MOST:
            raise BadHeader(f"{size} bytes of addresses")
        if len(found) < 16 + size:
            self.need = 16 + size - len(found)
            return
        if command == _LOCAL:
            return
        length = _FAMILIES.get(family)
        if length is None:
            if family not in _OTHERS or size < _OTHERS[family]:
                raise BadHeader(f"address family and protocol {family:#04x} in {size} bytes")
            return
        if size < 2 * length + 4:
            raise BadHeader(f"two addresses in {size} bytes")
        kind = IPv4Address if length == 4 else IPv6Address
        self.source = (
            str(kind(found[16 : 16 + length])),
            int.from_bytes(found[16 + 2 * length : 18 + 2 * length], "big"),
        )


def _port(text: bytes) -> int:
    if not text.isdigit() or len(text) > 5 or (len(text) > 1 and text.startswith(b"0")) or int(text) > 65535:
        raise BadHeader("a line without ports")
    return int(text)
