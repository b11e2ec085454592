# SPDX-License-Identifier: Apache-2.0
"""Queues of new messages that wait until older messages, missed or retained, have been sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from mqtt_nats.base import server_clock as natstime

if TYPE_CHECKING:
    from mqtt_nats.messages.message import Message
    from mqtt_nats.pubsub.granted_options import Choice
    from mqtt_nats.pubsub.routing_table import Filter, Member, Route


ENTRY_BYTES: Final = 64
"""Estimated bytes of a waiting message without topic, properties and payload."""


class Backlog:
    """Queue of QoS 1 and 2 messages that arrive from NATS while the messages missed before them are read.

    These messages are stored, too: if there are too many, the queue drops them and they are read from the stream.
    """

    __slots__ = ("_bytes", "_limit", "begun", "full", "in_force", "joined", "overflowed", "waiting")

    def __init__(self, limit: int) -> None:
        """``limit`` is in bytes."""
        self._limit = limit
        self.begun = natstime.now()
        """Unix time in seconds, by nats-server's clock."""
        self.overflowed = False
        """Whether messages have ever been dropped because the queue was full."""
        self.reset()

    def reset(self) -> None:
        """Empty the queue."""
        self._bytes = 0
        self.full = False
        """Whether messages were dropped because the queue was full."""
        self.waiting: list[tuple[Route, bytes, bytes, bytes]] = []
        self.joined: dict[Member, int] = {}
        """Number of messages that waited when a member joined: they are not for the member."""
        self.in_force: dict[Member, int] = {}
        """The same when its subscription was in force: those that are not retained are not for it either."""

    def join(self, member: Member) -> None:
        """Note that a member joins."""
        if self.waiting:
            self.joined[member] = len(self.waiting)

    def end_joining(self, member: Member) -> None:
        """Note that the subscription of a member is in force."""
        if self.waiting:
            self.in_force[member] = len(self.waiting)

    def part(self, member: Member) -> None:
        """Forget a member."""
        self.joined.pop(member, None)
        self.in_force.pop(member, None)

    def later(self, number: int, *, kept: bool) -> set[Member]:
        """Return the members for whom the message with this index is too old; ``kept``: it is retained."""
        late = {member for member, first in self.joined.items() if number < first} if self.joined else set()
        if self.in_force and not kept:
            late |= {member for member, first in self.in_force.items() if number < first}
        return late

    def keep_missed(self, route: Route, headers: bytes, payload: bytes, reply: bytes) -> bool:
        """Keep a message; when there is no room, drop all messages. False: the first ones are dropped."""
        self._bytes += len(headers) + len(payload) + 256
        if self.full:
            return True
        if self._bytes > self._limit:
            self.full = self.overflowed = True
            self.waiting.clear()
            return False
        self.waiting.append((route, headers, payload, reply))
        return True


class Gate:
    """Queue of a subscription's new messages, kept back while older messages are being sent.

    The older messages are retained messages, or messages that a reader still brings after QoS 0 has replaced the
    subscription. Without the gate an older message could arrive after a newer one.
    """

    __slots__ = (
        "_count",
        "_hold",
        "_limit",
        "after",
        "dropped",
        "ended",
        "former",
        "found",
        "users",
        "waiting",
        "waiting_bytes",
    )

    def __init__(
        self, found: Filter, limit: int, former: Gate | None = None, hold: Callable[[int], None] = lambda size: None
    ) -> None:
        """Make an empty queue.

        Args:
            limit: bytes that the gate may keep.
            former: the same subscription's previous gate, still closed.
            hold: counts the bytes of waiting messages, negative when they leave.
        """
        self._limit = limit
        self._hold = hold
        self.waiting_bytes = 0
        """Estimated bytes of the waiting messages."""
        self._count = 0
        self.dropped = 0
        self.found = found
        self.former = former
        self.users = 0
        """Number of replays and consumers that have to end before the gate opens."""
        self.ended = False
        """Whether the gate has been opened, or its subscription has ended."""
        self.after: list[Callable[[], None]] = []
        """Functions to call after the gate's messages have been delivered."""
        self.waiting: dict[bytes | int, tuple[Choice, Message]] = {}
        """Waiting messages in the order of arrival, by message id, or by number for a message without id."""

    def hold(self) -> None:
        """Add one replay or consumer that has to end before the gate opens."""
        self.users += 1

    def unhold(self) -> bool:
        """Remove one replay or consumer; return whether it was the last."""
        self.users -= 1
        if self.former is not None and self.former.ended:
            self.former = None
        return not self.users

    def chain(self) -> Iterator[Gate]:
        """Yield this gate and the gates before it."""
        gate: Gate | None = self
        while gate is not None:
            yield gate
            gate = gate.former

    @property
    def room(self) -> int:
        """Number of bytes that the gate may still keep."""
        return max(self._limit - self.waiting_bytes, 0)

    def keep_back(self, choice: Choice, message: Message, known: bytes = b"") -> bool:
        """Keep a message with id ``known``; a full gate drops QoS 0 messages. False: no room for a QoS 1 or 2 one."""
        if self.waiting_bytes + message.size > self._limit:
            self.dropped += 1
            return message.qos == 0 or choice.qos == 0
        self._add(message.size + ENTRY_BYTES)
        self._count += 1
        self.waiting[known or self._count] = choice, message
        return True

    def ids(self, key: bytes) -> list[bytes]:
        """Return the ids of the waiting messages of a topic, which is as it stands in a PUBLISH packet."""
        return [one for one, (_, message) in self.waiting.items() if isinstance(one, bytes) and message.key == key]

    def discard_up_to(self, known: bytes) -> None:
        """Drop a waiting message that is sent in another way, if it waits, and those of its topic before it."""
        if known not in self.waiting:
            return
        key = self.waiting[known][1].key
        for one, (_, message) in list(self.waiting.items()):
            if message.key == key:
                self.discard(one)
            if one == known:
                return

    def discard(self, known: bytes | int) -> None:
        """Drop a waiting message that is sent in another way."""
        kept = self.waiting.pop(known, None)
        if kept is not None:
            self._add(-kept[1].size - ENTRY_BYTES)

    def discard_stored(self) -> None:
        """Drop all waiting messages at QoS 1 and 2: they are stored, and sent in another way."""
        for known in [one for one, (_, message) in self.waiting.items() if isinstance(one, bytes) and message.qos]:
            self.discard(known)

    def close(self) -> list[tuple[Choice, Message]]:
        """Close the queue and return its messages; the caller runs :meth:`let_go` after their delivery."""
        self.ended = True
        self._add(-self.waiting_bytes)
        waiting, self.waiting = self.waiting, {}
        return list(waiting.values())

    def _add(self, size: int) -> None:
        self.waiting_bytes += size
        self._hold(size)

    def let_go(self) -> None:
        """Call the functions in `after`."""
        after, self.after = self.after, []
        for release in after:
            release()
