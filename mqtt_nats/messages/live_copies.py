# SPDX-License-Identifier: Apache-2.0
"""Live copies that were lost with the connection to NATS: they are sent again to the other gateways.

A message at QoS 1 or 2 is published on its subject, its live copy, and stored. The store is repeated until it is
acknowledged; the live copy is not. So before anything else leaves on a new connection, the live copies of messages that
are not stored yet are sent again, on subjects that only gateways hear: NATS clients may have had the first copy.
Gateways know it by its id. See docs/internals/pubsub.md#gaps.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.frames import MESSAGE
from mqtt_nats.messages.headers import publish_qos
from mqtt_streams.gateway_subjects import AGAIN

if TYPE_CHECKING:
    from mqtt_nats.backbone.acked_publisher import AckedPublisher
    from mqtt_nats.backbone.link import NatsConnection

log = logging.getLogger("mqtt_nats.broker")

COPY_ARRIVED_S: Final = 10.0
"""Seconds after which a live copy that was sent has arrived, if the connection was not lost meanwhile."""

IDS_REMEMBERED_S: Final = 15.0
"""Seconds for which every gateway certainly remembers the ids of messages that have come."""

SLICE_BYTES: Final = 8 * 1024 * 1024
SLICE_PAUSE: Final = 0.05
"""Bytes of live copies that are sent at once, and seconds until the next ones are."""

COUNTS_KEPT: Final = 16
"""Number of counts that are kept, one a second: those of `COPY_ARRIVED_S`."""


class LiveCopies:
    """Live copies of one gateway's messages that are not stored yet.

    Args:
        dropped: is told the reason and the number of live copies that may have been missed and are not sent again.
    """

    def __init__(self, link: NatsConnection, store: AckedPublisher, dropped: Callable[[str, int], None]) -> None:
        self._link, self._store, self._dropped = link, store, dropped
        self._marks: deque[tuple[float, int]] = deque(maxlen=COUNTS_KEPT)
        """Loop times in seconds, with the number of stores by then."""
        self._lost: tuple[float, int] | None = None
        """The same for the loss of the connection; None = it is not lost."""
        self._left: deque[bytes] = deque()
        """Frames of live copies that are still to be sent on this connection."""
        self._again: dict[bytes, float] = {}
        """Loop time in seconds at which a live copy was sent again, by token; only for stores that are pending."""
        self.sent = 0
        """Number of live copies that were sent again."""
        link.call_on_wire(self._changed)

    def tick(self, now: float) -> None:
        """Note the number of stores; called about once a second with loop time in seconds."""
        if self._lost is None:
            self._marks.append((now, self._store.count))
        if self._again:
            pending = self._store.pending
            self._again = {token: at for token, at in self._again.items() if token in pending}

    def _changed(self, up: bool) -> None:
        now = asyncio.get_running_loop().time()
        if not up:
            self._left.clear()
            self._lost = self._lost or (now, self._store.count)
        elif self._lost is not None:
            self._collect(*self._lost, now)
            self._send()
            self._lost = None

    def _collect(self, lost: float, sent: int, now: float) -> None:
        """Collect the live copies that may not have arrived, in order.

        Args:
            lost: loop time in seconds at which the connection was lost.
            sent: number of stores at that time: later messages have had no live copy at all.
            now: loop time in seconds.
        """
        arrived = max((count for at, count in self._marks if at <= lost - COPY_ARRIVED_S), default=0)
        certain = max((count for at, count in self._marks if at <= now - IDS_REMEMBERED_S), default=0)
        withheld = 0
        for token, op in self._store.pending.items():
            frame = op.frame
            if not frame.startswith(MESSAGE):
                continue
            number = int(token, 16)
            if number <= arrived and lost - self._again.get(token, 0.0) > COPY_ARRIVED_S:
                continue
            end = frame.index(b"\r\n")
            subject, _, size, total = frame[len(MESSAGE) : end].split(b" ")
            qos = publish_qos(frame[end + 2 : end + 2 + int(size)])
            if not qos:
                continue  # a mark in the stream
            # The first copy may have come, and was put so long ago that its id may be forgotten.
            if qos == 2 and number <= min(sent, certain):
                withheld += 1
                continue
            self._left.append(b"HPUB %b%b %b %b%b" % (AGAIN, subject, size, total, frame[end:]))
            self._again[token] = now
        if withheld:
            self._dropped("gap", withheld)
            text = "clean sessions at other gateways may have missed %d messages at QoS 2: NATS was away for too long"
            log.warning(text, withheld)

    def _send(self) -> None:
        """Send what is collected, so much at a time that nats-server can pass it on to all gateways."""
        size = 0
        while self._left and size < SLICE_BYTES:
            frame = self._left.popleft()
            self._link.out.append(frame)
            size += len(frame)
            self.sent += 1
        self._link.kick()
        if self._left:
            asyncio.get_running_loop().call_later(SLICE_PAUSE, self._send)
