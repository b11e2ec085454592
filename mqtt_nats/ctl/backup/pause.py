# SPDX-License-Identifier: Apache-2.0
"""Pause of all gateways of an account, as a backup or a restore asks for it. See docs/internals/ctl.md#backups."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

from mqtt_nats.base.errors import StartupError
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.definitions import load_definition
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.fleet import PAUSE_S, FleetStore, Stage
from mqtt_streams.fleet import STREAM as FLEET
from mqtt_streams.gateways import STREAM as GATEWAYS
from mqtt_streams.gateways import Entry, GatewayStore

if TYPE_CHECKING:
    from mqtt_nats.backbone.inbox import RequestInbox

RENEW: Final = 5.0
"""Seconds between two renewals of a pause."""

CONNECTIONS_END_MOST_S: Final = 90.0
"""Seconds in which every gateway has ended its connections."""

GATEWAYS_POLL_S: Final = 0.25
"""Seconds between two looks whether gateways still run."""


class FleetPause:
    """A pause that this command has asked for."""

    def __init__(self, store: FleetStore, stage: Stage) -> None:
        self._store = store
        self._identity = secrets.token_hex(8)
        self.stage = stage
        """Stage of the pause; `restoring` outlasts the command."""

    async def put(self, stage: Stage) -> None:
        """Go on to a stage. Raises ApiError, NoResponders, RequestTimeout."""
        self.stage = stage
        await self._store.put_pause(self._identity, stage)

    async def renew(self) -> None:
        """Renew the pause for as long as the command runs."""
        while True:
            await asyncio.sleep(RENEW)
            with suppress(ApiError, NoResponders, RequestTimeout):
                await self._store.put_pause(self._identity, self.stage)


async def interrupted(inbox: RequestInbox) -> bool:
    """Whether a restore was begun and has not ended.

    Raises:
        StartupError: another backup or restore has all gateways pause at present.
    """
    found = await FleetStore(inbox).pause()
    if found is not None and found.stage != "ended" and found.age < PAUSE_S:
        raise StartupError(
            f"another backup or restore runs, or was stopped less than {PAUSE_S:.0f} s ago: wait, and try again"
        )
    return found is not None and found.stage == "restoring"


@asynccontextmanager
async def paused(
    inbox: RequestInbox, stage: Stage, replicas: int, tell: Callable[[str], None]
) -> AsyncIterator[FleetPause]:
    """Have all gateways end their connections, and begin anew after this.

    Whatever happens, the pause ends here, unless its stage is `restoring`: streams are incomplete then, and gateways
    wait until a restore is complete.

    Args:
        stage: the first stage.
        replicas: replicas of the stream of wishes if it has to be made.

    Raises:
        StartupError: a gateway goes on.
    """
    await _make_stream(inbox, replicas)
    pause = FleetPause(FleetStore(inbox), stage)
    await pause.put(stage)
    renewal = asyncio.create_task(pause.renew())
    try:
        await _gateways_ended(inbox, tell)
        yield pause
    finally:
        renewal.cancel()
        if pause.stage == "announced":
            with suppress(ApiError, NoResponders, RequestTimeout):
                await pause.put("ended")


async def _make_stream(inbox: RequestInbox, replicas: int) -> None:
    try:
        await call(inbox, f"STREAM.INFO.{FLEET}")
    except ApiError as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise
        await call(inbox, f"STREAM.CREATE.{FLEET}", load_definition(FLEET) | {"num_replicas": replicas})


async def _gateways_ended(inbox: RequestInbox, tell: Callable[[str], None]) -> None:
    running = await _running(inbox)
    if running:
        tell(f"waiting for {len(running)} gateways to disconnect their clients")
    until = asyncio.get_running_loop().time() + CONNECTIONS_END_MOST_S
    while running:
        if asyncio.get_running_loop().time() > until:
            names = ", ".join(f"{one.identity} (version {one.info.get('version', 'unknown')})" for one in running)
            raise StartupError(f"gateways go on: {names}; stop them, and try again")
        await asyncio.sleep(GATEWAYS_POLL_S)
        running = await _running(inbox)


async def _running(inbox: RequestInbox) -> list[Entry]:
    try:
        await call(inbox, f"STREAM.INFO.{GATEWAYS}")
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return []
        raise
    return [one for one in await GatewayStore(inbox).entries() if not one.lapsed]
