# SPDX-License-Identifier: Apache-2.0
"""A gateway that stood still (a stopped process, a machine that was asleep) finds out what has moved before it acts.

What it would send to JetStream is not conditional: acknowledgements and stores of a session that another gateway has
taken over in the meantime. See docs/internals/rules.md#standstill.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING, Final

from mqtt_nats.base.server_clock import elapsed
from mqtt_nats.transport.turns import STANDSTILL, Hold

if TYPE_CHECKING:
    from mqtt_nats.gateway.broker import Broker

log = logging.getLogger("mqtt_nats.broker")

PATIENCE: Final = 5.0
"""Seconds until NATS is asked again."""


def tick(broker: Broker) -> None:
    """The event loop runs. Called every `CLOCK_STEP` seconds, in vain only when it stood still."""
    if monotonic() - broker.clock.read > STANDSTILL:
        _begin(broker)
    else:
        _read_clock(broker)


def _read_clock(broker: Broker) -> None:
    broker.clock.read = monotonic()
    broker.link.ticked = broker.wild.ticked = broker.shared.ticked = elapsed()


def watch(broker: Broker) -> None:
    """Notice from now on when it did not: before a client's bytes are handled, or a frame of NATS's, or one is sent."""
    _read_clock(broker)

    def noticed() -> None:
        _begin(broker)

    broker.clock.stood_still = noticed
    for link in (broker.link, broker.wild, broker.shared):
        link.on_standstill = noticed


def _begin(broker: Broker) -> None:
    stood = monotonic() - broker.clock.read
    log.warning("the gateway stood still for %.1f s", stood)
    broker.store.excuse(stood)
    broker.clock.now = now = asyncio.get_running_loop().time()
    _read_clock(broker)
    if broker.standing:
        return
    broker.standing = broker.link.stopped = broker.shared.stopped = True
    for client in broker.connections:
        client.connection.hold(Hold.STANDSTILL)
        if not client.greeted:  # it may have come a moment ago, by a clock that was not read since
            client.connection.opened = now
    broker.spawn(_catch_up(broker), "standstill")


async def _catch_up(broker: Broker) -> None:
    """Wait until takeover signals have come; a client whose session has moved has been told by then."""
    link = broker.link
    wire = link.wire
    waiting = set()
    try:
        while link.wire is wire and wire is not None:
            try:
                await link.stop(PATIENCE)
                break
            except TimeoutError:
                log.debug("NATS does not answer yet")
        else:
            # The signals were lost with the connection: recovery looks into the record of each session.
            waiting = set(broker.clients.values())
            await broker.online.wait()
    finally:
        broker.standing = False
        link.go_on()
        broker.shared.go_on()
        for client in list(broker.connections - waiting):
            client.connection.release(Hold.STANDSTILL)
