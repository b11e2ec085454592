# SPDX-License-Identifier: Apache-2.0
"""Frames of the usual form, all those of a chunk at once: no object of Python for a message.

Theory of operation. A frame may begin wherever HMSG follows a line end, also inside a payload. The first frame of a
chunk does begin at its beginning. Each further one counts only when the frame before it, by the sizes in its line, ends
there: so whatever payloads contain, what is returned is what a parser finds that reads frame after frame.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

LEAST: Final = 16 << 10
"""Bytes of a chunk below which reading frame after frame costs less."""

_BEGIN: Final = b"HMSG "
_CR: Final = 13
_LF: Final = 10

_Places = NDArray[np.int64]


class Block(NamedTuple):
    """Messages in order, as parallel binary arrays; `replies` means nothing where messages have no reply subject."""

    subjects: pa.Array
    replies: pa.Array
    headers: pa.Array
    payloads: pa.Array


class Found(NamedTuple):
    """Messages at the beginning of a chunk: `size` bytes of headers and payloads; the next frame begins at `end`."""

    block: Block
    size: int
    end: int


def messages(data: memoryview, sid: bytes, words: int) -> Found | None:
    """Return the first frames of a chunk as far as they are HMSG of a subscription with so many words in their line.

    None when not even the first one is whole and of this form.
    """
    starts, bodies = _candidates(np.frombuffer(data, np.uint8))
    if not len(starts):
        return None
    buffer = pa.py_buffer(data)
    (lines,) = _segments(buffer, np.stack((starts, bodies - len(b"\r\n")), 1), [0])
    subjects, sids, *replies, heads, sizes = split(lines, b" ", words, range(1, words))
    try:
        head, size = integers(heads).to_numpy(), integers(sizes).to_numpy()
    except pa.ArrowInvalid:
        return None
    starts, bodies = starts[: len(head)], bodies[: len(head)]
    ends = bodies + size
    good = (head >= 0) & (head <= size) & (ends + 2 <= len(data)) & pc.equal(sids, sid).to_numpy(zero_copy_only=False)
    good[:-1] &= ends[:-1] + 2 == starts[1:]
    count = len(good) if good.all() else int(good.argmin())
    if not count:
        return None
    edges = np.stack((starts, bodies, bodies + head, ends), 1)[:count]
    names = (subjects[:count], (replies[0] if replies else subjects)[:count])
    block = Block(*names, *_segments(buffer, edges, (1, 2)))
    return Found(block, int(size[:count].sum()), int(ends[count - 1]) + 2)


def split(lines: pa.Array, separator: bytes, count: int, wanted: Iterable[int]) -> list[pa.Array]:
    """Return the words at these places of lines, an array for each, up to the first line that has not `count` words."""
    _, offsets, text = lines.buffers()
    edges = np.frombuffer(offsets, np.int32)[lines.offset : lines.offset + len(lines) + 1]
    first = int(edges[0])
    places = np.flatnonzero(np.frombuffer(text, np.uint8)[first : edges[-1]] == separator[0]).astype(np.int32) + first
    others = np.flatnonzero(np.diff(np.searchsorted(places, edges)) != count - 1)
    good = int(others[0]) if len(others) else len(lines)
    inner = places[: good * (count - 1)].reshape(good, count - 1)
    words = np.empty((good, 2 * count), np.int32)  # where each word begins and ends
    words[:, 0], words[:, -1] = edges[:good], edges[1 : good + 1]
    words[:, 1:-1:2], words[:, 2::2] = inner, inner + 1
    return _segments(text, words, [2 * place for place in wanted])


def integers(words: pa.Array) -> pa.Array:
    """Return decimal numbers as int64; raises ArrowInvalid."""
    return words.view(pa.string()).cast(pa.int64())


def size_of(values: pa.Array) -> int:
    """Return the bytes of all values of a binary array."""
    edges = np.frombuffer(values.buffers()[1], np.int32)
    return int(edges[values.offset + len(values)] - edges[values.offset])


def _candidates(data: NDArray[np.uint8]) -> tuple[_Places, _Places]:
    """Return where frames may begin, and where what follows their lines begins."""
    ends = np.flatnonzero(data[:-1] == _CR)
    ends = ends[data[ends + 1] == _LF] + 2  # behind each line end
    lines = np.arange(-1, len(ends) - 1)  # line n begins behind line end n
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1])) if len(ends) else ends
    near = starts + len(_BEGIN) <= len(data)
    starts, lines = starts[near], lines[near]
    for place, byte in enumerate(_BEGIN):
        same = data[starts + place] == byte
        starts, lines = starts[same], lines[same]
    if not len(starts) or starts[0]:
        return starts[:0], starts[:0]
    return starts, ends[lines + 1]


def _segments(data: pa.Buffer, edges: NDArray[Any], wanted: Iterable[int]) -> list[pa.Array]:
    """Return segments between the edges of each row, as binary arrays; the edges of all rows ascend."""
    offsets = pa.py_buffer(np.ascontiguousarray(edges, np.int32))
    pieces = pa.Array.from_buffers(pa.binary(), max(edges.size - 1, 0), [None, offsets, data])
    return [pieces.take(pa.array(np.arange(which, edges.size, edges.shape[1]))) for which in wanted]
