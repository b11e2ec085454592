# SPDX-License-Identifier: Apache-2.0
"""Pending stores: publishes that JetStream must acknowledge, with callbacks for their end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from mypy_extensions import mypyc_attr

from mqtt_nats.backbone.frames import COMMON, MESSAGE, MESSAGE_ID, message_id
from mqtt_streams.api import ApiError

STALE = ApiError(408, 0, "the time limit for the store has passed")
"""Error of a store that is not sent again because it is too late."""


class TooLarge(ValueError):
    """Error: the message with its headers exceeds the server's ``max_payload``."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PendingStore:
    """Publish that JetStream must acknowledge; subclasses implement the callbacks for its end."""

    __slots__ = ("begun", "born", "frame")

    frame: bytes
    begun: float
    """Loop time in seconds of the first attempt; 0 = not sent yet."""
    born: float
    """Loop time in seconds of the last attempt; 0 = not sent yet, or withheld."""
    optional = False
    """Whether the frame acknowledges a consumer's delivery, which is settled when the consumer is gone."""

    def stored(self, ack: bytes) -> None:
        """Handle success: JetStream has stored the message; ``ack`` is its PubAck (JSON)."""
        raise AssertionError("an operation without an end")

    def failed(self, error: ApiError) -> None:
        """Handle failure: JetStream has refused the message for good, or the store is `STALE`."""
        raise AssertionError("an operation without an end")

    def explains(self) -> bool:
        """Return whether the failure is reported to the waiting client, and nothing else depends on the store."""
        return False

    def waits(self) -> bool:
        """Return whether the store waits for room while JetStream's storage is full; otherwise it fails at once."""
        return False

    def stale(self) -> bool:
        """Return whether it is too late to send the message again; an earlier attempt may have stored it."""
        return False


@mypyc_attr(allow_interpreted_subclasses=True)
class AwaitedStore(PendingStore):
    """Pending store whose end a coroutine awaits in ``done``."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def stored(self, ack: bytes) -> None:
        """Set the stream sequence as the result of ``done``."""
        if not self.done.done():
            self.done.set_result(sequence(ack))

    def failed(self, error: ApiError) -> None:
        """Set the error in ``done``."""
        if not self.done.done():
            self.done.set_exception(error)


@mypyc_attr(allow_interpreted_subclasses=True)
class IgnoredStore(PendingStore):
    """Pending store whose end has no effect."""

    __slots__ = ()

    def stored(self, ack: bytes) -> None:
        """Do nothing."""

    def failed(self, error: ApiError) -> None:
        """Do nothing."""


def sequence(ack: bytes) -> int:
    """Return the stream sequence in a PubAck."""
    start = ack.find(b'"seq":') + 6
    end = start
    size = len(ack)
    while end < size and (48 <= ack[end] <= 57 or ack[end] == 32):
        end += 1
    return int(ack[start:end])


def perhaps_stored(
    pending: Mapping[bytes, PendingStore], before: float, lost: float
) -> list[tuple[bytes, bytes, PendingStore]]:
    """Return id, token and operation of messages that may be stored, and that the stream may not recognise.

    The retained copy of a message has the same id as the copy for subscribers: the search tells nothing about it. A
    repeated retained copy takes the place of the same message on its topic.

    Args:
        pending: operations by token.
        before: loop time; the stream recognises what was sent first after it.
        lost: loop time at which the stream was last without a leader.
    """
    return [
        (message_id(op.frame), token, op)
        for token, op in pending.items()
        if (op.begun or lost) < before
        and op.frame.startswith(MESSAGE)
        and MESSAGE_ID in op.frame
        and (op.begun or COMMON.search(op.frame) is not None)
    ]
