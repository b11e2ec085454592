# SPDX-License-Identifier: Apache-2.0
"""Two gateways that all tests of the command line share, and the command line itself, without a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson
import pytest
from click.testing import CliRunner

from mqtt_nats.base.errors import StartupError
from mqtt_nats.cli import command
from tests.admin.results import check_result
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer, make_server
from tests.harness.process import wait_ready
from tests.harness.waiting import eventually, free_port

STARTING = 75.0  # seconds, for gateways that may start at once

RULES = """
default = "deny"

[[rules]]
effect = "deny"
topics = ["secret/#"]

[[rules]]
effect = "allow"
user = "alice"
access = "publish"
topics = ["alice/#"]
qos = [0, 1]

[[rules]]
effect = "allow"
client = ["c-*", "auto-*", "device-*"]
topics = ["#"]

[[rules]]
effect = "allow"
group = ["guests"]
access = "subscribe"
topics = ["hall/+"]

[groups]
guests = ["bob"]
"""


def attend(gateway: Gateway) -> Gateway:
    """Wait until a gateway accepts clients that was launched."""
    gateway.port = int(wait_ready(gateway.process, r"\bMQTT +127\.0\.0\.1:(\d+)", STARTING))
    return gateway


class Done(NamedTuple):
    """What a command line has come to."""

    status: int
    """0, 1 for what cannot be done, 2 for wrong usage."""
    text: str
    """What it prints, or complains."""
    output: str = ""
    """What it has printed before it complained."""


class Fleet:
    """Two gateways, ``one`` and ``two``, and the command line."""

    def __init__(self, server: NatsServer, one: Gateway, two: Gateway, monitor: int) -> None:
        self.server = server
        self.one = one
        self.two = two
        self.monitor = monitor
        """Port of the nats-server's monitoring."""
        self.ids = self._ids()
        """The ids of the two."""

    def _ids(self) -> tuple[str, str]:
        def known() -> dict[str, str]:
            found = self.json("cluster", "status")["gateways"]
            return {each["listen"][0]: each["id"] for each in found if each["state"] == "running" and each["listen"]}

        ports = [f"127.0.0.1:{gateway.port}" for gateway in (self.one, self.two)]
        found = eventually(lambda: known() if set(ports) <= known().keys() else None)
        return found[ports[0]], found[ports[1]]

    def run(self, *arguments: str, stdin: bytes = b"") -> Done:
        """One command line, as :func:`mqtt_nats.cli.main` runs it."""
        done = CliRunner().invoke(command, ["ctl", "--nats", self.server.url, *arguments], input=stdin)
        if isinstance(done.exception, StartupError):
            assert "\n" not in str(done.exception)
            return Done(1, str(done.exception), done.output)
        assert done.exit_code in (0, 2), (done.output, done.exc_info)
        return Done(done.exit_code, done.output)

    def text(self, *arguments: str, stdin: bytes = b"") -> str:
        """What a command line prints that works."""
        done = self.run(*arguments, stdin=stdin)
        assert done.status == 0, done.text
        return done.text

    def part(self, *arguments: str) -> tuple[Any, str]:
        """The same of a command line that does only a part of it; what it has printed, and what it complains about."""
        done = self.run(*arguments, "--json")
        assert done.status == 1, done.text
        found = orjson.loads(done.output)
        check_result(arguments, found)
        return found, done.text

    def json(self, *arguments: str, stdin: bytes = b"") -> Any:
        """The same for programs."""
        found = orjson.loads(self.text(*arguments, "--json", stdin=stdin))
        check_result(arguments, found)
        return found


@pytest.fixture(scope="package")
def fleet(nats_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("ctl")
    rules = directory / "acl.toml"
    rules.write_text(RULES, encoding="utf-8")
    monitor = free_port()
    server = make_server(nats_backend, directory / "nats", config=f'http: "127.0.0.1:{monitor}"')
    gateways: list[Gateway] = []
    try:
        server.start()
        for name in ("one", "two"):
            gateway = Gateway(directory / f"{name}.log", server.url, arguments=("--acl-file", str(rules)))
            gateways.append(gateway)
            gateway.port = free_port()
            gateway.launch()
        for gateway in gateways:
            attend(gateway)
        yield Fleet(server, gateways[0], gateways[1], monitor)
    finally:
        for gateway in gateways:
            gateway.process.discard()
        server.discard()
    for gateway in gateways:
        assert "Traceback" not in gateway.log, gateway.log[-8000:]
