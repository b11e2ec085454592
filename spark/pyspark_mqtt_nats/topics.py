# SPDX-License-Identifier: Apache-2.0
"""MQTT topic filters without NATS: matching, intersection, regular expressions.

In the whole source `#` is every topic, and a filter that begins with `+` matches no topic that begins with `$`. All
filters are legal.
"""

import re
from collections.abc import Iterable

from mqtt_streams.subjects import visible_to_wildcard


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a filter matches a topic."""
    levels = topic.split("/")
    wanted = topic_filter.split("/")
    if wanted[0] == "+" and topic.startswith("$"):
        return False
    if wanted[-1] == "#":
        wanted.pop()
        if len(levels) < len(wanted):
            return False
        del levels[len(wanted) :]
    return len(levels) == len(wanted) and all(want in ("+", have) for want, have in zip(wanted, levels, strict=True))


def pattern(topic_filter: str) -> str:
    """Return a regular expression, for Java and for Python, that finds the topics which a filter matches."""
    levels = topic_filter.split("/")
    tail = ""
    if levels[-1] == "#":
        levels.pop()
        tail = "(/.*)?" if levels else ".*"
    hidden = r"(?!\$)" if topic_filter.startswith("+") else ""
    body = "/".join("[^/]*" if level == "+" else re.escape(level) for level in levels)
    return rf"(?s)\A{hidden}{body}{tail}(?!.)"  # the end of the text is \z or \Z: Java and Python differ


def intersection(left: str, right: str) -> str | None:
    """Return the filter that matches what both match, None when no topic matches both."""
    ours, theirs = left.split("/"), right.split("/")
    found: list[str] = []
    for index in range(max(len(ours), len(theirs)) + 1):
        one = ours[index] if index < len(ours) else None
        two = theirs[index] if index < len(theirs) else None
        if one == "#" or two == "#":
            return "/".join([*found, *(theirs[index:] if one == "#" else ours[index:])])
        if one is None or two is None:
            return "/".join(found) if one is two else None
        both = two if one == "+" else one
        if one != two and ("+" not in (one, two) or not (index or visible_to_wildcard(one if two == "+" else two))):
            return None
        found.append(both)
    raise AssertionError("both filters have ended")


def intersections(left: Iterable[str], right: Iterable[str]) -> tuple[str, ...]:
    """Return filters for the topics that a filter of each side matches; () for no topic."""
    right = tuple(right)
    pairs = (intersection(one, two) for one in left for two in right)
    return tuple(dict.fromkeys(found for found in pairs if found is not None))
