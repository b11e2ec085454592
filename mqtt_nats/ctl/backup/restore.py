# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats restore``: the streams of a backup in the place of those of the account, while all gateways pause.

Everything that can be checked is checked before a stream is changed. From the first change to the end gateways serve
nobody, also if the command is killed: then it has to be run again. See docs/internals/ctl.md#backups.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.nats_connect import server_version
from mqtt_nats.ctl.backup import later_records, snapshot
from mqtt_nats.ctl.backup.directory import Manifest, SavedStream, read_manifest, verify
from mqtt_nats.ctl.backup.pause import interrupted, paused
from mqtt_nats.ctl.backup.save import account_of
from mqtt_nats.lifecycle.predecessor import NAME, PROCESS
from mqtt_streams.account import account_storage
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.definitions import BY_SIZE
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.fleet import FleetStore, Wish
from mqtt_streams.gateways import STREAM as GATEWAYS
from mqtt_streams.gateways import GatewayStore, LeaseTaken
from mqtt_streams.generations import GenerationStore
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.shared import STREAM as SHARED

if TYPE_CHECKING:
    from mqtt_nats.backbone.inbox import RequestInbox

PROBE: Final = "MQTT_restore_probe"
"""Stream that is made and removed to find out whether the account may have one with so many replicas."""

WITHOUT_CLIENTS: Final = (GATEWAYS, SHARED)
"""Streams in which gateways store something before any client comes."""

LEADERS_KNOWN_MOST_S: Final = 60.0
"""Seconds in which every stream has a leader that all servers know."""

JETSTREAM_RETRY_S: Final = 0.5
"""Seconds between two attempts at what JetStream has not answered, and between two looks at replicas."""

REPLICA_WAIT_MOST_S: Final = 60.0
"""Seconds to wait for replicas that come no closer to their leader."""


@dataclass(frozen=True)
class Wanted:
    """Arguments of a restore.

    `replicas`: of each stream; None = as saved, or one where the nats-server is alone. `streams`: names; empty = all.
    `replace`: whether what is stored may be lost. `account`: the account that the backup is known to be of.
    """

    directory: Path
    replicas: int | None = None
    streams: tuple[str, ...] = ()
    replace: bool = False
    account: str | None = None


async def restore(inbox: RequestInbox, wanted: Wanted, tell: Callable[[str], None]) -> list[SavedStream]:
    """Replace the streams of the account by those of a backup; return the restored ones.

    Raises:
        StartupError: the backup cannot be used, something would be lost, or gateways go on.
        ApiError, NoResponders, RequestTimeout: JetStream refuses, or does not answer.
    """
    manifest = read_manifest(wanted.directory)
    streams = _chosen(manifest, wanted.streams)
    verify(wanted.directory, [one for each in streams for one in (each.snapshot, each.later) if one is not None])
    await _check_place(inbox, manifest, wanted.account)
    again = await interrupted(inbox)
    if again and wanted.streams:
        raise StartupError("a restore was interrupted: restore all streams, without --stream")
    if not (wanted.replace or again):
        await _check_content(inbox, streams)
    configs = [await _config(inbox, one, wanted.replicas) for one in streams]
    replicas = configs[0]["num_replicas"]
    await _check_room(inbox, streams, configs)
    async with paused(inbox, "restoring" if again else "announced", replicas, tell) as pause:
        if not (wanted.replace or again):
            await _check_content(inbox, streams)
        await _insist(lambda: pause.put("restoring"))
        for one, config in zip(streams, configs, strict=True):
            await _insist(partial(_restore, inbox, wanted.directory, one, config))
            tell(f"{one.name}: {one.state.messages:,} messages, {one.state.consumers:,} consumers")
        for work in _last_works(inbox, manifest, wanted, streams):
            await _insist(work)
        for one in streams:
            await _wait_for_replicas(inbox, one.name, tell)
        await _insist(lambda: pause.put("ended"))
    return streams


def _last_works(
    inbox: RequestInbox, manifest: Manifest, wanted: Wanted, streams: list[SavedStream]
) -> Iterator[Callable[[], Awaitable[None]]]:
    """Yield what is left to do when the streams are restored."""
    if any(one.name == GATEWAYS for one in streams):
        # Also of a process that goes on as another gateway.
        yield partial(GatewayStore(inbox).end_all, NAME, PROCESS)
    if any(one.name in (MESSAGES, SHARED) for one in streams):
        yield partial(GenerationStore(inbox).replace, secrets.token_hex(11))
    if not wanted.streams:
        for name, loaded in manifest.plugins.items():
            yield partial(FleetStore(inbox).put, Wish("plugin", secrets.token_hex(8), name, loaded))


async def _insist(work: Callable[[], Awaitable[None]]) -> None:
    """Do what may be done twice, again while JetStream does not answer: gateways wait for the end of the restore.

    A leader may be missing, or other servers may not know yet of the subscriptions of a stream that was just made.

    Raises:
        StartupError: it has failed for `LEADERS_KNOWN_MOST_S`.
    """
    until = asyncio.get_running_loop().time() + LEADERS_KNOWN_MOST_S
    while True:
        try:
            return await work()
        except (NoResponders, RequestTimeout, LeaseTaken) as error:  # LeaseTaken: by the attempt before
            if asyncio.get_running_loop().time() > until:
                text = " ".join(str(error).split())
                raise StartupError(f"JetStream does not answer any more ({text}): run the restore again") from None
        await asyncio.sleep(JETSTREAM_RETRY_S)


def _chosen(manifest: Manifest, names: tuple[str, ...]) -> list[SavedStream]:
    there = {one.name: one for one in manifest.streams}
    if unknown := [name for name in names if name not in there]:
        raise StartupError(f"the backup has no stream {', '.join(unknown)}; it has {', '.join(there)}")
    return [one for name, one in there.items() if not names or name in names]


async def _check_place(inbox: RequestInbox, manifest: Manifest, account: str | None) -> None:
    """Check account and version of the nats-server."""
    here = await account_of(inbox)
    if here != manifest.account != account:
        raise StartupError(
            f"the backup is of account {manifest.account}, and this is account {here}: "
            f"use the credentials of {manifest.account}, or --account {manifest.account} if you want it here"
        )
    present, former = server_version(inbox.link), manifest.nats_server
    if present < _version(former):
        raise StartupError(
            f"the backup is of nats-server {former}, and this is {inbox.link.server.get('version')}, which may not be "
            "able to read it: use a nats-server that is as new"
        )


def _version(text: str) -> tuple[int, int]:
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


async def _info(inbox: RequestInbox, stream: str) -> dict[str, Any] | None:
    try:
        return await call(inbox, f"STREAM.INFO.{stream}")
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return None
        raise


async def _check_content(inbox: RequestInbox, streams: list[SavedStream]) -> None:
    found = []
    for one in streams:
        info = await _info(inbox, one.name)
        if info is not None and info["state"]["messages"] and (one.name not in WITHOUT_CLIENTS or len(streams) == 1):
            found.append(f"{one.name} ({info['state']['messages']:,} messages)")
    if found:
        raise StartupError(f"would be lost: {', '.join(found)}; make a backup of it, then use --replace")


async def _config(inbox: RequestInbox, saved: SavedStream, replicas: int | None) -> dict[str, Any]:
    """Return the configuration with which a stream is restored."""
    alone = not inbox.link.server.get("cluster")
    number = replicas or (1 if alone else saved.config.get("num_replicas", 1))
    return saved.config | {"num_replicas": number}


async def _check_room(inbox: RequestInbox, streams: list[SavedStream], configs: list[dict[str, Any]]) -> None:
    """Check that the account may have so many replicas and bytes: a refusal must not come between two streams."""
    replicas = configs[0]["num_replicas"]
    kept = ("storage", "placement", "num_replicas")
    probe = {name: configs[0][name] for name in kept if name in configs[0]}
    try:
        await call(inbox, f"STREAM.CREATE.{PROBE}", probe | {"name": PROBE, "subjects": [f"$MQTT.{PROBE}"]})
    except ApiError as error:
        hint = f"use --replicas with a number from 1 to {BY_SIZE}" if replicas > 1 else "change that first"
        raise StartupError(f"a stream with {replicas} replicas is refused: {error}; {hint}") from None
    finally:
        await snapshot.remove(inbox, PROBE)
    storage = account_storage(await call(inbox, "INFO"))
    if storage.allowed is None:
        return
    infos = [await _info(inbox, one.name) for one in streams]
    freed = sum(info["state"]["bytes"] * info["config"].get("num_replicas", 1) for info in infos if info is not None)
    needed = sum(one.state.bytes * replicas for one in streams)
    if needed > storage.allowed - storage.used + freed:
        raise StartupError(
            f"the backup needs {needed:,} bytes, and the account may store {storage.allowed:,}: raise its limit first"
        )


async def _restore(inbox: RequestInbox, directory: Path, saved: SavedStream, config: dict[str, Any]) -> None:
    later = saved.later if saved.records else None
    # A stream that refuses a second record of a subject would refuse what replaces a record of the snapshot.
    first = config | {"discard": "old", "discard_new_per_subject": False} if later is not None else config
    answer = await snapshot.load(inbox, first, saved.answer, directory / saved.snapshot.name)
    _verify(saved, answer)
    if later is not None:
        await later_records.load(inbox, saved.name, later_records.read(directory / later.name))
        await call(inbox, f"STREAM.UPDATE.{saved.name}", config)


async def _wait_for_replicas(inbox: RequestInbox, stream: str, tell: Callable[[str], None]) -> None:
    """Wait until every replica whose server runs has all messages of a restored stream.

    nats-server restores a stream on one server; the others copy it afterwards. Until then the death of that server
    would take with it what has been restored.
    """
    loop = asyncio.get_running_loop()
    until, least = loop.time() + REPLICA_WAIT_MOST_S, inf
    while True:
        try:
            lags = _lags(await call(inbox, f"STREAM.INFO.{stream}"))
        except (NoResponders, RequestTimeout):
            lags = None
        if lags is not None and not lags:
            return
        now, lag = loop.time(), inf if lags is None else sum(lags.values())
        if lag < least:
            until, least = now + REPLICA_WAIT_MOST_S, lag
        if now > until:
            behind = "it has no leader" if lags is None else f"the replicas on {', '.join(sorted(lags))} are behind"
            tell(f"{stream}: {behind}; until that ends, fewer servers than replicas have what was restored")
            return
        await asyncio.sleep(JETSTREAM_RETRY_S)


def _lags(info: dict[str, Any]) -> dict[str, int] | None:
    """Return the operations that replicas lack, by server; None = there is no leader that could say it."""
    cluster = info.get("cluster") or {}
    if cluster and not cluster.get("leader"):
        return None
    running = [one for one in cluster.get("replicas") or () if not one.get("offline")]
    return {one["name"]: int(one.get("lag", 0)) for one in running if not one.get("current") or one.get("lag")}


def _verify(saved: SavedStream, restored: dict[str, Any]) -> None:
    """Compare a restored snapshot with the stream that was saved.

    Messages that have expired since then, or that have no consumer any more, are missing rightly.
    """
    state, config = restored["state"], saved.config
    goes = config.get("max_age") or config.get("allow_msg_ttl") or config.get("retention", "limits") != "limits"
    problem = ""
    if int(state["last_seq"]) < saved.state.last_seq:
        problem = f"it ends at sequence {state['last_seq']:,} in place of {saved.state.last_seq:,}"
    elif not goes and int(state["messages"]) < saved.least:
        problem = f"it has {state['messages']:,} messages, and had at least {saved.least:,}"
    if problem:
        raise StartupError(f"stream {saved.name} was not restored: {problem}; run the restore again")
