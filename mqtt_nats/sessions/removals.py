# SPDX-License-Identifier: Apache-2.0
"""Messages and session records that somebody has removed, as by `nats stream purge`: the log says so.

nats-server tells nobody of a purge. It shows in the state of a stream. See docs/internals/sessions.md#removals.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from mqtt_streams.api import JetStream, call
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.stored import time_ns

if TYPE_CHECKING:
    from mqtt_nats.sessions.services import Registry
    from mqtt_nats.sessions.session import Session

log = logging.getLogger("mqtt_nats.broker")

AGE_SLACK_S: Final = 10.0
"""Seconds by which nats-server may remove messages before their age, as its clock shows here."""

_NS: Final = 1_000_000_000


class Removals:
    """Removals from the stream of messages since the last look."""

    def __init__(self) -> None:
        self._last = 0
        self._count = 0
        self._newest = 0.0
        """Last sequence, number of messages, and Unix time of the newest one in seconds, at the last look."""

    def check_removals(self, info: dict[str, Any], now: float) -> None:
        """Log that all messages of the last look are gone before their time.

        Args:
            info: answer to `STREAM.INFO`.
            now: Unix time in seconds, by nats-server's clock.
        """
        state, config = info["state"], info["config"]
        count, newest, last = self._count, self._newest, self._last
        self._count, self._last = int(state["messages"]), int(state["last_seq"])
        self._newest = time_ns(state["last_ts"]) / _NS if self._count else newest
        age = config.get("max_age", 0) / _NS or float("inf")
        bounded = config.get("max_msgs", -1) > 0 or config.get("max_bytes", -1) > 0
        if bounded or not count:
            return
        if last < int(state["first_seq"]) and self._last >= last and now < newest + age - AGE_SLACK_S:
            log.error(
                "stream %s: %d messages were removed before their time: somebody has purged it, unless all had an "
                "expiry; sessions that have not had them do not get them",
                MESSAGES,
                count,
            )


class MissingRecords:
    """Whether connected sessions have lost their records."""

    def __init__(self, js: JetStream, registry: Registry[Session]) -> None:
        self._js, self._registry = js, registry
        self._told = False

    async def check_records(self) -> None:
        """Log that there are fewer records than durable sessions are connected here.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        before = self._durable()
        count = int((await call(self._js, f"STREAM.INFO.{SESSIONS}"))["state"].get("num_subjects", 0))
        connected = len(before & self._durable())
        if count >= connected:
            self._told = False
        elif not self._told:
            self._told = True
            log.error(
                "stream %s has %d records, and %d durable sessions are connected here: somebody has purged it; "
                "sessions without a record end with their connection",
                SESSIONS,
                count,
                connected,
            )

    def _durable(self) -> set[tuple[str, int]]:
        """Return names and epochs of durable sessions whose claim is stored."""
        return {
            (name, client.epoch)
            for name, client in self._registry.clients.items()
            if client.epoch and client.alive and client.record is not None and not client.record.clean
        }
