# SPDX-License-Identifier: Apache-2.0
"""Fired timers: each is taken and handled by one gateway.

nats-server looks at all pull requests that wait for a timer whenever another pull request comes. Of
many gateways only some wait for timers at a time, chosen at random: see docs/internals/lifecycle.md#deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import TRANSIENT
from mqtt_nats.ingress.scheduled import message_due
from mqtt_nats.lifecycle.expiry import expire
from mqtt_nats.lifecycle.will import will_due
from mqtt_nats.sessions.groups.ownership import answer
from mqtt_nats.sessions.paused_consumers import resume
from mqtt_nats.sessions.record import list_exchanges
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.timers import CONSUMER, EXPIRY, MESSAGE, WILL, FiredTimer, OthersWait
from mqtt_streams.timers import STREAM as TIMERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from mqtt_nats.lifecycle.will import Wills
    from mqtt_nats.sessions.record import Exchanges

log = logging.getLogger("mqtt_nats.broker")

PULL_WAIT_S: Final = 30.0
"""Seconds for which a pull request waits for a timer before the gateway sends another."""

LATER: Final = b'-NAK {"delay":250000000}'
"""Answer to a timer that cannot be handled now: it is delivered again after the delay in nanoseconds, not AckWait."""

TIMER_TAKERS: Final = 8
"""Number of gateways, on average, that begin to wait for timers within `TAKERS_CHOICE_S`."""

TAKERS_CHOICE_S: Final = 5.0
"""Seconds after which a gateway that does not wait for timers chooses again whether it does."""

TIMERS_AT_ONCE: Final = 256
"""Timers that a gateway handles at the same time: thousands of sessions may expire at the same moment."""

EXPIRIES_TOGETHER_LEAST: Final = 4
"""Sessions that expire at the same time for which the exchanges of all sessions are listed: up to 100,000 subjects."""

TIMERS_RETRY_S: Final = 0.25
"""Seconds before JetStream is asked again."""


async def take_timers(wills: Wills, watches: Callable[[float], bool]) -> None:
    """Take fired timers for as long as the gateway runs.

    Args:
        watches: draws whether this gateway is among those chosen. Its argument is the average number of gateways to be
            chosen from all.
    """
    ready, waits = False, True
    while True:
        try:
            await wills.services.nats.online.wait()
            if not ready:
                if await wills.services.streams.timers.ensure_consumer():
                    await resume(wills.services.nats.inbox, TIMERS, CONSUMER)
                ready = True
            timers: list[FiredTimer] = []
            if waits:
                timers = await wills.services.streams.timers.fetch(PULL_WAIT_S, TIMERS_AT_ONCE)
                await _handle_all(wills, timers)
            else:
                await asyncio.sleep(TAKERS_CHOICE_S)
            waits = bool(timers) or watches(TIMER_TAKERS)
        except OthersWait:
            await asyncio.sleep(PULL_WAIT_S * random.random())
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("timers: %s", error)
            ready = False  # the consumer may be gone
            await asyncio.sleep(TIMERS_RETRY_S)


async def _handle_all(wills: Wills, timers: list[FiredTimer]) -> None:
    """Handle timers at the same time; sessions that end together share what is read of all sessions."""
    exchanges = None
    if sum(timer.kind == EXPIRY for timer in timers) >= EXPIRIES_TOGETHER_LEAST:
        try:
            exchanges = await list_exchanges(wills.services)
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("QoS 2 messages under way are not listed: %s", error)
    await asyncio.gather(*(_handle(wills, timer, exchanges) for timer in timers))


async def _handle(wills: Wills, timer: FiredTimer, exchanges: Exchanges | None) -> None:
    """Handle a timer by its kind; after an interruption JetStream delivers it again, to any gateway."""
    try:
        if timer.kind == EXPIRY:
            await expire(wills, timer, exchanges)
        elif timer.kind == WILL:
            await will_due(wills, timer)
        elif timer.kind == MESSAGE:
            await message_due(wills.ingress, timer)
            return
        else:
            log.debug("a timer of kind %s is left to a newer gateway", timer.kind)
            return
        await wills.services.streams.timers.done(timer)
    except (ApiError, NoResponders, RequestTimeout) as error:
        log.debug("timer of %s: %s", timer.key, error)
        if not isinstance(error, ApiError) or error.err_code in TRANSIENT:
            answer(wills.services, timer.ack.encode(), LATER)
    except Exception:
        log.exception("a timer could not be handled")
