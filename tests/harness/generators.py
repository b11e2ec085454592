# SPDX-License-Identifier: Apache-2.0
"""Async generators that nobody has closed: what they hold is given back some time later, by a task of its own."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def all_closed() -> Iterator[None]:
    """Fail if an async generator that begins within the block is left before its end and not closed."""
    usual = sys.get_asyncgen_hooks()
    left: list[str] = []

    def forgotten(one: Any) -> None:
        left.append(one.__qualname__)
        if usual.finalizer is not None:
            usual.finalizer(one)

    sys.set_asyncgen_hooks(usual.firstiter, forgotten)
    try:
        yield
    finally:
        gc.collect()  # the traceback of an error may hold one
        sys.set_asyncgen_hooks(*usual)
    assert not left, f"not closed: {', '.join(left)}"
