# SPDX-License-Identifier: Apache-2.0
"""Settings of the admin listener."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FilePath, SecretStr, field_validator

from mqtt_nats.access.settings import is_loopback
from mqtt_nats.transport.every_address import EVERY
from mqtt_nats.transport.listener_settings import Address, parse_address

TOKEN_LEAST: Final = 16

DASHBOARD_PORTS: Final = range(8080, 8100)
"""Ports for the dashboard of ``serve --embedded`` on a terminal, the first ones first."""


def free_dashboard_address(taken: Collection[int]) -> str:
    """Return a loopback address that is free; with port 0 where no port of `DASHBOARD_PORTS` is.

    Args:
        taken: ports of other listeners of the same settings, which do not listen yet.
    """
    for port in DASHBOARD_PORTS:
        if port not in taken and is_free(port):
            return f"127.0.0.1:{port}"
    return "127.0.0.1:0"


def is_free(port: int) -> bool:
    """Whether nobody listens on a port of 127.0.0.1."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def can_be_presented(token: SecretStr) -> SecretStr:
    """Return a token as it is. Raises ValueError: it cannot be a bearer token."""
    text = token.get_secret_value()
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise ValueError("it has white space, control or non-ASCII characters, perhaps a line break at its end")
    return token


def _off_is_none(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() == "off" else value


class AdminSettings(BaseModel):
    """Settings of the admin listener: address, tokens and TLS."""

    model_config = ConfigDict(defer_build=True)  # only models that inherit from this one are built

    admin_listen: Annotated[Address | None, BeforeValidator(_off_is_none)] = Field(
        default=None,
        description="Address of the admin listener (metrics, health, HTTP API, dashboard; extra `admin`), HOST:PORT; "
        "`off`: there is none. Unset: `serve --embedded` on a terminal has one on 127.0.0.1 with a token of its own, "
        "others have none.",
    )
    admin_token: SecretStr | None = Field(
        default=None,
        min_length=TOKEN_LEAST,
        description="What administrators have to present as a bearer token; without it, `admin_tls_client_ca` and "
        "`admin_tokens_file`, `admin_listen` has to be an address of this machine only.",
    )
    admin_tokens_file: FilePath | None = Field(
        default=None,
        description="TOML file with tokens of named administrators, each with the role `administrator` or `viewer`.",
    )
    admin_tls_cert: FilePath | None = Field(
        default=None, description="PEM file with the certificate of the admin listener, which then speaks TLS."
    )
    admin_tls_key: FilePath | None = Field(default=None, description="PEM file with the key of `admin_tls_cert`.")
    admin_tls_client_ca: FilePath | None = Field(
        default=None,
        description="PEM file with certificate authorities; the admin listener accepts only clients with a "
        "certificate of one of them.",
    )
    admin_tls_crl_file: FilePath | None = Field(
        default=None,
        description="PEM file with the lists of revoked certificates of the authorities in `admin_tls_client_ca`, of "
        "all of them.",
    )

    @field_validator("admin_token")
    @classmethod
    def _can_be_presented(cls, token: SecretStr | None) -> SecretStr | None:
        return token if token is None else can_be_presented(token)

    def check_admin(self, taken: list[str]) -> None:
        """Check that only administrators can use the admin listener.

        Args:
            taken: addresses of the MQTT listeners.

        Raises:
            ValueError: a setting is wrong; the text names it.
        """
        listen = self.admin_listen
        given = [name for name in AdminSettings.model_fields if name != "admin_listen" and getattr(self, name)]
        if listen is None:
            if given:
                raise ValueError(f"{given[0]} needs admin_listen")
            return
        if (self.admin_tls_cert is None) != (self.admin_tls_key is None):
            raise ValueError("admin_tls_cert and admin_tls_key need each other")
        if self.admin_tls_client_ca is not None and self.admin_tls_cert is None:
            raise ValueError("admin_tls_client_ca needs admin_tls_cert and admin_tls_key")
        if parse_address(listen)[0] == EVERY:
            raise ValueError("admin_listen has one address: 0.0.0.0 for IPv4, [::] for IPv6")
        if self.admin_tls_crl_file is not None and self.admin_tls_client_ca is None:
            raise ValueError("admin_tls_crl_file needs admin_tls_client_ca")
        if parse_address(listen)[1] and listen in taken:
            raise ValueError(f"admin_listen has the address of an MQTT listener, {listen}")
        if not self.admin_is_proved and not self.admin_is_near:
            raise ValueError(
                f"admin_listen {listen} can be reached from other machines: set admin_token, admin_tokens_file or "
                "admin_tls_client_ca, or listen on 127.0.0.1"
            )

    @property
    def admin_is_proved(self) -> bool:
        """Whether administrators have to authenticate, by token or certificate."""
        return self.admin_has_tokens or self.admin_tls_client_ca is not None

    @property
    def admin_has_tokens(self) -> bool:
        """Whether administrators have to present a token."""
        return self.admin_token is not None or self.admin_tokens_file is not None

    @property
    def admin_is_near(self) -> bool:
        """Whether the admin listener is reachable from this machine only."""
        return self.admin_listen is None or is_loopback(parse_address(self.admin_listen)[0])
