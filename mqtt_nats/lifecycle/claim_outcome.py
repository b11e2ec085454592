# SPDX-License-Identifier: Apache-2.0
"""Claims of which nobody knows whether they were stored, by clients that were refused for that.

A stored claim makes the deadline of the session void, and the timers of delayed wills, as they name the record before
it. Nobody would set new ones: the record names a gateway that runs. See docs/internals/rules.md#unknown-outcomes.
"""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.retry import PAUSE
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.lifecycle.deadline import set_deadline
from mqtt_nats.lifecycle.will import delay_will, settle_wills
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.sessions import PoisonedRecord, SessionRecord

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client

log = logging.getLogger("mqtt_nats.broker")

SETTLING: Final = 10.0
"""Seconds in which what was sent to a stream is stored, if ever: its leader may just be elected."""


async def leave_claimed(client: Client, expected: int, *, continued: bool) -> None:
    """Find out whether a claim was stored; if so, leave the session as one whose connection has just ended.

    Args:
        expected: sequence of the record that it was to replace, 0 = none.
        continued: it was to go on with the session.
    """
    loop = asyncio.get_running_loop()
    until = inf
    pause = PAUSE
    while True:
        await client.broker.online.wait()
        try:
            if await _leave(client, expected, continued) or loop.time() > until:
                return
            until = min(until, loop.time() + SETTLING)
        except PoisonedRecord:  # somebody else's
            return
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("%s: nothing tells yet whether it has claimed its session: %s", client, error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, SETTLING)


async def _leave(client: Client, expected: int, continued: bool) -> bool:
    """Look once; False: it was not stored so far, and nothing else either."""
    broker = client.broker
    mine = client.record
    assert mine is not None
    assert mine.v5 is not None
    found = await broker.sessions.load(client.hash, client.client_id)
    if (0 if found is None else found[1]) == expected:
        return False
    if found is None or found[0].v5 is None or found[0].v5.nonce != mine.v5.nonce:
        return True
    record, client.epoch = found
    log.info("%s: it was refused, and has claimed its session: that is left", client)
    if continued:
        await _delay_wills(client, record)
    else:
        await settle_wills(broker, client.hash, found[0].v5.wills, client.epoch, continued=False)
    if client.expiry is not None:
        set_deadline(client, natstime.now() + client.expiry)
        broker.link.kick()
    return True


async def _delay_wills(client: Client, record: SessionRecord) -> None:
    """The client is not back: wills come when their delay is over, or the session, counted from now."""
    broker = client.broker
    assert record.v5 is not None
    for gateway in record.v5.wills:
        will = await broker.wills.load(gateway, client.hash)
        if will is None or will.epoch >= client.epoch:
            continue
        if will.delay and client.expiry != 0:
            delay = will.delay if client.expiry is None else min(will.delay, client.expiry)
            delay_will(broker, will, client.epoch, natstime.now() + delay)
        else:
            await settle_wills(broker, client.hash, [gateway], client.epoch, continued=False)
