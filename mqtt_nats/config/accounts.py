# SPDX-License-Identifier: Apache-2.0
"""Settings of the connection to a NATS account, for the gateway and for its tenants (``[tenants.NAME]``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, FilePath, SecretStr, model_validator
from pydantic_settings import NoDecode

from mqtt_nats.base.config_files import without_userinfo
from mqtt_nats.base.limit_settings import Names
from mqtt_nats.pubsub.subject_mapping import parse_mappings
from mqtt_streams.subjects import RESERVED_ROOTS

_URL_SCHEMES = ("nats", "tls")  # the data path does not support WebSocket
_PREFIX = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")


def _split_urls(value: Any) -> Any:
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list | tuple):
        return value
    urls = tuple(url.strip() if isinstance(url, str) else url for url in value)
    for url in urls:
        if not isinstance(url, str):
            continue  # pydantic reports the type
        try:
            parts = urlsplit(url)
            usable = parts.scheme in _URL_SCHEMES and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ValueError("expected URLs such as nats://127.0.0.1:4222, separated by commas")
    return urls


def _check_mappings(value: dict[str, str]) -> dict[str, str]:
    parse_mappings(value)
    return value


def _check_prefixes(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not _PREFIX.fullmatch(value) or value.partition(".")[0] in RESERVED_ROOTS:
            raise ValueError(
                f"{value!r} is not a prefix of reply subjects: expected tokens of a subject, such as `_INBOX_app`, no "
                "wildcards, and nothing that belongs to NATS or the gateways"
            )
    return values


Urls = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_urls), Field(min_length=1)]
TenantName = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]


class AccountSettings(BaseModel):
    """Settings of login and TLS for an account, and of its subject mappings and reply prefixes."""

    model_config = ConfigDict(defer_build=True)  # only models that inherit from this one are built

    nats_user: str | None = Field(default=None, description="User name for NATS.")
    nats_password: SecretStr | None = Field(default=None, description="Password for NATS.")
    nats_token: SecretStr | None = Field(default=None, description="Token for NATS.")
    nats_nkey: FilePath | None = Field(default=None, description="File with an nkey seed for NATS.")
    nats_creds: FilePath | None = Field(default=None, description="Credentials file (JWT and seed) for NATS.")
    nats_tls_ca: FilePath | None = Field(
        default=None, description="PEM file with the certificate authorities that may vouch for nats-server."
    )
    nats_tls_cert: FilePath | None = Field(
        default=None, description="PEM file with the client certificate for NATS; needs `nats_tls_key`."
    )
    nats_tls_key: FilePath | None = Field(default=None, description="PEM file with the key of `nats_tls_cert`.")
    nats_tls_hostname: str | None = Field(
        default=None, description="Name expected in the certificate of nats-server, where it is not the URL's."
    )
    jetstream_domain: Annotated[str, Field(pattern=r"^[^\s.*>]+$")] | None = Field(
        default=None,
        description="JetStream domain that has the streams, where it is not that of the nats-server of `nats`: behind "
        "a leafnode, the domain of the hub.",
    )
    mappings: Annotated[dict[str, str], AfterValidator(_check_mappings)] = Field(
        default={},
        description="The subject mappings of the NATS account, as nats-server has them: `old.*` to "
        "`new.{{wildcard(1)}}`. Where several fit, the first counts.",
    )

    reply_prefixes: Annotated[Names, AfterValidator(_check_prefixes)] = Field(
        default=(),
        description="First tokens of the subjects, beside `_INBOX`, on which NATS clients of the account wait for "
        "replies, such as `_INBOX_app`. MQTT clients may answer there without a rule. Any other reply subject is a "
        "topic, and needs a rule.",
    )

    @model_validator(mode="after")
    def _check_account(self) -> Self:
        ways = [
            name for name in ("nats_user", "nats_token", "nats_nkey", "nats_creds") if getattr(self, name) is not None
        ]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)} exclude each other: give one way to log in to NATS")
        if self.nats_password is not None and self.nats_user is None:
            raise ValueError("nats_password needs nats_user")
        if (self.nats_tls_cert is None) != (self.nats_tls_key is None):
            raise ValueError("nats_tls_cert and nats_tls_key need each other")
        return self

    def requires_tls(self, urls: tuple[str, ...]) -> bool:
        """Whether connections to nats-server require TLS: by a TLS setting, or by one URL with `tls://`."""
        given = (self.nats_tls_ca, self.nats_tls_cert, self.nats_tls_hostname)
        return any(one is not None for one in given) or any(urlsplit(url).scheme == "tls" for url in urls)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Remove user names and passwords of NATS URLs from ``repr``."""
        for name, value in super().__repr_args__():
            yield name, tuple(map(without_userinfo, value)) if name == "nats" and value else value


class NatsSettings(AccountSettings):
    """Settings of the connection to NATS, which the command line of an operator needs too."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, defer_build=True)

    nats: Urls = Field(
        default=("nats://127.0.0.1:4222",), description="URLs of the nats-server cluster, separated by commas."
    )
    data: Path = Field(
        default=Path("data"), description="Directory for the data of the embedded nats-server, and the login there."
    )

    @property
    def nats_display(self) -> str:
        """``nats`` without user names and passwords, for messages and logs."""
        return ",".join(without_userinfo(url) for url in self.nats)


class TenantSettings(AccountSettings):
    """Settings of a tenant's account; an entry of ``tenants``."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True)

    nats: Urls | None = Field(default=None, description="URLs of the nats-servers; unset: those of the gateway.")

    def over(self, general: AccountSettings, urls: tuple[str, ...]) -> dict[str, Any]:
        """Return the changes to the gateway's settings for this tenant. The login always comes from the tenant.

        URLs, authorities and host name of nats-server, the requirement of TLS and the JetStream domain are those of the
        gateway, unless the tenant sets them, or other URLs.

        Args:
            urls: URLs of the gateway's nats-servers.
        """
        changes = {name: getattr(self, name) for name in AccountSettings.model_fields}
        if self.nats_tls_ca is None:
            changes["nats_tls_ca"] = general.nats_tls_ca
        for name in ("nats_tls_hostname", "jetstream_domain") if self.nats is None else ():
            changes[name] = getattr(self, name) or getattr(general, name)
        if self.nats is not None:
            return changes | {"nats": self.nats}
        if general.nats_tls_cert is not None:  # the tenant has no use of it, but inherits the requirement of TLS
            changes["nats"] = tuple(f"tls://{url.partition('://')[2]}" for url in urls)
        return changes
