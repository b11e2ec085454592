# SPDX-License-Identifier: Apache-2.0
"""Access rules of an ACL file of mosquitto.

mosquitto asks the topics of the user (or those of anonymous clients) first, then the patterns of everybody. In each of
both lists denials come first, wherever they stand in the file. What nothing allows is denied.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from mqtt_nats.codec import MqttError, validate_topic_filter
from mqtt_nats.ctl.migration.findings import Migration, read_lines

_ACCESS: Final = {"read": "subscribe", "write": "publish", "readwrite": "both", "deny": "both"}

_ANONYMOUS: Final = None
"""Key of topics before the first user: they are those of clients without a user name."""


class _Entry(NamedTuple):
    deny: bool
    access: str
    topic: str


def read_rules(path: Path, migration: Migration) -> list[dict[str, Any]]:
    """Return the rules of the file in the order in which a gateway asks them; findings go to ``migration``.

    Raises:
        StartupError: the file cannot be read.
    """
    topics: dict[str | None, list[_Entry]] = defaultdict(list)
    patterns: list[_Entry] = []
    user: str | None = _ANONYMOUS
    for number, line in enumerate(read_lines(path), 1):
        words = line.strip().split(None, 1)
        if not words or words[0].startswith("#"):
            continue
        rest = words[1].strip() if len(words) > 1 else ""
        match words[0]:
            case "user" if rest:
                user = rest
            case "topic" | "pattern" if rest:
                entry = _entry(rest)
                if _usable(path, number, words[0], entry, migration):
                    (patterns if words[0] == "pattern" else topics[user]).append(entry)
            case _:
                migration.find(path, number, "missing", words[0], "mosquitto refuses this line; it is left out")
    rules = []
    for name, entries in topics.items():
        who: dict[str, Any] = {"anonymous": True} if name is None else {"user": name}
        rules += _rules(entries, who)
    return rules + _rules(patterns, {})


def _entry(rest: str) -> _Entry:
    word, _, topic = rest.partition(" ")
    if word in _ACCESS and topic.strip():
        return _Entry(word == "deny", _ACCESS[word], topic.strip())
    return _Entry(False, "both", rest)


def _usable(path: Path, number: int, word: str, entry: _Entry, migration: Migration) -> bool:
    topic = entry.topic
    if topic.startswith("$share/"):
        text = "rules are about the filter behind $share/<group>/; add a rule for that filter"
        migration.find(path, number, "missing", topic, text)
        return False
    try:
        validate_topic_filter(topic)
    except MqttError as error:
        migration.find(path, number, "missing", topic, f"the line is left out: {error}")
        return False
    if word == "topic" and ("%u" in topic or "%c" in topic):
        text = "mosquitto takes %u and %c literally in `topic`; the line is left out. `pattern` may have been meant"
        migration.find(path, number, "missing", topic, text)
        return False
    if word == "pattern" and "%m" in topic:
        text = (
            "%m is the mountpoint of VerneMQ: tenants have rules of their own (docs/tenants.md); the line is left out"
        )
        migration.find(path, number, "missing", topic, text)
        return False
    migration.find(path, number, "moved", topic, "a rule in acl.toml")
    return True


def _rules(entries: list[_Entry], who: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rules for these clients: denials first, one rule for each kind of access."""
    groups: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for entry in sorted(entries, key=lambda one: not one.deny):
        groups[entry.deny, entry.access].append(entry.topic)
    return [
        {"effect": "deny" if deny else "allow", **who, "access": access, "topics": list(dict.fromkeys(topics))}
        for (deny, access), topics in groups.items()
    ]
