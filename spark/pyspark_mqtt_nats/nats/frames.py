# SPDX-License-Identifier: Apache-2.0
"""The NATS protocol as it comes from the socket, split into messages in bulk.

No sockets here: bytes in, arrays out. Stored messages that a consumer delivers have a reply subject. A chunk of them is
taken at once (see `bulk`), as far as it goes. The rest is read frame after frame: such a message goes into parallel
lists; every other message is rare and becomes a `Loose` each, and what is no message a line.
"""

from typing import Final, NamedTuple

import pyarrow as pa

from pyspark_mqtt_nats.errors import ConnectError
from pyspark_mqtt_nats.nats import bulk
from pyspark_mqtt_nats.nats.bulk import Block, size_of

LINE_MOST: Final = 1 << 20
"""Longest line in bytes; INFO of a large cluster is the longest that there is."""

_SIZES: Final = {b"%d" % size: size for size in range(2048)}
"""Looking up is faster than int()."""

_MANY: Final = 100
"""Messages that must come at once for another try in the same chunk: looking at all of it is for nothing otherwise."""


class Loose(NamedTuple):
    """A message without a reply subject, or of another subscription; `headers` is the raw block, b"" for none."""

    subject: bytes
    sid: bytes
    headers: bytes
    payload: bytes


class _Lists(NamedTuple):
    """A block that grows."""

    subjects: list[bytes]
    replies: list[bytes]
    headers: list[bytes]
    payloads: list[bytes]


class Frames:
    """Splits what a connection receives.

    Args:
        sid: the subscription whose messages go into blocks.
        bare: of those only the ones without a reply subject, and with headers; else only those with a reply subject.
    """

    def __init__(self, sid: bytes, *, bare: bool = False) -> None:
        self._sid = sid
        self._words = 5 if bare else 6  # HMSG subject sid [reply] size-of-headers size
        self._loose: list[Loose] = []
        self._lines: list[bytes] = []
        self._kept: list[bytes] = []
        self._length = 0
        self._need = 0
        self._blocks: list[Block] = []
        self._lists = _Lists([], [], [], [])  # behind the blocks
        self._taken = 0  # messages in the blocks
        self._size = 0

    def __len__(self) -> int:
        return self._taken + len(self._lists.replies)

    @property
    def size(self) -> int:
        """Bytes of headers and payloads collected."""
        return self._size

    @property
    def last(self) -> tuple[bytes, bytes]:
        """Reply subject and header block of the last message collected; there must be one."""
        if self._lists.replies:
            return self._lists.replies[-1], self._lists.headers[-1]
        block = self._blocks[-1]
        return block.replies[-1].as_py(), block.headers[-1].as_py()

    def take(self, most: int) -> Block:
        """The first `most` messages collected, which are then forgotten here."""
        self._gather()
        whole = Block(*map(pa.concat_arrays, zip(*self._blocks, strict=True)))
        taken = Block(*(part[:most] for part in whole))
        self._blocks.clear()
        self._taken = 0
        self._size -= size_of(taken.headers) + size_of(taken.payloads)
        if len(whole.replies) > most:
            self._add(Block(*(part[most:] for part in whole)))
        return taken

    def loose(self, sid: bytes) -> list[Loose]:
        """The messages of a subscription that are in no block, which are then forgotten here."""
        found = [one for one in self._loose if one.sid == sid]
        if found:
            self._loose = [one for one in self._loose if one.sid != sid]
        return found

    def lines(self) -> list[bytes]:
        """What the server said (PING, INFO, -ERR) without the line ends, which is then forgotten here."""
        found, self._lines = self._lines, []
        return found

    def _add(self, block: Block) -> None:
        self._blocks.append(block)
        self._taken += len(block.replies)

    def _gather(self) -> None:
        """Make a block of the lists."""
        if self._lists.replies or not self._blocks:
            self._add(Block(*(pa.array(part, pa.binary()) for part in self._lists)))
            self._lists = _Lists([], [], [], [])

    def rest(self) -> bytes:
        """The beginning of a frame that has not come whole, which is then forgotten here."""
        rest = b"".join(self._kept)
        self._kept.clear()
        self._length = self._need = 0
        return rest

    def feed(self, data: bytes) -> None:
        """Take what the socket gave, cut anywhere; raises ConnectError for what is not the protocol."""
        self._length += len(data)
        if self._length < self._need:  # the rest of a large message is joined once, when it is all there
            self._kept.append(data)
            return
        if self._kept:
            data = b"".join((*self._kept, data))
            self._kept.clear()
        self._need = 0
        at = self._frames(data, self._bulk(data), len(data))
        rest = len(data) - at
        if rest:
            if not self._need and rest > LINE_MOST:
                raise _no_protocol([data[at : at + 40]])
            self._kept.append(data[at:])
        self._length = rest

    def _bulk(self, data: bytes) -> int:
        """Take what can be taken at once, and what is between: the server says when a request has ended.

        Returns where the first frame begins that was not taken.
        """
        at = 0
        while len(data) - at >= bulk.LEAST:
            found = bulk.messages(memoryview(data)[at:], self._sid, self._words)
            if found is None:
                break
            self._gather()
            self._add(found.block)
            self._size += found.size
            at = self._frames(data, at + found.end, at + found.end + 1)
            if len(found.block.replies) < _MANY:
                break
        return at

    def _frames(self, data: bytes, at: int, until: int) -> int:
        """Take frame after frame, those that begin before `until` and are whole.

        Returns where the first frame begins that was not taken.
        """
        find = data.find
        total = len(data)
        sid, count = self._sid, self._words
        subjects, replies, headers, payloads = self._lists
        known = _SIZES.get
        while at < until and (end := find(b"\r\n", at)) >= 0:
            words = data[at:end].split(b" ")
            start = end + 2
            if len(words) == count and words[2] == sid and words[0] == b"HMSG":
                try:
                    stop = start + (known(words[-1]) or int(words[-1]))
                    body = start + (known(words[-2]) or int(words[-2]))
                except ValueError:
                    raise _no_protocol(words) from None
                if not start <= body <= stop:
                    raise _no_protocol(words)
                if stop + 2 > total:
                    self._need = stop + 2 - at
                    break
                subjects.append(words[1])
                replies.append(words[3])
                headers.append(data[start:body])
                payloads.append(data[body:stop])
                self._size += stop - start
                at = stop + 2
                continue
            kind = words[0].upper()
            if kind in (b"MSG", b"HMSG"):
                stop = self._message(kind, words, data, start)
                if not stop:
                    self._need += start - at
                    break
                at = stop
            else:
                self._line(kind, words)
                at = start
        return at

    def _message(self, kind: bytes, words: list[bytes], data: bytes, start: int) -> int:
        """Collect a message that is not one of the usual; returns where it ends, 0 when that has not come yet."""
        with_headers = kind == b"HMSG"
        spare = len(words) - (5 if with_headers else 4)  # 1: it has a reply subject
        try:
            size = int(words[-1])
            head = int(words[-2]) if with_headers else 0
        except ValueError:
            spare = -1
        if spare not in (0, 1) or not 0 <= head <= size:
            raise _no_protocol(words)
        stop = start + size
        if stop + 2 > len(data):
            self._need = size + 2
            return 0
        block = data[start : start + head]
        payload = data[start + head : stop]
        if spare and words[2] == self._sid and self._words == 6:
            for part, value in zip(self._lists, (words[1], words[3], block, payload), strict=True):
                part.append(value)
            self._size += size
        else:
            self._loose.append(Loose(words[1], words[2], block, payload))
        return stop + 2

    def _line(self, kind: bytes, words: list[bytes]) -> None:
        if kind in (b"PING", b"INFO", b"-ERR"):
            self._lines.append(b" ".join((kind, *words[1:])))
        elif kind not in (b"PONG", b"+OK"):
            raise _no_protocol(words)


def _no_protocol(words: list[bytes]) -> ConnectError:
    shown = b" ".join(words)[:40]
    return ConnectError(f"what answers is not NATS: {shown!r}; check the option `servers`", "servers")
