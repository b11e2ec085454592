# SPDX-License-Identifier: Apache-2.0
"""What can be set for one listener: an entry of ``[[listeners]]``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FilePath, model_validator

Kind = Literal["tcp", "tls", "ws", "wss"]


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
    """The reverse of :func:`parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(value: Any) -> Any:
    """The value, when it is no string or an address; raises ValueError."""
    if isinstance(value, str):
        parse_address(value)
    return value


Address = Annotated[str, BeforeValidator(check_address)]


class ListenerSettings(BaseModel):
    """One address, and how clients are let in there."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    listen: Address = Field(description="Address, HOST:PORT; port 0 takes a free one.")
    type: Kind = Field(default="tcp", description="`tcp`, `tls`, `ws` (WebSocket) or `wss` (the same over TLS).")
    tls_cert: FilePath | None = Field(
        default=None, description="PEM file with the certificate of the gateway, and those between it and its root."
    )
    tls_key: FilePath | None = Field(default=None, description="PEM file with the key of `tls_cert`, not encrypted.")
    tls_client_ca: FilePath | None = Field(
        default=None,
        description="PEM file with the authorities that vouch for clients: nobody connects without a certificate of "
        "theirs.",
    )
    tls_minimum: Literal["1.2", "1.3"] = Field(default="1.2", description="Oldest version of TLS that is spoken.")
    max_connections: int | None = Field(
        default=None,
        ge=1,
        description="Connections at the same time, in each worker; more are closed before anything is read from them.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        given = [name for name in self.model_fields_set if name.startswith("tls_") and getattr(self, name) is not None]
        if not self.secure and given:
            raise ValueError(f"{sorted(given)[0]} needs a type with TLS, not {self.type}")
        if self.secure and (self.tls_cert is None or self.tls_key is None):
            raise ValueError(f"type {self.type} needs tls_cert and tls_key")
        return self

    @property
    def secure(self) -> bool:
        """Whether TLS is spoken."""
        return self.type in ("tls", "wss")

    @property
    def web(self) -> bool:
        """Whether clients come by WebSocket."""
        return self.type in ("ws", "wss")


class Bound(NamedTuple):
    """An address that is listened on."""

    host: str
    port: int
    type: Kind

    def __str__(self) -> str:
        address = join_address(self.host, self.port)
        return address if self.type == "tcp" else f"{self.type}://{address}"
