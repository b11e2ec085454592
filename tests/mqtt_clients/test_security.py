# SPDX-License-Identifier: Apache-2.0
"""The clients with TLS, WebSocket, passwords and rules: who gets in, and what is said to who does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mqtt_nats.access.passwords import set_password
from tests.backbone.certificates import Authority, Pair
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.mqtt_clients.support import run
from tests.transport.support import NAME, ports, tls, write_config

RULES = """
[[rules]]
effect = "allow"
topics = "device/%u/#"
"""


class Setup(NamedTuple):
    authority: Authority
    client: Pair
    open: int
    tls: int
    strict: int
    """Asks for a certificate."""
    renamed: int
    """Has a certificate with another name than `localhost`."""
    ws: int
    wss: int
    users: int
    """Needs a password."""


@pytest.fixture(scope="module")
def setup(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    directory = tmp_path_factory.mktemp("secure")
    authority = Authority(directory)
    pair, client = authority.issue("localhost"), authority.issue("device")
    config = write_config(
        directory / "open.toml",
        tls(pair),
        tls(pair, tls_client_ca=authority.file),
        tls(authority.issue(NAME)),
        {"listen": "127.0.0.1:0", "type": "ws"},
        {**tls(pair), "type": "wss"},
    )
    passwords, rules = directory / "passwords", directory / "acl.toml"
    set_password(passwords, "lamp", "lamp-secret")
    rules.write_text(RULES, encoding="utf-8")
    first = Gateway(directory / "open.log", nats_server.url, arguments=("--config", config))
    closed = ("--password-file", str(passwords), "--acl-file", str(rules))
    second = Gateway(directory / "users.log", nats_server.url, arguments=closed)
    try:
        first.start()
        second.start()
        plain, strict, renamed = ports(first, "MQTTS")
        (ws,), (wss,) = ports(first, "WS"), ports(first, "WSS")
        yield Setup(authority, client, first.port, plain, strict, renamed, ws, wss, second.port)
        for gateway in (first, second):
            assert gateway.term() == 0
            assert "Traceback" not in gateway.log
        assert "lamp-secret" not in second.log
    finally:
        first.process.discard()
        second.process.discard()


def there_and_back(setup: Setup, *server: str) -> None:
    """A message goes both ways through a listener, 300 KB of it."""
    topic, payload = f"secure/{server[-1]}/{len(server)}", b"x" * 300_000
    session = ("-i", topic, "-c", "-q", "1", "-t", topic)
    assert run("sub", *server, *session, "-E").returncode == 0
    published = run("pub", *server, "-t", topic, "-q", "2", "-s", given=payload)
    assert (published.returncode, published.stderr) == (0, b"")
    assert run("sub", *server, *session, "-C", "1").stdout == payload + b"\n"


@pytest.mark.long
def test_tls(setup: Setup) -> None:
    there_and_back(setup, "-h", "localhost", "-p", str(setup.tls), "--cafile", str(setup.authority.file))


def test_tls_by_url(setup: Setup) -> None:
    there_and_back(setup, "--url", f"mqtts://localhost:{setup.tls}", "--cafile", str(setup.authority.file))


def test_client_certificate(setup: Setup) -> None:
    trust = ("-h", "localhost", "-p", str(setup.strict), "--cafile", str(setup.authority.file))
    there_and_back(setup, *trust, "--cert", str(setup.client.certificate), "--key", str(setup.client.key))
    refused = run("pub", *trust, "-t", "a", "-m", "x")
    assert refused.returncode == 1
    assert refused.stderr.startswith(b"mqtt-nats: ")
    assert refused.stderr.count(b"\n") == 1


def test_certificates_that_are_not_valid(setup: Setup) -> None:
    port, publish = str(setup.tls), ("-t", "a", "-m", "x")
    unknown = run("pub", "-h", "localhost", "-p", port, "--tls", *publish)
    assert unknown.returncode == 1
    assert f"mqtt-nats: the certificate of localhost:{port} is not valid: ".encode() in unknown.stderr
    port = str(setup.renamed)
    other_name = run("pub", "-h", "localhost", "-p", port, "--cafile", str(setup.authority.file), *publish)
    assert other_name.returncode == 1
    assert f"mqtt-nats: the certificate of localhost:{port} is not valid: ".encode() in other_name.stderr


def test_plain_against_tls(setup: Setup) -> None:
    done = run("pub", "-p", str(setup.tls), "-t", "a", "-m", "x")
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    done = run("pub", "-h", "localhost", "-p", str(setup.open), "--tls", "-t", "a", "-m", "x")
    assert done.returncode == 1
    assert f"mqtt-nats: TLS with localhost:{setup.open} failed".encode() in done.stderr


def test_websocket(setup: Setup) -> None:
    there_and_back(setup, "--url", f"ws://127.0.0.1:{setup.ws}/mqtt")


def test_websocket_over_tls(setup: Setup) -> None:
    there_and_back(setup, "--url", f"wss://localhost:{setup.wss}", "--cafile", str(setup.authority.file))


def test_websocket_refused(setup: Setup) -> None:
    done = run("pub", "--url", f"ws://127.0.0.1:{setup.ws}/elsewhere", "-t", "a", "-m", "x")
    assert (done.returncode, done.stderr) == (1, b"mqtt-nats: WebSocket refused: HTTP status 404\n")
    done = run("pub", "--url", f"ws://127.0.0.1:{setup.open}/mqtt", "-t", "a", "-m", "x")
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)


LAMP = ("-u", "lamp", "-t", "device/lamp/state", "-q", "1", "-m", "on")


def test_a_password_from_option_variable_and_file(setup: Setup, tmp_path: Path) -> None:
    port, secret = str(setup.users), "lamp-secret"
    file = tmp_path / "password"
    file.write_text(f"{secret}\n", encoding="utf-8")
    assert run("pub", "-p", port, *LAMP, "-P", secret).returncode == 0
    assert run("pub", "-p", port, *LAMP, env={"MQTT_NATS_CLIENT_PASSWORD": secret}).returncode == 0
    assert run("pub", "-p", port, *LAMP, "--password-file", str(file)).returncode == 0
    wrong = {"MQTT_NATS_CLIENT_PASSWORD": "wrong"}
    assert run("pub", "-p", port, *LAMP, "--password-file", str(file), env=wrong).returncode == 0


@pytest.mark.parametrize(
    ("version", "arguments", "text"),
    [
        ("5.0", (*LAMP, "-P", "wrong"), "connection refused: bad user name or password (reason code 0x86)"),
        ("3.1.1", (*LAMP, "-P", "wrong"), "connection refused: bad user name or password (return code 4)"),
        ("5.0", ("-t", "a", "-m", "x"), "connection refused: not authorized (reason code 0x87)"),
        ("3.1.1", ("-t", "a", "-m", "x"), "connection refused: not authorized (return code 5)"),
        (
            "5.0",
            ("-u", "lamp", "-P", "lamp-secret", "-t", "device/door/state", "-q", "1", "-m", "on"),
            "message refused: not authorized (reason code 0x87)",
        ),
    ],
)
def test_refused(setup: Setup, version: str, arguments: tuple[str, ...], text: str) -> None:
    done = run("pub", "-V", version, "-p", str(setup.users), *arguments)
    assert done.returncode == 1
    assert done.stderr.decode().startswith(f"mqtt-nats: {text}"), done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(("version", "why"), [("5.0", "not authorized (reason code 0x87)"), ("3.1.1", "failure")])
def test_a_subscription_is_refused(setup: Setup, version: str, why: str) -> None:
    arguments = ("-u", "lamp", "-P", "lamp-secret", "-t", "device/lamp/#", "-t", "device/door/#")
    done = run("sub", "-V", version, "-p", str(setup.users), *arguments)
    assert done.returncode == 1
    assert done.stderr.decode().startswith(f"mqtt-nats: subscription to 'device/door/#' refused: {why}")
