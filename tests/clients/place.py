# SPDX-License-Identifier: Apache-2.0
"""Where scenarios take place: a nats-server, and a gateway with TCP, ws and wss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.backbone.certificates import Authority
from tests.harness.gateway import Gateway
from tests.harness.nats import ProcessNatsServer
from tests.harness.waiting import free_port

_LISTENERS = """\
[[listeners]]
listen = "127.0.0.1:{ws}"
type = "ws"

[[listeners]]
listen = "127.0.0.1:{wss}"
type = "wss"
tls_cert = "{pair.certificate}"
tls_key = "{pair.key}"
"""


class Place(NamedTuple):
    """A gateway that runs."""

    gateway: Gateway
    ws: int
    wss: int
    authority: Path
    """The certificate of the authority of ``wss``."""
    directory: Path
    """For logs and files."""

    @property
    def port(self) -> int:
        """Of the listener for TCP."""
        return self.gateway.port


@contextlib.contextmanager
def place(directory: Path) -> Iterator[Place]:
    """A nats-server and a gateway, with their files in ``directory``."""
    authority = Authority(directory)
    ports = {"ws": free_port(), "wss": free_port()}
    configuration = directory / "gateway.toml"
    configuration.write_text(_LISTENERS.format(pair=authority.issue("localhost"), **ports), encoding="utf-8")
    nats = ProcessNatsServer(directory / "nats")
    nats.start()
    gateway = Gateway(directory / "gateway.log", nats.url, arguments=["--config", str(configuration)])
    try:
        gateway.start()
        yield Place(gateway, **ports, authority=authority.file, directory=directory)
    finally:
        gateway.process.discard()
        nats.discard()
