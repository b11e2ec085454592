# SPDX-License-Identifier: Apache-2.0
"""Handover of a member's topics from its ending filters to other filters of the same member.

Theory of operation. A message comes once for each filter, on connections of which one may be ahead of the other, and
the member is served through one of the filters: the *first*. When the first ends, the *heir* takes its place: the
filter that was confirmed next. A message that one of the two connections had brought by then, and the other
connection had not, would be lost or would come twice. So the change is made in three steps. Each step lasts until
both connections have brought all messages that were on their way when the step began:

    ======== ===================================== ==========================================
    step     message from the first                message from the heir
    ======== ===================================== ==========================================
    noting   is delivered, and noted               is dropped: the first has brought it, or will
    keeping  is delivered, and noted               is kept until the first has brought it
    ended    is ignored                            is delivered, unless the first has brought it
    ======== ===================================== ==========================================

Messages that are still kept when the first ends are delivered then. See docs/internals/pubsub.md#overlap.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from mqtt_nats.messages.message import Message
from mqtt_nats.pubsub.granted_options import Choice, choose
from mqtt_nats.pubsub.routing_table import Filter, Group, Member, Table

NOTED_IDS_MOST: Final = 250_000
"""Maximum number of noted ids: while one connection is away, the other connection may bring any number."""

MOST_KEPT: Final = 4 * 1024 * 1024
"""Maximum payload bytes of kept messages."""


class Parting(Member):
    """Stand-in for a member, on the topics on which another filter of the member takes over."""

    __slots__ = ("_ended", "_ending", "_keeping", "_kept", "_noted", "_size", "_table", "member")

    def __init__(self, table: Table, member: Member, ending: Set[Filter]) -> None:
        super().__init__(member.write_buffer, member.durable, member.bridge)
        self.client_id = member.client_id
        self.version = member.version
        self.member = member
        self._table = table
        self._ending = ending
        self._noted: dict[bytes, None] = {}
        self._kept: dict[bytes, tuple[Choice, Message]] = {}
        self._size = 0
        self._keeping = self._ended = False
        table.partings[member] = self
        for found in ending:
            table.changed(found)

    def place(self, groups: dict[Filter, Group], first: Filter, granted: int, matching: list[Filter]) -> bool:
        """Take the member's place on a topic; False: no other filter takes over there."""
        through = [first]
        if not self._ended:
            heir = next((one for one in matching if one not in self._ending), None)
            if heir is None or heir is first:
                return False
            through.append(heir)
        for found in through:
            choice = choose(self.member, granted, found, matching)
            groups.setdefault(found, Group()).guarded.append((self, choice))
        return True

    def guard(self, choice: Choice, message: Message, known: bytes = b"") -> None:
        """Deliver, keep or drop a message, according to the present step."""
        if not message.qos:
            known = b""
        if self._ended:
            if known in self._noted:
                return
        elif choice.found in self._ending:
            if known in self._noted:  # the message was kept, then delivered when there was no more room
                return
            if known:
                self._note(known)
        else:
            if known and self._keeping and known not in self._noted:
                self._keep(known, choice, message)
            return
        self.member.guard(choice, message, known)

    def _note(self, known: bytes) -> None:
        if len(self._noted) >= NOTED_IDS_MOST:
            self._noted.clear()
        self._noted[known] = None
        kept = self._kept.pop(known, None)
        if kept is not None:
            self._size -= len(kept[1].payload)

    def _keep(self, known: bytes, choice: Choice, message: Message) -> None:
        self._kept[known] = choice, message
        self._size += len(message.payload)
        if self._size > MOST_KEPT or len(self._kept) > NOTED_IDS_MOST:
            self._let_go()

    def _let_go(self) -> None:
        """Deliver the kept messages: at the end, or when there is no more room, since early is better than lost."""
        kept, self._kept, self._size = self._kept, {}, 0
        for known, (choice, message) in kept.items():
            self._note(known)
            self.member.guard(choice, message, known)

    def keep_filter(self) -> None:
        """Begin the step in which messages from the heirs are kept."""
        self._keeping = True

    def filters_ended(self) -> None:
        """Begin the last step: the filters have ended."""
        self._ended = True
        self._let_go()

    def finish(self) -> None:
        """Remove the stand-in: the member takes its messages itself again."""
        if self._table.partings.get(self.member) is self:
            del self._table.partings[self.member]
            self._table.change_all()
