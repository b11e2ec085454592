# SPDX-License-Identifier: Apache-2.0
"""Reads the histories of all clients, and finds what was promised and not kept.

Nothing here knows a broker: a promise is about what clients have seen. A message counts as lost when its publisher has
the acknowledgement, a subscription of a session that outlives its connections was granted before the message was
handed over and not ended before it was acknowledged, both QoS are at least 1, and that subscriber's application never
got it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mqtt_nats.codec import matches
from tests.chaos.history import Event
from tests.chaos.messages import Message

SHARE = "$share/"
_RECENT = 20  # connections of one client that may have taken its session over from one that is still used
_SHOWN = 5  # violations of one kind that are described one by one


@dataclass(frozen=True)
class Promises:
    """What is promised in a run. Everything that a durable session makes possible, unless said otherwise.

    Attributes:
        order: the first deliveries to a subscriber, of one publisher's messages on one topic at one QoS, keep the
            publisher's order.
        leaders_change: then the order holds where a message was acknowledged before the other one was sent: a leader
            that goes away may drop one of those that were on their way, and store what came after it.
        once: at QoS 2 on both sides no application gets a message twice.
        marked: what comes again has DUP, unless its publisher had to send it again.
        sessions: a session that outlives its connections is present at every reconnect.
        resent: seconds after CONNACK in which everything unacknowledged has come again; 0: it has to come, however
            late, when the connection lasts.
        shared: what a group has subscribed comes to one of its members. That is waited for, more than half a minute:
            so late goes to another member what one had when its gateway was killed.
        handover: seconds after another connection's CONNACK from which the former one gets no acknowledgement any more.
    """

    order: bool = True
    leaders_change: bool = False
    once: bool = True
    marked: bool = True
    sessions: bool = True
    resent: float = 0.0
    shared: bool = False
    handover: float = 2.0


EVERYTHING = Promises()


@dataclass(frozen=True)
class Violation:
    """One broken promise.

    Attributes:
        kind: a word or two.
        text: what happened to whom.
        who: the subscriber, where it is known.
        message: the message, where it is known.
    """

    kind: str
    text: str
    who: str = ""
    message: Message | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Verdict:
    """What a history says.

    Attributes:
        violations: broken promises, by kind and time.
        figures: counts, and times in milliseconds.
        missing: (subscriber, publisher, number) of what was acknowledged and not delivered.
    """

    violations: list[Violation] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)
    missing: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def kinds(self) -> set[str]:
        """The kinds of the violations."""
        return {one.kind for one in self.violations}

    def lines(self) -> list[str]:
        """The violations; of a kind that has many, the first ones and a count."""
        counts = Counter(one.kind for one in self.violations)
        shown: Counter[str] = Counter()
        lines: list[str] = []
        for one in self.violations:
            shown[one.kind] += 1
            if shown[one.kind] <= _SHOWN:
                lines.append(str(one))
        lines.extend(f"{kind}: {count - _SHOWN} more" for kind, count in counts.items() if count > _SHOWN)
        return lines


@dataclass(slots=True)
class _Sent:
    """A message as its publisher knows it."""

    topic: str
    qos: int
    at: int
    times: int = 1
    acked: int = 0
    """When; 0 = not."""
    doubtful: bool = False
    """The publisher's session was gone before it knew."""


@dataclass(slots=True)
class _Subscription:
    filter: str
    qos: int
    since: int
    until: int = 1 << 62


@dataclass
class _Subscriber:
    """What one client id has received, over all its connections."""

    durable: bool = True
    subscriptions: list[_Subscription] = field(default_factory=list)
    delivered: dict[Message, int] = field(default_factory=dict)
    """When first."""
    times: Counter[Message] = field(default_factory=Counter)
    retained: set[Message] = field(default_factory=set)
    """Messages that came with RETAIN 1, and not yet with RETAIN 0."""
    fresh: Counter[Message] = field(default_factory=Counter)
    """How often at QoS 1 for the first time, or without DUP."""
    newest: dict[tuple[str, str, int], int] = field(default_factory=dict)
    """Highest number by publisher, topic and QoS."""
    held: dict[int, Message] = field(default_factory=dict)
    """QoS 2 messages by identifier, until PUBREL."""
    open: dict[int, Message] = field(default_factory=dict)
    """By identifier: what this connection has received at QoS 1 or 2, last."""
    owed: dict[int, Message] = field(default_factory=dict)
    """What a lost connection has left unacknowledged."""
    ever: bool = False
    back: int = 0
    """When the connection was accepted that has to bring what is owed."""
    groups: set[str] = field(default_factory=set)
    """Shared subscriptions (``$share/...``): then order and repetitions are those of the group."""


@dataclass
class _Group:
    """A shared subscription: what all of its members together have received."""

    filter: str
    qos: int
    since: int
    until: int = 1 << 62
    """When the first member left."""
    times: Counter[Message] = field(default_factory=Counter)


def check(events: Iterable[Event], promises: Promises = EVERYTHING) -> Verdict:
    """What the events of all clients, in the order of their time, say about the promises."""
    return _Checker(list(events), promises).verdict()


class _Checker:
    def __init__(self, events: Sequence[Event], promises: Promises) -> None:
        self._events = events
        self._promises = promises
        self._verdict = Verdict()
        self._sent: dict[Message, _Sent] = {}
        self._subscribers: defaultdict[str, _Subscriber] = defaultdict(_Subscriber)
        self._groups: dict[str, _Group] = {}
        self._repeats = self._reordered = self._resends = self._duplicates = 0
        self._unasked = 0
        self._slowest_resume = 0
        self._waiting: defaultdict[str, set[Message]] = defaultdict(set)
        self._progress: dict[str, int] = {}
        self._longest = 0
        self._wills: dict[Message, Event] = {}
        self._will_ends: dict[Message, str] = {}
        self._accepted: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self._handed: dict[tuple[str, int, int], int] = {}

    def _violation(self, kind: str, text: str, who: str = "", message: Message | None = None) -> None:
        self._verdict.violations.append(Violation(kind, text, who, message))

    def verdict(self) -> Verdict:
        """Go through all events, then count what is missing."""
        for event in self._events:
            handler = getattr(self, f"_on_{event.what.replace('-', '_')}", None)
            if handler is not None:
                handler(event)
        self._find_lost()
        self._find_lost_of_groups()
        self._judge_wills()
        delays = [
            at - self._sent[message].at
            for one in self._subscribers.values()
            for message, at in one.delivered.items()
            if message in self._sent
        ]
        kills = sum(event.what == "killed" for event in self._events)
        dropped = sum(event.what == "lost" and event.reason == "dropped" for event in self._events)
        self._verdict.figures = {
            "sent": len(self._sent),
            "acked": sum(one.acked > 0 for one in self._sent.values()),
            "delivered": sum(len(one.delivered) for one in self._subscribers.values()),
            "kills": kills,
            "reconnects": sum(max(len(each) - 1, 0) for each in self._accepted.values()),
            "dropped": dropped,
            "wills": sum(one == "once" for one in self._will_ends.values()),
            "lost": len(self._verdict.missing),
            "duplicated": self._duplicates,
            "shared": sum(len(one.times) for one in self._groups.values()),
            "repeated": self._repeats,
            "resent": self._resends,
            "reordered": self._reordered,
            "longest_pause_ms": self._longest // 1_000_000,
            "longest_delay_ms": max(delays, default=0) // 1_000_000,
            "longest_resume_ms": self._slowest_resume // 1_000_000,
        }
        return self._verdict

    # -- connections ------------------------------------------------------------------------------

    def _on_connect(self, event: Event) -> None:
        self._subscribers[event.who].durable = not event.clean

    def _on_connected(self, event: Event) -> None:
        one = self._subscribers[event.who]
        self._accepted[event.who].append((event.t, event.conn))
        if one.ever and one.durable and not event.present and self._promises.sessions:
            self._violation("session gone", f"{event.who} was there before, and its session is not present")
        if not event.present:
            one.held.clear()
            one.owed.clear()
            one.newest = dict(one.newest)
        one.ever = True
        one.open.clear()
        one.back = event.t

    def _on_lost(self, event: Event) -> None:
        one = self._subscribers[event.who]
        for identifier in event.open or ():
            if identifier in one.open:
                one.owed[identifier] = one.open[identifier]
        one.back = 0
        self._leave_will(event)

    def _on_taken_over(self, event: Event) -> None:
        self._leave_will(event)

    def _leave_will(self, event: Event) -> None:
        """A connection has ended without DISCONNECT: a will without a delay is due, whoever has ended it."""
        will = self._wills.get((event.who, -event.conn))
        if will is not None and not will.delay:
            self._will_ends.setdefault((event.who, -event.conn), "once")

    def _on_disconnect(self, event: Event) -> None:
        self._finish_owed(event)
        self._will_ends[event.who, -event.conn] = "never"

    def _on_abandoned(self, event: Event) -> None:
        self._finish_owed(event)
        self._will_ends[event.who, -event.conn] = "once"

    def _finish_owed(self, event: Event) -> None:
        """The client ends by itself: what it had not acknowledged has had its time to come again."""
        one = self._subscribers[event.who]
        if one.durable and one.back:
            for identifier, message in one.owed.items():
                if one.groups and identifier not in one.held:
                    continue  # at QoS 1 others of the group may have had it meanwhile
                self._violation(
                    "not sent again", f"{event.who} has not acknowledged {_name(message)} (packet id {identifier})"
                )

    # -- publishers -------------------------------------------------------------------------------

    def _on_publish(self, event: Event) -> None:
        message = (event.who, event.n)
        one = self._sent.get(message)
        if one is None:
            self._sent[message] = _Sent(event.topic, event.qos, event.t)
        else:
            one.times += 1
        if event.qos:
            waiting = self._waiting[event.who]
            if not waiting:
                self._progress[event.who] = event.t
            waiting.add(message)
            self._handed[event.who, event.conn, event.n] = event.t

    def _on_acked(self, event: Event) -> None:
        message = (event.who, event.n)
        one = self._sent.get(message)
        if one is None or one.acked:
            self._violation("acknowledged twice", f"{_name(message)} on {event.topic}")
            return
        one.acked = event.t
        self._waiting[event.who].discard(message)
        self._longest = max(self._longest, event.t - self._progress.get(event.who, event.t))
        self._progress[event.who] = event.t
        handed = self._handed.get((event.who, event.conn, event.n), 0)
        ours = next((at for at, conn in self._accepted[event.who] if conn == event.conn), 0)
        for at, conn in self._accepted[event.who][-_RECENT:]:
            if ours < at < handed - self._promises.handover * 1e9:
                self._violation(
                    "two owners",
                    f"{_name(message)} was handed over on connection {event.conn} "
                    f"{(handed - at) / 1e6:.0f} ms after connection {conn} was accepted, and acknowledged",
                )
                break

    def _on_unknown(self, event: Event) -> None:
        message = (event.who, event.n)
        self._waiting[event.who].discard(message)
        if message in self._sent:
            self._sent[message].doubtful = True

    def _on_refused(self, event: Event) -> None:
        self._waiting[event.who].discard((event.who, event.n or 0))

    def _on_will(self, event: Event) -> None:
        self._wills[event.who, event.n] = event

    # -- subscribers ------------------------------------------------------------------------------

    def _on_subscribed(self, event: Event) -> None:
        one = self._subscribers[event.who]
        if event.filter.startswith(SHARE):
            one.groups.add(event.filter)
            self._groups.setdefault(event.filter, _Group(event.filter.split("/", 2)[2], event.qos, event.t))
            return
        for known in one.subscriptions:
            if known.filter == event.filter and known.until > event.t:
                return
        one.subscriptions.append(_Subscription(event.filter, event.qos, event.t))

    def _on_unsubscribe(self, event: Event) -> None:
        if event.filter in self._groups:
            group = self._groups[event.filter]
            group.until = min(group.until, event.t)
        for known in self._subscribers[event.who].subscriptions:
            if known.filter == event.filter:
                known.until = min(known.until, event.t)

    def _on_received(self, event: Event) -> None:
        if not event.qos:
            return
        one = self._subscribers[event.who]
        message = (event.of, event.n)
        identifier = event.id
        if event.dup:
            self._resends += 1
        if one.owed and one.owed.get(identifier) == message:
            del one.owed[identifier]
            passed = event.t - one.back
            self._slowest_resume = max(self._slowest_resume, passed)
            if self._promises.resent and passed > self._promises.resent * 1e9:
                self._violation(
                    "sent again late", f"{_name(message)} came to {event.who} {passed / 1e6:.0f} ms after CONNACK"
                )
            if not event.dup and self._promises.marked and not one.groups:
                self._violation("DUP missing", f"{event.who} got {_name(message)} again, without DUP")
        if event.qos == 2:
            held = one.held.get(identifier)
            if held is not None and held != message:
                self._violation(
                    "packet id in use",
                    f"{event.who} got {_name(message)} under {identifier}, which is {_name(held)}'s until PUBREL",
                )
            one.held.setdefault(identifier, message)
        elif not event.dup or message not in one.delivered:
            one.fresh[message] += 1
            sent = self._sent.get(message)
            known = message in one.delivered and self._promises.marked and not one.groups
            # A message published during SUBSCRIBE may come as the retained one, and as a new one.
            if event.retain:
                one.retained.add(message)
            elif message in one.retained:
                one.retained.discard(message)
                known = False
            if known and (sent is None or one.fresh[message] > sent.times):
                self._violation("DUP missing", f"{event.who} got {_name(message)} again, without DUP")
        one.open[identifier] = message

    def _on_released(self, event: Event) -> None:
        self._subscribers[event.who].held.pop(event.id, None)

    def _on_delivered(self, event: Event) -> None:
        one = self._subscribers[event.who]
        message = (event.of, event.n)
        one.times[message] += 1
        if event.n < 0:  # a will
            one.delivered.setdefault(message, event.t)
            return
        sent = self._sent.get(message)
        if sent is None or sent.topic != event.topic:
            self._violation("invented", f"{event.who} got {_name(message)} on {event.topic}, which nobody has sent")
            return
        for group in one.groups:
            self._shared_out(event.who, self._groups[group], message, sent)
        if message in one.delivered:
            self._repeats += 1
            if sent.qos == 2 and self._granted(one, sent) == 2:
                self._duplicates += 1
                if self._promises.once:
                    self._violation("duplicated", f"{event.who} got {_name(message)} {one.times[message]} times")
            return
        one.delivered[message] = event.t
        if one.groups:
            return  # what one member had may come to another one, behind what is newer
        line = (event.of, event.topic, sent.qos)
        newest = one.newest.get(line, 0)
        if event.n < newest:
            self._reordered += 1
            on_its_way = not sent.acked or sent.acked > self._sent[event.of, newest].at
            excused = self._promises.leaders_change and on_its_way
            if self._promises.order and sent.qos and not excused:
                text = f"{event.who} got {_name(message)} after {event.of}/{newest}"
                self._violation("out of order", text, event.who, message)
        else:
            one.newest[line] = event.n

    def _shared_out(self, who: str, group: _Group, message: Message, sent: _Sent) -> None:
        """A member of a group has been given a message."""
        if not matches(group.filter, sent.topic):
            return
        group.times[message] += 1
        if group.times[message] > 1 and min(sent.qos, group.qos) == 2:
            self._duplicates += 1
            if self._promises.once:
                times = group.times[message]
                self._violation("duplicated", f"{_name(message)} came {times} times to the group, at last to {who}")

    def _granted(self, one: _Subscriber, sent: _Sent) -> int:
        """Highest QoS of the subscriptions that match."""
        return max((each.qos for each in one.subscriptions if matches(each.filter, sent.topic)), default=0)

    # -- at the end -------------------------------------------------------------------------------

    def _find_lost(self) -> None:
        for name, one in self._subscribers.items():
            if not one.durable:
                continue
            wanted: dict[str, list[_Subscription]] = {}
            for message, sent in self._sent.items():
                if not sent.qos or not sent.acked or message in one.delivered:
                    continue
                if sent.topic not in wanted:
                    wanted[sent.topic] = [
                        each for each in one.subscriptions if each.qos and matches(each.filter, sent.topic)
                    ]
                if any(each.since < sent.at and each.until > sent.acked for each in wanted[sent.topic]):
                    self._verdict.missing.append((name, *message))
                    self._violation(
                        "lost",
                        f"{_name(message)} on {sent.topic} at QoS {sent.qos} was acknowledged; {name} has not got it",
                    )

    def _find_lost_of_groups(self) -> None:
        if not self._promises.shared:
            return
        for text, group in self._groups.items():
            for message, sent in self._sent.items():
                wanted = sent.qos and group.qos and group.since < sent.at and sent.acked < group.until
                if wanted and sent.acked and message not in group.times and matches(group.filter, sent.topic):
                    self._verdict.missing.append((text, *message))
                    self._violation(
                        "lost", f"{_name(message)} on {sent.topic} was acknowledged; no member of {text} has got it"
                    )

    def _judge_wills(self) -> None:
        for message, will in self._wills.items():
            fate = self._will_ends.get(message, "")
            for name, one in self._subscribers.items():
                if not one.durable or not any(
                    matches(each.filter, will.topic) and each.since < will.t for each in one.subscriptions
                ):
                    continue
                times = one.times[message]
                exact = min(will.qos, max(each.qos for each in one.subscriptions if matches(each.filter, will.topic)))
                text = f"that of {message[0]}'s connection {-message[1]} came to {name} {times} times"
                if times > 1 and exact == 2:
                    self._violation("will fired twice", text)
                elif times and fate == "never":
                    self._violation("will fired after DISCONNECT", text)
                elif not times and fate == "once" and exact:
                    self._violation("will never fired", text)


def _name(message: Message) -> str:
    return f"{message[0]}/{message[1]}"
