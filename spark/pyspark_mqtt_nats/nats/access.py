# SPDX-License-Identifier: Apache-2.0
"""Settings of a connection: servers, login, TLS. No secret shows in a repr.

Files are read on the driver when the options are parsed; their contents are sent to the executors.
"""

import re
from base64 import b32decode
from binascii import crc_hqx
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

DEFAULT_PORT: Final = 4222

INBOX_PREFIX: Final = "$MQTT.spark"
"""First tokens of the subjects on which answers arrive: MQTT clients and other NATS users cannot have them."""
_SECTION: Final = re.compile(r"-{3,}\s*BEGIN ([A-Z ]+?)\s*-{3,}\s*(\S+)\s*-{3,}\s*END ([A-Z ]+?)\s*-{3,}")


@dataclass(frozen=True, slots=True)
class Server:
    """One server of the option `servers`; `str()` omits user, password and token."""

    host: str
    port: int = DEFAULT_PORT
    tls: bool = False
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'nats'}://{host}:{self.port}"


def parse_server(url: str) -> Server:
    """Parse `nats://host:port` or `tls://...`, with `user:password@` or `token@`; ValueError does not show the URL."""
    expected = "expected URLs such as nats://127.0.0.1:4222 or tls://nats.example.org, separated by commas"
    try:
        parts = urlsplit(url.strip())
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        raise ValueError(expected) from None
    if parts.scheme not in ("nats", "tls") or not parts.hostname or not port or parts.path not in ("", "/"):
        raise ValueError(expected)
    if parts.query or parts.fragment or re.search(r"\s", parts.hostname):
        raise ValueError(expected)
    user = None if parts.username is None else unquote(parts.username)
    password = None if parts.password is None else unquote(parts.password)
    return Server(parts.hostname, port, parts.scheme == "tls", user or None, password)


class Credentials(NamedTuple):
    """JWT and seed of a credentials file."""

    jwt: str
    seed: str

    def __repr__(self) -> str:
        return "Credentials(...)"


def parse_credentials(text: str) -> Credentials:
    """Return the JWT and the seed of a credentials file; raises ValueError."""
    sections = {begin: body for begin, body, end in _SECTION.findall(text) if begin == end}
    try:
        jwt, seed = sections["NATS USER JWT"], sections["USER NKEY SEED"]
    except KeyError:
        raise ValueError("not a credentials file: it needs a NATS USER JWT and a USER NKEY SEED") from None
    return Credentials(jwt, check_seed(seed))


def check_seed(seed: str) -> str:
    """Return a user's nkey seed without surrounding white space; raises a ValueError that does not show the seed."""
    seed = seed.strip()
    try:
        raw = b32decode(seed + "=" * (-len(seed) % 8))
    except ValueError:
        raw = b""
    # 2 bytes of type, 32 of seed, 2 of checksum over the first 34; nkeys does not verify the checksum.
    if len(raw) != 36 or crc_hqx(raw[:-2], 0) != int.from_bytes(raw[-2:], "little"):
        raise ValueError("not the seed of an nkey")
    if not seed.startswith("SU"):
        raise ValueError("the seed of an nkey, but not a user's: that begins with SU")
    return seed


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach NATS. At most one of user, token, creds, nkey is set; TLS material is PEM text; times in seconds."""

    servers: tuple[Server, ...] = (Server("127.0.0.1"),)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    creds: Credentials | None = field(default=None, repr=False)
    nkey: str | None = field(default=None, repr=False)
    tls_ca: str | None = field(default=None, repr=False)
    tls_cert: str | None = field(default=None, repr=False)
    tls_key: str | None = field(default=None, repr=False)
    tls_hostname: str | None = None
    tls_first: bool = False
    connect_timeout: float = 10.0
    request_timeout: float = 10.0
    api_prefix: str = "$JS.API"
    inbox_prefix: str = INBOX_PREFIX

    @property
    def wants_tls(self) -> bool:
        """Whether a TLS option or a `tls://` server was given: then CONNECT is never sent unencrypted."""
        given = (self.tls_ca, self.tls_cert, self.tls_hostname)
        return self.tls_first or any(one is not None for one in given) or any(one.tls for one in self.servers)

    @property
    def login(self) -> str:
        """Name of the option that gives the login, "" for none."""
        for name in ("creds", "nkey", "token", "user"):
            if getattr(self, name) is not None:
                return name
        if any(server.user is not None for server in self.servers):
            return "servers"
        return "tlsCert" if self.tls_cert is not None else ""
