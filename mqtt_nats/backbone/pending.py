# SPDX-License-Identifier: Apache-2.0
"""Publishes that JetStream must acknowledge, and what their end means."""

from __future__ import annotations

import asyncio

from mypy_extensions import mypyc_attr

from mqtt_streams.api import ApiError

STALE = ApiError(408, 0, "it is too late to store it")
"""Why something is not sent again."""


class TooLarge(ValueError):
    """The message with its headers does not fit into the server's ``max_payload``."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PendingStore:
    """One stored publish; subclasses say what its end means."""

    __slots__ = ("begun", "born", "frame")

    frame: bytes
    begun: float
    """Loop time of the first attempt; 0 = it was not sent yet."""
    born: float
    """Loop time of the last one."""
    optional = False
    """It acknowledges what a consumer has delivered: when that is gone, there is nothing to wait for."""

    def stored(self, ack: bytes) -> None:
        """JetStream has stored the message; ``ack`` is its PubAck (JSON)."""
        raise AssertionError("an operation without an end")

    def failed(self, error: ApiError) -> None:
        """JetStream has refused the message for good, or it is `STALE`."""
        raise AssertionError("an operation without an end")

    def explains(self) -> bool:
        """Whether who waits for it is told why it was refused, and nothing else depends on it."""
        return False

    def stale(self) -> bool:
        """Whether it is too late to send it again; it may be stored all the same, by what was sent before."""
        return False


@mypyc_attr(allow_interpreted_subclasses=True)
class AwaitedStore(PendingStore):
    """A stored publish that somebody awaits."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def stored(self, ack: bytes) -> None:
        """Give the stream sequence to whoever waits."""
        if not self.done.done():
            self.done.set_result(sequence(ack))

    def failed(self, error: ApiError) -> None:
        """Raise in whoever waits."""
        if not self.done.done():
            self.done.set_exception(error)


@mypyc_attr(allow_interpreted_subclasses=True)
class IgnoredStore(PendingStore):
    """A stored publish whose end concerns nobody."""

    __slots__ = ()

    def stored(self, ack: bytes) -> None:
        """Nothing depends on it."""

    def failed(self, error: ApiError) -> None:
        """Nothing depends on it."""


def sequence(ack: bytes) -> int:
    """The stream sequence that a PubAck names."""
    start = ack.find(b'"seq":') + 6
    end = start
    size = len(ack)
    while end < size and (48 <= ack[end] <= 57 or ack[end] == 32):
        end += 1
    return int(ack[start:end])
