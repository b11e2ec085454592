# SPDX-License-Identifier: Apache-2.0
"""Options that the clients have in common: server, TLS, user, session and will. Options of mosquitto's clients."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click

from mqtt_nats.codec import Connect, MqttError, Properties, Will, check_topic_name
from mqtt_nats.mqtt_clients.stream import Server, Tls

PASSWORD_VARIABLE: Final = "MQTT_NATS_CLIENT_PASSWORD"

VERSIONS: Final = {
    **dict.fromkeys(("3.1.1", "4", "311", "mqttv311"), 4),
    **dict.fromkeys(("5.0", "5", "mqttv5"), 5),
}

SCHEMES: Final = {"mqtt": (1883, False), "mqtts": (8883, True), "ws": (80, False), "wss": (443, True)}
"""Scheme of a URL: port, and whether TLS is used."""

EXPIRY_NEVER: Final = 0xFFFF_FFFF
"""Session Expiry Interval of a session that does not expire (section 3.1.2.11.2)."""

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SECONDS = click.IntRange(0, 0xFFFF_FFFF)

Command = Callable[..., Any]


def _version(context: click.Context, parameter: click.Parameter, text: str) -> int:
    if text not in VERSIONS:
        raise click.BadParameter(f"{text!r} is neither 3.1.1 nor 5.0")
    return VERSIONS[text]


def topic_name(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """Check a topic name; click's callback."""
    if text is not None:
        try:
            check_topic_name(text)
        except MqttError as error:
            raise click.BadParameter(str(error)) from None
    return text


_OPTIONS: Final = (
    click.option("-h", "--host", help="Host name or address of the server. [default: localhost]"),
    click.option("-p", "--port", type=click.IntRange(1, 65_535), help="[default: 1883; with TLS 8883]"),
    click.option("--url", help="Instead of host and port: mqtt://, mqtts://, ws:// or wss://HOST[:PORT][/PATH]."),
    click.option("-V", "--mqtt-version", default="5.0", show_default=True, callback=_version, help="3.1.1 or 5.0."),
    click.option("-i", "--id", "client_id", default="", help="Client identifier. [default: the server makes one]"),
    click.option("-u", "--username", help="User name."),
    click.option(
        "-P",
        "--password",
        envvar=PASSWORD_VARIABLE,
        help=f"Others on this machine can see it; better in {PASSWORD_VARIABLE} or --password-file.",
    ),
    click.option("--password-file", type=_FILE, help="The first line of this file is the password."),
    click.option("-k", "--keep-alive", type=click.IntRange(0, 65_535), default=60, show_default=True, help="Seconds."),
    click.option("-c", "--session", is_flag=True, help="The session outlives the connection; needs --id."),
    click.option("-x", "--session-expiry", type=_SECONDS, help="With -c: seconds until it ends. [default: never]"),
    click.option("--tls", is_flag=True, help="TLS with the authorities of the system. Implied by the options below."),
    click.option("--cafile", type=_FILE, help="Certificates of authorities (PEM)."),
    click.option(
        "--capath",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Directory with such certificates.",
    ),
    click.option("--cert", type=_FILE, help="Certificate of this client (PEM)."),
    click.option("--key", type=_FILE, help="Key of the client's certificate (PEM)."),
    click.option(
        "--will-topic",
        callback=topic_name,
        help="Topic of a will, which the server publishes when the connection is lost.",
    ),
    click.option("--will-payload", help="Payload of the will."),
    click.option("--will-qos", type=click.IntRange(0, 2), help="QoS of the will. [default: 0]"),
    click.option("--will-retain", is_flag=True, help="The will is retained."),
    click.option("--will-delay", type=_SECONDS, help="Seconds from the loss of the connection until it is published."),
)


def connection_options(command: Command) -> Command:
    """Add the common options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def server_of(given: dict[str, Any]) -> Server:
    """Return the server that the options name. UsageError for options that exclude each other."""
    tls = _tls_of(given)
    if given["url"] is None:
        port = given["port"] or (1883 if tls is None else 8883)
        return Server(given["host"] or "localhost", port, tls)
    if given["host"] is not None or given["port"] is not None:
        raise click.UsageError("--url is instead of --host and --port")
    return _server_at(given["url"], tls)


def _server_at(url: str, tls: Tls | None) -> Server:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = parts = None
    if parts is None or parts.scheme not in SCHEMES or not host or parts.query or parts.fragment:
        raise click.UsageError("--url is mqtt://, mqtts://, ws:// or wss://HOST[:PORT][/PATH]")
    if parts.username is not None:
        raise click.UsageError("user and password do not belong in --url: --username, --password-file")
    default, secure = SCHEMES[parts.scheme]
    if tls is not None and not secure:
        raise click.UsageError(f"{parts.scheme}:// is without TLS")
    websocket = parts.scheme.startswith("ws")
    if not websocket and parts.path not in ("", "/"):
        raise click.UsageError(f"{parts.scheme}:// has no path")
    path = (parts.path or "/mqtt") if websocket else None
    return Server(host, port or default, (tls or Tls()) if secure else None, path)


def _tls_of(given: dict[str, Any]) -> Tls | None:
    if given["key"] is not None and given["cert"] is None:
        raise click.UsageError("--key needs --cert")
    tls = Tls(given["cafile"], given["capath"], given["cert"], given["key"])
    return tls if given["tls"] or tls != Tls() else None


def connect_of(given: dict[str, Any]) -> Connect:
    """Return the CONNECT packet that the options describe. UsageError for options that exclude each other."""
    version, session, expiry = given["mqtt_version"], given["session"], given["session_expiry"]
    if session and not given["client_id"]:
        raise click.UsageError("--session needs --id")
    if expiry is not None and not session:
        raise click.UsageError("--session-expiry needs --session")
    password = _password_of(given)
    if password is not None and given["username"] is None and version == 4:
        raise click.UsageError("a password without --username needs MQTT 5.0")
    properties = Properties()
    if session and version == 5:
        properties["session_expiry_interval"] = EXPIRY_NEVER if expiry is None else expiry
    elif expiry is not None:
        raise click.UsageError("--session-expiry is for MQTT 5.0")
    return Connect(
        version,
        given["client_id"],
        not session,
        given["keep_alive"],
        given["username"],
        password,
        _will_of(given),
        properties or None,
    )


def _password_of(given: dict[str, Any]) -> bytes | None:
    file: Path | None = given["password_file"]
    if file is None:
        password: str | None = given["password"]
        return None if password is None else os.fsencode(password)
    source = click.get_current_context().get_parameter_source("password")
    if source is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--password-file is instead of --password")
    try:
        return file.read_bytes().partition(b"\n")[0].removesuffix(b"\r")
    except OSError as error:
        raise click.UsageError(f"--password-file cannot be read: {error.strerror}") from None


def _will_of(given: dict[str, Any]) -> Will | None:
    topic: str | None = given["will_topic"]
    delay: int | None = given["will_delay"]
    if topic is None:
        for name in ("will_payload", "will_qos", "will_retain", "will_delay"):
            if given[name] is not None and given[name] is not False:
                raise click.UsageError(f"--{name.replace('_', '-')} needs --will-topic")
        return None
    properties = Properties()
    if delay is not None:
        if given["mqtt_version"] == 4:
            raise click.UsageError("--will-delay is for MQTT 5.0")
        properties["will_delay_interval"] = delay
    payload = os.fsencode(given["will_payload"] or "")
    return Will(topic, payload, given["will_qos"] or 0, given["will_retain"], properties or None)
