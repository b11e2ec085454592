# SPDX-License-Identifier: Apache-2.0
"""Log records of connections: how they begin, and the cause of their end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqtt_nats.hooks.session_notices import CAUSES, DISCONNECTS
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import Raw5, connect, disconnect, publish
from tests.harness.waiting import eventually

PATIENCE = 20.0


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = Gateway(tmp_path_factory.mktemp("log") / "log", nats_server.url)
    found.start(port=0)
    yield found
    found.process.discard()


def lines(gateway: Gateway, name: str) -> list[str]:
    """The records about a client, from its name on."""
    return [line[line.index("client '") :] for line in gateway.log.splitlines() if f"client {name!r}" in line]


def leave(client: Raw5) -> None:
    client.send(disconnect())


def vanish(client: Raw5) -> None:
    client.close()


def violate(client: Raw5) -> None:
    client.send(publish("+", b"x"))


ENDS: dict[str, tuple[Callable[[Raw5], None], str, str]] = {
    "left": (leave, "the client has sent DISCONNECT", "cause=client reason_code=0x00"),
    "vanished": (vanish, "the connection was lost", "cause=lost reason_code=0x80"),
    "violates": (violate, "topic name contains a wildcard", "cause=protocol error reason_code=0x90"),
    "silent": (lambda client: None, "keep alive timeout", "cause=keep alive timeout reason_code=0x8D"),
}


@pytest.mark.parametrize("name", ENDS)
def test_begin_and_end_with_its_cause(gateway: Gateway, name: str) -> None:
    act, text, fields = ENDS[name]
    client = Raw5(gateway.port)
    client.send(connect(name, keepalive=1 if name == "silent" else 60))
    client.receive()
    act(client)
    begun, ended = eventually(lambda: found if len(found := lines(gateway, name)) > 1 else None, PATIENCE)
    client.close()
    peer = r"127\.0\.0\.1:\d+"
    keepalive = 1 if name == "silent" else 60
    beginning = f"is connected: MQTT 5.0, anonymous, keep alive {keepalive} s, new session"
    assert re.match(rf"client '{name}' from {peer} {re.escape(beginning)} \[gateway=", begun)
    assert re.match(rf"client '{name}' from {peer} is disconnected: {re.escape(text)} \[.* {fields}\]$", ended)


def test_a_takeover_names_both(gateway: Gateway) -> None:
    with Raw.connected(gateway.port, "moves", clean=False), Raw.connected(gateway.port, "moves", clean=False):
        found = eventually(lambda: found if len(found := lines(gateway, "moves")) > 2 else None, PATIENCE)
    assert "MQTT 3.1.1, anonymous, keep alive 60 s, new session" in found[0]
    assert sum("keep alive 60 s, session resumed" in line for line in found) == 1
    assert sum("is disconnected: another connection has claimed the session" in line for line in found) == 1


def test_a_refused_client_is_named_before_it_has_its_session(
    nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """Its authentication fails: `access denied` is all that it is told."""
    users = tmp_path / "users"
    users.write_text("", encoding="utf-8")
    gateway = gateway_factory(nats_server, "--password-file", str(users), "--log-format", "json")
    with Raw5(gateway.port) as client:
        client.send(connect("intruder", flags=0xC0, tail=b"\0\3bob\0\1x"))
        client.receive()
        client.expect_closed()
    records = [json.loads(line) for line in gateway.log.splitlines() if "intruder" in line]
    assert [one["client"] for one in records] == ["intruder", "intruder"]
    assert "no authenticator knows the user" in records[0]["message"]
    assert re.fullmatch(r"client 'intruder' from \S+ is refused: access denied", records[1]["message"])


def test_a_setting_turns_the_records_off(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """Only ends that the gateway itself has caused are still logged."""
    gateway = gateway_factory(nats_server, "--no-log-connections")
    for name, act in (("left", leave), ("violates", violate)):
        with Raw5.open(gateway.port, name) as client:
            act(client)
            client.expect_closed()
    assert eventually(lambda: lines(gateway, "violates"), PATIENCE)
    assert gateway.term() == 0
    assert not lines(gateway, "left")
    (line,) = lines(gateway, "violates")
    assert "is disconnected: topic name contains a wildcard" in line


def test_causes_are_counted_by_name() -> None:
    assert set(CAUSES.values()) < set(DISCONNECTS)
    assert len(set(DISCONNECTS)) == len(DISCONNECTS)
