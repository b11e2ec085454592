# SPDX-License-Identifier: Apache-2.0
"""``ctl streams``: show the streams, warn of settings that break promised durability, change replicas and retention."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from pydantic import Field

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.logs import plain
from mqtt_nats.ctl.servers import servers
from mqtt_nats.ctl.tables import quantity, span, table
from mqtt_nats.ctl.verb import Arguments, Length, Refused, Verb
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call, has_leader
from mqtt_streams.definitions import BY_SIZE, EVERY
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.messages import STREAM as MESSAGES

PING_TIMEOUT: Final = 0.5
"""Seconds to wait for the answers of nats-servers."""

MONITORING: Final = 5.0
"""Time-out of a monitoring address in seconds."""

SYNCED: Final = 1.0
"""Longest ``sync_interval`` in seconds with which no more can be lost than documented."""

NS: Final = 1_000_000_000


class Listing(Arguments):
    """Monitoring addresses to read in addition."""

    monitor: tuple[str, ...] = Field(
        default=(),
        description="Monitoring address of a nats-server (http://127.0.0.1:8222), for its sync_interval.",
        json_schema_extra={"metavar": "URL"},
    )


class Change(Arguments):
    """Change of a stream's replicas or retention."""

    stream: str = Field(description="The name of a stream, or all.")
    replicas: int | None = Field(
        default=None, ge=1, le=5, description="How many replicas it is to have.", json_schema_extra={"metavar": "N"}
    )
    retention: Length | None = Field(
        default=None,
        description="How long messages are kept, only for $MQTT_msgs: 90s, 15m, 2h, 7d.",
        json_schema_extra={"metavar": "TIME"},
    )


async def listed(inbox: RequestInbox, asked: Listing) -> dict[str, Any]:
    """Return the streams, and warnings about broken promises of durability, one line each."""
    infos = await asyncio.gather(*(_info(inbox, name) for name in EVERY))
    found = [one for one in infos if one is not None]
    if not found:
        raise Refused("there are no streams: no gateway has run here yet", 404)
    size = sum(one["jetstream"] for one in await servers(inbox, PING_TIMEOUT))
    warnings = _warnings(found, size)
    monitored = [await _monitored(url) for url in asked.monitor]
    warnings += [line for one in monitored for line in one["warnings"]]
    monitoring = [{key: one[key] for key in ("url", "name", "sync_interval", "sync_always")} for one in monitored]
    return {"streams": found, "servers": size, "monitoring": monitoring, "warnings": warnings}


async def _info(inbox: RequestInbox, name: str) -> dict[str, Any] | None:
    try:
        info = await call(inbox, f"STREAM.INFO.{name}")
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return None
        return _unknown(name, " ".join(str(error).split()))
    except (NoResponders, RequestTimeout):
        return _unknown(name, "does not answer")
    config, state, cluster = info["config"], info["state"], info.get("cluster") or {}
    return {
        "name": name,
        "obstacle": "" if has_leader(info) else "no leader",
        "replicas": config.get("num_replicas", 1),
        "leader": cluster.get("leader", ""),
        "followers": [
            {
                "name": one["name"],
                "current": bool(one.get("current")),
                "offline": bool(one.get("offline")),
                "lag": int(one.get("lag", 0)),
            }
            for one in cluster.get("replicas") or []
        ],
        "storage": config.get("storage", "file"),
        "retention": config.get("retention", "limits"),
        "max_age": config.get("max_age", 0) / NS,
        "messages": state["messages"],
        "bytes": state["bytes"],
        "consumers": state["consumer_count"],
    }


def _unknown(name: str, obstacle: str) -> dict[str, Any]:
    return {
        "name": name,
        "obstacle": obstacle,
        "replicas": 0,
        "leader": "",
        "followers": [],
        "storage": "",
        "retention": "",
        "max_age": 0.0,
        "messages": 0,
        "bytes": 0,
        "consumers": 0,
    }


def _warnings(found: list[dict[str, Any]], size: int) -> list[str]:
    """Return warnings about streams that do not keep messages as promised, in a cluster of ``size`` nats-servers."""
    lines = []
    for one in found:
        name = one["name"]
        if one["obstacle"]:
            lines.append(f"{name}: {one['obstacle']}: nothing is stored there at present")
            continue
        if one["replicas"] < BY_SIZE <= size:
            said = "1 replica" if one["replicas"] == 1 else f"{one['replicas']} replicas"
            remedy = f"`mqtt-nats ctl streams set '{name}' --replicas {BY_SIZE}`"
            lines.append(f"{name} has {said} in a cluster of {size}: a server that is lost takes it along: {remedy}")
        for each in one["followers"]:
            if each["offline"] or not each["current"]:
                behind = f"is {each['lag']:,} operations behind" if each["lag"] else "is not current"
                state = "is offline" if each["offline"] else behind
                lines.append(f"{name}: the replica on {each['name']} {state}")
        if one["storage"] != "file":
            lines.append(f"{name} is kept in memory: it does not outlive its nats-server")
    levels = sorted({one["replicas"] for one in found if not one["obstacle"]})
    if len(levels) > 1:
        lines.append(f"streams have different numbers of replicas, {', '.join(map(str, levels))}: the least counts")
    return lines


async def _monitored(url: str) -> dict[str, Any]:
    """Return the settings of disk writes from a nats-server's monitoring address, with warnings.

    Raises:
        Refused: no nats-server answers there.
    """
    import httpx  # needed by this verb only

    base = url if "://" in url else f"http://{url}"
    try:
        async with httpx.AsyncClient(timeout=MONITORING) as client:
            answer = await client.get(f"{base.rstrip('/')}/varz")
            answer.raise_for_status()
            found = answer.json()
        config = (found.get("jetstream") or {}).get("config") or {}
        name, interval = str(found["server_name"]), config.get("sync_interval", 0) / NS
        always = bool(config.get("sync_always"))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise Refused(f"no nats-server answers at {plain(url)}: {why}") from None
    warnings = []
    if not config:
        warnings.append(f"nats-server {name} has no JetStream")
    elif not always and interval > SYNCED:
        what = f"nats-server {name} writes to the disk every {span(interval)} (sync_interval)"
        warnings.append(f"{what}: a power cut of all replicas can lose what was acknowledged since; 1s is what we run")
    return {"url": url, "name": name, "sync_interval": interval, "sync_always": always, "warnings": warnings}


def shown(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    rows = []
    for one in found["streams"]:
        if one["obstacle"]:
            rows.append([one["name"], "", one["obstacle"], *[""] * 6])
            continue
        followers = [_follower(each) for each in one["followers"]]
        lag = max((each["lag"] for each in one["followers"]), default=0)
        rows.append(
            [
                one["name"],
                f"{one['replicas']}",
                one["leader"],
                ", ".join(followers),
                f"{lag:,}",
                f"{one['messages']:,}",
                quantity(one["bytes"]),
                f"{one['consumers']:,}",
                span(one["max_age"]) if one["max_age"] else "always",
            ]
        )
    heading = ["stream", "replicas", "leader", "followers", "lag", "messages", "size", "consumers", "kept"]
    lines = table(heading, rows, "kept, lag, consumers, followers, leader")
    for one in found["monitoring"]:
        how = "before each acknowledgement" if one["sync_always"] else f"every {span(one['sync_interval'])}"
        lines.append(f"nats-server {one['name']} writes to the disk {how}")
    if found["warnings"]:
        lines += ["", *(f"warning: {one}" for one in found["warnings"])]
    return "\n".join(lines)


def _follower(one: dict[str, Any]) -> str:
    state = " (offline)" if one["offline"] else "" if one["current"] else " (behind)"
    return f"{one['name']}{state}"


async def change(inbox: RequestInbox, asked: Change) -> dict[str, Any]:
    """Change the replicas of streams, or the retention time of ``$MQTT_msgs``; only messages older than the new time
    are removed.

    Raises:
        Refused: no change is given, there is no such stream, or the servers are too few.
    """
    if asked.replicas is None and asked.retention is None:
        raise Refused("no change is requested: give --replicas or --retention")
    names = [name for name in EVERY if asked.stream in ("all", name)]
    if not names:
        raise Refused(
            f"there is no stream {plain(asked.stream)} of gateways: it is all, or one of {', '.join(EVERY)}", 404
        )
    if asked.retention is not None and MESSAGES not in names:
        raise Refused(f"--retention is about {MESSAGES}: the others keep what belongs to a session or a topic")
    if asked.retention is not None and asked.retention < 1:
        raise Refused("the shortest retention is one second")
    found: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    for name in names:
        try:
            one = await _change(inbox, name, asked)
        except (ApiError, NoResponders, RequestTimeout) as error:
            if asked.stream != "all" or not (found or isinstance(error, ApiError)):
                raise  # the error does not concern this stream alone: JetStream does not answer
            refused.append({"name": name, "why": " ".join(str(error).split()) or "it does not answer"})
        except Refused as error:
            refused.append({"name": name, "why": str(error)})
        else:
            found += [one] if one is not None else []
    if refused and not found:
        raise Refused("; ".join(f"{one['name']} is not changed: {one['why']}" for one in refused), 409)
    return {"streams": found, "refused": refused}


async def _change(inbox: RequestInbox, name: str, asked: Change) -> dict[str, Any] | None:
    """Change one stream and return its state; None: a missing stream where all streams are changed.

    Raises:
        Refused: nats-server refuses the change.
    """
    try:
        config = (await call(inbox, f"STREAM.INFO.{name}"))["config"]
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND and asked.stream == "all":
            return None
        raise
    wanted = _wanted(name, config, asked)
    before = {key: config.get(key) for key in wanted}
    if before != wanted:
        try:
            config = (await call(inbox, f"STREAM.UPDATE.{name}", config | wanted))["config"]
        except ApiError as error:
            raise Refused(" ".join(str(error).split()), 409) from None
    return {
        "name": name,
        "replicas": config.get("num_replicas", 1),
        "max_age": config.get("max_age", 0) / NS,
        "changed": before != {key: config.get(key) for key in wanted},
    }


def left(asked: Change, found: dict[str, Any]) -> str:
    """Return the streams that were not changed, with the reasons."""
    return "; ".join(f"{one['name']} is not changed: {plain(one['why'])}" for one in found["refused"])


def _wanted(name: str, config: dict[str, Any], asked: Change) -> dict[str, Any]:
    """Return the settings to change."""
    wanted: dict[str, Any] = {}
    if asked.replicas is not None:
        wanted["num_replicas"] = asked.replicas
    if asked.retention is not None and name == MESSAGES:
        wanted["max_age"] = int(asked.retention * NS)
        # nats-server refuses a duplicate window longer than max_age.
        if config.get("duplicate_window", 0) > wanted["max_age"]:
            wanted["duplicate_window"] = wanted["max_age"]
    return wanted


def shown_changed(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    lines = []
    for one in found["streams"]:
        kept = f", keeps messages for {span(one['max_age'])}" if one["name"] == MESSAGES and one["max_age"] else ""
        replicas = "1 replica" if one["replicas"] == 1 else f"{one['replicas']} replicas"
        lines.append(f"{one['name']}: {replicas}{kept}{'' if one['changed'] else ' (as before)'}")
    if any(one["name"] == MESSAGES and one["changed"] for one in found["streams"]):
        lines.append(
            "Gateways raise what is below their settings when they start, and lower how long messages are kept while "
            "none is stored: set message_retention and stream_replicas there too."
        )
    return "\n".join(lines)


VERBS: Final = (
    Verb(
        "streams.list",
        "GET",
        "/streams",
        Listing,
        listed,
        "Show the streams, their replicas and what they hold; warn of what does not match what is promised.",
        shown,
    ),
    Verb(
        "streams.set",
        "POST",
        "/streams/{stream}",
        Change,
        change,
        "Change the replicas of STREAM, or of all, and how long messages are kept, while everything runs.",
        shown_changed,
        lacking=left,
    ),
)
