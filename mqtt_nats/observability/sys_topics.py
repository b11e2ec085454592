# SPDX-License-Identifier: Apache-2.0
"""`$SYS` topics: published every `sys_interval`; a new subscriber gets the last values at once.

Each gateway publishes its own topics below `$SYS/brokers/<gateway>/` through NATS. It also sends a report to the other
gateways, on a subject of gateways, so that each gateway can send its own clients the sums below `$SYS/broker/` and the
last values of all gateways. Where there are many gateways, only those whose clients subscribe to `$SYS` read the
reports: else the number of reports that are read would grow with the square of the number of gateways.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final

import orjson

from mqtt_nats import __version__
from mqtt_nats.backbone.connect import Phase
from mqtt_nats.codec import matches
from mqtt_nats.messages.message import Message
from mqtt_nats.observability.load_averages import Averages
from mqtt_nats.observability.topics import Report, of_cluster, of_gateway, totals
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.gateway_subjects import REPORTS, REPORTS_WANTED
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.retained import RetainedMessage
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.stored import records_in
from mqtt_streams.subjects import SYSTEM_LEVEL, system_subject

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.messages.identity import Identity
    from mqtt_nats.pubsub.data_path import Path

log = logging.getLogger("mqtt_nats.broker")

MISSED: Final = 3
"""Intervals without a report after which a gateway's values are dropped."""

GATEWAYS_MOST: Final = 4000
"""Most other gateways whose reports are kept."""

GATEWAYS_READ_MOST: Final = 32
"""Number of other gateways up to which reports are read although no client wants them: a first client has the sums."""

NOT_READ: Final = {"messages": 0, "bytes": 0, "retained": 0, "sessions": 0}
"""In place of the sizes of the streams, which are read only where a client wants them."""

UNTOLD: Final = ("stored", "lag", "nats")
"""Counters that are in no topic, and are left out of reports."""


def of_system(topic_filter: str) -> bool:
    """Whether a topic filter is below `$SYS`."""
    return topic_filter == SYSTEM_LEVEL or topic_filter.startswith(SYSTEM_LEVEL + "/")


def spread(path: Path, topic: str, payload: bytes, *, abroad: bool) -> None:
    """Publish on a `$SYS` topic at QoS 0: to all gateways, or (``abroad`` False) to this gateway's clients only."""
    spread_under(path, topic, system_subject(topic).encode(), payload, abroad=abroad)


def spread_under(path: Path, topic: str, subject: bytes, payload: bytes, *, abroad: bool) -> None:
    """Publish as `spread` on a topic whose subject is known."""
    if abroad:
        path.link.out.append(b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload))
    if not path.table.wanted(topic):
        return
    route = path.table.route_of_subject(subject)
    if route is None:
        return
    message = Message(route.key, payload, 0)
    if abroad:
        path.fanout.local(route, message)
    else:
        for group in route.groups.values():
            path.fanout.group(group, message)


class System:
    """Publisher of the `$SYS` topics of one gateway, with the last reports of other gateways.

    Args:
        interval: seconds between two publishes; 0 = nothing is published.
        snapshot: returns all counters of the gateway.
    """

    def __init__(
        self,
        nats: NatsLinks,
        path: Path,
        identity: Identity,
        interval: float,
        snapshot: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        self._nats, self._path, self._identity, self._snapshot = nats, path, identity, snapshot
        self._interval = interval
        self._averages = Averages()
        self._report: Report | None = None
        self._others: dict[str, tuple[float, Report]] = {}
        """Last reports of other gateways with the time of arrival (loop time in seconds), by gateway id."""
        self._most = self._most_here = 0
        self._streams: dict[str, int] = {}
        self._own = b"%b.%b" % (REPORTS, identity.id.encode())
        """Subject on which other gateways answer a report of this gateway."""
        self._subjects: dict[bytes, bytes] = {}
        """Subscriptions by subject."""
        self._wanted_sid = b""
        if self._interval:
            self._wanted_sid = path.link.subscribe_raw(REPORTS_WANTED, self._wanted)
            self._read_reports()
        nats.reconnect.register(Phase.REQUESTS, self._renew)

    def _renew(self) -> None:
        """Subscribe again after a reconnect."""
        if self._wanted_sid:
            self._path.link.renew(self._wanted_sid, REPORTS_WANTED)
        for subject, sid in self._subjects.items():
            self._path.link.renew(sid, subject)

    def _read_reports(self) -> None:
        """Subscribe to the reports of other gateways."""
        for subject in (REPORTS, self._own):
            self._subjects[subject] = self._path.link.subscribe_raw(subject, self._heard)

    def _choose(self) -> None:
        """Read the reports of others only if there are few, or a client wants them."""
        if self._subjects and len(self._others) <= GATEWAYS_READ_MOST:
            return
        wanted = any(self._path.table.wanted(topic) for topic in self._topics())
        if wanted:
            self._ask()
        elif self._subjects:
            for sid in self._subjects.values():
                self._path.link.unsubscribe_raw(sid)
            self._subjects.clear()
            self._others.clear()

    def _ask(self) -> None:
        """Read the reports of others from now on, and ask for the present ones, unless they are read already."""
        if self._interval and not self._subjects and self._report is not None:
            self._read_reports()
            self._path.link.out.append(b"PUB %b %b 0\r\n\r\n" % (REPORTS_WANTED, self._own))
            self._path.link.kick()

    def _wanted(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Send the last report to a gateway that begins to read reports."""
        if reply.startswith(REPORTS + b".") and self._report is not None:
            body = orjson.dumps(self._report)
            self._path.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
            self._path.link.kick()

    async def publish_topics(self) -> None:
        """Publish every `sys_interval` while the gateway runs."""
        if not self._interval:
            return
        last = time.monotonic()
        try:
            while True:
                try:
                    now = time.monotonic()
                    await self.tick(now - last)
                    last = now
                except Exception:
                    log.exception("$SYS topics were not published")
                await asyncio.sleep(self._interval)
        finally:
            self._tell(orjson.dumps({"id": self._identity.id, "gone": True}), b"")

    async def tick(self, seconds: float) -> None:
        """Publish the present values, ``seconds`` after the last time."""
        found = await self._snapshot()
        self._averages.update(totals(found), seconds)
        self._most_here = max(self._most_here, found["clients"])
        first = self._report is None
        self._choose()
        await self._look()
        for name in UNTOLD:
            del found[name]
        self._report = report = found | {
            "interval": self._interval,
            "version": __version__,
            "loads": self._averages.loads,
            "most": self._most_here,
            "streams": self._streams,
        }
        self._tell(orjson.dumps(report), self._own if first else b"")
        for topic, value in of_gateway(report).items():
            spread(self._path, topic, value.encode(), abroad=True)
        for topic, value in self._sums().items():
            spread(self._path, topic, value.encode(), abroad=False)
        self._path.link.kick()

    async def _look(self) -> None:
        """Read the sizes of the streams, if reports are read here; without an answer the former values stay."""
        if not self._subjects:
            self._streams = {}  # old values would be taken for those of this report
            return
        found: dict[str, int] = {}
        try:
            for name, key in ((MESSAGES, "messages"), (RETAINED, "retained"), (SESSIONS, "sessions")):
                state = (await call(self._nats.inbox, f"STREAM.INFO.{name}"))["state"]
                found[key] = int(state["messages"]) if name == MESSAGES else records_in(state)
                if name == MESSAGES:
                    found["bytes"] = int(state["bytes"])
        except (ApiError, NoResponders, RequestTimeout, TimeoutError):
            return
        self._streams = found

    def _tell(self, body: bytes, reply: bytes) -> None:
        link = self._path.link
        target = b"%b %b" % (REPORTS, reply) if reply else REPORTS
        link.out.append(b"PUB %b %d\r\n%b\r\n" % (target, len(body), body))
        link.kick()

    def _heard(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Store the report of another gateway; answer the first report of a new gateway."""
        try:
            report: dict[str, Any] = orjson.loads(payload)
            identity = report["id"]
            if identity == self._identity.id or not isinstance(identity, str):
                return
            if report.get("gone"):
                self._others.pop(identity, None)
            elif len(self._others) < GATEWAYS_MOST or identity in self._others:
                float(report["interval"])
                of_gateway(report)
                of_cluster([report], 0)
                self._others[identity] = asyncio.get_running_loop().time(), report
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
            log.debug("a gateway's report cannot be read")
            return
        if reply == b"%b.%b" % (REPORTS, identity.encode()) and self._report is not None:
            body = orjson.dumps(self._report)
            self._path.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
            self._path.link.kick()

    def _known(self) -> list[Report]:
        """Return the last reports of all gateways, after dropping gateways that are silent for `MISSED` intervals."""
        now = asyncio.get_running_loop().time()
        gone = [name for name, (at, one) in self._others.items() if now - at > MISSED * float(one["interval"])]
        for name in gone:
            del self._others[name]
        own = [] if self._report is None else [self._report]
        return own + [one for _, one in self._others.values()]

    def _sums(self) -> dict[str, str]:
        reports = self._known()
        if not reports:
            return {}
        self._most = max(self._most, sum(one["clients"] for one in reports))
        return of_cluster(reports, self._most)

    def _topics(self) -> Iterator[str]:
        """Yield all topics, also those that have no value until the sizes of the streams are read."""
        reports = [{**one, "streams": one["streams"] or NOT_READ} for one in self._known()]
        if reports:
            yield from of_cluster(reports, 0)
        for one in reports:
            yield from of_gateway(one)

    def values(self) -> dict[str, str]:
        """Return the last value of every topic."""
        found = self._sums()
        for one in self._known():
            found |= of_gateway(one)
        return found

    def page(self, topic_filter: str, subject: str) -> list[RetainedMessage]:
        """Return the last values in the form of retained messages, for one subject of a subscription."""
        self._ask()
        wild = "*" in subject or ">" in subject
        stamp = time.time_ns()
        return [
            RetainedMessage(one, 0, value.encode(), b"", 0, stamp)
            for topic, value in self.values().items()
            if (one := system_subject(topic)) == subject or (wild and matches(topic_filter, topic))
        ]
