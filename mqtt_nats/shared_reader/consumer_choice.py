# SPDX-License-Identifier: Apache-2.0
"""Choice of a session's kind: with a consumer for each subscription, or without consumers, its position in a record.

With `session_positions = "auto"` sessions have consumers up to a number of consumers in the account. The choice is made
when a session subscribes for the first time, and when it is resumed. A session changes its kind only if the number is
beyond the bound by a margin, so that it does not change at each connection.
See docs/internals/shared_reader.md#sessions-without-consumers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings

CONSUMERS_ALONE: Final = 1000
"""Default of `session_consumers` where the stream of messages has one replica."""

CONSUMERS_REPLICATED: Final = 200
"""Default of `session_consumers` where it has several: each consumer is a raft group of nats-server."""

MARGIN: Final = 0.25
"""Part of the bound by which the number of consumers is above or below it before present sessions change."""


class ConsumerChoice:
    """Choice between consumers and records, by the settings and the number of consumers."""

    def __init__(self, settings: Settings) -> None:
        self._wanted: str = settings.session_positions
        self._bound = settings.session_consumers

    def wants_records(
        self, in_records: bool, own: int, consumers: int, replicas: int, *, listener: bool = False
    ) -> bool:
        """Return whether a session is to have no consumers, but a position in records.

        It moves to records when it subscribes first or is resumed, and back to consumers at a resume.

        Args:
            in_records: whether it has none.
            own: number of consumers that it has, or would have; 0: a new session.
            consumers: number of consumers of the stream of messages.
            replicas: of that stream.
            listener: nats-server's MQTT listener has served the session, and may serve it again: it needs consumers.
        """
        if self._wanted != "auto":
            return self._wanted == "records"
        if listener:
            return False
        bound = self._bound or (CONSUMERS_REPLICATED if replicas > 1 else CONSUMERS_ALONE)
        if in_records:
            return consumers + own > bound * (1 - MARGIN)
        return consumers > bound * (1 + MARGIN) if own else consumers >= bound
