# SPDX-License-Identifier: Apache-2.0
"""Users and access rules of mosquitto's plugin "dynamic security", from its file `dynamic-security.json`.

The plugin asks the roles of the user by priority, then those of the user's groups. In each role, literal filters come
before patterns, and both are in the order of their priority. The first that fits decides, then the defaults do. No rule
that is made of them allows more: denials of deliveries deny subscriptions.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from mqtt_nats.access.acl import covers
from mqtt_nats.access.passwords import check_entry
from mqtt_nats.codec import MqttError, validate_topic_filter
from mqtt_nats.ctl.migration.findings import Migration
from mqtt_nats.ctl.migration.mosquitto_conf import Directive

LIBRARY: Final = "mosquitto_dynamic_security"
"""Part of the name of the plugin's file."""

_SEND: Final = "publishclientsend"
_RECEIVE: Final = "publishclientreceive"
_LITERAL: Final = "subscribeliteral"
_PATTERN: Final = "subscribepattern"

_CONTROL: Final = "$CONTROL"

Row = Mapping[str, Any]


class _Entry(NamedTuple):
    kind: str
    """Type of the entry in lower case."""
    topic: str
    allow: bool


def read_dynamic_security(path: Path, config: Directive, migration: Migration) -> None:
    """Add users and rules of the file; findings go to ``migration``.

    Args:
        config: the option that names the file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        made = _File(path, found, migration)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"{path} cannot be read ({type(error).__name__}): its users and rules are not moved"
        migration.find(config.file, config.line, "missing", config.name, text)
        migration.add_rules([])
        migration.add_users({})
        return
    migration.add_users(made.users)
    migration.add_rules(made.rules)
    migration.find(config.file, config.line, "moved", config.name, "users to passwords, roles and groups to acl.toml")


class _File:
    def __init__(self, path: Path, found: Row, migration: Migration) -> None:
        self._path, self._migration = path, migration
        self._receives = bool(_defaults(found).get("publishClientReceive", False))
        self._roles = {str(one["rolename"]): list(self._entries(one)) for one in found.get("roles", ())}
        self._groups = {str(one["groupname"]): one for one in found.get("groups", ())}
        self.users: dict[str, str] = {}
        """Hashes by user."""
        self.rules: list[dict[str, Any]] = []
        self._read(found)

    def _read(self, found: Row) -> None:
        alike: dict[tuple[str, tuple[_Entry, ...]], list[str]] = defaultdict(list)
        """Users by the client id that they must have (empty: any), and their entries."""
        for client in found.get("clients", ()):
            name = str(client["username"])
            if self._user(name, client):
                alike[str(client.get("clientid") or ""), tuple(self._of_client(name, client))].append(name)
        for (client_id, entries), names in alike.items():
            who: dict[str, Any] = {"user": names, **({"client": client_id} if client_id else {})}
            self.rules += self._rules(entries, who)
        anonymous = self._groups.get(str(found.get("anonymousGroup") or ""))
        if anonymous is not None:
            self.rules += self._rules(tuple(self._of_roles(anonymous)), {"anonymous": True})
        defaults = _defaults(found)
        if defaults.get("publishClientSend", False):
            self.rules.append({"effect": "allow", "access": "publish", "topics": ["#"]})
        if defaults.get("subscribe", False) and self._receives:
            self.rules.append({"effect": "allow", "access": "subscribe", "topics": ["#", "$SYS/#"]})

    def _note(self, kind: Any, subject: str, text: str) -> None:
        self._migration.find(self._path, 0, kind, subject, text)

    def _user(self, name: str, client: Row) -> bool:
        """Add a user; False: the user cannot log in, and is left out."""
        subject = f"user {name!r}"
        if client.get("disabled"):
            self._note("missing", subject, "the user is disabled, and is left out")
            return False
        if "password" not in client:
            self._note("missing", subject, "the user has no password, and is left out")
            return False
        try:
            salt, digest = str(client["salt"]), str(client["password"])
            _, self.users[name] = check_entry(f"{name}:$7${int(client['iterations'])}${salt}${digest}")
        except (ValueError, KeyError) as error:
            self._note("missing", subject, f"the user is left out: {error}")
            return False
        self._note("moved", subject, "a line in passwords")
        if client.get("clientid"):
            text = f"may log in with any client id, and has rights with {client['clientid']!r} only"
            self._note("changes", subject, text)
        return True

    def _of_client(self, name: str, client: Row) -> Iterator[_Entry]:
        yield from self._of_roles(client)
        named = {str(one["groupname"]): int(one.get("priority", -1)) for one in client.get("groups", ())}
        for group in self._groups.values():
            for one in group.get("clients", ()):
                if str(one["username"]) == name:
                    named.setdefault(str(group["groupname"]), int(one.get("priority", -1)))
        for group_name in sorted(named, key=lambda one: (-named[one], one)):
            if group_name in self._groups:
                yield from self._of_roles(self._groups[group_name])

    def _of_roles(self, owner: Row) -> Iterator[_Entry]:
        roles = sorted(owner.get("roles", ()), key=lambda one: (-int(one.get("priority", -1)), str(one["rolename"])))
        for role in roles:
            yield from self._roles.get(str(role["rolename"]), ())

    def _entries(self, role: Row) -> Iterator[_Entry]:
        """Yield the entries of a role in the order in which they are asked."""
        rows = sorted(role.get("acls", ()), key=lambda one: -int(one.get("priority", 0)))
        rows.sort(key=lambda one: str(one["acltype"]).lower() != _LITERAL)
        for row in rows:
            kind, topic, allow = str(row["acltype"]).lower(), str(row["topic"]), bool(row.get("allow"))
            if kind not in (_SEND, _RECEIVE, _LITERAL, _PATTERN) or topic.startswith(_CONTROL):
                continue  # UNSUBSCRIBE is always permitted, and `$CONTROL` is the plugin's own
            subject = f"role {role['rolename']!r}"
            wrong = _wrong(topic)
            if wrong:
                self._note("missing", subject, f"{topic!r}: {wrong}")
                if allow:
                    continue
                topic = "#"  # nothing behind a denial that has no counterpart may be allowed
            yield _Entry(kind, topic, allow)

    def _rules(self, entries: Sequence[_Entry], who: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rules for these clients; neighbours of one kind are one rule."""
        received = [one for one in entries if one.kind == _RECEIVE]
        kept = [_Entry(_PATTERN, one.topic, False) for one in received if not one.allow]
        for one in entries:
            subscribes = one.kind in (_LITERAL, _PATTERN)
            permitted = self._receives or any(each.allow and covers(each.topic, one.topic) for each in received)
            if subscribes and one.allow and not permitted:
                text = "no publishClientReceive allows it, so that no message would be delivered; it is left out"
                self._note("missing", f"{one.topic!r} of {who}", text)
            elif subscribes or one.kind == _SEND:
                kept.append(one)
        found: list[dict[str, Any]] = []
        for one in kept:
            access = "publish" if one.kind == _SEND else "subscribe"
            topic: Any = {"eq": one.topic} if one.kind == _LITERAL else one.topic
            rule = {"effect": "allow" if one.allow else "deny", **who, "access": access}
            if found and {key: value for key, value in found[-1].items() if key != "topics"} == rule:
                if topic not in found[-1]["topics"]:
                    found[-1]["topics"].append(topic)
            else:
                found.append({**rule, "topics": [topic]})
        return found


def _defaults(found: Row) -> Row:
    defaults: Row = found.get("defaultACLAccess", {})
    return defaults


def _wrong(topic: str) -> str:
    """Return why rules here cannot have a filter; empty: they can."""
    if topic.startswith("$share/"):
        return "rules are about the filter behind $share/<group>/"
    try:
        validate_topic_filter(topic)
    except MqttError as error:
        return str(error)
    return ""
