# SPDX-License-Identifier: Apache-2.0
"""Names of shared subscriptions, and the groups that a session leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mqtt_nats.codec import TopicFilterInvalid, validate_topic_filter
from mqtt_nats.codec.topics import SHARED, split_shared
from mqtt_streams.shared import group_hash

PREFIX: Final = SHARED


def parse_shared(text: str, max_levels: int) -> tuple[str, str]:
    """Return the group and the filter of ``$share/<group>/<filter>``.

    Raises:
        TopicFilterInvalid: the group's name is empty or has a wildcard, or the filter is illegal
            [MQTT-4.8.2-1] [MQTT-4.8.2-2] (5.0).
    """
    group, topic_filter = split_shared(text)
    if not group:
        raise TopicFilterInvalid("a shared subscription is $share/<group>/<filter>")
    validate_topic_filter(topic_filter, max_levels)
    return group, topic_filter


def groups_of(texts: Iterable[str]) -> list[str]:
    """Return the hashes of the groups of these shared subscriptions; illegal texts are left out."""
    found = []
    for text in texts:
        try:
            name, topic_filter = parse_shared(text, 65_535)
        except TopicFilterInvalid:
            continue
        found.append(group_hash(name, topic_filter))
    return found


def plain_filter(topic_filter: str) -> str:
    """Return a filter; for a shared subscription, without ``$share/<group>/``."""
    return topic_filter.split("/", 2)[2] if topic_filter.startswith(PREFIX) else topic_filter


def is_open(text: str) -> bool:
    """Return whether a filter has wildcards or belongs to a group, so that many filters may match the same topic."""
    return "+" in text or "#" in text or text.startswith(PREFIX)
