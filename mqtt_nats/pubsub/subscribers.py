# SPDX-License-Identifier: Apache-2.0
"""Who gets messages: members, their filters, and the group of members that one filter serves on a topic."""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from mqtt_nats.backbone.link import Link
from mqtt_nats.messages.message import Message
from mqtt_nats.pubsub.backlog import Backlog, Gate
from mqtt_nats.pubsub.granted_options import Choice, Options
from mqtt_nats.transport.write_buffer import Outlet


@mypyc_attr(allow_interpreted_subclasses=True)
class Member:
    """A connected session as the subscription table sees it."""

    __slots__ = (
        "_ranks",
        "bridge",
        "client_id",
        "durable",
        "filters",
        "gates",
        "options",
        "outlet",
        "picky",
        "version",
    )

    def __init__(self, outlet: Outlet, durable: bool, bridge: bool) -> None:
        self.outlet = outlet
        self.durable = durable
        self.client_id = ""
        self.version = 4
        """Protocol version, 4 (MQTT 3.1.1) or 5."""
        self.bridge = bridge
        """It gets none of its own messages, and RETAIN as it was published: a bridge of 3.1.1, which cannot ask."""
        self.picky = False
        """Its packets are its own: it allows topic aliases, or limits the size of packets."""
        self.filters: dict[Filter, int] = {}
        """Granted QoS per filter, in the order of confirmation."""
        self.options: dict[Filter, Options] | None = None
        """Of the subscriptions that have any."""
        self.gates: dict[Filter, Gate] | None = None
        """Subscriptions whose new messages wait until their retained messages have been sent."""
        self._ranks: dict[Filter, int] | None = None
        """The place of each filter in that order, where somebody has asked."""

    def in_order(self, mine: list[Filter]) -> list[Filter]:
        """Some of its filters, in the order of confirmation; what this costs does not grow with its other filters."""
        if len(mine) < 2:
            return mine
        ranks = self._ranks
        if ranks is None:
            ranks = self._ranks = {found: rank for rank, found in enumerate(self.filters)}
        return sorted(mine, key=ranks.__getitem__)

    def reordered(self) -> None:
        """A filter was added or removed."""
        self._ranks = None

    def take(self, message: Message, qos: int) -> None:
        """Accept a message at QoS 1 or 2 (regular sessions only)."""
        raise AssertionError("only regular sessions take QoS 1 and 2 messages from core NATS")

    def guard(self, choice: Choice, message: Message) -> None:
        """Accept a message, or not: this member looks at each."""
        raise AssertionError("only members with options or a gate are asked")


class Group:
    """The members that get the messages of one topic through one filter."""

    __slots__ = ("guarded", "high", "low", "low5", "zero", "zero5")

    def __init__(self) -> None:
        self.zero: list[Outlet] = []
        """Who gets a QoS 0 message in the encoding of 3.1.1."""
        self.zero5: list[Outlet] = []
        """Who gets it in that of 5.0."""
        self.low: list[Outlet] = []
        """Who gets a QoS 1 or 2 message at QoS 0."""
        self.low5: list[Outlet] = []
        self.high: list[tuple[Member, int]] = []
        """Who gets a QoS 1 or 2 message at up to the QoS named."""
        self.guarded: list[tuple[Member, Choice]] = []
        """Members with options or a gate, kept apart so that the others need no check."""

    def __bool__(self) -> bool:
        return bool(self.zero or self.zero5 or self.low or self.low5 or self.high or self.guarded)

    def __len__(self) -> int:
        """How many entries it has: a measure of the memory that it takes."""
        return len(self.zero) + len(self.zero5) + len(self.high) + len(self.guarded)

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

    __slots__ = ("backlog", "denied", "link", "local", "members", "seen", "seen_before", "sids", "subjects", "text")

    def __init__(self, text: str, subjects: tuple[bytes, ...], link: Link, local: bool) -> None:
        self.text = text
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
        self.seen: dict[bytes, None] = {}
        """Ids of QoS 1 and 2 messages that came through NATS lately, and those of the time before."""
        self.seen_before: dict[bytes, None] = {}
