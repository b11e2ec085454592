# SPDX-License-Identifier: Apache-2.0
"""Permissions of a user of nats-server, applied to MQTT topics and filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from mqtt_nats.access.acl import Identity, Permissions
from mqtt_streams.subjects import encode_topic, filter_to_subjects


@dataclass(frozen=True, slots=True)
class Subjects:
    """Allowed and denied subjects, with wildcards; a denied subject overrides an allowed one. ``allow`` None: all."""

    allow: tuple[str, ...] | None
    deny: tuple[str, ...] = ()

    @classmethod
    def parse(cls, values: Any) -> Self:
        """Parse one entry of nats-server's permissions; raises ValueError."""
        if values is None:
            return cls(None)
        if not isinstance(values, Mapping):
            raise ValueError("expected permissions")
        allow, deny = values.get("allow") or [], values.get("deny") or []
        for one in (allow, deny):
            if not isinstance(one, Sequence) or isinstance(one, str) or not all(isinstance(each, str) for each in one):
                raise ValueError("expected lists of subjects")
        # `foo queue` is about members of a queue group: ignored in `allow`; in `deny` it denies all of `foo`.
        plain = tuple(one for one in allow if " " not in one)
        return cls(plain if allow else None, tuple(one.partition(" ")[0] for one in deny))

    def permits(self, subject: str, *, hidden: bool = True) -> bool:
        """Whether everything that ``subject`` matches is allowed; ``hidden`` False: ignore denied subjects with `$`."""
        if self.allow is not None and not any(_covers(one, subject) for one in self.allow):
            return False
        return not any(_overlaps(one, subject) for one in self.deny if hidden or not one.startswith("$"))

    def touches(self, subject: str) -> bool:
        """Whether a subject that ``subject`` matches is allowed according to single entries."""
        if self.allow is not None and not any(_overlaps(one, subject) for one in self.allow):
            return False
        return not any(_covers(one, subject) for one in self.deny)


class SubjectRules(Permissions):
    """Permissions of one user of NATS."""

    __slots__ = ("_publish_subjects", "_subscribe_subjects")

    def __init__(self, publish: Subjects, subscribe: Subjects) -> None:
        super().__init__((), False)
        self._publish_subjects = publish
        self._subscribe_subjects = subscribe

    def permissions(self, one: Identity) -> Permissions:
        """Return these permissions: they belong to one user."""
        return self

    def may_publish(self, topic: str, qos: int, retain: bool) -> bool:
        """Whether the user may publish to the topic's subject."""
        try:
            return self._publish_subjects.permits(encode_topic(topic))
        except ValueError:
            return False

    def subscribe(self, topic_filter: str, qos: int) -> bool:
        """Whether the user may subscribe all subjects of the filter."""
        try:
            subjects = filter_to_subjects(topic_filter)
        except ValueError:
            return False
        hidden = topic_filter[0] not in "+#"  # [MQTT-4.7.2-1] (3.1.1, 5.0)
        return all(self._subscribe_subjects.permits(one, hidden=hidden) for one in subjects)

    def touches(self, topic_filter: str, qos: int) -> bool:
        """Whether the user may subscribe a subject of the filter."""
        try:
            subjects = filter_to_subjects(topic_filter)
        except ValueError:
            return False
        return any(self._subscribe_subjects.touches(one) for one in subjects)

    def names(self, topic_filter: str, qos: int) -> bool:
        """Whether an allow entry covers the filter; a user without allow entries has no rule."""
        return self._subscribe_subjects.allow is not None and self.subscribe(topic_filter, qos)


def _covers(wide: str, narrow: str) -> bool:
    wanted, given = wide.split("."), narrow.split(".")
    for at, token in enumerate(wanted):
        if at == len(given):
            return False
        if token == ">":
            return True
        if given[at] == ">" or (token != "*" and token != given[at]):
            return False
    return len(wanted) == len(given)


def _overlaps(one: str, other: str) -> bool:
    first, second = one.split("."), other.split(".")
    for left, right in zip(first, second, strict=False):
        if ">" in (left, right):
            return True
        if left != right and "*" not in (left, right):
            return False
    return len(first) == len(second)
