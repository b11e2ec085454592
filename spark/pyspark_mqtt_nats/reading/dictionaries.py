# SPDX-License-Identifier: Apache-2.0
"""Decode each different value once, then only look it up: columns by number instead of by value."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa

ENTRIES_MOST: Final = 1 << 16
BYTES_MOST: Final = 16 << 20
"""What a dictionary may hold from earlier batches before it starts anew, so that memory stays flat."""


class Dictionary:
    """Columns that follow from a key.

    Args:
        decode: key -> the values of all columns.
        columns: name -> (place among the values, Arrow type); what is not wanted need not be here.
    """

    def __init__(self, decode: Callable[[bytes], Sequence[Any]], columns: dict[str, tuple[int, pa.DataType]]) -> None:
        self._decode = decode
        self._columns = columns
        self._forget()

    def _forget(self) -> None:
        self._codes: dict[bytes, int] = {}
        self._bytes = 0
        self._arrays = {name: pa.array([], kind) for name, (_, kind) in self._columns.items()}

    def codes(self, keys: pa.Array) -> pa.Array:
        """A number for each of these binary keys, good for `column` until the next call."""
        encoded = keys.dictionary_encode()
        different: list[bytes] = encoded.dictionary.to_pylist()
        known = self._codes
        new = [key for key in different if key not in known]
        if new:
            if len(known) + len(new) > ENTRIES_MOST or self._bytes > BYTES_MOST:
                self._forget()
                known, new = self._codes, different
            self._add(new)
        return pa.array([known[key] for key in different], pa.int32()).take(encoded.indices)

    def _add(self, keys: list[bytes]) -> None:
        first = len(self._codes)
        self._codes.update(zip(keys, range(first, first + len(keys)), strict=True))
        self._bytes += sum(map(len, keys))
        rows = [self._decode(key) for key in keys]
        for name, (place, kind) in self._columns.items():
            values = pa.array([row[place] for row in rows], kind)
            self._arrays[name] = pa.concat_arrays([self._arrays[name], values])

    def column(self, name: str, codes: pa.Array) -> pa.Array:
        """The column for numbers that `codes` gave."""
        return self._arrays[name].take(codes)
