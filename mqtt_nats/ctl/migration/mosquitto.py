# SPDX-License-Identifier: Apache-2.0
"""``migrate mosquitto``: a mosquitto.conf as settings of a gateway."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final

from mqtt_nats.access.passwords import check_entry
from mqtt_nats.ctl.migration.dynamic_security import LIBRARY, read_dynamic_security
from mqtt_nats.ctl.migration.findings import Migration, read_lines
from mqtt_nats.ctl.migration.mosquitto_conf import (
    BRIDGE_OPTIONS,
    Configuration,
    Directive,
    Section,
    nearby,
    read_configuration,
)
from mqtt_nats.ctl.migration.mosquitto_options import OPTIONS, PLUGIN_OPTIONS
from mqtt_nats.ctl.migration.mosquitto_rules import read_rules
from mqtt_nats.transport.every_address import EVERY
from mqtt_nats.transport.listener_settings import join_address

_PERIODS: Final = {"h": 3600, "d": 86_400, "w": 604_800, "m": 2_592_000, "y": 31_536_000}
"""Seconds of the units of `persistent_client_expiration`."""

_HEADER_BYTES: Final = 65_540
"""Bytes of a PUBLISH packet besides its payload, at most, without properties."""

_EVERY_HOST: Final = {"ipv4": "0.0.0.0", "ipv6": "::"}
"""Host of a listener without one, by `socket_domain`; otherwise it has both families."""

_HEADROOM: Final = 5120
"""Bytes of `max_payload` of nats-server that headers of a stored message need."""

_USUAL_PACKET: Final = 1_048_576
_LARGE_PACKET: Final = 8_000_000
_LARGEST_PACKET: Final = 64 * 1024 * 1024 - _HEADROOM
"""Bytes of packets that a nats-server stores: by default, with the `max_payload` that it advises, with the largest."""

_PLUGINS: Final = ("plugin", "global_plugin", "auth_plugin")
_DYNAMIC_CONFIG: Final = "plugin_opt_config_file"

_DEFAULT_OPTIONS: Final = ("port", "bind_address")
"""Options that begin the default listener."""

TLS_FILES: Final = (
    ("certfile", "tls_cert"),
    ("keyfile", "tls_key"),
    ("cafile", "tls_client_ca"),
    ("crlfile", "tls_crl_file"),
)
"""Options that name files for TLS, and their settings."""

_CONVERTED: Final = frozenset(
    {
        "acl_file", "allow_anonymous", "cafile", "certfile", "crlfile", "global_max_clients", "global_max_connections",
        "keyfile", "max_connections", "max_inflight_messages", "max_keepalive", "max_packet_size", "max_qos",
        "max_queued_messages", "max_topic_alias", "message_size_limit", "password_file",
        "persistent_client_expiration", "protocol", "require_certificate", "sys_interval", "tls_version",
        "use_identity_as_username", "websockets_origin"
    }
)  # fmt: skip
"""Options that a function of this module converts."""


def migrate(path: Path) -> Migration:
    """Read a mosquitto.conf with all files that it names, and return what a gateway needs in its place.

    Raises:
        StartupError: a file cannot be read.
    """
    found = read_configuration(path)
    migration = Migration()
    _common(path, found.common, migration)
    _users(found, migration)
    _plugins(found, migration)
    _rules(found, migration)
    _listeners(path, found, migration)
    for bridge in found.bridges:
        _bridge(bridge, migration)
    for section in (found.common, *found.listeners):
        for one in (*section.options.values(), *section.topics):
            _remaining(one, migration)
    migration.findings.sort(key=lambda one: (one.file, one.line))
    return migration


def _remaining(one: Directive, migration: Migration) -> None:
    if _is_dynamic_security(one) or one.name == _DYNAMIC_CONFIG:
        return
    if one.name.startswith(PLUGIN_OPTIONS):
        migration.find(one.file, one.line, "missing", one.name, "an option of a plugin, which a gateway does not load")
    elif one.name in OPTIONS:
        kind, text = OPTIONS[one.name]
        migration.find(one.file, one.line, kind, one.name, text)
    elif one.name in BRIDGE_OPTIONS or one.name.startswith("bridge_"):
        migration.find(one.file, one.line, "missing", one.name, "an option of a bridge, and no connection is before it")
    elif one.name not in (*_CONVERTED, *_DEFAULT_OPTIONS):
        migration.find(one.file, one.line, "missing", one.name, "this option is not known here")


# -- options of all clients -------------------------------------------------------------------------


def _common(path: Path, common: Section, migration: Migration) -> None:
    converters: dict[str, Callable[[Directive, Migration], None]] = {
        "max_inflight_messages": _inflight,
        "max_queued_messages": _queued,
        "max_keepalive": _keep_alive,
        "max_topic_alias": _number("topic_alias_maximum", 65_535),
        "message_size_limit": _size(_HEADER_BYTES),
        "max_packet_size": _size(0),
        "sys_interval": _number("sys_interval", 86_400),
        "persistent_client_expiration": _expiration,
    }
    for name, convert in converters.items():
        one = common.options.get(name)
        if one is not None:
            convert(one, migration)
    if not {"message_size_limit", "max_packet_size"} & common.options.keys():
        _unlimited(path, 0, "no max_packet_size", migration)
    one = common.options.get("global_max_connections") or common.options.get("global_max_clients")
    if one is not None:
        text = "max_connections is set for each listener, and counts in each worker"
        migration.find(one.file, one.line, "changes", one.name, text)


def _whole(one: Directive, migration: Migration) -> int | None:
    """Return the number of an option; None: it is no number."""
    if one.value.isascii() and one.value.isdecimal():
        return int(one.value)
    if one.value != "-1":
        migration.find(one.file, one.line, "missing", one.name, f"{one.value!r} is no number")
    return None


def _number(setting: str, most: int) -> Callable[[Directive, Migration], None]:
    def convert(one: Directive, migration: Migration) -> None:
        value = _whole(one, migration)
        if value is not None:
            migration.settings[setting] = min(value, most)
            migration.find(one.file, one.line, "moved", one.name, f"{setting} = {min(value, most)}")

    return convert


def _size(header: int) -> Callable[[Directive, Migration], None]:
    def convert(one: Directive, migration: Migration) -> None:
        value = _whole(one, migration)
        if not value:
            _unlimited(one.file, one.line, one.name, migration)
            return
        size = min(value + header, _LARGEST_PACKET)
        migration.settings["max_packet_size"] = min(size, migration.settings.get("max_packet_size", size))
        text = f"max_packet_size = {size}" + (", of the whole packet and not of the payload" if header else "")
        if value + header > _LARGE_PACKET:
            text += f"; nats-server needs max_payload of {size + _HEADROOM}, and advises at most 8 MB"
        kept = not header and size <= _USUAL_PACKET
        migration.find(one.file, one.line, "moved" if kept else "changes", one.name, text)

    return convert


def _unlimited(file: Path, line: int, name: str, migration: Migration) -> None:
    """Set the size of packets for a mosquitto without limit, which takes 268,435,455 bytes."""
    size = migration.settings.setdefault("max_packet_size", _LARGE_PACKET)
    text = (
        f"mosquitto takes packets of 256 MB; max_packet_size = {size}. A nats-server without --embedded needs "
        f"max_payload of {size + _HEADROOM} or more (its default is 1 MB; nats-server.conf of mqtt-nats has 8 MB)"
    )
    migration.find(file, line, "changes", name, text)


def _inflight(one: Directive, migration: Migration) -> None:
    value = _whole(one, migration)
    if value == 0 or (value is not None and value > 65_535):
        migration.find(one.file, one.line, "changes", one.name, "never unlimited: max_inflight, 100 by default")
    elif value is not None:
        migration.settings["max_inflight"] = value
        text = f"max_inflight = {value}, for each durable subscription and not for each client"
        migration.find(one.file, one.line, "changes", one.name, text)


def _keep_alive(one: Directive, migration: Migration) -> None:
    value = _whole(one, migration)
    if value is None:
        return
    if not 0 < value < 65_535:
        migration.find(one.file, one.line, "not needed", one.name, "there is no upper bound by default")
        return
    migration.settings["server_keep_alive"] = value
    text = (
        f"server_keep_alive = {value}: the upper bound for 5.0 clients, as there. 3.1.1 clients with a longer keep "
        "alive are let in; mosquitto refuses them"
    )
    migration.find(one.file, one.line, "changes", one.name, text)


def _queued(one: Directive, migration: Migration) -> None:
    value = _whole(one, migration)
    if value == 0:
        text = "max_backlog is unlimited by default; max_queued bounds sessions that end with their connection"
        migration.find(one.file, one.line, "changes", one.name, text)
    elif value is not None:
        migration.settings["max_backlog"] = migration.settings["max_queued"] = value
        migration.find(one.file, one.line, "moved", one.name, f"max_backlog = {value} and max_queued = {value}")


def _expiration(one: Directive, migration: Migration) -> None:
    found = re.fullmatch(r"(\d{1,6})\s*([hdwmy])", one.value)
    if found is None:
        migration.find(one.file, one.line, "missing", one.name, f"{one.value!r} is no period")
        return
    seconds = min(int(found[1]) * _PERIODS[found[2]], 0xFFFF_FFFE)
    shown = next(
        f"{seconds // unit}{name}" for name, unit in (("d", 86_400), ("h", 3600), ("s", 1)) if seconds % unit == 0
    )
    migration.settings["session_expiry_interval"] = shown
    text = (
        f"session_expiry_interval = {shown}, for 3.1.1 clients; messages wait for message_retention, a day by default"
    )
    migration.find(one.file, one.line, "changes", one.name, text)


# -- users and rules --------------------------------------------------------------------------------


def _of_listeners(found: Configuration, name: str) -> list[Directive]:
    sections = [found.common, *(found.listeners if found.per_listener else [])]
    return [one.options[name] for one in sections if name in one.options]


def _users(found: Configuration, migration: Migration) -> None:
    for one in _of_listeners(found, "password_file"):
        path = nearby(one.file, one.value)
        users = dict(migration.users or {})
        for number, line in enumerate(read_lines(path), 1):
            name = line.split(":", 1)[0]
            if not line.strip() or line.startswith("#"):
                continue
            try:
                name, text = check_entry(line)
            except ValueError as error:
                migration.find(path, number, "missing", f"user {name!r}", f"the user is left out: {error}")
                continue
            if users.setdefault(name, text) != text:
                text = "another file has the user with another password; this one is left out"
                migration.find(path, number, "missing", f"user {name!r}", text)
            else:
                migration.find(path, number, "moved", f"user {name!r}", "a line in passwords")
        migration.add_users(users)
        migration.find(one.file, one.line, "moved", one.name, "password_file = passwords")


def _is_dynamic_security(one: Directive) -> bool:
    return one.name in _PLUGINS and LIBRARY in one.value


def _plugins(found: Configuration, migration: Migration) -> None:
    """Read the file of the plugin dynamic security, in the order in which mosquitto asks: before the ACL file."""
    sections = (found.common, *found.listeners)
    plugin = next((one for each in sections for one in each.options.values() if _is_dynamic_security(one)), None)
    config = next((each.options[_DYNAMIC_CONFIG] for each in sections if _DYNAMIC_CONFIG in each.options), None)
    if plugin is not None and config is not None:
        text = "its users, groups and roles are moved; `mqtt-nats passwd` and acl.toml change them"
        migration.find(plugin.file, plugin.line, "changes", plugin.name, text)
        read_dynamic_security(nearby(config.file, config.value), config, migration)
    elif plugin is not None:
        text = f"{_DYNAMIC_CONFIG} is missing: its users and rules are not moved"
        migration.find(plugin.file, plugin.line, "missing", plugin.name, text)
    elif config is not None:
        migration.find(config.file, config.line, "missing", config.name, "an option of a plugin that is not known here")


def _rules(found: Configuration, migration: Migration) -> None:
    directives = _of_listeners(found, "acl_file")
    if not directives:
        return
    files = list(dict.fromkeys(nearby(one.file, one.value) for one in directives))
    migration.add_rules(chain.from_iterable([read_rules(path, migration) for path in files]))
    migration.settings["acl_subscribe"] = "deliver"
    for one in directives:
        text = "acl_file = acl.toml, with acl_subscribe = deliver: each message is looked at, as there"
        if found.per_listener:
            text = "acl.toml has the rules of all listeners together, and holds at each of them"
        migration.find(one.file, one.line, "changes" if found.per_listener else "moved", one.name, text)


# -- listeners --------------------------------------------------------------------------------------


def _listeners(path: Path, found: Configuration, migration: Migration) -> None:
    sections = list(found.listeners)
    if found.opens_default is not None:
        sections.insert(0, found.common)
    if not sections:
        migration.settings["listen"] = "127.0.0.1:1883"
        text = "listen = 127.0.0.1:1883, for this machine only; mosquitto has ::1 too"
        migration.find(path, 0, "changes", "no listener", text)
    made = [one for section in sections for one in _listener(section, found, migration)]
    if made:
        migration.settings["listeners"] = made
    anonymous = found.common.options.get("allow_anonymous")
    if anonymous is not None:
        text = f"allow_anonymous = {'true' if anonymous.on else 'false'} of each listener"
        migration.find(anonymous.file, anonymous.line, "moved", anonymous.name, text)


def _listener(section: Section, found: Configuration, migration: Migration) -> Iterator[dict[str, Any]]:
    head = section.head
    if head is None:
        head = found.opens_default
        assert head is not None
        port, host = section.value("port") or "1883", section.value("bind_address") or ""
    else:
        port, _, host = (part.strip() for part in head.value.partition(" "))
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65_536):
        migration.find(head.file, head.line, "missing", f"listener {head.value}", "only TCP ports are listened on")
        return
    if lost := _lost_restriction(section):
        text = f"{lost}: without that more clients could connect, so the listener is left out"
        migration.find(head.file, head.line, "missing", f"listener {head.value}", text)
        return
    family = section.value("socket_domain") or ""
    made: dict[str, Any] = {"listen": join_address(host or _EVERY_HOST.get(family, EVERY), int(port))}
    _kind(section, head, made, migration)
    _tls(section, made, migration)
    if section.on("use_identity_as_username") and "tls_client_ca" in made:
        made["use_identity"] = "cn"
    else:
        made["allow_anonymous"] = (section if found.per_listener else found.common).on("allow_anonymous")
    _limits(section, made, migration)
    if not made.get("allow_anonymous", True) and migration.users is None and "tls_client_ca" not in made:
        text = "nobody can log in: there is no password_file. Name authenticators before the gateway starts"
        migration.find(head.file, head.line, "missing", f"listener {head.value}", text)
    text = f"[[listeners]] {made['listen']}"
    if section.head is None and head.name not in _DEFAULT_OPTIONS:
        text += ": before any listener, this option opens the default listener of mosquitto"
    migration.find(head.file, head.line, "moved", f"{head.name} {head.value}", text)
    yield made


def _lost_restriction(section: Section) -> str:
    """Return which restriction of a listener has no counterpart here; empty = there is none."""
    options = section.options
    if "bind_interface" in options:
        return "bind_interface: name the address of the interface"
    if "certfile" not in options and {"psk_hint", "psk_file"} & options.keys():
        return "TLS with pre-shared keys: use certificates"
    if section.on("require_certificate") and "cafile" not in options:
        return "require_certificate without cafile: put the authorities into one file"
    return ""


def _kind(section: Section, head: Directive, made: dict[str, Any], migration: Migration) -> None:
    web = section.value("protocol") == "websockets"
    secure = section.value("certfile") is not None
    made["type"] = ("wss" if secure else "ws") if web else ("tls" if secure else "tcp")
    one = section.options.get("protocol")
    if one is not None and one.value not in ("mqtt", "websockets"):
        migration.find(one.file, one.line, "missing", one.name, f"{one.value} is not served; the listener is for MQTT")
    elif one is not None:
        migration.find(one.file, one.line, "moved", one.name, f"type = {made['type']}")
    if web:
        made["paths"] = ["*"]
        origins = section.options.get("websockets_origin")
        made["origins"] = ["*"] if origins is None else [origins.value]
        migration.find(head.file, head.line, "moved", "websockets", "any path and origin, as there: paths, origins")


def _tls(section: Section, made: dict[str, Any], migration: Migration) -> None:
    if made["type"] in ("tcp", "ws"):
        return
    demanded = section.on("require_certificate")
    for option, setting in TLS_FILES:
        one = section.options.get(option)
        if one is None:
            continue
        if option in ("cafile", "crlfile") and not demanded:
            text = f"clients need no certificate (require_certificate false): no {setting}"
            migration.find(one.file, one.line, "not needed", option, text)
            continue
        made[setting] = str(one.file.parent.joinpath(one.value)) if one.value.startswith(".") else one.value
        migration.find(one.file, one.line, "moved", option, setting)
    for name in ("require_certificate", "use_identity_as_username"):
        one = section.options.get(name)
        if one is not None:
            migration.find(one.file, one.line, "moved", name, "tls_client_ca" if demanded else "no tls_client_ca")
    one = section.options.get("tls_version")
    if one is not None:
        made["tls_minimum"] = "1.3" if one.value.endswith("1.3") else "1.2"
        kept = one.value in ("tlsv1.2", "tlsv1.3")
        text = f"tls_minimum = {made['tls_minimum']}"
        migration.find(one.file, one.line, "moved" if kept else "changes", one.name, text)


def _limits(section: Section, made: dict[str, Any], migration: Migration) -> None:
    for option, most in (("max_connections", 1_000_000_000), ("max_qos", 2)):
        one = section.options.get(option)
        if one is None:
            continue
        value = _whole(one, migration)
        if value is None or (option == "max_connections" and not value):
            migration.find(one.file, one.line, "not needed", option, "there is no bound by default")
        else:
            made[option] = min(value, most)
            text = f"{option} = {made[option]}" + (", in each worker" if option == "max_connections" else "")
            migration.find(one.file, one.line, "moved", option, text)


# -- bridges ----------------------------------------------------------------------------------------


def _bridge(bridge: Section, migration: Migration) -> None:
    head = bridge.head
    assert head is not None
    address = bridge.value("address") or bridge.value("addresses") or "?"
    text = (
        f"a gateway cannot be a bridge: keep a mosquitto with this bridge to {address}, and give that mosquitto a "
        "second bridge, to the gateway (docs/bridges.md)"
    )
    migration.find(head.file, head.line, "missing", f"connection {head.value}", text)
    for one in (*bridge.options.values(), *bridge.topics):
        secret = one.name in ("remote_password", "password", "bridge_psk", "local_password")
        what = one.name if secret or not one.value else f"{one.name} {one.value}"
        migration.find(one.file, one.line, "not needed", what, f"stays in mosquitto, with the bridge {head.value}")
