# SPDX-License-Identifier: Apache-2.0
"""Access rules for publishing and subscribing: an ordered list, of which the first rule that applies decides.

A rule about subscriptions is compared with the whole requested filter. An allowing rule applies when it covers all
topics of the filter; a denying rule applies when it has a topic in common with the filter. So deliveries need no check:
every message that a granted subscription matches is allowed. Where each message is checked (setting
``acl_subscribe``), a filter only has to have a topic in common with an allowing rule.
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
"""Filter of the presence topics, which name clients and addresses: only clients that a rule permits may read them."""

_PRESENCE_START: Final = b"$SYS/brokers/"

_PLACEHOLDER: Final = re.compile(f"{USER}|{CLIENT}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a client, with which rules are compared.

    Attributes:
        user: authenticated user; None for an anonymous client, whatever user name it presents.
        address: the peer's IP address; empty without one.
        groups: groups of the user according to the authenticator.
    """

    user: str | None
    client_id: str
    address: str = ""
    groups: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Group:
    """A group and its users in the ACL file; an authenticator may add users."""

    name: str
    users: frozenset[str]


@dataclass(frozen=True, slots=True)
class Who:
    """Clients to which a rule applies: a client must be in each given list (None: the list is not given).

    A client id that ends in ``*`` is a prefix of client ids.
    """

    users: tuple[str, ...] | None = None
    clients: tuple[str, ...] | None = None
    groups: tuple[Group, ...] | None = None
    addresses: tuple[IPv4Network | IPv6Network, ...] | None = None
    anonymous: bool | None = None
    """True: clients without an authenticated user only; False: authenticated users only; None: both."""

    def includes(self, one: Identity) -> bool:
        """Whether the rule applies to this client."""
        if self.anonymous is not None and self.anonymous is not (one.user is None):
            return False
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
    """A topic filter of a rule, possibly with placeholders; ``literal``: the rule applies to exactly this text."""

    text: str
    literal: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of access; ``qos`` and ``retain`` None = any. ``retain`` applies to publishing only."""

    allow: bool
    who: Who
    access: Access
    topics: tuple[Pattern, ...]
    qos: frozenset[int] | None = None
    retain: bool | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """The ordered rules of an ACL file or of one client."""

    rules: tuple[Rule, ...] = ()
    default: bool = False
    """Decision where no rule applies; True = allow."""

    def permissions(self, one: Identity) -> Permissions:
        """Return the permissions of a client."""
        found: list[_Bound] = []
        for rule in self.rules:
            if rule.who.includes(one):
                bound = [_bind(pattern, one, rule.allow) for pattern in rule.topics]
                topics = tuple(pattern for pattern in bound if pattern is not None)
                if topics:
                    found.append(_Bound(rule, topics))
        return Permissions(found, self.default)


def _bind(pattern: Pattern, one: Identity, allow: bool) -> Pattern | None:
    """Return the pattern with the client's names in place of placeholders; None: it does not apply to this client.

    A name that would change the meaning of the pattern (wildcard, slash, ``$`` at the beginning) is never inserted: an
    allowing pattern then allows nothing, and a denying pattern denies everything from this level on.
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
    """Permissions of one client to publish and subscribe."""

    __slots__ = ("_default", "_publish", "_subscribe")

    def __init__(self, bound: Sequence[_Bound], default: bool) -> None:
        self._publish = [one for one in bound if one.rule.access != "subscribe"]
        self._subscribe = [one for one in bound if one.rule.access != "publish"]
        self._default = default

    def publish(self, key: bytes, qos: int, retain: bool) -> bool:
        """Whether a message may be published; ``key`` is the topic as encoded in a packet, length first."""
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
        """Whether a topic of a filter may be subscribed according to single rules, where each message is checked."""
        rule = self._touched_rule(topic_filter, qos)
        return self._default if rule is None else rule.allow

    def names(self, topic_filter: str, qos: int) -> bool:
        """Whether a rule, not only the default, permits a filter."""
        rule = self._subscribe_rule(topic_filter, qos)
        return rule is not None and rule.allow

    def may_subscribe(self, topic_filter: str, qos: int) -> bool:
        """Whether a filter may be subscribed; a filter of presence needs a rule, not only the default.

        Wider filters, such as `$SYS/#`, need none: messages of presence are then checked one by one.
        """
        if not self.subscribe(topic_filter, qos):
            return False
        if not topic_filter.startswith("$SYS/") or not covers(PRESENCE, topic_filter):  # the cheap test comes first
            return True
        return self.names(topic_filter, qos)

    def may_share(self, topic_filter: str, qos: int) -> bool:
        """Whether a shared filter may be subscribed; one that overlaps `PRESENCE` needs a rule."""
        if topic_filter.startswith("$SYS/") and overlaps(PRESENCE, topic_filter) and not self.names(topic_filter, qos):
            return False
        return self.may_subscribe(topic_filter, qos)

    def may_touch(self, topic_filter: str, qos: int) -> bool:
        """Whether a filter may be subscribed whose messages are each checked by `may_subscribe`."""
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
        """Return the first rule that allows a topic of the filter or denies all its topics; None without one."""
        for one in self._subscribe:
            if one.rule.qos is not None and qos not in one.rule.qos:
                continue
            if any(_decides(each, topic_filter, one.rule.allow) for each in one.topics):
                return one.rule
        return None

    def explain(
        self, access: Literal["publish", "subscribe"], topic: str, qos: int, retain: bool, touching: bool = False
    ) -> tuple[bool, Rule | None]:
        """Return whether a publish or subscription is permitted, and the deciding rule; None: the default decides.

        Args:
            touching: each message of a subscription is checked, and ``topic`` may be a filter.
        """
        if access == "publish":
            return self.may_publish(topic, qos, retain), self._publish_rule(topic, qos, retain)
        if topic.startswith("$share/") and topic.count("/") > 1:
            topic = topic.split("/", 2)[2]
        if touching and _has_wildcards(topic) and not covers(PRESENCE, topic):
            return self.may_touch(topic, qos), self._touched_rule(topic, qos)
        return self.may_subscribe(topic, qos), self._subscribe_rule(topic, qos)


EVERYTHING: Final = Permissions((), True)
"""Permissions of every client without rules."""


class OwnRules(Protocol):
    """Rules for one client, from its authenticator, which restrict the rules of the ACL file."""

    def permissions(self, one: Identity) -> Permissions:
        """Return the permissions of the client."""


class Both(Permissions):
    """Intersection of two permissions."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Permissions, second: Permissions) -> None:
        super().__init__((), False)
        self._first = first
        self._second = second

    def may_publish(self, topic: str, qos: int, retain: bool) -> bool:
        """Whether both permissions allow the message."""
        return self._first.may_publish(topic, qos, retain) and self._second.may_publish(topic, qos, retain)

    def subscribe(self, topic_filter: str, qos: int) -> bool:
        """Whether both permissions allow the filter."""
        return self._first.subscribe(topic_filter, qos) and self._second.subscribe(topic_filter, qos)

    def touches(self, topic_filter: str, qos: int) -> bool:
        """Whether each permission allows a topic of the filter."""
        return self._first.touches(topic_filter, qos) and self._second.touches(topic_filter, qos)

    def names(self, topic_filter: str, qos: int) -> bool:
        """Whether a rule of either permission permits a filter."""
        return self._first.names(topic_filter, qos) or self._second.names(topic_filter, qos)


def of_presence(key: bytes) -> bool:
    """Whether a topic, as encoded in a packet, is one of presence."""
    return key.startswith(_PRESENCE_START, 2) and matches(PRESENCE, key[2:].decode())


def covers(wide: str, narrow: str) -> bool:
    """Whether the filter ``wide`` matches every topic that the filter ``narrow`` matches."""
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
    # `a/#` also matches `a`, but `a` matches no lower level.
    return len(given) == len(wanted)


def overlaps(one: str, other: str) -> bool:
    """Whether both filters match a common topic."""
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
    """Whether a rule allows a topic of a filter or denies all its topics; no topic equals a literal with wildcards."""
    if allow:
        return not (pattern.literal and _has_wildcards(pattern.text)) and overlaps(pattern.text, topic_filter)
    return pattern.text == topic_filter if pattern.literal else covers(pattern.text, topic_filter)


def _has_wildcards(text: str) -> bool:
    return "+" in text or "#" in text


def _begins_with_wildcard(levels: Sequence[str]) -> bool:
    return levels[0] in ("+", "#")
