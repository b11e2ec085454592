# SPDX-License-Identifier: Apache-2.0
"""Access settings of the gateway, and settings of one authenticator (``[[authenticators]]``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, FilePath, model_validator

from mqtt_nats.base.limit_settings import DURATION

if TYPE_CHECKING:
    from mqtt_nats.transport.listener_settings import ListenerSettings

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "HS256", "HS384", "HS512"
]

ANY: Final = "*"
"""Value of ``account`` of :class:`NatsSettings` for users of every account."""


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def parse_host(listen: str) -> str:
    """Return the host of ``HOST:PORT``, without brackets."""
    return listen.rpartition(":")[0].removeprefix("[").removesuffix("]")


def _check_url(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("expected a URL such as https://auth.example.org/mqtt")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL must not have a user name or password in it")
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ValueError("http is for 127.0.0.1 and ::1 only: use https")
    return value


def _check_keys(value: Any) -> Any:
    if isinstance(value, str) and "://" in value:
        return _check_url(value)
    if isinstance(value, str) and not Path(value).is_file():
        raise ValueError("path does not point to a file")
    return value


def _check_servers(value: Any) -> Any:
    for url in value if isinstance(value, list | tuple) else ():
        if isinstance(url, str):
            try:
                parts = urlsplit(url)
                usable = parts.scheme in ("nats", "tls") and parts.hostname and parts.port != 0 and "@" not in url
            except ValueError:
                usable = False
            if not usable:
                raise ValueError("expected URLs such as tls://nats.example.org:4222, without user name and password")
    return value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# Highest cost of Argon2id: 1 GiB, 100 passes, 64 lanes.
MEMORY_MOST: Final = 1024 * 1024
PASSES_MOST: Final = 100
LANES_MOST: Final = 64

_COST: Final = re.compile(r"m=(\d{1,7}),t=(\d{1,3}),p=(\d{1,2})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of Argon2id: memory in KiB, passes over the memory, and lanes.

    Raises:
        ValueError: the cost is too high or too low.
    """

    memory: int
    passes: int
    lanes: int

    def __post_init__(self) -> None:
        if not 1 <= self.passes <= PASSES_MOST or not 1 <= self.lanes <= LANES_MOST:
            raise ValueError(f"t must be from 1 to {PASSES_MOST}, and p from 1 to {LANES_MOST}")
        if not 8 * self.lanes <= self.memory <= MEMORY_MOST:
            raise ValueError(f"m must be from 8 * p to {MEMORY_MOST}")

    def __str__(self) -> str:
        """Return the cost as in the lines of a password file (RFC 9106)."""
        return f"m={self.memory},t={self.passes},p={self.lanes}"


def parse_cost(text: str) -> Cost:
    """Return the cost that a text such as ``m=4096,t=1,p=1`` names; raises ValueError."""
    found = _COST.fullmatch(text)
    if found is None:
        raise ValueError("expected m=<KiB>,t=<passes>,p=<lanes>, such as m=4096,t=1,p=1")
    return Cost(*map(int, found.groups()))


DEVICE_COST: Final = Cost(4 * 1024, 1, 1)
"""For random passwords, which devices should have: some milliseconds and 4 MiB for each log-in."""

PEOPLE_COST: Final = Cost(19 * 1024, 2, 1)
"""For passwords that people choose: the least cost that OWASP recommends, some 25 ms and 19 MiB."""

CostText = Annotated[str, AfterValidator(lambda text: str(parse_cost(text)))]

Url = Annotated[str, BeforeValidator(_check_url)]
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed), Field(min_length=1)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True)

    name: str = Field(
        default="", pattern=r"^[\w.-]*$", description="What listeners call it; `type`, where it is not given."
    )
    tenant: str | None = Field(
        default=None, min_length=1, description="The tenant that its users belong to; unset: that of the listener."
    )

    @property
    def called(self) -> str:
        """Name of the authenticator; its type if no name is set."""
        return self.name or str(self.type)  # type: ignore[attr-defined]


class PasswordSettings(_Settings):
    """Settings of an authenticator with a password file."""

    type: Literal["password"]
    file: FilePath = Field(description="File with the users and their hashed passwords, written by `mqtt-nats passwd`.")
    concurrency: int = Field(
        default=2, ge=1, le=64, description="Passwords that are verified at the same time, each in a thread."
    )
    cost: CostText = Field(
        default=str(DEVICE_COST),
        description="Cost of Argon2id (KiB, passes, lanes) with which hashes of other brokers are replaced at log-in.",
    )


class TokenSettings(_Settings):
    """Settings of an authenticator for JSON Web Tokens in place of passwords."""

    type: Literal["jwt"]
    keys: Annotated[str, BeforeValidator(_check_keys)] = Field(
        description="The keys of who signs (JWKS): a file, or an https URL."
    )
    algorithms: Annotated[tuple[Algorithm, ...], BeforeValidator(_listed), Field(min_length=1)] = Field(
        description="Algorithms of signatures that are accepted, such as `RS256`, `ES256`, `EdDSA`."
    )
    issuer: str | None = Field(
        default=None,
        min_length=1,
        description="Value that `iss` must have; the next authenticator decides about tokens of other issuers.",
    )
    audience: Texts | None = Field(
        default=None, description="Audiences, one of which `aud` must name; unset: tokens with an `aud` are denied."
    )
    leeway: Annotated[float, DURATION] = Field(
        default=10, ge=0, le=300, allow_inf_nan=False, description="Seconds by which clocks may differ."
    )
    user_claim: str = Field(default="sub", min_length=1, description="Claim with the name of the user.")
    groups_claim: str = Field(default="groups", min_length=1, description="Claim with the groups of the user.")
    acl_claim: str = Field(default="acl", min_length=1, description="Claim with what the client may do at most.")
    client_claim: str | None = Field(
        default=None, min_length=1, description="Claim that has to be there, and to be the client id."
    )
    tenant_claim: str | None = Field(
        default=None, min_length=1, description="Claim that has to be there, with the tenant of the user."
    )
    refresh: Annotated[float, DURATION] = Field(
        default=600, ge=10, le=86_400, allow_inf_nan=False, description="Seconds after which a URL is read again."
    )
    tls_ca: FilePath | None = Field(
        default=None, description="PEM file with the authorities that may vouch for the URL's server."
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        shared = [one for one in self.algorithms if one.startswith("HS")]
        if shared and len(shared) != len(self.algorithms):
            raise ValueError("algorithms with a shared key (HS) and those with a public key exclude each other")
        if shared and "://" in self.keys:
            raise ValueError("a shared key (HS) is read from a file")
        return self


class HttpSettings(_Settings):
    """Settings of an authenticator that asks an HTTP service."""

    type: Literal["http"]
    url: Url = Field(description="Where to ask, by POST: https, or http on loopback.")
    timeout: Annotated[float, DURATION] = Field(
        default=5, gt=0, le=9, description="Seconds in which the answer must be there."
    )
    concurrency: int = Field(default=20, ge=1, le=1000, description="Questions at the same time.")
    token_file: FilePath | None = Field(
        default=None, description="File with a token that is sent along, `Authorization: Bearer`."
    )
    tls_ca: FilePath | None = Field(default=None, description="PEM file with the authorities that may vouch for it.")
    tls_cert: FilePath | None = Field(
        default=None, description="PEM file with the certificate that it is shown; needs `tls_key`."
    )
    tls_key: FilePath | None = Field(default=None, description="PEM file with the key of `tls_cert`.")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key need each other")
        return self


class NatsSettings(_Settings):
    """Settings of an authenticator for users of nats-server."""

    type: Literal["nats"]
    servers: Annotated[Texts, BeforeValidator(_check_servers)] | None = Field(
        default=None, description="URLs of the nats-servers that know the users; unset: those of `nats`."
    )
    account: str | None = Field(
        default=None,
        min_length=1,
        description="Account that users have to be of, `*` for any; unset: that of the gateway, or of `tenant`. "
        "`servers` need it.",
    )
    permissions: Literal["needed", "wanted"] = Field(
        default="needed",
        description="For users who may not ask nats-server for their permissions: `needed` denies them; with "
        "`wanted`, and an `account` of `*`, the ACL file alone decides. Clients with a JWT are denied in "
        "either case.",
    )
    timeout: Annotated[float, DURATION] = Field(
        default=5, gt=0, le=9, description="Seconds in which nats-server must have answered."
    )
    concurrency: int = Field(default=10, ge=1, le=1000, description="Connections at the same time.")

    @model_validator(mode="after")
    def _whose_users(self) -> Self:
        if self.servers is not None and self.account is None:
            raise ValueError(f"servers need an account, whose users come in; {ANY!r} = those of any")
        return self


AnySettings = PasswordSettings | TokenSettings | HttpSettings | NatsSettings
AuthenticatorSettings = Annotated[AnySettings, Field(discriminator="type")]

KINDS: dict[str, type[AnySettings]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(AnySettings)
}
"""Models of authenticator settings by ``type``."""

SCRAM: Final = "scram"
"""Name of `scram_file` in the `authenticators` of a listener."""


class AccessSettings(BaseModel):
    """Access settings of the gateway: authenticators and access rules."""

    model_config = ConfigDict(defer_build=True)  # only models that inherit from this one are built

    allow_anonymous: bool | None = Field(
        default=None,
        description="Accept clients without user name and password. Unset: only on loopback, and only without an "
        "authenticator.",
    )
    password_file: FilePath | None = Field(
        default=None,
        description="File with users and their hashed passwords, written by `mqtt-nats passwd`; asked before others.",
    )
    password_cost: CostText = Field(
        default=str(DEVICE_COST),
        description="Cost of Argon2id (KiB, passes, lanes) with which hashes of other brokers in `password_file` are "
        "replaced at log-in.",
    )
    scram_file: FilePath | None = Field(
        default=None,
        description="File with users that may authenticate by SCRAM-SHA-256, written by `mqtt-nats passwd --scram`.",
    )
    authenticators: tuple[AuthenticatorSettings, ...] = Field(
        default=(),
        description="Authenticators of clients, `[[authenticators]]` in the file; the gateway asks them in this order.",
    )
    acl_file: FilePath | None = Field(
        default=None,
        description="File with the rules of who may publish and subscribe what; unset: everybody everything.",
    )
    acl_subscribe: Literal["filter", "deliver"] = Field(
        default="filter",
        description="What rules are asked about: the whole `filter` of a subscription, once; or each message, when it "
        "is delivered, and the filter only has to have a topic in common with what is allowed.",
    )

    @property
    def all_authenticators(self) -> tuple[AnySettings, ...]:
        """Authenticator of ``password_file``, if set, and ``authenticators``."""
        if self.password_file is None:
            return self.authenticators
        settings = PasswordSettings(type="password", file=self.password_file, cost=self.password_cost)
        return (settings, *self.authenticators)

    def chain_of(self, listener: ListenerSettings) -> tuple[str, ...]:
        """Return the names of a listener's authenticators, `scram` included where it is allowed."""
        if listener.authenticators is not None:
            return listener.authenticators
        return (*(one.called for one in self.all_authenticators), *((SCRAM,) if self.scram_file else ()))

    def is_open(self, listener: ListenerSettings) -> bool:
        """Whether a listener admits anonymous clients."""
        if listener.allow_anonymous is not None:
            return listener.allow_anonymous
        if self.allow_anonymous is not None:
            return self.allow_anonymous
        return not self.chain_of(listener)

    def is_near(self, listener: ListenerSettings) -> bool:
        """Whether a listener is reachable from this machine only."""
        return is_loopback(parse_host(listener.listen)) and not listener.proxy_protocol

    def exposes_passwords(self, listener: ListenerSettings) -> bool:
        """Whether passwords cross the network without encryption on the way to a listener."""
        asks = set(self.chain_of(listener)) - {SCRAM} and listener.use_identity is None
        return bool(asks) and not (listener.secure or self.is_near(listener) or listener.proxy_protocol)

    def check_access(self, listeners: Sequence[ListenerSettings], entries: Sequence[ListenerSettings]) -> None:
        """Check that each listener admits some clients, and all clients only where a setting allows it.

        Args:
            entries: listeners with settings of their own.

        Raises:
            ValueError: a setting is wrong; the text names it.
        """
        names = [one.called for one in self.all_authenticators]
        for name in names:
            if names.count(name) > 1 or name == SCRAM:
                raise ValueError(f"two authenticators are called {name}: give them a name")
        for one in listeners:
            self._check(one, one in entries)

    def _check(self, one: ListenerSettings, entry: bool) -> None:
        """Check one listener: a listener reachable from other machines is open only by an explicit setting."""
        chain = self.chain_of(one)
        known = {*(each.called for each in self.all_authenticators), *((SCRAM,) if self.scram_file else ())}
        for name in chain:
            if name not in known:
                raise ValueError(f"listener {one.listen}: there is no authenticator {name!r}")
        if chain or one.tls_client_ca is not None:
            return
        said = one.allow_anonymous if entry else self.allow_anonymous
        if not self.is_open(one):
            raise ValueError(f"listener {one.listen}: without authenticators and allow_anonymous no client can connect")
        if not said and not self.is_near(one):
            where = "for it " if entry else ""
            raise ValueError(
                f"listener {one.listen} would accept every client: set password_file, scram_file or "
                f"authenticators, or {where}allow_anonymous = true"
            )
