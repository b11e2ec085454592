# SPDX-License-Identifier: Apache-2.0
"""``ctl trace``: live events of the packets of one client, or of the messages of some topics."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from datetime import datetime
from heapq import heappop, heappush
from typing import Any, Final

import orjson

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.logs import plain
from mqtt_nats.ctl.commands.topics import checked
from mqtt_nats.ctl.gateway_requests import ask, tell

TRACE_RENEWAL_S: Final = 5.0
"""Seconds between two renewals of the trace at the gateways."""

ORDERED: Final = 0.25
"""Seconds for which an event waits, so that events of several gateways can be sorted by time."""

LASTS_MOST: Final = 3600.0
"""Longest duration of a trace in seconds; gateways end it then too."""

EVENTS_WAITING_MOST: Final = 10_000
"""Most events that wait for the viewer; further events are dropped and counted."""

MESSAGES_TIMED_MOST: Final = 10_000
"""Most messages whose times are stored for durations; beyond it all are dropped."""

SAID: Final = {
    "topic": "{}",
    "qos": "QoS {}",
    "retain": "retain",
    "dup": "dup",
    "id": "id {}",
    "bytes": "{} bytes",
    "crc": "crc {}",
    "filters": "{}",
    "codes": "{}",
    "from": "from {}",
    "count": "{} events, because there were too many",
    "reason": "{}",
}
"""Formats of an event's fields in a line, in this order."""

Event = dict[str, Any]


class Durations:
    """Durations of messages: from publish to delivery to each subscriber, and from delivery to acknowledgement."""

    def __init__(self) -> None:
        self._published: dict[tuple[str, str, int], float] = {}
        self._delivered: dict[tuple[str, str, int], float] = {}

    def add(self, event: Event) -> None:
        """Note an event, and add its duration if known: ``ms`` since the event that it ``answers``."""
        kind, at = event.get("event"), event["time"]
        body = (event.get("topic", ""), event.get("crc", ""), event.get("bytes", 0))
        place = (event["gateway"], event["client"], event.get("id", 0))
        begun: float | None = None
        if kind == "published":
            self._note(self._published, body, at)
        elif kind == "delivered":
            begun = self._published.get(body)
            if event.get("id"):
                self._note(self._delivered, place, at)
        elif kind in ("acknowledged", "refused"):
            begun = self._delivered.pop(place, None)
        if begun is not None:
            event["ms"] = round((at - begun) * 1000, 1)
            event["answers"] = "publish" if kind == "delivered" else "delivery"

    def _note(self, known: dict[Any, float], key: Any, at: float) -> None:
        if len(known) >= MESSAGES_TIMED_MOST:
            known.clear()
        known[key] = at


async def trace(
    inbox: RequestInbox, seconds: float, *, client: str = "", topic: str = ""
) -> AsyncGenerator[Event, None]:
    """Yield events for ``seconds`` (0: `LASTS_MOST`) or until the viewer closes the generator.

    The first event names the gateways that take part, and the gateway to which the client is connected.

    Raises:
        Refused: no gateway answers, or the topic filter is illegal.
    """
    link, name = inbox.link, secrets.token_hex(8)
    to = b"%btrace.%b" % (inbox.prefix, name.encode())
    waiting: asyncio.Queue[Event] = asyncio.Queue()
    lost: dict[str, int] = {}

    def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        page = orjson.loads(payload)
        gateway, events = page["id"], page["events"]
        room = max(EVENTS_WAITING_MOST - waiting.qsize(), 0)
        missed = lost.pop(gateway, 0) + page["lost"] + len(events[room:])
        for event in events[:room]:
            waiting.put_nowait({"gateway": gateway, **event})
        if missed and not room:
            lost[gateway] = missed
        elif missed:
            said = {"gateway": gateway, "client": "", "event": "lost", "count": missed}
            waiting.put_nowait({"time": events[-1]["time"], **said})

    question = {"trace": name, "to": to.decode(), "client": client, "topic": checked(topic) if topic else ""}
    sid = link.subscribe_raw(to, arrived)
    end = asyncio.get_running_loop().time() + min(seconds or LASTS_MOST, LASTS_MOST)
    renewing = asyncio.create_task(_renew(inbox, question, sid, waiting))
    try:
        begun = await ask(inbox, "trace", question)
        yield {
            "event": "tracing",
            "gateways": sorted(begun.heard),
            "connected": [one["gateway"] for one in begun.items if one.get("connected")],
            "silent": begun.silent,
        }
        async with aclosing(_ordered(waiting, end)) as events:
            async for event in events:
                yield event
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        link.unsubscribe_raw(sid)
        tell(inbox, "trace", {**question, "stop": True})
        with suppress(TimeoutError):
            await link.fence()


async def _ordered(waiting: asyncio.Queue[Event], end: float) -> AsyncGenerator[Event, None]:
    """Yield events sorted by time, each `ORDERED` seconds after its arrival."""
    loop = asyncio.get_running_loop()
    durations = Durations()
    kept: list[tuple[float, int, float, Event]] = []
    number = 0
    while loop.time() < end or kept:
        due = min(kept[0][2] if kept else end, end if loop.time() < end else float("inf"))
        try:
            async with asyncio.timeout(None if due == float("inf") else max(due - loop.time(), 0.0)):
                event = await waiting.get()
            number += 1
            heappush(kept, (event["time"], number, loop.time() + ORDERED, event))
        except TimeoutError:
            pass
        while kept and (kept[0][2] <= loop.time() or loop.time() >= end):
            event = heappop(kept)[-1]
            durations.add(event)
            yield event


async def _renew(inbox: RequestInbox, question: dict[str, Any], sid: bytes, waiting: asyncio.Queue[Event]) -> None:
    """Renew the trace at the gateways at intervals; a gateway that has started meanwhile begins the trace then."""
    link = inbox.link
    wire = link.wire
    while True:
        await asyncio.sleep(TRACE_RENEWAL_S)
        if link.online and link.wire is not wire:
            wire = link.wire
            link.renew(sid, question["to"].encode())
        if waiting.qsize() < EVENTS_WAITING_MOST:
            tell(inbox, "trace", question)


def line(event: Event) -> str:
    """Return an event as a line of text."""
    if event.get("event") == "tracing":
        where = ", ".join(event["connected"])
        text = f"gateways {', '.join(event['gateways'])} are looking"
        text += f"; the client is connected to {where}" if where else ""
        return "; ".join([text, *(f"gateway {one} has not answered" for one in event["silent"])])
    at = datetime.fromtimestamp(event["time"]).astimezone().strftime("%H:%M:%S.%f")[:-3]
    parts = [at, event["gateway"]]
    if "packet" in event:
        parts.append("from client" if event["from_client"] else "to client  ")
        parts.append(event["packet"])
    else:
        parts += [plain(event["client"])] * bool(event["client"])
        parts.append(event["event"])
    for key, text in SAID.items():
        value = event.get(key)
        if value not in (None, False, "", 0) or (key in ("qos", "bytes") and value == 0):
            parts.append(text.format(plain(", ".join(map(str, value)) if isinstance(value, list) else str(value))))
    if "ms" in event:
        parts.append(f"{event['ms']:g} ms after its {event['answers']}")
    return "  ".join(parts)
