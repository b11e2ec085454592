# SPDX-License-Identifier: Apache-2.0
"""``migrate emqx``: users, access rules and bans that EMQX has exported.

EMQX 5 gives users as CSV or JSON of `import_users`, rules and bans as JSON of its REST API, and rules as `acl.conf`.
EMQX 4 gives all of them in the JSON of `emqx_ctl data export`.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any, Final, Literal

from mqtt_nats.access.passwords import DIGESTS, check_entry, hash_password
from mqtt_nats.access.settings import DEVICE_COST
from mqtt_nats.base.errors import StartupError
from mqtt_nats.base.networks import parse_network
from mqtt_nats.ctl.migration.emqx_rules import EVERYTHING, add_stored_rules, read_acl
from mqtt_nats.ctl.migration.findings import Ban, Migration

_RULE: Final = re.compile(r"\s*\{\s*'?(?:allow|deny)\b")
_HEADER: Final = re.compile(r"\w+(?:,\w+)*")
_SETTINGS: Final = re.compile(r"^\s*[a-z_][\w.]*\s*[={]", re.MULTILINE)
"""A line of an `emqx.conf`: a key, and its value or block. Lines of an `acl.conf` begin with a brace or `%`."""

NAMES: Final[dict[str, Literal["client", "user", "address"]]] = {
    "clientid": "client",
    "username": "user",
    "peerhost": "address",
    "peerhost_net": "address",
}
"""Kinds of bans here by those of EMQX."""

UNSALTED: Final = ",disable"
"""End of an algorithm whose hashes have no salt."""

_SALT_4: Final = 4  # bytes before the hash in the passwords of EMQX 4
_EXPORT_4: Final = ("auth_mnesia", "acl_mnesia", "blacklist")


def migrate(paths: Sequence[Path], algorithm: str, no_match: str) -> Migration:
    """Read exported files in this order, and return what a gateway needs in their place.

    Args:
        algorithm: algorithm and place of the salt of the passwords, such as `sha256,prefix`.
        no_match: `authorization.no_match` of EMQX: what is decided where no rule applies.

    Raises:
        StartupError: a file cannot be read, or is none of those that are understood.
    """
    migration = Migration(rules=[], rules_default="allow" if no_match == "allow" else "deny")
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise StartupError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise StartupError(
                f"{path} is no text: export users, rules and bans one by one (docs/migrating.md)"
            ) from None
        try:
            _read(path, text, algorithm, migration)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
            raise StartupError(f"{path} is no export of EMQX that is understood: {error}") from None
    return migration


def _read(path: Path, text: str, algorithm: str, migration: Migration) -> None:
    head = text.lstrip()[:1]
    header = text.partition("\n")[0].strip()
    columns = set(header.split(","))
    if head and head in "{[" and not _RULE.match(text):
        _read_json(path, json.loads(text), algorithm, migration)
    elif {"user_id", "password_hash"} <= columns or {"user_id", "password"} <= columns:
        _users(path, list(csv.DictReader(io.StringIO(text))), algorithm, migration)
    elif {"as", "who"} <= columns:
        _bans(path, list(csv.DictReader(io.StringIO(text))), algorithm, migration)
    elif path.suffix == ".csv" or _HEADER.fullmatch(header):
        raise ValueError(
            "its first line has neither the columns user_id and password_hash (users), nor as and who (bans)"
        )
    elif path.suffix == ".hocon" or _SETTINGS.search(text):
        raise ValueError(
            "it has settings of EMQX (emqx.conf, cluster.hocon). Give the exported users, rules and bans; the table in "
            "docs/migrating.md has the settings of a gateway for those of EMQX"
        )
    else:
        read_acl(path, text, migration)


def _read_json(path: Path, found: Any, algorithm: str, migration: Migration) -> None:
    if isinstance(found, dict) and any(name in found for name in _EXPORT_4):
        _users(path, list(_users_4(path, found.get("auth_mnesia", ()), migration)), algorithm, migration)
        add_stored_rules(path, _rules_4(found.get("acl_mnesia", ())), migration)
        _bans(path, found.get("blacklist", ()), algorithm, migration)
        return
    rows = found.get("data", ()) if isinstance(found, dict) else found
    if not rows:
        return
    first = rows[0]
    if "user_id" in first:
        _users(path, rows, algorithm, migration)
    elif "rules" in first:
        add_stored_rules(path, rows, migration)
    elif "who" in first:
        _bans(path, rows, algorithm, migration)
    else:
        raise ValueError("it has neither users, nor rules, nor bans")


# -- users ------------------------------------------------------------------------------------------


def _users(path: Path, rows: Sequence[Mapping[str, Any]], algorithm: str, migration: Migration) -> None:
    users = {}
    superusers = []
    if any(row.get("password") is None and "salt_bytes" not in row for row in rows):
        text = (
            f"hashes are taken as {algorithm}: the file does not say their algorithm, nor whether the salt is before "
            "or behind the password. Compare password_hash_algorithm of EMQX; --password-hash names others"
        )
        migration.find(path, 0, "changes", "password_hash", text)
    for number, row in enumerate(rows, 2):
        name = str(row["user_id"])
        try:
            users[name] = _hash(name, row, algorithm)
        except ValueError as error:
            migration.find(path, number, "missing", f"user {name!r}", f"the user is left out: {error}")
            continue
        migration.find(path, number, "moved", f"user {name!r}", "a line in passwords")
        if str(row.get("is_superuser", "")).lower() in ("true", "1"):
            superusers.append(name)
    migration.add_users(users)
    if superusers:
        migration.add_rules([{"effect": "allow", "user": superusers, "topics": EVERYTHING}], first=True)
        migration.find(path, 0, "moved", "is_superuser", f"a rule that allows everything to {len(superusers)} users")


def _hash(name: str, row: Mapping[str, Any], algorithm: str) -> str:
    if row.get("password") is not None:
        text = hash_password(str(row["password"]).encode(), DEVICE_COST)
    elif algorithm.endswith(UNSALTED):
        return _hash(name, {**row, "salt": ""}, algorithm.removesuffix(UNSALTED) + ",prefix")
    elif algorithm not in DIGESTS:
        place = ", with the place of the salt" if f"{algorithm},prefix" in DIGESTS else ""
        raise ValueError(f"hashes of {algorithm} are not accepted, only {', '.join(DIGESTS)}{place}")
    else:
        salt = base64.b64encode(row.get("salt_bytes") or str(row.get("salt") or "").encode()).decode()
        digest = base64.b64encode(bytes.fromhex(str(row["password_hash"]))).decode()
        text = f"$digest${algorithm}${salt}${digest}"
    return check_entry(f"{name}:{text}")[1]


def _users_4(path: Path, rows: Sequence[Mapping[str, Any]], migration: Migration) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row.get("type", "username") != "username":
            text = "passwords of client ids are not asked for; give the device a user"
            migration.find(path, 0, "missing", f"client id {row['login']!r}", text)
            continue
        data = base64.b64decode(row["password"], validate=True)
        yield {"user_id": row["login"], "salt_bytes": data[:_SALT_4], "password_hash": data[_SALT_4:].decode("ascii")}


# -- rules and bans ---------------------------------------------------------------------------------


def _rules_4(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rules of EMQX 4 in the form of EMQX 5."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        kind = row.get("type", "all")
        grouped[kind, str(row.get("type_value", ""))].append(row)
    return [{**({} if kind == "all" else {kind: value}), "rules": rules} for (kind, value), rules in grouped.items()]


def _bans(path: Path, rows: Sequence[Mapping[str, Any]], algorithm: str, migration: Migration) -> None:
    for number, row in enumerate(rows, 2):
        kind, value = NAMES.get(str(row.get("as", ""))), str(row["who"])
        if kind is None:
            text = "a ban here is of a client id, a user or a network, and no regular expression"
            migration.find(path, number, "missing", f"ban of {value!r}", text)
            continue
        if kind == "address":
            value = str(parse_network(value))
        seconds = _left(row.get("until"))
        if seconds is not None and seconds <= 0:
            migration.find(path, number, "not needed", f"ban of {value!r}", "it has ended")
            continue
        migration.bans.append(Ban(kind, value, seconds, str(row.get("reason") or "from EMQX")))
        migration.find(path, number, "moved", f"ban of {value!r}", "a line in bans.sh")


def _left(until: Any) -> int | None:
    """Return the seconds until a ban ends (Unix time, or a time with its zone); None: never."""
    if until in (None, "", "infinity", "undefined"):
        return None
    if str(until).isdecimal():
        return int(until) - int(time())
    return int((datetime.fromisoformat(str(until)) - datetime.now(UTC)).total_seconds())
