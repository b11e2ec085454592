# SPDX-License-Identifier: Apache-2.0
"""Access rules of EMQX: its `acl.conf`, and the rules of its built-in database as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mqtt_nats.codec import MqttError, validate_topic_filter
from mqtt_nats.ctl.migration.erlang_terms import Atom, read_terms
from mqtt_nats.ctl.migration.findings import Migration

ACTIONS: Final = {
    "publish": "publish", "pub": "publish", "subscribe": "subscribe", "sub": "subscribe",
    "all": "both", "pubsub": "both",
}  # fmt: skip
"""Access of a rule here by the action of EMQX 4 and 5."""

EVERYTHING: Final = ["#", "$SYS/#"]
"""Topics of a rule without topics."""

_WHO: Final = {
    "user": "user", "username": "user", "client": "client", "clientid": "client", "ipaddr": "address",
    "ipaddrs": "address",
}  # fmt: skip


class NotMoved(ValueError):
    """A rule has no counterpart; the text says why."""


LOST: Final = "a denial before it has no counterpart, so that this rule would allow more than before"


def read_acl(path: Path, text: str, migration: Migration) -> None:
    """Add the rules of an `acl.conf`; the first rule about everybody and everything is the default, and the last.

    Raises:
        ValueError: the file is no `acl.conf`.
    """
    for line, term in read_terms(text):
        if migration.lost_denial and isinstance(term, tuple) and term[:1] == ("allow",):
            migration.find(path, line, "missing", "rule", LOST)
            continue
        if migration.decided:
            _leave_out(path, line, "rule", migration)
            continue
        try:
            if not isinstance(term, tuple) or len(term) not in (2, 3, 4) or term[0] not in ("allow", "deny"):
                raise NotMoved("it is no rule of allow or deny")
            if term[1:] == (Atom("all"),):
                migration.decide("allow" if term[0] == "allow" else "deny", f"{path}:{line}")
                migration.find(path, line, "moved", "rule", f"default = {term[0]}")
                continue
            migration.add_rules([_rule(term)])
            migration.find(path, line, "moved", "rule", "a rule in acl.toml")
        except NotMoved as error:
            migration.find(path, line, "missing", "rule", str(error))
            if isinstance(term, tuple) and term[:1] == ("deny",):
                migration.lose_denial()


def _leave_out(path: Path, line: int, subject: str, migration: Migration) -> None:
    """Note a rule that EMQX never asks, since a rule before it decides; in another file, the order may be wrong."""
    text = f"{migration.decided} is about everybody and everything, and decides before this rule"
    if migration.decided.startswith(f"{path}:"):
        migration.find(path, line, "not needed", subject, text)
    else:
        migration.find(path, line, "missing", subject, f"{text}; name FILES in the order in which EMQX asks them")


def _rule(term: tuple[Any, ...]) -> dict[str, Any]:
    made: dict[str, Any] = {"effect": str(term[0]), **_who(term[1])}
    action = term[2] if len(term) > 2 else Atom("all")
    options: Any = []
    if isinstance(action, tuple):
        action, options = action if len(action) == 2 else (None, None)
    if not isinstance(action, Atom) or action not in ACTIONS:
        raise NotMoved("the action is none of publish, subscribe and all, alone or with options")
    made["access"] = ACTIONS[action]
    made |= _options(options, made["access"])
    topics = term[3] if len(term) > 3 else EVERYTHING
    made["topics"] = [_topic(one) for one in (topics if isinstance(topics, list) else [topics])]
    return made


def _options(options: Any, access: str) -> dict[str, Any]:
    """Return the options of an action, one or a list of them: `{qos, 1}`, `{qos, [1, 2]}`, `{retain, true}`."""
    found: dict[str, Any] = {}
    for one in options if isinstance(options, list) else [options]:
        match one:
            case ("qos", value):
                levels = value if isinstance(value, list) else [value]
                if not levels or any(level not in (0, 1, 2) for level in levels):
                    raise NotMoved("the QoS of an action is none of 0, 1 and 2")
                found.setdefault("qos", []).extend(levels)
            case ("retain", "true" | "false" as value) if access == "subscribe":
                pass  # EMQX asks for it at publishes only
            case ("retain", "true" | "false" as value):
                found["retain"] = value == "true"
            case ("retain", "all"):
                pass
            case _:
                raise NotMoved("an option of the action is neither {qos, ...} nor {retain, true | false | all}")
    return found


def _who(who: Any) -> dict[str, Any]:
    match who:
        case "all":
            return {}
        case ("and", list() as parts):
            found: dict[str, Any] = {}
            for part in parts:
                one = _who(part)
                if one.keys() & found.keys():
                    raise NotMoved("it names two of a kind that must both fit")
                found |= one
            return found
        case (kind, str() | list() as names) if kind in _WHO:
            return {_WHO[kind]: names}
    raise NotMoved("a rule here names users, client ids or addresses, and no regular expression or alternative")


def _topic(topic: Any) -> Any:
    if isinstance(topic, tuple) and len(topic) == 2 and topic[0] == "eq":
        return {"eq": checked(str(topic[1]))}
    if not isinstance(topic, str):
        raise NotMoved("a topic is no text")
    if topic.startswith("eq "):
        return {"eq": checked(topic.removeprefix("eq ").strip())}
    return checked(topic)


def checked(topic: str) -> str:
    """Return a filter with the placeholders of a gateway; raises NotMoved for one that rules cannot have."""
    for theirs, ours in (("${username}", "%u"), ("${clientid}", "%c")):
        topic = topic.replace(theirs, ours)
    if "${" in topic:
        raise NotMoved(f"the placeholder in {topic!r} is not known: %u and %c are")
    if topic.startswith("$share/"):
        raise NotMoved("rules are about the filter behind $share/<group>/")
    try:
        validate_topic_filter(topic)
    except MqttError as error:
        raise NotMoved(f"{topic!r}: {error}") from None
    return topic


def add_stored_rules(path: Path, entries: list[Mapping[str, Any]], migration: Migration) -> None:
    """Add rules of the built-in database: those of client ids, then of users, then of all, as EMQX asks them."""
    for kind, name in (("client", "clientid"), ("user", "username"), ("", "")):
        for entry in entries:
            value = entry.get(name) if name else None
            if (value is None) != (not name) or (not name and ("clientid" in entry or "username" in entry)):
                continue
            for rule in entry.get("rules", ()):
                effect = rule.get("permission", rule.get("access")) if isinstance(rule, Mapping) else None
                if migration.lost_denial and effect == "allow":
                    migration.find(path, 0, "missing", f"rule of {value or 'all'}", LOST)
                    continue
                if migration.decided:
                    _leave_out(path, 0, f"rule of {value or 'all'}", migration)
                    continue
                try:
                    migration.add_rules([_stored(rule, {kind: value} if kind else {})])
                    migration.find(path, 0, "moved", f"rule of {value or 'all'}", "a rule in acl.toml")
                except (NotMoved, KeyError, TypeError) as error:
                    text = str(error) if isinstance(error, NotMoved) else "it is no rule of the built-in database"
                    migration.find(path, 0, "missing", f"rule of {value or 'all'}", text)
                    if effect != "allow":
                        migration.lose_denial()


def _stored(rule: Mapping[str, Any], who: dict[str, Any]) -> dict[str, Any]:
    effect = rule.get("permission", rule.get("access"))
    if effect not in ("allow", "deny") or rule["action"] not in ACTIONS:
        raise NotMoved("it is no rule of the built-in database")
    made = {"effect": effect, **who, "access": ACTIONS[rule["action"]], "topics": [_topic(rule["topic"])]}
    qos = rule.get("qos")
    if qos not in (None, "all", [0, 1, 2], ["0", "1", "2"]):
        made["qos"] = [int(one) for one in (qos if isinstance(qos, list) else str(qos).split(","))]
    if isinstance(rule.get("retain"), bool) and made["access"] != "subscribe":
        made["retain"] = rule["retain"]
    return made
