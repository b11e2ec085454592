# SPDX-License-Identifier: Apache-2.0
"""Standstill: after a pause of the process or the machine the gateway learns which sessions have moved before it acts.

Acknowledgements and stores in JetStream are not conditional: without this the gateway would send them for sessions that
another gateway has taken over in the meantime. See docs/internals/lifecycle.md#standstill.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING, Final

from mqtt_nats.transport.turns import STANDSTILL, Hold

if TYPE_CHECKING:
    from mqtt_nats.sessions.services import Services

log = logging.getLogger("mqtt_nats.broker")

PONG_TIMEOUT: Final = 5.0
"""Seconds after which a PING without PONG is repeated."""


def tick(services: Services) -> None:
    """Read the clock, or begin a standstill where it was not read in time; called every `CLOCK_STEP` seconds."""
    if monotonic() - services.clock.read > STANDSTILL:
        _begin(services)
    else:
        _read_clock(services)


def _read_clock(services: Services) -> None:
    services.clock.touch()
    services.nats.tick()


def watch(services: Services) -> None:
    """Detect standstills from now on: before a client's bytes or a frame of NATS are handled, or a frame is sent."""
    _read_clock(services)

    def noticed() -> None:
        _begin(services)

    services.clock.call_on_standstill(noticed)
    services.nats.call_on_standstill(noticed)


def _begin(services: Services) -> None:
    stood = monotonic() - services.clock.read
    log.warning("the gateway process did not run for %.1f s", stood)
    services.nats.store.excuse(stood)
    now = asyncio.get_running_loop().time()
    services.clock.set(now)
    _read_clock(services)
    if not services.nats.begin_standstill():
        return
    for client in services.registry.connections:
        client.connection.hold(Hold.STANDSTILL)
        if not client.greeted:  # its connect timeout begins anew: `opened` may come from the clock that was not read
            client.connection.restart_timeout(now)
    services.tasks.spawn(_catch_up(services), "standstill")


async def _catch_up(services: Services) -> None:
    """Wait until the takeover signals have come, which end clients whose session has moved; then go on."""
    link = services.nats.link
    wire = link.wire
    waiting = set()
    try:
        while link.wire is wire and wire is not None:
            try:
                await link.stop(PONG_TIMEOUT)
                break
            except TimeoutError:
                log.debug("NATS does not answer yet")
        else:
            # The signals were lost with the connection: the recovery reads the record of each session.
            waiting = set(services.registry.clients.values())
            await services.nats.online.wait()
    finally:
        services.nats.end_standstill()
        for client in list(services.registry.connections - waiting):
            client.connection.release(Hold.STANDSTILL)
