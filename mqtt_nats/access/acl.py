# SPDX-License-Identifier: Apache-2.0
"""Who may publish and subscribe what: ordered rules, the first that applies decides.

A rule about subscriptions is held against the whole filter that is asked for. An allowing rule has to cover all its
topics; a denying one applies as soon as it has a topic in common with it. So what a subscription brings need not be
looked at again: whoever has one may have every message that it matches. Where each message is looked at (setting
``acl_subscribe``), a filter only has to have a topic in common with what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final, Literal, Protocol

from mqtt_nats.codec import matches

Access = Literal["publish", "subscribe", "both"]

USER: Final = "%u"
CLIENT: Final = "%c"

PRESENCE: Final = "$SYS/brokers/+/clients/#"
"""Who comes and goes, with names and addresses: nobody reads it whom a rule does not permit it."""

_PLACEHOLDER: Final = re.compile(f"{USER}|{CLIENT}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a client is.

    Attributes:
        user: whom the authentication has proved it to be; None for an anonymous client, whatever it calls itself.
        address: the peer's IP address; empty where there is none.
        groups: those that the authentication has put the user into.
    """

    user: str | None
    client_id: str
    address: str = ""
    groups: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Group:
    """A group, and the users that are always in it; the authentication may put more into it."""

    name: str
    users: frozenset[str]


@dataclass(frozen=True, slots=True)
class Who:
    """Whom a rule is about: everybody who is in each of the lists that are given (None: not given).

    A client id that ends in ``*`` stands for all that begin so.
    """

    users: tuple[str, ...] | None = None
    clients: tuple[str, ...] | None = None
    groups: tuple[Group, ...] | None = None
    addresses: tuple[IPv4Network | IPv6Network, ...] | None = None

    def includes(self, one: Identity) -> bool:
        """Whether the rule is about this client."""
        if self.users is not None and one.user not in self.users:
            return False
        if self.groups is not None and not any(
            one.user in group.users or group.name in one.groups for group in self.groups
        ):
            return False
        if self.clients is not None and not any(_named(one.client_id, each) for each in self.clients):
            return False
        if self.addresses is None:
            return True
        if not one.address:
            return False
        address = ip_address(one.address.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network or address in network for network in self.addresses)


def _named(client_id: str, pattern: str) -> bool:
    if pattern.endswith("*"):
        return client_id.startswith(pattern[:-1])
    return client_id == pattern


@dataclass(frozen=True, slots=True)
class Pattern:
    """A topic filter of a rule, which may have placeholders; ``literal``: only this very text is meant."""

    text: str
    literal: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; ``qos`` and ``retain`` None: any. ``retain`` is about publishing only."""

    allow: bool
    who: Who
    access: Access
    topics: tuple[Pattern, ...]
    qos: frozenset[int] | None = None
    retain: bool | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules, in their order."""

    rules: tuple[Rule, ...] = ()
    default: bool = False
    """What happens where no rule applies."""

    def permissions(self, one: Identity) -> Permissions:
        """What this client may do."""
        found: list[_Bound] = []
        for rule in self.rules:
            if rule.who.includes(one):
                bound = [_bind(pattern, one, rule.allow) for pattern in rule.topics]
                topics = tuple(pattern for pattern in bound if pattern is not None)
                if topics:
                    found.append(_Bound(rule, topics))
        return Permissions(found, self.default)


def _bind(pattern: Pattern, one: Identity, allow: bool) -> Pattern | None:
    """The pattern with the client's names in it; None: it is not about this client.

    A name that would change the pattern's meaning (wildcard, slash, a ``$`` at its beginning) is never put in: an
    allowing rule then allows nothing, and a denying one denies everything from this level on.
    """
    names = {USER: one.user, CLIENT: one.client_id}
    levels: list[str] = []
    for level in pattern.text.split("/"):
        for placeholder in _PLACEHOLDER.findall(level):
            name = names[placeholder]
            if name is None:
                return None
            if not name or any(sign in name for sign in "+#/\0") or name[0] == "$":
                return None if allow else Pattern("/".join([*levels, "#"]))
        levels.append(_PLACEHOLDER.sub(lambda found: names[found[0]] or "", level))
    return Pattern("/".join(levels), pattern.literal)


@dataclass(frozen=True, slots=True)
class _Bound:
    rule: Rule
    topics: tuple[Pattern, ...]


class Permissions:
    """What one client may do."""

    __slots__ = ("_default", "_publish", "_subscribe")

    def __init__(self, bound: Sequence[_Bound], default: bool) -> None:
        self._publish = [one for one in bound if one.rule.access != "subscribe"]
        self._subscribe = [one for one in bound if one.rule.access != "publish"]
        self._default = default

    def publish(self, key: bytes, qos: int, retain: bool) -> bool:
        """Whether a message may be published; ``key`` is the topic as it stands in a packet, length first."""
        return self.may_publish(key[2:].decode(), qos, retain)

    def may_publish(self, topic: str, qos: int, retain: bool) -> bool:
        """Whether a message may be published on a topic."""
        rule = self._publish_rule(topic, qos, retain)
        return self._default if rule is None else rule.allow

    def _publish_rule(self, topic: str, qos: int, retain: bool) -> Rule | None:
        for one in self._publish:
            rule = one.rule
            if rule.qos is not None and qos not in rule.qos:
                continue
            if rule.retain is not None and rule.retain is not retain:
                continue
            if any(each.text == topic if each.literal else matches(each.text, topic) for each in one.topics):
                return rule
        return None

    def subscribe(self, topic_filter: str, qos: int) -> bool:
        """Whether a filter (without ``$share/<group>/``) may be subscribed."""
        rule = self._subscribe_rule(topic_filter, qos)
        return self._default if rule is None else rule.allow

    def touches(self, topic_filter: str, qos: int) -> bool:
        """Whether some topic of a filter may be subscribed, as far as single rules tell: for who looks at each."""
        rule = self._touched_rule(topic_filter, qos)
        return self._default if rule is None else rule.allow

    def names(self, topic_filter: str, qos: int) -> bool:
        """Whether a rule permits a filter, and not only the default."""
        rule = self._subscribe_rule(topic_filter, qos)
        return rule is not None and rule.allow

    def may_subscribe(self, topic_filter: str, qos: int) -> bool:
        """Whether a filter may be subscribed; one that touches `PRESENCE` only where a rule says so."""
        if not self.subscribe(topic_filter, qos):
            return False
        if not topic_filter.startswith("$SYS/") or not overlaps(PRESENCE, topic_filter):  # most are told by the first
            return True
        return self.names(topic_filter, qos)

    def may_touch(self, topic_filter: str, qos: int) -> bool:
        """Whether a filter may be subscribed of which each message is looked at by `may_subscribe`."""
        if covers(PRESENCE, topic_filter):
            return self.may_subscribe(topic_filter, qos)
        return self.touches(topic_filter, qos)

    def _subscribe_rule(self, topic_filter: str, qos: int) -> Rule | None:
        for one in self._subscribe:
            if one.rule.qos is not None and qos not in one.rule.qos:
                continue
            applies = covers if one.rule.allow else overlaps
            if any(
                each.text == topic_filter if each.literal else applies(each.text, topic_filter) for each in one.topics
            ):
                return one.rule
        return None

    def _touched_rule(self, topic_filter: str, qos: int) -> Rule | None:
        """The first rule that allows a topic of a filter, or denies all of them."""
        for one in self._subscribe:
            if one.rule.qos is not None and qos not in one.rule.qos:
                continue
            if any(_decides(each, topic_filter, one.rule.allow) for each in one.topics):
                return one.rule
        return None

    def explain(
        self, access: Literal["publish", "subscribe"], topic: str, qos: int, retain: bool, touching: bool = False
    ) -> tuple[bool, Rule | None]:
        """Whether something is permitted, and the rule that has decided it; None: none has.

        Args:
            touching: each message of a subscription is looked at, and ``topic`` may be a filter.
        """
        if access == "publish":
            return self.may_publish(topic, qos, retain), self._publish_rule(topic, qos, retain)
        if topic.startswith("$share/") and topic.count("/") > 1:
            topic = topic.split("/", 2)[2]
        if touching and _has_wildcards(topic) and not covers(PRESENCE, topic):
            return self.may_touch(topic, qos), self._touched_rule(topic, qos)
        return self.may_subscribe(topic, qos), self._subscribe_rule(topic, qos)


EVERYTHING: Final = Permissions((), True)
"""Where there are no rules."""


class OwnRules(Protocol):
    """What one client may do at most, whatever the rules for all allow: its authentication has said so."""

    def permissions(self, one: Identity) -> Permissions:
        """What this client may do."""


class Both(Permissions):
    """What is permitted by two."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Permissions, second: Permissions) -> None:
        super().__init__((), False)
        self._first = first
        self._second = second

    def may_publish(self, topic: str, qos: int, retain: bool) -> bool:
        """Whether both permit it."""
        return self._first.may_publish(topic, qos, retain) and self._second.may_publish(topic, qos, retain)

    def subscribe(self, topic_filter: str, qos: int) -> bool:
        """Whether both permit it."""
        return self._first.subscribe(topic_filter, qos) and self._second.subscribe(topic_filter, qos)

    def touches(self, topic_filter: str, qos: int) -> bool:
        """Whether each permits some topic of it."""
        return self._first.touches(topic_filter, qos) and self._second.touches(topic_filter, qos)

    def names(self, topic_filter: str, qos: int) -> bool:
        """Whether a rule of one of them permits a filter."""
        return self._first.names(topic_filter, qos) or self._second.names(topic_filter, qos)


def covers(wide: str, narrow: str) -> bool:
    """Whether every topic that the filter ``narrow`` matches is matched by ``wide``."""
    wanted, given = wide.split("/"), narrow.split("/")
    if _begins_with_wildcard(wanted) and given[0].startswith("$"):
        return False
    for at, level in enumerate(wanted):
        if level == "#":
            return True
        if at == len(given):
            return False
        if given[at] == "#" or (level != "+" and level != given[at]):
            return False
    # `a/#` matches `a` too, `a` does not match what is below.
    return len(given) == len(wanted)


def overlaps(one: str, other: str) -> bool:
    """Whether there is a topic that both filters match."""
    first, second = one.split("/"), other.split("/")
    if (_begins_with_wildcard(first) and second[0].startswith("$")) or (
        _begins_with_wildcard(second) and first[0].startswith("$")
    ):
        return False
    for left, right in zip(first, second, strict=False):
        if "#" in (left, right):
            return True
        if left != right and "+" not in (left, right):
            return False
    longer = max(first, second, key=len)
    shared = min(len(first), len(second))
    return len(longer) == shared or (len(longer) == shared + 1 and longer[shared] == "#")


def _decides(pattern: Pattern, topic_filter: str, allow: bool) -> bool:
    """Whether a rule allows a topic of a filter, or denies all of them; no message has a literal with wildcards."""
    if allow:
        return not (pattern.literal and _has_wildcards(pattern.text)) and overlaps(pattern.text, topic_filter)
    return pattern.text == topic_filter if pattern.literal else covers(pattern.text, topic_filter)


def _has_wildcards(text: str) -> bool:
    return "+" in text or "#" in text


def _begins_with_wildcard(levels: Sequence[str]) -> bool:
    return levels[0] in ("+", "#")
