# SPDX-License-Identifier: Apache-2.0
"""Subscribers: members, their filters, and the group of members that one filter serves on a topic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from mqtt_nats.backbone.link import Handler, NatsConnection
from mqtt_nats.messages.message import Message
from mqtt_nats.pubsub.backlog import Backlog, Gate
from mqtt_nats.pubsub.filter_index import Overlaps
from mqtt_nats.pubsub.granted_options import Choice, Options
from mqtt_nats.transport.write_buffer import WriteBuffer
from mqtt_streams.subjects import filter_to_subjects

if TYPE_CHECKING:
    from mqtt_nats.pubsub.beginnings import Beginning
    from mqtt_nats.pubsub.routing_table import Route

OVERLAPS_MOST: Final = 16
"""Maximum number of overlapping filters of one session that have their own NATS subscriptions."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Member:
    """Member of the subscription table: a connected session."""

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
        "version",
        "write_buffer",
    )

    def __init__(self, write_buffer: WriteBuffer, durable: bool, bridge: bool) -> None:
        self.write_buffer = write_buffer
        self.client_id = ""
        self.version = 4
        """Protocol version, 4 (MQTT 3.1.1) or 5."""
        self.durable = durable
        self.bridge = bridge
        """Whether the client is a 3.1.1 bridge, which cannot ask: no own messages, RETAIN as published."""
        self.checks_each = False
        """Whether each packet is checked: topic aliases, a maximum packet size, or rules for each message."""
        self.filters: dict[Filter, int] = {}
        """Granted QoS per filter, in the order of confirmation."""
        self.options: dict[Filter, Options] | None = None
        """Options by filter, for the filters that have any; None = no filter has options."""
        self.gates: dict[Filter, Gate] | None = None
        """Gates of subscriptions whose new messages wait for older messages."""
        self._ranks: dict[Filter, int] | None = None
        """Place of each filter in the order of confirmation; None = not computed."""
        self._overlaps: Overlaps | None = None
        """Filters with wildcards and their own NATS subscriptions; None = not computed."""

    def in_order(self, mine: list[Filter]) -> list[Filter]:
        """Return some of its filters in the order of confirmation; the cost does not grow with its other filters."""
        if len(mine) < 2:
            return mine
        ranks = self._ranks
        if ranks is None:
            ranks = self._ranks = {found: rank for rank, found in enumerate(self.filters)}
        return sorted(mine, key=ranks.__getitem__)

    def joined(self, found: Filter) -> None:
        """Note that a filter was added, or its QoS has changed."""
        self._ranks = None
        if self._overlaps is not None and found.open and found.carrier is None:
            self._overlaps.add(found.text)

    def parted(self, found: Filter | None) -> None:
        """Note that a filter was removed; None: all filters were removed."""
        self._ranks = None
        if found is None:
            self._overlaps = None
        elif self._overlaps is not None and found.open and found.carrier is None:
            self._overlaps.remove(found.text)

    def gate(self, found: Filter) -> Gate | None:
        """Return the gate of a filter; None = new messages do not wait."""
        return None if self.gates is None else self.gates.get(found)

    def close_by(self, gate: Gate) -> None:
        """Have new messages of a filter wait at a gate."""
        if self.gates is None:
            self.gates = {}
        self.gates[gate.found] = gate

    def forget_gate(self, found: Filter) -> Gate | None:
        """Let new messages of a filter pass, and return the filter's gate; None = it had none."""
        if self.gates is None:
            return None
        gate = self.gates.pop(found, None)
        if not self.gates:  # an empty dictionary would take memory for each client
            self.gates = None
        return gate

    def choose_options(self, found: Filter, options: Options | None) -> None:
        """Set the options of a filter; None = it has none."""
        if options is not None:
            if self.options is None:
                self.options = {}
            self.options[found] = options
        elif self.options:
            self.options.pop(found, None)

    def forget_filters(self) -> None:
        """Forget all filters and their options."""
        self.filters.clear()
        self.parted(None)
        self.options = None

    def overlapped(self, text: str) -> bool:
        """Return whether a new filter overlaps the maximum number of filters with their own NATS subscriptions."""
        if len(self.filters) < OVERLAPS_MOST:
            return False
        overlaps = self._overlaps
        if overlaps is None:
            overlaps = self._overlaps = Overlaps()
            for one in self.filters:
                if one.open and one.carrier is None:
                    overlaps.add(one.text)
        return overlaps.count(text) >= OVERLAPS_MOST

    def send_or_queue(self, message: Message, qos: int) -> None:
        """Accept a message at QoS 1 or 2 (regular sessions only)."""
        raise AssertionError("only regular sessions take QoS 1 and 2 messages from core NATS")

    def guard(self, choice: Choice, message: Message, known: bytes = b"") -> None:
        """Check a message, and accept or drop it.

        Args:
            known: its id; empty when it has none.
        """
        raise AssertionError("only members with options or a gate are asked")


class Group:
    """Group of members that get the messages of one topic through one filter."""

    __slots__ = ("guarded", "high", "low", "low5", "stored", "zero", "zero5")

    def __init__(self) -> None:
        self.zero: list[WriteBuffer] = []
        """Outlets of 3.1.1 members, for QoS 0 messages."""
        self.zero5: list[WriteBuffer] = []
        """Outlets of 5.0 members, for QoS 0 messages."""
        self.low: list[WriteBuffer] = []
        """Outlets of 3.1.1 members that get QoS 1 and 2 messages at QoS 0."""
        self.low5: list[WriteBuffer] = []
        """Outlets of 5.0 members that get QoS 1 and 2 messages at QoS 0."""
        self.high: list[tuple[Member, int]] = []
        """Members that get QoS 1 and 2 messages, with the highest QoS granted."""
        self.guarded: list[tuple[Member, Choice]] = []
        """Members that check each message, with their choices; kept apart so that other members need no check."""
        self.stored = False
        """Whether a durable member gets QoS 1 and 2 messages from the stream instead of here."""

    def __bool__(self) -> bool:
        return bool(self.zero or self.zero5 or self.low or self.low5 or self.high or self.guarded)

    def __len__(self) -> int:
        """Return the number of entries, as a measure of the group's memory."""
        return len(self.zero) + len(self.zero5) + len(self.high) + len(self.guarded)

    def await_stored(self) -> None:
        """Note that a durable member gets QoS 1 and 2 messages from the stream."""
        self.stored = True

    def without(self, members: Set[Member]) -> Group:
        """Return the group without some members."""
        found = Group()
        found.merge(self)
        if self.stored:
            found.await_stored()
        found.remove(members)
        return found

    def remove(self, members: Set[Member]) -> None:
        """Remove members, and those that stand in for them."""
        gone = {id(member.write_buffer) for member in members}
        for outlets in (self.zero, self.zero5, self.low, self.low5):
            outlets[:] = [one for one in outlets if id(one) not in gone]
        self.high[:] = [one for one in self.high if one[0] not in members]
        self.guarded[:] = [one for one in self.guarded if id(one[0].write_buffer) not in gone]

    def merge(self, other: Group) -> None:
        """Add the members of ``other``."""
        self.zero += other.zero
        self.zero5 += other.zero5
        self.low += other.low
        self.low5 += other.low5
        self.high += other.high
        self.guarded += other.guarded


NOBODY: Final = Group()  # group of every topic without local members


class Filter:
    """Topic filter with local subscribers, and its NATS subscriptions."""

    __slots__ = (
        "backlog",
        "beginnings",
        "carrier",
        "denied",
        "joining",
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
        """Whether the filter has wildcards."""
        self.local = local
        """Whether members get the messages of this gateway's clients directly, without NATS."""
        self.denied = False
        """Whether NATS does not allow this gateway to subscribe the filter."""
        self.carrier = carrier
        """Carrier that brings the filter's messages; None = the filter has its own NATS subscriptions."""
        self.subjects = subjects
        self.link = link
        self.members: dict[Member, int] = {}
        self.sids: list[bytes] = []
        self.backlog: Backlog | None = None
        """Queue of new messages while missed messages are read; None = no missed messages are read."""
        self.beginnings: dict[Member, Beginning] | None = None
        """Beginnings of recent members; None = there are none."""
        self.joining: set[Member] | None = None
        """Members that have just joined: what the connection brings is older; None = there are none."""
        self.seen: dict[bytes, str] = {}
        """Ids of recent QoS 1 and 2 messages from NATS, with their subjects; `seen_before` has the older half."""
        self.seen_before = self.seen  # until the first rotation: most filters have no ids, and need one dictionary

    def carry(self, sids: list[bytes]) -> None:
        """Note the subscription ids of the filter in NATS."""
        self.sids = sids

    def deny(self) -> None:
        """Note that NATS does not allow this gateway to subscribe the filter."""
        self.denied = True

    def renew(self) -> None:
        """Subscribe again, after a reconnect or after NATS has denied it."""
        self.denied = False
        if self.carrier is None:
            for sid, subject in zip(self.sids, self.subjects, strict=True):
                self.link.renew(sid, subject)

    def rotate(self) -> bool:
        """Forget the older half of the remembered ids; return whether others are left."""
        self.seen_before, self.seen = self.seen, {}
        return bool(self.seen_before)

    def begin(self, member: Member, beginning: Beginning) -> None:
        """Note the beginning of a member's subscription."""
        if self.beginnings is None:
            self.beginnings = {}
        self.beginnings[member] = beginning
        if self.backlog is not None:
            self.backlog.join(member)

    def begin_joining(self, member: Member) -> None:
        """Note that a member has just joined, which others have joined before.

        A message that is acknowledged may still be on its way from nats-server, on another connection than the
        acknowledgement. So what the filter's connection brings before a PONG is older than the subscription.
        """
        if len(self.members) == 1 and self.carrier is None:
            return  # nats-server gets the filter's subscription behind what is older
        if self.joining is None:
            self.joining = set()
        self.joining.add(member)

    def end_joining(self, member: Member) -> None:
        """Note that the subscription of a member is in force: later messages are for it, those that wait are not."""
        if self.joining is None or member not in self.joining:
            return
        self.joining.discard(member)
        self.joining = self.joining or None
        if self.backlog is not None:
            self.backlog.end_joining(member)

    def remove_member(self, member: Member) -> None:
        """Remove a member."""
        del self.members[member]
        if self.joining is not None:
            self.joining.discard(member)
            self.joining = self.joining or None
        if self.beginnings is not None:
            self.beginnings.pop(member, None)
        if self.backlog is not None:
            self.backlog.part(member)

    def forget_beginnings(self, before: float) -> bool:
        """Forget beginnings before a Unix time in seconds; return whether others are left."""
        left = {member: one for member, one in (self.beginnings or {}).items() if one.at >= before}
        self.beginnings = left or None
        return bool(left)

    def queue(self, backlog: Backlog) -> None:
        """Queue new messages while missed messages are read; what is queued already is dropped, and read as well."""
        if self.backlog is not None:
            self.doubt_beginnings()
        self.backlog = backlog

    def keep_missed(self, backlog: Backlog, route: Route, headers: bytes, payload: bytes, reply: bytes) -> None:
        """Queue a message."""
        if not backlog.keep_missed(route, headers, payload, reply):
            self.doubt_beginnings()

    def doubt_beginnings(self, since: float = 0.0) -> None:
        """Note that messages that count as come since recent members joined have not come, and are to be read.

        Args:
            since: Unix time in seconds from which the last sequence of the stream was read.
        """
        for one in (self.beginnings or {}).values():
            if one.read_at >= since:
                one.doubt()

    def take_backlog(self) -> Backlog | None:
        """Return the queue, into which no more messages go; None = there is none."""
        backlog, self.backlog = self.backlog, None
        return backlog


class Carrier:
    """Carrier: NATS subscriptions that bring the messages of many filters that overlap others of their sessions.

    nats-server sends a message once for each matching subscription, even if all of them belong to one session.
    """

    __slots__ = ("carried", "find", "link", "sids", "subjects")

    def __init__(self, text: str, link: NatsConnection, find: Callable[[bytes], Collection[Filter]]) -> None:
        """``text`` is a filter that covers the carried filters; ``find`` returns the filters that deliver a subject."""
        self.link = link
        self.find = find
        self.carried: dict[Filter, Handler] = {}
        self.subjects = tuple(subject.encode() for subject in filter_to_subjects(text))
        self.sids = [link.subscribe_raw(subject, self.arrived) for subject in self.subjects]

    def arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Pass a message to the carried filters that deliver its subject."""
        carried = self.carried
        for found in tuple(self.find(subject)):
            handler = carried.get(found)
            if handler is not None:
                handler(subject, reply, headers, payload)

    def renew(self) -> None:
        """Subscribe again after a reconnect."""
        for sid, subject in zip(self.sids, self.subjects, strict=True):
            self.link.renew(sid, subject)

    def unsubscribe(self) -> None:
        """Unsubscribe: the carrier has no filters left."""
        for sid in self.sids:
            self.link.unsubscribe_raw(sid)


def cover(levels: list[str]) -> str:
    """Return the carrier's filter: the leading literals of the first two levels, then ``#``."""
    head: list[str] = []
    for level in levels[:2]:
        if level == "+" or level == "#":
            break
        head.append(level)
    return "/".join([*head, "#"])
