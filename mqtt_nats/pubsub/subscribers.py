# SPDX-License-Identifier: Apache-2.0
"""Who gets messages: members, their filters, and the group of members that one filter serves on a topic."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from mypy_extensions import mypyc_attr

from mqtt_nats.backbone.link import Handler, NatsConnection
from mqtt_nats.messages.message import Message
from mqtt_nats.pubsub.backlog import Backlog, Gate
from mqtt_nats.pubsub.filter_index import Overlaps
from mqtt_nats.pubsub.granted_options import Choice, Options
from mqtt_nats.transport.write_buffer import WriteBuffer
from mqtt_streams.subjects import filter_to_subjects

OVERLAPS_MOST: Final = 16
"""Filters of one session that overlap and have their own NATS subscriptions."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Member:
    """A connected session as the subscription table sees it."""

    __slots__ = (
        "_overlaps",
        "_ranks",
        "bridge",
        "checks_each",
        "client_id",
        "durable",
        "filters",
        "gates",
        "options",
        "outlet",
        "version",
    )

    def __init__(self, outlet: WriteBuffer, durable: bool, bridge: bool) -> None:
        self.outlet = outlet
        self.durable = durable
        self.client_id = ""
        self.version = 4
        """Protocol version, 4 (MQTT 3.1.1) or 5."""
        self.bridge = bridge
        """It gets none of its own messages, and RETAIN as it was published: a bridge of 3.1.1, which cannot ask."""
        self.checks_each = False
        """Its packets are its own: it allows topic aliases, limits the size of packets, or may not have each."""
        self.filters: dict[Filter, int] = {}
        """Granted QoS per filter, in the order of confirmation."""
        self.options: dict[Filter, Options] | None = None
        """Of the subscriptions that have any."""
        self.gates: dict[Filter, Gate] | None = None
        """Subscriptions whose new messages wait until their retained messages have been sent."""
        self._ranks: dict[Filter, int] | None = None
        """The place of each filter in that order, where somebody has asked."""
        self._overlaps: Overlaps | None = None
        """Its filters with wildcards that have their own NATS subscriptions, once there are many."""

    def in_order(self, mine: list[Filter]) -> list[Filter]:
        """Some of its filters, in the order of confirmation; what this costs does not grow with its other filters."""
        if len(mine) < 2:
            return mine
        ranks = self._ranks
        if ranks is None:
            ranks = self._ranks = {found: rank for rank, found in enumerate(self.filters)}
        return sorted(mine, key=ranks.__getitem__)

    def joined(self, found: Filter) -> None:
        """A filter was added, or its QoS has changed."""
        self._ranks = None
        if self._overlaps is not None and found.open and found.carrier is None:
            self._overlaps.add(found.text)

    def parted(self, found: Filter | None) -> None:
        """A filter was removed; None: all were."""
        self._ranks = None
        if found is None:
            self._overlaps = None
        elif self._overlaps is not None and found.open and found.carrier is None:
            self._overlaps.remove(found.text)

    def overlapped(self, text: str) -> bool:
        """Whether as many of its filters as may have their own NATS subscriptions overlap a new one."""
        if len(self.filters) < OVERLAPS_MOST:
            return False
        overlaps = self._overlaps
        if overlaps is None:
            overlaps = self._overlaps = Overlaps()
            for one in self.filters:
                if one.open and one.carrier is None:
                    overlaps.add(one.text)
        return overlaps.count(text) >= OVERLAPS_MOST

    def take(self, message: Message, qos: int) -> None:
        """Accept a message at QoS 1 or 2 (regular sessions only)."""
        raise AssertionError("only regular sessions take QoS 1 and 2 messages from core NATS")

    def guard(self, choice: Choice, message: Message, known: bytes = b"") -> None:
        """Accept a message, or not: this member looks at each.

        Args:
            known: its id; empty when it has none.
        """
        raise AssertionError("only members with options or a gate are asked")


class Group:
    """The members that get the messages of one topic through one filter."""

    __slots__ = ("guarded", "high", "low", "low5", "stored", "zero", "zero5")

    def __init__(self) -> None:
        self.zero: list[WriteBuffer] = []
        """Who gets a QoS 0 message in the encoding of 3.1.1."""
        self.zero5: list[WriteBuffer] = []
        """Who gets it in that of 5.0."""
        self.low: list[WriteBuffer] = []
        """Who gets a QoS 1 or 2 message at QoS 0."""
        self.low5: list[WriteBuffer] = []
        self.high: list[tuple[Member, int]] = []
        """Who gets a QoS 1 or 2 message at up to the QoS named."""
        self.guarded: list[tuple[Member, Choice]] = []
        """Members with options or a gate, kept apart so that the others need no check."""
        self.stored = False
        """Somebody gets a QoS 1 or 2 message from the stream, and not here."""

    def __bool__(self) -> bool:
        return bool(self.zero or self.zero5 or self.low or self.low5 or self.high or self.guarded)

    def __len__(self) -> int:
        """How many entries it has: a measure of the memory that it takes."""
        return len(self.zero) + len(self.zero5) + len(self.high) + len(self.guarded)

    def await_stored(self) -> None:
        """Somebody gets QoS 1 and 2 messages from the stream."""
        self.stored = True

    def merge(self, other: Group) -> None:
        """Add the members of ``other``."""
        self.zero += other.zero
        self.zero5 += other.zero5
        self.low += other.low
        self.low5 += other.low5
        self.high += other.high
        self.guarded += other.guarded


NOBODY: Final = Group()  # of every topic without local members


class Filter:
    """A topic filter with local subscribers, and its NATS subscriptions."""

    __slots__ = (
        "backlog",
        "carrier",
        "denied",
        "link",
        "local",
        "members",
        "open",
        "seen",
        "seen_before",
        "sids",
        "subjects",
        "text",
    )

    def __init__(
        self, text: str, subjects: tuple[bytes, ...], link: NatsConnection, local: bool, carrier: Carrier | None = None
    ) -> None:
        self.text = text
        self.open = "+" in text or "#" in text
        """It has wildcards."""
        self.carrier = carrier
        """What brings its messages, where it has no NATS subscriptions of its own."""
        self.subjects = subjects
        self.link = link
        self.local = local
        """Members get what this gateway's own clients publish without a way through NATS."""
        self.members: dict[Member, int] = {}
        self.sids: list[bytes] = []
        self.denied = False
        """NATS does not allow this gateway to subscribe it."""
        self.backlog: Backlog | None = None
        """While messages that were missed are being read: those that come meanwhile."""
        self.seen: dict[bytes, str] = {}
        """By the ids of QoS 1 and 2 messages that came through NATS lately their subjects; those of the time before."""
        self.seen_before: dict[bytes, str] = {}


class Carrier:
    """NATS subscriptions that bring the messages of many filters, which overlap others of their sessions.

    nats-server sends a message once for each subscription that matches, however many of them are one session's.
    """

    __slots__ = ("carried", "find", "link", "sids", "subjects")

    def __init__(self, text: str, link: NatsConnection, find: Callable[[bytes], Collection[Filter]]) -> None:
        """``text`` is a filter that matches whatever the carried ones do; ``find``: who gets a subject's messages."""
        self.link = link
        self.find = find
        self.carried: dict[Filter, Handler] = {}
        self.subjects = tuple(subject.encode() for subject in filter_to_subjects(text))
        self.sids = [link.subscribe_raw(subject, self.arrived) for subject in self.subjects]

    def arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Hand a message to the filters that are carried."""
        carried = self.carried
        for found in tuple(self.find(subject)):
            handler = carried.get(found)
            if handler is not None:
                handler(subject, reply, headers, payload)

    def renew(self) -> None:
        """Subscribe again after a reconnect."""
        for sid, subject in zip(self.sids, self.subjects, strict=True):
            self.link.renew(sid, subject)

    def end(self) -> None:
        """Nothing is carried any more."""
        for sid in self.sids:
            self.link.unsubscribe_raw(sid)


def cover(levels: list[str]) -> str:
    """The filter of the carrier: the first two levels, as far as they are literals, and all below."""
    head: list[str] = []
    for level in levels[:2]:
        if level == "+" or level == "#":
            break
        head.append(level)
    return "/".join([*head, "#"])
