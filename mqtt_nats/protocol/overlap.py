# SPDX-License-Identifier: Apache-2.0
"""Overlapping subscriptions of a session: choice of the one that delivers a stored message (its owner here).

A message that several subscriptions of a session match is delivered once, through the subscription with the
lowest (start sequence, subject) that had begun when the message was stored. Every gateway computes the same
owner, so the choice survives a resume (docs/internals/pubsub.md#overlap).
"""

from __future__ import annotations

from bisect import insort
from itertools import zip_longest
from typing import Generic, TypeVar

from mqtt_nats.protocol.inflight import SubscriptionState

T = TypeVar("T")

MAX_TOPICS = 4096

PAIRS_MOST = 10_000
"""Largest number of pairs of patterns that are compared in one turn of the event loop."""


class Overlap(Generic[T]):
    """The subscriptions of one session that get stored messages, in the order of ownership."""

    __slots__ = ("_entries", "_matching")

    def __init__(self) -> None:
        self._entries: list[tuple[int, str, T, SubscriptionState]] = []
        self._matching: dict[str, list[tuple[int, str, T, SubscriptionState]]] = {}

    def add(self, pattern: str, value: T, source: SubscriptionState) -> None:
        """Add a subscription on the NATS subject ``pattern``."""
        insort(self._entries, (source.start, pattern, value, source), key=lambda entry: entry[:2])
        self._matching.clear()

    def remove(self, value: T) -> list[T]:
        """Remove a subscription that has ended.

        Returns:
            Subscriptions whose messages may have been sent at the higher QoS of the ended one: their ``was_qos`` and
            ``until`` have changed.
        """
        ended = [entry for entry in self._entries if entry[2] is value]
        self._entries = [entry for entry in self._entries if entry[2] is not value]
        self._matching.clear()
        raised: list[T] = []
        for _, pattern, _, source in ended:
            for _, other, kept, lower in self._entries:
                if lower.qos < source.qos and patterns_meet(pattern, other):
                    lower.raised(source.qos)
                    raised.append(kept)
        return raised

    def after(self, value: T) -> list[SubscriptionState]:
        """Return the subscriptions that may have left messages to this one: they overlap, and come later in order."""
        at = next(number for number, entry in enumerate(self._entries) if entry[2] is value)
        pattern = self._entries[at][1]
        return [source for _, other, _, source in self._entries[at + 1 :] if patterns_meet(other, pattern)]

    def owner(self, subject: str, sequence: int, own: bool = False) -> tuple[T | None, int]:
        """Return the subscription that delivers a message, and the highest QoS granted by any that it matches.

        [MQTT-3.3.5-1] (3.1.1), [MQTT-3.3.4-2] (5.0)

        Args:
            own: whether the session has published the message: subscriptions with No Local do not count.
        """
        owner: T | None = None
        granted = 0
        for start, _, value, source in self._match(subject):
            if start <= sequence and not (own and source.no_local) and _reaches(source, sequence):
                if owner is None:
                    owner = value
                granted = max(granted, source.granted(sequence))
        return owner, granted

    def matching(self, subject: str, sequence: int, own: bool) -> list[T]:
        """Return all subscriptions that match a message, the owner first."""
        matching = self._match(subject)
        return [
            value
            for start, _, value, one in matching
            if start <= sequence and not (own and one.no_local) and _reaches(one, sequence)
        ]

    def extras(self, subject: str, sequence: int, own: bool, *, pending: bool = False) -> tuple[list[int], bool]:
        """Return the identifiers of all matching subscriptions, and whether RETAIN stays as published (5.0).

        Args:
            pending: the message was pending at the resume. Subscriptions that begin later count, too: an import of the
                position moves the begin of a subscription behind what its consumer has delivered.
        """
        identifiers: list[int] = []
        kept = False
        for start, _, _, source in self._match(subject):
            begun = pending or start <= sequence
            if begun and not (own and source.no_local) and _reaches(source, sequence):
                kept = kept or source.kept
                if source.identifier is not None:
                    identifiers.append(source.identifier)
        return identifiers, kept

    def _match(self, subject: str) -> list[tuple[int, str, T, SubscriptionState]]:
        matching = self._matching.get(subject)
        if matching is None:
            if len(self._matching) >= MAX_TOPICS:
                self._matching.clear()
            tokens = subject.split(".")
            matching = [entry for entry in self._entries if subject_matches(entry[1], tokens)]
            self._matching[subject] = matching
        return matching


def _reaches(source: SubscriptionState, sequence: int) -> bool:
    """Whether a message was stored before the subscription was lowered to QoS 0, or it was not lowered."""
    return not source.ended or sequence <= source.end


def subject_matches(pattern: str, tokens: list[str]) -> bool:
    """Whether a NATS subject pattern matches the subject made of ``tokens``, as MQTT has it.

    No wildcard matches a leading ``$``.

    [MQTT-4.7.2-1] (3.1.1, 5.0): such a message of a wildcard consumer is dropped, so its subscription must not own it.
    """
    if pattern[0] in "*>" and tokens[0].startswith("$"):
        return False
    parts = pattern.split(".")
    for index, part in enumerate(parts):
        if part == ">":
            return len(tokens) > index
        if index >= len(tokens) or (part != "*" and part != tokens[index]):
            return False
    return len(parts) == len(tokens)


def patterns_meet(one: str, other: str) -> bool:
    """Whether some subject matches both NATS subject patterns."""
    for left, right in zip_longest(one.split("."), other.split(".")):
        if left is None or right is None:
            return False
        if ">" in (left, right):
            return True
        if left != right and "*" not in (left, right):
            return False
    return True
