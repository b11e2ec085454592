# SPDX-License-Identifier: Apache-2.0
"""Settings of one listener: an entry of ``[[listeners]]``."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated, Any, Final, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, FilePath, model_validator

from mqtt_nats.base.limit_settings import (
    DURATION,
    MOST_BYTES,
    Bytes,
    ClientLimits,
    Count,
    Inflight,
    Names,
    Networks,
    PacketSize,
    Qos,
    Rate,
    Rules,
    Seconds,
    Sixteen,
    at_listener,
)

Kind = Literal["tcp", "tls", "ws", "wss"]
TemporaryRefusals = Literal["close", "connack"]

NO_HOST: Final = ("null", "file://")
"""Values of `Origin` that browsers send for pages from files, or without a site."""

ANYBODY: Final = "*"
"""Value in `origins` that allows pages of all sites."""

_ORIGIN: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._~-]+)(?::(?P<port>[0-9]{1,5}))?"
)
_PATH: Final = re.compile(r"/[!\x24-\x3e\x40-\x7e]*")

PATHS: Final = ("/mqtt", "/")
"""Default paths for MQTT over WebSocket: `/mqtt` is usual; clients whose URL has no path request `/`."""

ANY_PATH: Final = "*"
"""Value in `paths` that allows any path."""

_PORTS: Final = {"http": 80, "https": 443}

_MIB: Final = 1024 * 1024

INSTEAD: Final = "For this listener, in place of the gateway's value."


def _never_is_none(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() == "never" else value


def parse_address(value: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` or ``[IPv6]:PORT``; raises ValueError. Port 0 asks for a free one."""
    host, colon, port = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address needs brackets: [::1]:1883")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError("expected HOST:PORT, such as 127.0.0.1:1883")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, or ``[IPv6]:PORT``: the reverse of :func:`parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(value: Any) -> Any:
    """Return the value unchanged; raises ValueError for a string that is no address."""
    if isinstance(value, str):
        parse_address(value)
    return value


def normal_origin(value: str) -> str:
    """Return an origin as browsers send it, in lower case, without the scheme's default port; raises ValueError."""
    text = value.lower()
    if text in NO_HOST:
        return text
    found = _ORIGIN.fullmatch(text)
    if found is None or int(found["port"] or 0) > 65535:
        raise ValueError(f"{value!r} is no origin: expected SCHEME://HOST or SCHEME://HOST:PORT, without a path")
    start = f"{found['scheme']}://{found['host']}"
    port = int(found["port"] or 0)
    return f"{start}:{port}" if port and port != _PORTS.get(found["scheme"]) else start


def is_own_origin(origin: str, host: str, secure: bool) -> bool:
    """Return whether a page's origin is the host under which the listener was reached, on any port.

    Without TLS the host has to be an address, or localhost: an attacker's own name may resolve to this listener, and
    would then be both page and host. With TLS the certificate is for the name.

    Args:
        origin: the origin that a browser has sent.
        host: the header `Host`.
    """
    found = _ORIGIN.fullmatch(origin.lower())
    try:
        asked = urlsplit(f"//{host}").hostname
    except ValueError:
        asked = None
    if found is None or found["scheme"] not in _PORTS or not asked:
        return False
    page = found["host"].strip("[]")
    try:
        one, other = (ip_address("127.0.0.1" if name == "localhost" else name) for name in (page, asked))
    except ValueError:
        return secure and page == asked
    return one == other or (one.is_loopback and other.is_loopback)


def _normal_origins(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(ANYBODY if one == ANYBODY else normal_origin(one) for one in value)


def _check_paths(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise ValueError("no client can connect: give a path, such as /mqtt, or * for any")
    for one in value:
        if one != ANY_PATH and not _PATH.fullmatch(one):
            raise ValueError(f"{one!r} is no path: expected something like /mqtt, without ? and #, or * for any")
    return value


Origins = Annotated[Names, AfterValidator(_normal_origins)]
Paths = Annotated[Names, AfterValidator(_check_paths)]
Address = Annotated[str, BeforeValidator(check_address)]


class ListenerSettings(BaseModel):
    """Settings of one listener: its address, and the conditions for clients."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True)

    listen: Address = Field(
        description="Address, HOST:PORT; the host `*` is all addresses, IPv4 and IPv6; port 0 takes a free one."
    )
    type: Kind = Field(default="tcp", description="`tcp`, `tls`, `ws` (WebSocket) or `wss` (the same over TLS).")
    tls_cert: FilePath | None = Field(
        default=None, description="PEM file with the certificate of the gateway, and those between it and its root."
    )
    tls_key: FilePath | None = Field(default=None, description="PEM file with the key of `tls_cert`, not encrypted.")
    tls_client_ca: FilePath | None = Field(
        default=None,
        description="PEM file with certificate authorities; the listener accepts only clients with a certificate of "
        "one of them.",
    )
    tls_crl_file: FilePath | None = Field(
        default=None,
        description="PEM file with the lists of revoked certificates of the authorities in `tls_client_ca`, of all of "
        "them. A client whose certificate, or an authority of it, is revoked or has no list in force is refused.",
    )
    tls_minimum: Literal["1.2", "1.3"] = Field(default="1.2", description="Oldest version of TLS that is spoken.")
    use_identity: Literal["cn", "dns", "email", "uri"] | None = Field(
        default=None,
        description="The name in the client's certificate that is its user, the common name or one of the alternative "
        "names; needs `tls_client_ca`. No authenticator is asked.",
    )
    authenticators: Names | None = Field(
        default=None,
        description="Names of the authenticators of this listener, in this order; `scram` is `scram_file`. Unset: all "
        "of them. `[]`: none.",
    )
    allow_anonymous: bool | None = Field(
        default=None,
        description="For this listener, in place of the gateway's value. A listener beyond loopback that asks no "
        "authenticator needs `true`.",
    )
    proxy_protocol: Networks = Field(
        default=(),
        description="Networks of proxies that send the PROXY protocol (version 1 or 2); only they may connect.",
    )
    paths: Paths = Field(
        default=PATHS,
        description="For WebSocket: the paths of MQTT, with or without a slash at the end; `*` among them for any.",
    )
    origins: Origins = Field(
        default=(),
        description="For WebSocket: what browsers may send as `Origin` (`https://example.org`), `*` for anything; "
        "unset: pages of the listener's own host, on whatever port.",
    )
    addresses: Rules = Field(
        default=(), description="As `addresses` of the gateway; both lists must allow the address."
    )
    tenant: str | None = Field(
        default=None,
        description="The tenant that clients belong to here; unset: that of the user, or the gateway's own account.",
    )
    max_connections: Count | None = Field(
        default=None,
        description="Connections at the same time, in each worker; more are closed before anything is read from them.",
    )
    max_connections_per_address: Count | None = Field(default=None, description=INSTEAD)
    connect_rate: Rate | None = Field(default=None, description=INSTEAD)
    connect_rate_per_address: Rate | None = Field(default=None, description=INSTEAD)
    connect_timeout: Seconds | None = Field(default=None, description=INSTEAD)
    connect_packet_size: PacketSize | None = Field(default=None, description=INSTEAD)
    max_packet_size: PacketSize | None = Field(default=None, description=INSTEAD)
    message_rate: Rate | None = Field(default=None, description=INSTEAD)
    byte_rate: Bytes | None = Field(default=None, description=INSTEAD)
    max_subscriptions: Count | None = Field(default=None, description=INSTEAD)
    max_inflight: Inflight | None = Field(default=None, description=INSTEAD)
    max_queued: Count | None = Field(default=None, description=INSTEAD)
    receive_maximum: Sixteen | None = Field(default=None, description=INSTEAD)
    max_qos: Qos | None = Field(default=None, description=INSTEAD)
    durable_sessions: bool | None = Field(default=None, description=INSTEAD)
    carried_messages: bool | None = Field(default=None, description=INSTEAD)
    temporary_refusals: TemporaryRefusals | None = Field(default=None, description=INSTEAD)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        given = [name for name in self.model_fields_set if name.startswith("tls_") and getattr(self, name) is not None]
        if not self.secure and given:
            raise ValueError(f"{sorted(given)[0]} needs a type with TLS, not {self.type}")
        if self.origins and not self.web:
            raise ValueError(f"origins needs a type with WebSocket, not {self.type}")
        if "paths" in self.model_fields_set and not self.web:
            raise ValueError(f"paths needs a type with WebSocket, not {self.type}")
        if self.secure and (self.tls_cert is None or self.tls_key is None):
            raise ValueError(f"type {self.type} needs tls_cert and tls_key")
        if self.use_identity is not None and self.tls_client_ca is None:
            raise ValueError("use_identity needs tls_client_ca")
        if self.tls_crl_file is not None and self.tls_client_ca is None:
            raise ValueError("tls_crl_file needs tls_client_ca")
        if self.use_identity is not None and (self.authenticators or self.allow_anonymous):
            raise ValueError("use_identity excludes authenticators and allow_anonymous")
        return self

    @property
    def secure(self) -> bool:
        """Whether the listener uses TLS."""
        return self.type in ("tls", "wss")

    @property
    def web(self) -> bool:
        """Whether the listener uses WebSocket."""
        return self.type in ("ws", "wss")


class ConnectionSettings(ClientLimits):
    """Settings in force for the connections of a listener."""

    model_config = ConfigDict(frozen=True)

    session_expiry_interval: Annotated[int | None, DURATION, BeforeValidator(_never_is_none)] = Field(
        default=None,
        ge=1,
        le=0xFFFFFFFE,
        description="Time for which the session of an absent 3.1.1 client is kept (clean session 0). `never`: until "
        "the client or an operator ends it; `max_sessions` limits their number.",
    )
    max_session_expiry_interval: Annotated[int | None, DURATION, BeforeValidator(_never_is_none)] = Field(
        default=604_800,
        ge=1,
        le=0xFFFFFFFE,
        description="Longest time for which the session of an absent 5.0 client is kept; CONNACK tells it to a client"
        " that requests more. `never`: for as long as the client requests.",
    )
    durable_sessions: bool = Field(
        default=True, description="Keep sessions whose clients ask for it; off, every session ends with its connection."
    )
    carried_messages: bool = Field(
        default=False,
        description="Clients may publish messages for one session only, as `mqtt-nats migrate sessions` does: not for "
        "the listeners of other clients.",
    )
    temporary_refusals: TemporaryRefusals = Field(
        default="close",
        description="How CONNECT is refused for a reason that passes, such as `connect_rate`: `close` = the connection "
        "is closed, since some clients never connect again after a CONNACK with an error; `connack` = CONNACK has the "
        "reason.",
    )
    max_packet_size: PacketSize = Field(
        default=ByteSize(_MIB),
        description="Largest MQTT packet accepted, in bytes.",
    )
    connect_packet_size: PacketSize = Field(
        default=ByteSize(8 * 1024),
        description="Largest packet accepted before CONNECT is handled, in bytes: a connection keeps no more until "
        "then. Clients with larger wills need more.",
    )
    connect_timeout: Seconds = Field(
        default=15.0,
        description="Time in which a new connection must send its CONNECT.",
    )
    max_inflight: Inflight = Field(
        default=100,
        description="QoS 1 and 2 messages sent but not acknowledged, per durable subscription and per regular session. "
        "A filter that ends in `/#` counts as two subscriptions. A durable session has the sum of its subscriptions.",
    )
    max_queued: Count = Field(
        default=10_000, description="QoS 1 and 2 messages waiting in memory for a regular session."
    )
    max_outbound_bytes: ByteSize = Field(
        default=ByteSize(16 * _MIB),
        ge=64 * 1024,
        le=MOST_BYTES,
        description="Bytes waiting to be sent to one client; above this QoS 0 messages for it are dropped.",
    )
    max_subscriptions: Count = Field(
        default=10_000,
        description="Subscriptions of one session. A durable session has room for fewer: one message of JetStream.",
    )
    receive_maximum: Sixteen = Field(
        default=1024,
        description="QoS 1 and 2 publishes that a 5.0 client may have unacknowledged (Receive Maximum).",
    )
    topic_alias_maximum: int = Field(
        default=32, ge=0, le=65535, description="Topic aliases that a 5.0 client may use for its publishes."
    )
    server_keep_alive: Annotated[int | None, DURATION] = Field(
        default=None,
        ge=1,
        le=65535,
        description="Longest keep alive; a 5.0 client that requests a longer one, or none, gets this value.",
    )
    response_information: str | None = Field(
        default=None,
        max_length=1000,
        description="Response Information for 5.0 clients that request it; `%c` stands for the client id.",
    )
    max_topic_levels: int = Field(
        default=128, ge=1, le=1900, description="Levels in a topic or filter, counted by their slashes."
    )
    publish_client_id: bool = Field(
        default=True, description="Name the publisher to NATS clients in the header `Nmqtt-Client`."
    )

    def at(self, listener: ListenerSettings) -> Self:
        """Return the settings in force at a listener."""
        changes = at_listener(dict(listener))
        return self.model_copy(update=changes) if changes else self


class Bound(NamedTuple):
    """Address on which a listener accepts connections."""

    host: str
    port: int
    type: Kind | Literal["admin"]

    def __str__(self) -> str:
        address = join_address(self.host, self.port)
        return address if self.type == "tcp" else f"{self.type}://{address}"
