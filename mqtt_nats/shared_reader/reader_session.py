# SPDX-License-Identifier: Apache-2.0
"""A session in the index of the shared reader, and its handover from a catch-up reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.messages.message import Stored

KEPT_BACK: Final = 10_000
"""Maximum number of messages that are kept back for a session during its handover."""


class ReaderHandover:
    """Handover of a session from its catch-up reader to the shared reader, while it is under way.

    Args:
        since: stream sequence after which the shared reader's messages may count.
    """

    __slots__ = ("kept", "overfull", "since")

    def __init__(self, since: int = 0) -> None:
        self.since = since
        self.kept: list[tuple[int, Stored]] = []
        """Messages of the shared reader after `since`, kept until the handover is done."""
        self.overfull = False
        """Whether too many messages were kept back: the handover has to begin anew."""

    def keep_back(self, sequence: int, message: Stored) -> None:
        """Keep a message of the shared reader until the handover is done."""
        if sequence > self.since:
            self.kept.append((sequence, message))
            if len(self.kept) > KEPT_BACK:
                self.overfull = True
                self.kept.clear()


class ReaderSession:
    """Session in the index of the shared reader."""

    __slots__ = ("client", "filters", "handover", "shown", "side")

    def __init__(self, client: Receiver, side: DurableDelivery) -> None:
        self.client = client
        self.side = side
        self.filters: list[str] = []
        self.handover: ReaderHandover | None = None
        self.shown = 0
        """Stream sequence to which the dormant consumers were set last; 0 = by no job of this connection."""

    def show(self, first: int) -> bool:
        """Note the sequence to which the dormant consumers are to be set; False: they are set to it."""
        moved, self.shown = first != self.shown, first
        return moved

    def begin_handover(self, handover: ReaderHandover) -> None:
        """Keep the messages of the shared reader from now on."""
        self.handover = handover

    def end_handover(self) -> ReaderHandover | None:
        """End the handover and return it; None = none was under way."""
        handover, self.handover = self.handover, None
        return handover
