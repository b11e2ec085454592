# SPDX-License-Identifier: Apache-2.0
"""``migrate nats``: what changes when gateways take the place of the MQTT listener of a nats-server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mqtt_nats.authenticators.nats_users import ASK, asked_on
from mqtt_nats.base.errors import StartupError
from mqtt_nats.ctl.migration.findings import Kind, Migration
from mqtt_nats.ctl.migration.nats_conf import Value, read_nats

_TLS: Final = "tls_cert, tls_key and tls_client_ca of the listener, from the same files"
_USERS: Final = 'an authenticator of type "nats" lets the same users in, with their permissions: docs/authentication.md'

_MQTT: Final[dict[str, tuple[Kind, str]]] = {
    "ack_wait": (
        "changes",
        "messages are sent again when a client comes back, not after a time [MQTT-4.4.0-1] (5.0)",
    ),
    "api_timeout": ("not needed", "requests to JetStream are repeated until they are answered"),
    "authorization": ("changes", _USERS + "; the user of this block needs an entry in authorization of the server"),
    "consumer_inactive_threshold": ("changes", "session_expiry_interval and max_session_expiry_interval end sessions"),
    "consumer_memory_storage": ("changes", "consumers are stored as their stream is"),
    "consumer_replicas": ("changes", "consumers have as many replicas as their stream: stream_replicas"),
    "downgrade_qos2_subscribe": ("changes", "QoS 2 is granted; max_qos = 1 of the listener grants less"),
    "host": ("moved", "listen of the gateway"),
    "js_domain": ("moved", "jetstream_domain"),
    "js_ack_wait": ("changes", "messages are sent again when a client comes back, and not after a time"),
    "listen": ("moved", "listen of the gateway"),
    "max_ack_pending": ("moved", "max_inflight of the gateway, for each subscription"),
    "net": ("moved", "listen of the gateway"),
    "no_auth_user": ("changes", "allow_anonymous = true of the listener; such clients have the rights of the gateway"),
    "port": ("moved", "listen of the gateway"),
    "reject_qos2_publish": ("changes", "QoS 2 is accepted; max_qos = 1 of the listener refuses it with a reason code"),
    "stream_replicas": ("moved", "stream_replicas of the gateway"),
    "tls": ("moved", _TLS),
}

_CONNECTION_TYPES: Final = ("allowed_connection_types", "connection_types", "clients")


def check(path: Path) -> Migration:
    """Read the configuration of a nats-server that has `mqtt`, and return findings only.

    Raises:
        StartupError: a file cannot be read, or the configuration has no `mqtt`.
    """
    found = read_nats(path)
    mqtt = found.get("mqtt")
    if mqtt is None or not isinstance(mqtt.value, dict):
        raise StartupError(f"{path}: there is no mqtt block, so there is nothing to move")
    migration = Migration()
    for name, value in mqtt.value.items():
        kind, text = _MQTT.get(name.lower(), ("missing", "this option is not known here"))
        migration.find(value.file, value.line, kind, f"mqtt.{name}", text)
    if found.get("jetstream") is None and not _accounts_with_jetstream(found) and mqtt.get("js_domain") is None:
        migration.find(path, 0, "missing", "jetstream", "gateways need JetStream in their account")
    _users(found, migration)
    _others(found, migration)
    migration.find(
        path,
        0,
        "moved",
        "sessions, retained and queued messages",
        "gateways use the streams of this listener; both may serve clients at the same time (docs/compatibility.md)",
    )
    return migration


def _accounts_with_jetstream(found: Value) -> bool:
    accounts = found.get("accounts")
    return accounts is not None and any(
        one.get("jetstream") is not None
        for one in (accounts.value.values() if isinstance(accounts.value, dict) else ())
    )


def _lists_of_users(found: Value) -> Iterator[tuple[str, Value]]:
    authorization = found.get("authorization")
    users = None if authorization is None else authorization.get("users")
    if users is not None:
        yield "authorization", users
    accounts = found.get("accounts")
    for name, account in accounts.value.items() if accounts is not None and isinstance(accounts.value, dict) else ():
        users = account.get("users")
        if users is not None:
            yield f"account {name}", users


def _users(found: Value, migration: Migration) -> None:
    names = []
    for place, users in _lists_of_users(found):
        names.append(place)
        for user in users.value if isinstance(users.value, list) else ():
            name = user.get("user", "username", "nkey")
            label = f"{place}: user {'?' if name is None else name.value}"
            _types(user, label, migration)
            _permissions(user, label, "" if name is None else str(name.value), migration)
    if len(names) > 1:
        text = "one gateway serves one account, or several with [tenants.NAME]: docs/tenants.md"
        migration.find(found.file, 0, "changes", ", ".join(names), text)
    for key in ("operator", "auth_callout", "resolver"):
        one = found.get(key)
        if one is not None:
            text = "clients with a bearer JWT as password are let in by an authenticator of type nats"
            migration.find(one.file, one.line, "changes", key, text)


def _types(user: Value, label: str, migration: Migration) -> None:
    types = user.get(*_CONNECTION_TYPES)
    if types is None or not isinstance(types.value, list):
        return
    allowed = {str(one.value).upper() for one in types.value}
    if "MQTT" in allowed and "STANDARD" not in allowed:
        text = (
            'add "STANDARD", and have nats-server read the file again (`nats-server --signal reload`): a gateway asks '
            "by a standard connection whether the user may come in"
        )
        migration.find(types.file, types.line, "changes", label, text)


def _permissions(user: Value, label: str, name: str, migration: Migration) -> None:
    permissions = user.get("permissions", "permission")
    if permissions is None:
        return
    text = (
        f"permissions hold for the topics; the user also needs publish on {ASK.decode()} and subscribe on "
        f"{asked_on({'user': name})}*, and not $MQTT.sub.> any more. nats-server has to read the file again"
    )
    migration.find(permissions.file, permissions.line, "changes", label, text)


def _others(found: Value, migration: Migration) -> None:
    websocket = found.get("websocket")
    if websocket is not None:
        text = "MQTT over WebSocket moves to a listener of type ws or wss; NATS clients stay at this one"
        migration.find(websocket.file, websocket.line, "changes", "websocket", text)
    for key in ("mappings", "maps"):
        one = found.get(key)
        if one is not None:
            text = "repeat the mappings in the settings of the gateway: docs/tenants.md"
            migration.find(one.file, one.line, "changes", key, text)
