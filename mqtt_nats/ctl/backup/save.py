# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats backup``: every stream of the account, in an order that loses nothing while gateways serve clients.

What is in two streams one after the other is saved in that order, so that it is in one of them at least: publishes
that are held, wills and timers before messages. What counts messages is saved after them, so that a message that a
subscriber has acknowledged does not come again: positions and owed PUBRELs. See docs/internals/ctl.md#backups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from mqtt_nats import __version__
from mqtt_nats.base.errors import StartupError
from mqtt_nats.ctl.backup import later_records, snapshot
from mqtt_nats.ctl.backup.directory import (
    FORMAT,
    Manifest,
    SavedFile,
    SavedState,
    SavedStream,
    prepare,
    write_manifest,
    writing,
)
from mqtt_nats.ctl.backup.pause import interrupted, paused
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call, has_leader
from mqtt_streams.bans import STREAM as BANS
from mqtt_streams.definitions import EVERY, NEVER_AGAIN
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.fleet import STREAM as FLEET
from mqtt_streams.fleet import FleetStore
from mqtt_streams.gateways import STREAM as GATEWAYS
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.positions import STREAM as POSITIONS
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.qos2 import STREAM as QOS2IN
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.shared import STREAM as SHARED
from mqtt_streams.timers import STREAM as TIMERS
from mqtt_streams.wills import STREAM as WILLS

if TYPE_CHECKING:
    from mqtt_nats.backbone.inbox import RequestInbox

ORDER: Final = (BANS, RETAINED, WILLS, TIMERS, QOS2IN, MESSAGES, OUT, POSITIONS, SESSIONS, SHARED, GATEWAYS)
"""Order of the snapshots. `KV_MQTT_fleet` is not among them: its wishes are in the manifest."""

WHOLE: Final = (MESSAGES, OUT)
"""Streams whose messages are never replaced, so that a snapshot has all of them."""

SNAPSHOT_ATTEMPTS: Final = 5
"""Attempts at a snapshot that breaks off, as when the leader of the stream changes."""

SNAPSHOT_RETRY_S: Final = 2.0
"""Seconds between two of them."""


async def account_of(inbox: RequestInbox) -> str:
    """Return the name of the account of this connection; empty where nats-server does not tell.

    Raises:
        RequestTimeout: no answer.
    """
    try:
        answer = orjson.loads((await inbox.request("$SYS.REQ.USER.INFO")).payload)
    except NoResponders:
        return ""
    data = answer.get("data") if isinstance(answer, dict) else None
    return str(data.get("account", "")) if isinstance(data, dict) else ""


async def backup(inbox: RequestInbox, directory: Path, *, pause: bool, tell: Callable[[str], None]) -> Manifest:
    """Write a backup into an empty directory.

    Args:
        pause: have all gateways pause meanwhile.
        tell: is called with lines about the progress.

    Raises:
        StartupError: the directory cannot be used, or the streams are not complete.
        ApiError, NoResponders, RequestTimeout: JetStream refuses, or does not answer.
    """
    if await interrupted(inbox):
        raise StartupError("a restore was interrupted, and the streams are incomplete: run the restore again first")
    begun = _now()
    account = await account_of(inbox)
    found = [stream for stream in ORDER if await _exists(inbox, stream)]
    if not {SESSIONS, MESSAGES} <= set(found):
        raise StartupError("there are no streams of mqtt-nats here: no gateway has run in this account")
    prepare(directory)
    wishes = {one.name: one.loaded for one in await _wishes(inbox) if one.kind == "plugin"}
    async with AsyncExitStack() as stack:
        if pause:
            await stack.enter_async_context(paused(inbox, "announced", 1, tell))
        saved = await _streams(inbox, directory, found, tell)
    manifest = Manifest(
        format=FORMAT,
        mqtt_nats=__version__,
        nats_server=str(inbox.link.server.get("version", "")),
        account=account,
        begun=begun,
        ended=_now(),
        paused=pause,
        streams=tuple(saved),
        plugins=wishes,
    )
    write_manifest(directory, manifest)
    return manifest


async def _streams(
    inbox: RequestInbox, directory: Path, names: list[str], tell: Callable[[str], None]
) -> list[SavedStream]:
    saved: dict[str, SavedStream] = {}
    for stream in names:
        saved[stream] = one = await _snapshot(inbox, directory, stream)
        if stream in NEVER_AGAIN:  # at once: a restore fills the gap between snapshot and records
            saved[stream] = await _later(inbox, directory, one)
        tell(f"{stream}: {one.state.messages:,} messages, {one.state.consumers:,} consumers")
    for stream in names:
        if stream not in (*NEVER_AGAIN, *WHOLE):
            saved[stream] = await _later(inbox, directory, saved[stream])
    return list(saved.values())


async def _snapshot(inbox: RequestInbox, directory: Path, stream: str) -> SavedStream:
    for attempt in range(SNAPSHOT_ATTEMPTS):
        if attempt:
            await asyncio.sleep(SNAPSHOT_RETRY_S)
        with writing(directory, f"{stream.removeprefix('$')}.snapshot") as file:
            try:
                answer = await snapshot.save(inbox, stream, file)
                least = await _least(inbox, stream, answer["state"]["last_seq"])
            except (snapshot.Incomplete, NoResponders, RequestTimeout) as error:
                problem = str(error)
                continue
            except ApiError as error:
                problem = str(error)  # also of a consumer that has no leader at this moment
                continue
            return _saved(stream, answer, least, file.done())
    raise StartupError(f"stream {stream} cannot be saved: {' '.join(problem.split())}")


async def _least(inbox: RequestInbox, stream: str, end: int) -> int:
    """Return how many messages up to sequence ``end`` there are at least.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    info = await call(inbox, f"STREAM.INFO.{stream}")
    later = int(info["state"]["last_seq"]) - end
    if later < 0 or not has_leader(info):  # a replica that is behind may still count what was removed
        return 0
    return max(0, int(info["state"]["messages"]) - later)


def _saved(stream: str, answer: dict[str, Any], least: int, file: SavedFile) -> SavedStream:
    state = answer["state"]
    return SavedStream(
        name=stream,
        config=answer["config"],
        state=SavedState(
            messages=state["messages"],
            bytes=state["bytes"],
            first_seq=state["first_seq"],
            last_seq=state["last_seq"],
            consumers=state.get("consumer_count", 0),
        ),
        answer=state,
        snapshot=file,
        least=least,
    )


async def _later(inbox: RequestInbox, directory: Path, saved: SavedStream) -> SavedStream:
    (subject,) = saved.config["subjects"]
    with writing(directory, f"{saved.name.removeprefix('$')}.later") as file:
        count = await later_records.save(inbox, saved.name, subject, saved.state.last_seq, file)
        return saved.model_copy(update={"later": file.done(), "records": count})


async def _exists(inbox: RequestInbox, stream: str) -> bool:
    try:
        await call(inbox, f"STREAM.INFO.{stream}")
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return False
        raise
    return True


async def _wishes(inbox: RequestInbox) -> list[Any]:
    return await FleetStore(inbox).all() if await _exists(inbox, FLEET) else []


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


assert set(ORDER) == set(EVERY) - {FLEET}
