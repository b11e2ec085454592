# SPDX-License-Identifier: Apache-2.0
"""Gateways with several listeners, and clients that reach them by TLS."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.backbone.certificates import Authority, Pair
from tests.harness.gateway import Gateway
from tests.harness.raw import Raw

NAME = "gateway.test"
"""What certificates of gateways are made out to."""

PATIENCE = 30.0


def write_config(path: Path, *listeners: Mapping[str, Any]) -> str:
    """A configuration file with these listeners; its name."""
    lines = []
    for one in listeners:
        lines.append("[[listeners]]")
        lines += [
            f'{name} = "{value}"' if isinstance(value, str | Path) else f"{name} = {value}"
            for name, value in one.items()
        ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def tls(pair: Pair, **more: Any) -> dict[str, Any]:
    """A listener with TLS."""
    return {"listen": "127.0.0.1:0", "type": "tls", "tls_cert": pair.certificate, "tls_key": pair.key, **more}


def ports(gateway: Gateway, label: str) -> list[int]:
    """Ports of the listeners that the gateway announces as ``label``, in their order."""
    assert gateway.nats_url, "the line of NATS comes after those of the listeners"
    found = re.findall(rf"\b{label} +127\.0\.0\.1:(\d+) ", gateway.log)
    return [int(port) for port in found]


def trusting(authority: Authority, client: Pair | None = None) -> ssl.SSLContext:
    """What a client needs to trust the authority, and to show a certificate."""
    context = ssl.create_default_context(cafile=str(authority.file))
    if client is not None:
        context.load_cert_chain(*client)
    return context


def dial(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection with TLS."""
    plain = socket.create_connection(("127.0.0.1", port), PATIENCE)
    try:
        return context.wrap_socket(plain, server_hostname=NAME)
    except BaseException:
        plain.close()
        raise


class Secure(Raw):
    """MQTT by hand over TLS."""

    def __init__(self, port: int, context: ssl.SSLContext, *, patience: float = PATIENCE) -> None:
        super().__init__(port, patience=patience)
        plain = self.socket
        try:
            self.socket = context.wrap_socket(plain, server_hostname=NAME)
        except BaseException:
            plain.close()
            raise

    @property
    def serial(self) -> int:
        """Serial number of the gateway's certificate."""
        assert isinstance(self.socket, ssl.SSLSocket)
        found = self.socket.getpeercert()
        assert found is not None
        return int(str(found["serialNumber"]), 16)
