# SPDX-License-Identifier: Apache-2.0
"""Clean sessions without a record: they have begun while JetStream had no room for one.

Such a session needs nothing that is stored. It gets its record when there is room: one session at a time tries.
See docs/internals/sessions.md#no-room.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Final, TypeVar

from mqtt_nats.backbone.pending_stores import lacks_room
from mqtt_nats.sessions.record import save_record
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.sessions import Conflict

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mqtt_nats.sessions.services import Services
    from mqtt_nats.sessions.session import Session

T = TypeVar("T")

log = logging.getLogger("mqtt_nats.broker")

ROOM_AGAIN_S: Final = 1.0
"""Seconds until a record that JetStream has no room for is written again; a session may take twice as long."""

WRITTEN_S: Final = 10.0
"""Maximum seconds for which the record of one session is waited for, before another session tries."""


async def save_when_room(client: Session) -> int:
    """Write the record of a claimed session; while JetStream has no room, this waits.

    Raises:
        Conflict, ApiError, NoResponders, RequestTimeout: as `save_record`; the last also when the client has gone.
    """
    return await when_room(client, lambda: save_record(client, client.epoch))


async def when_room(client: Session, step: Callable[[], Awaitable[T]], waiting: Callable[[], None] | None = None) -> T:
    """Return the result of ``step``, which is repeated while JetStream has no room for what it stores.

    Args:
        waiting: called when the first attempt is refused.

    Raises:
        RequestTimeout: the client has gone meanwhile; any other error of ``step``.
    """
    while True:
        try:
            return await step()
        except ApiError as error:
            if not lacks_room(error):
                raise
            refusal = error
        if waiting is not None:
            waiting()
            waiting = None
        if not client.alive:
            raise RequestTimeout(str(refusal))
        await client.idle(asyncio.sleep(ROOM_AGAIN_S * random.uniform(1.0, 2.0)))


def begin_unrecorded(client: Session) -> None:
    """Have a clean session without a record get one when there is room."""
    services = client.services
    services.unrecorded[client] = None
    if len(services.unrecorded) == 1:
        services.tasks.spawn(_record_all(services), "records of clean sessions")


async def _record_all(services: Services) -> None:
    """Write the records of sessions, one after the other, while there is room for them."""
    while services.unrecorded:
        client = next(iter(services.unrecorded))
        done = asyncio.Event()
        client.do(_record(client, done))
        try:
            async with asyncio.timeout(WRITTEN_S):
                await done.wait()
        except TimeoutError:  # other jobs of the client last longer, or it has ended
            if services.unrecorded.pop(client, 0) is None and client.alive:
                services.unrecorded[client] = None  # its turn comes later
        if client in services.unrecorded:
            await asyncio.sleep(ROOM_AGAIN_S)


async def _record(client: Session, done: asyncio.Event) -> None:
    """Write the record of one session, in a job of its client."""
    try:
        if client in client.services.unrecorded:
            await save_record(client, 0)
    except Conflict:
        client.taken_over()
    except (ApiError, NoResponders, RequestTimeout) as error:
        log.debug("%s: its record is not stored yet: %s", client, error)
    finally:
        done.set()
