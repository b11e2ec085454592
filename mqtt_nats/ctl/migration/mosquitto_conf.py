# SPDX-License-Identifier: Apache-2.0
"""Directives of a mosquitto.conf and of the files that it includes, by listener and bridge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from mqtt_nats.base.errors import StartupError
from mqtt_nats.ctl.migration.findings import read_lines

INCLUDES_MOST: Final = 200
"""Most files that a configuration may include."""

LISTENER_OPTIONS: Final = frozenset(
    {
        "accept_protocol_versions", "allow_zero_length_clientid", "bind_interface", "cafile", "capath", "certfile",
        "ciphers", "ciphers_tls1.3", "crlfile", "dhparamfile", "disable_client_cert_date_checks",
        "enable_proxy_protocol", "http_dir", "keyfile", "max_connections", "max_qos",
        "mount_point", "protocol", "proxy_protocol_v2_require_tls",
        "psk_hint", "require_certificate", "socket_domain", "tls_engine", "tls_engine_kpass_sha1", "tls_keyform",
        "tls_version", "use_identity_as_username", "use_subject_as_username", "use_username_as_clientid",
        "websockets_headers_size", "websockets_log_level", "websockets_origin"
    }
)  # fmt: skip
"""Options of the listener that stands before them; before any listener they are those of the default listener."""

BRIDGE_OPTIONS: Final = frozenset(
    {
        "address", "addresses", "cleansession", "clientid", "idle_timeout", "keepalive_interval", "local_cleansession",
        "local_clientid", "local_password", "local_username", "notification_topic", "notifications",
        "notifications_local_only", "password", "remote_clientid", "remote_password", "remote_username",
        "restart_timeout", "round_robin", "start_type", "threshold", "topic", "try_private", "username"
    }
)  # fmt: skip
"""Options of the bridge that stands before them in the file, besides those that begin with `bridge_`."""

_OPENING: Final = frozenset(
    {
        "bind_address", "cafile", "capath", "certfile", "ciphers", "ciphers_tls1.3", "crlfile", "dhparamfile",
        "keyfile", "max_connections", "max_qos", "mount_point", "port", "protocol", "psk_hint", "require_certificate",
        "socket_domain", "tls_engine", "tls_engine_kpass_sha1", "use_identity_as_username",
        "use_subject_as_username", "use_username_as_clientid"
    }
)  # fmt: skip
_UNCHANGED: Final = frozenset(
    [("max_connections", "-1"), ("max_qos", "2"), ("protocol", "mqtt"), *((name, "false") for name in _OPENING)]
)

PER_LISTENER: Final = frozenset(
    ["acl_file", "allow_anonymous", "auth_plugin", "auto_id_prefix", "password_file", "plugin", "psk_file"]
)
"""Options that belong to a listener with ``per_listener_settings true``, and to all clients otherwise."""


class Directive(NamedTuple):
    """Line of a mosquitto configuration file: an option and its value."""

    file: Path
    line: int
    name: str
    value: str

    @property
    def on(self) -> bool:
        """Whether the value is `true`."""
        return self.value.lower() in ("true", "1")


@dataclass(slots=True)
class Section:
    """A listener or a bridge, with its directives."""

    head: Directive | None
    """The line that begins the section; None: the default listener."""
    options: dict[str, Directive] = field(default_factory=dict)
    topics: list[Directive] = field(default_factory=list)
    """Lines `topic` of a bridge."""

    def value(self, name: str) -> str | None:
        """Return the value of an option; None: it is not set."""
        found = self.options.get(name)
        return None if found is None else found.value

    def on(self, name: str) -> bool:
        """Whether an option is set to true."""
        found = self.options.get(name)
        return found is not None and found.on


@dataclass(slots=True)
class Configuration:
    """A configuration of mosquitto, in its parts."""

    common: Section
    """Options of all clients, and of the default listener."""
    listeners: list[Section]
    bridges: list[Section]
    per_listener: bool

    @property
    def opens_default(self) -> Directive | None:
        """Option for which mosquitto opens the default listener, beside others too; None: there is none."""
        found = self.common.options.values()
        return next((one for one in found if one.name in _OPENING and (one.name, one.value) not in _UNCHANGED), None)


def read_configuration(path: Path) -> Configuration:
    """Read a mosquitto.conf.

    Raises:
        StartupError: a file cannot be read, or includes have no end.
    """
    lines = list(_directives(path, [INCLUDES_MOST]))
    per_listener = any(one.name == "per_listener_settings" and one.on for _, one in lines)
    found = Configuration(Section(None), [], [], per_listener)
    listeners: dict[int, Section] = {}  # of each file, the last one
    bridges: dict[int, Section] = {}
    for file, one in lines:
        if one.name in ("listener", "connection"):
            section = Section(one)
            (found.listeners if one.name == "listener" else found.bridges).append(section)
            (listeners if one.name == "listener" else bridges)[file] = section
            continue
        owner = found.common
        if one.name in BRIDGE_OPTIONS or one.name.startswith("bridge_"):
            owner = bridges.get(file, owner)
        elif one.name in LISTENER_OPTIONS or (per_listener and one.name in PER_LISTENER):
            owner = listeners.get(file, owner)
        if one.name == "topic":
            owner.topics.append(one)
        else:
            owner.options[one.name] = one
    return found


def _directives(path: Path, left: list[int]) -> Iterator[tuple[int, Directive]]:
    """Yield the lines of a file, and of the files that it includes, in their order, each with the number of its file.

    mosquitto ends listeners and bridges with the file: options of an included file do not belong to those before it.
    """
    left[0] -= 1
    file = left[0]
    if file < 0:
        raise StartupError(f"{path}: more than {INCLUDES_MOST} files are included")
    for number, line in enumerate(read_lines(path), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, _, value = text.partition(" ")
        name, value = name.strip(), value.strip()
        if name == "include_dir":
            for each in included(path, Path(value)):
                yield from _directives(each, left)
        else:
            yield file, Directive(path, number, name, value)


def included(path: Path, directory: Path) -> list[Path]:
    """Return the files of an `include_dir` in the order in which mosquitto reads them.

    A directory that is not on this machine is looked for beside the configuration, so that a copy can be read.

    Raises:
        StartupError: the directory is in neither place.
    """
    for each in (directory, path.parent / directory.name):
        if each.is_dir():
            # By name, upper and lower case alike.
            return sorted(
                (one for one in each.iterdir() if one.name.endswith(".conf")), key=lambda one: one.name.lower()
            )
    raise StartupError(f"{path}: include_dir {directory} is neither there nor beside the file")


def nearby(file: Path, name: str) -> Path:
    """Return the path of a file that the configuration names: there, or beside the configuration for a copy."""
    path = Path(name)
    beside = file.parent / path.name
    return path if path.is_file() or not beside.is_file() else beside
