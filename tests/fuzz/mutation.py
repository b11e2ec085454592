# SPDX-License-Identifier: Apache-2.0
"""Changes of bytes that are likely to reach something."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from random import Random
from typing import Any, Final

BYTES: Final = (
    *(0, 1, 2, 3, 4, 5, 0x0B, 0x0F, 0x10, 0x11, 0x15, 0x16, 0x17, 0x1F, 0x21, 0x22, 0x23, 0x24, 0x26, 0x2B, 0x2F),
    *(0x30, 0x32, 0x34, 0x3F, 0x40, 0x50, 0x62, 0x70, 0x7F, 0x80, 0x82, 0x90, 0xA2, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0, 0xFF),
)
PIECES: Final = (
    *(b"\0\4MQTT", b"\0\6MQIsdp", b"\0\0", b"\xff\xff", b"\x80\x01", b"\xff\xff\xff\x7f", b"\x80\x80\x80\x80\x01"),
    *(b"\0\1+", b"\0\1#", b"$share/g/", b"\xc3\x28", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\xef\xbb\xbf", b"\0\1\0"),
    *(b"\x26\0\1a\0\1b", b"\x0b\x01", b"\x23\0\1", b"\x03\0\1x", b"\x08\0\1x", b"\x16\0\0", b"\x02\0\0\0\x01"),
)
LONGEST: Final = 4096
DEEPEST: Final = 20


def remaining_length(value: int) -> bytes:
    """A length as it stands in the fixed header."""
    out = bytearray()
    while True:
        value, low = value >> 7, value & 127
        out.append(low | 128 if value else low)
        if not value:
            return bytes(out)


def mutated(
    data: bytes, other: bytes, random: Random, pieces: Sequence[bytes] = PIECES, *, packet: bool = True
) -> bytes:
    """``data`` with one to five changes; some bring in parts of ``other``.

    Args:
        pieces: what is put in as a whole.
        packet: it is an MQTT packet, whose length may have to be right again.
    """
    out = bytearray(data)
    choose = random.random
    for _ in range(1 + int(choose() * choose() * 5)):
        size = len(out)
        at = int(choose() * size) if size else 0
        how = int(choose() * 12)
        if how < 2 and size:
            out[at] ^= 1 << int(choose() * 8)
        elif how < 4 and size:
            out[at] = BYTES[int(choose() * len(BYTES))]
        elif how == 4:
            out[at : at + 1 + int(choose() * 8)] = b""
        elif how == 5:
            out[at:at] = random.randbytes(1 + int(choose() * 8))
        elif how == 6:
            out[at:at] = out[at : at + 1 + int(choose() * 60)] * (1 + int(choose() * 3))
        elif how == 7:
            out[at:] = b""
        elif how == 8:
            out[at:at] = pieces[int(choose() * len(pieces))]
        elif how == 9:
            start = int(choose() * len(other))
            out[at:at] = other[start : start + 1 + int(choose() * 80)]
        elif how == 10 and packet and size > 1:  # the length that would be right, or nearly
            end = 1
            while end < min(size, 4) and out[end] > 127:
                end += 1
            out[1 : end + 1] = remaining_length(max(size - end - 1 + int(choose() * 5) - 2, 0))
        else:
            out += other
    return bytes(out[:LONGEST])


def of_pieces(*pieces: bytes) -> Callable[[bytes, bytes, Random], bytes]:
    """Changes of what is no MQTT packet and has these pieces."""

    def change(data: bytes, other: bytes, random: Random) -> bytes:
        return mutated(data, other, random, pieces, packet=False)

    return change


def of_toml(lines: Sequence[bytes], *pieces: bytes) -> Callable[[bytes, bytes, Random], bytes]:
    """Changes of TOML: mostly whole lines and tables, sometimes bytes.

    Args:
        lines: what is put in, in the place of a line with the same key where there is one.
        pieces: as for :func:`mutated`.
    """

    def change(data: bytes, other: bytes, random: Random) -> bytes:
        if random.random() < 0.3:
            return mutated(data, other, random, pieces, packet=False)
        tables, donor = _tables(data), _tables(other)
        for _ in range(1 + int(random.random() * 3)):
            at = int(random.random() * (len(tables) + 1))
            how = random.random()
            if how < 0.15:
                tables[at : at + 1] = []
            elif how < 0.45 or not tables:
                tables[at:at] = [random.choice(donor or [[b"\n"]]).copy()]
            else:
                _put(random.choice(tables), random.choice(lines) + b"\n", random)
        return b"".join(line for table in tables for line in table)[:LONGEST]

    return change


def _tables(text: bytes) -> list[list[bytes]]:
    """The lines of each table of a TOML text; the first one may have no header."""
    found: list[list[bytes]] = []
    for line in text.splitlines(keepends=True):
        if line.startswith(b"[") or not found:
            found.append([])
        found[-1].append(line)
    return found


def _put(table: list[bytes], line: bytes, random: Random) -> None:
    """Put a line into a table, mostly in the place of one with its key."""
    key = line.partition(b"=")[0].strip()
    same = [at for at, one in enumerate(table) if one.partition(b"=")[0].strip() == key]
    if same and random.random() < 0.9:
        table[random.choice(same)] = line
    else:
        table.append(line)


def of_json(values: Sequence[Any], *pieces: bytes) -> Callable[[bytes, bytes, Random], bytes]:
    """Changes of JSON objects: mostly one of the values within, sometimes the text.

    Args:
        values: what is put in the place of a value, beside values of the other object.
        pieces: as for :func:`mutated`.
    """

    def change(data: bytes, other: bytes, random: Random) -> bytes:
        if random.random() < 0.3:
            return mutated(data, other, random, pieces, packet=False)
        try:
            tree, donor = json.loads(data), json.loads(other)
        except (ValueError, RecursionError):
            return mutated(data, other, random, pieces, packet=False)
        places, more = list(_places(tree)), list(_places(donor))
        for _ in range(1 + int(random.random() ** 2 * 4)):
            if not places:
                break
            inside, key = random.choice(places)
            how = random.random()
            if how < 0.15 and isinstance(inside, dict):
                inside.pop(key, None)
            elif how < 0.55 and more:
                from_, place = random.choice(more)
                if isinstance(inside, dict) and isinstance(place, str) and random.random() < 0.5:
                    key = place
                inside[key] = deepcopy(from_[place])
            else:
                inside[key] = deepcopy(random.choice(values))
            places = list(_places(tree))
        return json.dumps(tree, ensure_ascii=random.random() < 0.5).encode(errors="surrogatepass")[:LONGEST]

    return change


def _places(tree: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Each container of a tree with each of its keys, as deep as records are."""
    if isinstance(tree, dict | list) and depth < DEEPEST:
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key], depth + 1)
