# SPDX-License-Identifier: Apache-2.0
"""Granted options: the filter and the options by which a member gets the messages of a topic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.messages.message import encoded_id

if TYPE_CHECKING:
    from mqtt_nats.pubsub.subscribers import Filter, Group, Member


class Options(NamedTuple):
    """Options of an MQTT 5.0 subscription besides its QoS (section 3.8.3.1)."""

    no_local: bool = False
    retain_as_published: bool = False
    identifier: int | None = None


PLAIN: Final = Options()


class Choice:
    """Result of a member's subscription options for one topic, for members that need more than a plain copy."""

    __slots__ = ("found", "ids", "kept", "own", "qos")

    def __init__(self, found: Filter, qos: int, ids: bytes, kept: bool) -> None:
        self.found = found
        """Filter through which the member is served."""
        self.qos = qos
        """Highest granted QoS of the matching subscriptions."""
        self.ids = ids
        """Subscription identifiers of all matching subscriptions, encoded as properties."""
        self.kept = kept
        """Whether RETAIN stays as published."""
        self.own: Choice | None = self
        """Choice for messages that the member published itself; None = the member does not get them."""

    def restrict(self, own: Choice | None) -> None:
        """Set the choice for messages that the member published itself."""
        self.own = own


def choose(member: Member, qos: int, found: Filter, matching: Sequence[Filter]) -> Choice:
    """Return the combined options of all matching subscriptions of a member, given in their order.

    One copy carries the identifiers of all [MQTT-3.3.4-4] (5.0); RETAIN stays when one of the
    subscriptions wants that [MQTT-3.3.1-13] (5.0).
    """
    options = member.options or {}
    mine = [(options.get(one, PLAIN), member.filters[one]) for one in matching]
    choice = _sum(found, mine, member, qos)
    others = [each for each in mine if not each[0].no_local]
    if member.bridge or not others:  # [MQTT-3.8.3-3] (5.0)
        choice.restrict(None)
    elif len(others) < len(mine):
        choice.restrict(_sum(found, others, member, max(granted for _, granted in others)))
    return choice


def _sum(found: Filter, mine: list[tuple[Options, int]], member: Member, qos: int) -> Choice:
    if member.version != 5:
        return Choice(found, qos, b"", member.bridge)
    ids = b"".join(encoded_id(one.identifier) for one, _ in mine)
    return Choice(found, qos, ids, any(one.retain_as_published for one, _ in mine))


def place(group: Group, member: Member, qos: int, found: Filter, matching: Sequence[Filter], apart: bool) -> None:
    """Add a member to the right list of a group; ``apart``: packets are renamed or checked for each member."""
    if qos and member.durable:
        group.await_stored()
    gated = member.gates and found in member.gates
    if member.options or member.checks_each or member.bridge or gated or apart:
        choice = choose(member, qos, found, matching)
        if gated or apart or member.checks_each or choice.own is not choice or choice.ids or choice.kept:
            group.guarded.append((member, choice))
            return
    if member.version == 5:
        group.zero5.append(member.write_buffer)
    else:
        group.zero.append(member.write_buffer)
    if qos == 0:
        if member.version == 5:
            group.low5.append(member.write_buffer)
        else:
            group.low.append(member.write_buffer)
    elif not member.durable:  # a durable session gets these messages from the stream
        group.high.append((member, qos))
