# SPDX-License-Identifier: Apache-2.0
"""Index of the sessions that want a message of the shared reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mqtt_nats.pubsub.filter_index import FilterIndex
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.subjects import visible_to_wildcard

if TYPE_CHECKING:
    from collections import Counter

    from mqtt_nats.shared_reader.reader_session import ReaderSession

TOPICS_MOST: Final = 16384
SWAPPED: Final = {ord("."): "/", ord("/"): "."}
"""Translation of a NATS subject, whose tokens may contain slashes, to the levels of a topic."""


class ServedFilters:
    """Index of the filters of sessions that the shared reader serves; it counts the filters in ``wanted``."""

    def __init__(self, wanted: Counter[str]) -> None:
        self.targets: dict[bytes, list[ReaderSession]] = {}
        """Cache: the sessions that get the messages of a subject, by stored subject."""
        self._wanted = wanted
        self._index: FilterIndex[dict[ReaderSession, None]] = FilterIndex()
        self._present: dict[str, dict[ReaderSession, None]] = {}

    def put(self, member: ReaderSession) -> None:
        """Add the filters of a session's live subscriptions."""
        for one in member.side.bindings.values():
            if one.source.is_served:
                self.add(member, one.consumer.filter_subject)

    def add(self, member: ReaderSession, filter_subject: str) -> None:
        """Add the filter of one consumer of a session."""
        subject = filter_subject.removeprefix(STORED_PREFIX)
        if subject in member.filters:
            return
        members = self._present.get(subject)
        if members is None:
            members = self._present[subject] = {}
            self._index.add(as_filter(subject), members)
        members[member] = None
        member.filters.append(subject)
        self._wanted[STORED_PREFIX + subject] += 1
        self.targets.clear()

    def remove(self, member: ReaderSession) -> None:
        """Remove all filters of a session."""
        wanted = self._wanted
        for subject in member.filters:
            members = self._present[subject]
            members.pop(member, None)
            if not members:
                del self._present[subject]
                self._index.remove(as_filter(subject))
            wanted[STORED_PREFIX + subject] -= 1
            if wanted[STORED_PREFIX + subject] <= 0:
                del wanted[STORED_PREFIX + subject]
        if member.filters:
            member.filters.clear()
            self.targets.clear()

    def find(self, subject: bytes) -> list[ReaderSession]:
        """Return the sessions that get the messages of a subject, and cache them in :attr:`targets`."""
        if len(self.targets) >= TOPICS_MOST:
            self.targets.clear()
        text = subject[len(STORED_PREFIX) :].decode("utf-8", "replace")
        found: dict[ReaderSession, None] = {}
        if shown(text):
            for members in self._index.match(text.translate(SWAPPED)):
                found.update(members)
        targets = self.targets[subject] = list(found)
        return targets


def shown(subject: str) -> bool:
    """Return whether sessions may get a stored message: no session gets the messages of reply inboxes."""
    return subject[:1] == "$" or visible_to_wildcard(subject)


def as_filter(subject: str) -> str:
    """Return the filter, with topic levels, of a filter subject without its prefix."""
    tokens = subject.translate(SWAPPED).split("/")
    return "/".join({"*": "+", ">": "#"}.get(token, token) for token in tokens)
