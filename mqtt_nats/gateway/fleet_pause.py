# SPDX-License-Identifier: Apache-2.0
"""Pause of all gateways while the streams of an account are replaced, as by `mqtt-nats restore`.

A gateway that hears of a pause ends as on SIGTERM, and begins anew when the pause is over: nothing that it knew of the
former streams is left. See docs/internals/gateway.md#pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.fleet import FleetStore, Pause, read_pause

if TYPE_CHECKING:
    import anyio

    from mqtt_streams.api import JetStream

log = logging.getLogger("mqtt_nats.gateway")

PAUSE_CHECK_S: Final = 1.0
"""Seconds between two looks whether the pause is over."""

PAUSE_REMINDER_S: Final = 60.0
"""Seconds between two log records of a pause that lasts."""


class FleetPause:
    """Watch of one account's pause.

    Args:
        begin: called when a pause has begun, or has been missed.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._known = ""
        """Id of the last pause that was over when the gateway started; empty = none."""

    async def wait(self, js: JetStream, stop: anyio.Event, label: str) -> bool:
        """Wait until no pause is in force; return False when ``stop`` was set meanwhile. ``label``: begins log records.

        A JetStream that does not answer has no pause: the caller finds out why.
        """
        store, loop = FleetStore(js), asyncio.get_running_loop()
        told = -PAUSE_REMINDER_S
        while True:
            try:
                found = await store.pause()
            except (ApiError, NoResponders, RequestTimeout):
                return not stop.is_set()
            if found is None or not found.in_force:
                self._known = found.identity if found is not None else ""
                return not stop.is_set()
            if loop.time() >= told + PAUSE_REMINDER_S:
                told = loop.time()
                log.warning("%s%s", label, _described(found))
            try:
                async with asyncio.timeout(PAUSE_CHECK_S):
                    await stop.wait()
                return False
            except TimeoutError:
                pass

    async def forbids(self, js: JetStream) -> bool:
        """Whether streams that are missing must not be made now. Raises ApiError, NoResponders, RequestTimeout."""
        found = await FleetStore(js).pause()
        return found is not None and found.in_force

    async def look_for_pause(self, store: FleetStore) -> None:
        """Begin the pause that was not heard of. Raises ApiError, NoResponders, RequestTimeout."""
        found = await store.pause()
        if found is not None and found.identity != self._known:
            self._begin()

    def heard(self, payload: bytes) -> None:
        """Begin a pause from the message that announces it."""
        found = read_pause(payload)
        if found is not None and found[0] != self._known:
            self._begin()


def _described(pause: Pause) -> str:
    if pause.stage == "announced":
        return "paused: a backup or a restore is about to begin"
    if pause.age < PAUSE_REMINDER_S:
        return "paused: `mqtt-nats restore` replaces the streams"
    return (
        f"paused: `mqtt-nats restore` was interrupted {pause.age:.0f} s ago, and the streams are incomplete; "
        "run it again"
    )
