# SPDX-License-Identifier: Apache-2.0
"""Topic names and filters (section 4.7): validation, and a reference matcher of linear time."""

from __future__ import annotations

from typing import Final

from mqtt_nats.codec.errors import MalformedPacket, TopicFilterInvalid, TopicNameInvalid
from mqtt_nats.codec.wire import text

MAX_LEVELS = 65_535
"""Default limit of levels: no topic can have more."""

MAX_BYTES = 65_535
"""Bytes of the longest MQTT string."""

SHARED: Final = "$share/"
"""Prefix of the filter of a shared subscription."""


def validate_topic_name(key: bytes, max_levels: int = MAX_LEVELS, max_bytes: int = MAX_BYTES) -> str:
    """Return the topic of a PUBLISH from its key (two length bytes, then UTF-8).

    Raises MalformedPacket for bytes that are not UTF-8 or contain NUL, TopicNameInvalid as `check_topic_name`.
    """
    if len(key) < 2 or key[0] << 8 | key[1] != len(key) - 2:
        raise MalformedPacket("topic key without its length")
    if len(key) - 2 > max_bytes:
        raise TopicNameInvalid(f"topic name has more than {max_bytes} bytes")
    topic = text(key[2:])  # [MQTT-3.3.2-1] [MQTT-4.7.3-2] (3.1.1, 5.0)
    check_topic_name(topic, max_levels)
    return topic


def check_topic_name(topic: str, max_levels: int = MAX_LEVELS) -> None:
    """Raise TopicNameInvalid for an empty name, a wildcard or more than `max_levels` levels."""
    if not topic:  # [MQTT-4.7.3-1] (3.1.1, 5.0)
        raise TopicNameInvalid("topic name is empty")
    if "+" in topic or "#" in topic:  # [MQTT-3.3.2-2] [MQTT-4.7.1-1] (3.1.1), [MQTT-4.7.0-1] (5.0)
        raise TopicNameInvalid("topic name contains a wildcard")
    if topic.count("/") >= max_levels:
        raise TopicNameInvalid(f"topic name has more than {max_levels} levels")


def _check_syntax(topic_filter: str) -> None:
    if not topic_filter:  # [MQTT-4.7.3-1] (3.1.1, 5.0)
        raise MalformedPacket("topic filter is empty")
    if "\0" in topic_filter:  # [MQTT-4.7.3-2] (3.1.1, 5.0)
        raise MalformedPacket("topic filter contains U+0000")
    if "#" in topic_filter:  # [MQTT-4.7.1-2] (3.1.1), [MQTT-4.7.1-1] (5.0)
        body = topic_filter[:-1]
        if "#" in body or (body and body[-1] != "/"):
            raise MalformedPacket("# is not the whole of the last level")
    if "+" in topic_filter:  # [MQTT-4.7.1-3] (3.1.1), [MQTT-4.7.1-2] (5.0)
        for level in topic_filter.split("/"):
            if "+" in level and level != "+":
                raise MalformedPacket("+ is not the whole of a level")


def split_shared(text: str) -> tuple[str, str]:
    """Return group and filter of `$share/<group>/<filter>`; both empty for an illegal group or a missing slash.

    [MQTT-4.8.2-1] [MQTT-4.8.2-2] (5.0)
    """
    group, slash, topic_filter = text[len(SHARED) :].partition("/")
    return (group, topic_filter) if group and slash and "+" not in group and "#" not in group else ("", "")


def check_filter_syntax(text: str) -> None:
    """Raise MalformedPacket for a text that is no topic filter, shared or not, in SUBSCRIBE or UNSUBSCRIBE."""
    topic_filter = text
    if text.startswith(SHARED):
        group, topic_filter = split_shared(text)
        if not group:
            raise MalformedPacket("a shared subscription is $share/<group>/<filter>")
    _check_syntax(topic_filter)


def validate_topic_filter(topic_filter: str, max_levels: int = MAX_LEVELS, max_bytes: int = MAX_BYTES) -> None:
    """Raise TopicFilterInvalid for an empty filter, NUL, a misplaced wildcard, too many levels or bytes of UTF-8."""
    if len(topic_filter) * 4 > max_bytes and len(topic_filter.encode()) > max_bytes:
        raise TopicFilterInvalid(f"topic filter has more than {max_bytes} bytes")
    if topic_filter.count("/") >= max_levels:
        raise TopicFilterInvalid(f"topic filter has more than {max_levels} levels")
    try:
        _check_syntax(topic_filter)
    except MalformedPacket as error:
        raise TopicFilterInvalid(str(error)) from None


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a filter matches a topic name; a leading `+` or `#` never matches `$`. [MQTT-4.7.2-1] (3.1.1, 5.0)"""
    if topic_filter[0] in "+#" and topic[0] == "$":
        return False
    wanted = topic_filter.split("/")
    levels = topic.split("/")
    if wanted[-1] == "#":
        wanted.pop()
        levels_of_prefix = levels[: len(wanted)]  # `a/#` also matches `a`
    else:
        levels_of_prefix = levels
    if len(levels_of_prefix) != len(wanted):
        return False
    return all(want in ("+", level) for want, level in zip(wanted, levels_of_prefix, strict=True))
