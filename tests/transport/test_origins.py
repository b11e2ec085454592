# SPDX-License-Identifier: Apache-2.0
"""Pages of other sites do not use a browser's way to the gateway."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from mqtt_nats.transport.listener_settings import ListenerSettings, is_own_origin
from tests.base.support import PATIENCE, Inside, running
from tests.harness.nats import NatsServer
from tests.transport.web import request


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer) -> Iterator[Inside]:
    origins = ["HTTPS://Example.ORG:443", "http://localhost:8000"]
    given: list[dict[str, Any]] = [{"origins": origins}, {}, {"origins": ["*"]}]
    with running(nats_server.url, *({"type": "ws", **one} for one in given)) as found:
        yield found


@pytest.mark.parametrize(
    ("listener", "origin", "status"),
    [
        (0, "https://example.org", b"101"),
        (0, "HTTPS://Example.org", b"101"),
        (0, "https://example.org:443", b"101"),
        (0, "https://example.org/", b"403"),
        (0, "*", b"403"),
        (0, "http://localhost:8000", b"101"),
        (0, None, b"101"),
        (0, "http://example.org", b"403"),
        (0, "https://example.org:8443", b"403"),
        (0, "https://example.org.evil.example", b"403"),
        (0, "null", b"403"),
        (0, "", b"403"),
        (1, "https://evil.example", b"403"),
        (1, "null", b"403"),
        (1, "file://", b"403"),
        (1, "*", b"403"),
        (1, None, b"101"),
        (1, "http://127.0.0.1", b"101"),
        (1, "http://127.0.0.1:8000", b"101"),
        (1, "http://localhost:8000", b"101"),
        (1, "https://[::1]", b"101"),
        (1, "http://127.0.0.1.evil.example", b"403"),
        (1, "http://127.0.0.1@evil.example", b"403"),
        (1, "http://evil.example@127.0.0.1", b"403"),
        (1, "capacitor://localhost", b"403"),
        (2, "https://evil.example", b"101"),
        (2, "null", b"101"),
    ],
)
def test_origins(inside: Inside, listener: int, origin: str | None, status: bytes) -> None:
    port = inside.ports[listener]
    with closing(socket.create_connection(("127.0.0.1", port), PATIENCE)) as plain:
        plain.sendall(request(Origin=origin, Host=f"127.0.0.1:{port}"))
        assert plain.recv(1000).split(b" ", 2)[1] == status


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8083", "", "[", "127.0.0.1.evil.example"])
def test_a_name_of_somebody_elses_that_leads_here(inside: Inside, host: str) -> None:
    """Its page and the listener are on the same host for a browser."""
    with closing(socket.create_connection(("127.0.0.1", inside.ports[1]), PATIENCE)) as plain:
        plain.sendall(request(Host=host, Origin="http://evil.example"))
        assert plain.recv(1000).split(b" ", 2)[1] in (b"403", b"400")


@pytest.mark.parametrize(
    ("origin", "host", "secure", "own"),
    [
        ("http://10.0.0.7:8000", "10.0.0.7:8083", False, True),
        ("http://10.0.0.7:8000", "10.0.0.8:8083", False, False),
        ("http://[fe80::1]", "[fe80:0::1]:8083", False, True),
        ("http://mqtt.example.org", "mqtt.example.org:8083", False, False),
        ("https://mqtt.example.org", "mqtt.example.org:8084", True, True),
        ("https://MQTT.example.org", "mqtt.Example.org", True, True),
        ("https://www.example.org", "mqtt.example.org", True, False),
        ("https://mqtt.example.org.evil.example", "mqtt.example.org", True, False),
        ("null", "mqtt.example.org", True, False),
        ("https://", "", True, False),
    ],
)
def test_the_listeners_own_host(origin: str, host: str, secure: bool, own: bool) -> None:
    """A name counts with TLS only, where it is that of the certificate."""
    assert is_own_origin(origin, host, secure) is own


def test_two_origins_have_both_to_be_allowed(inside: Inside) -> None:
    with closing(socket.create_connection(("127.0.0.1", inside.ports[0]), PATIENCE)) as plain:
        head = request(Origin="https://example.org")
        plain.sendall(head.replace(b"Origin:", b"Origin: https://evil.example\r\nOrigin:"))
        assert plain.recv(1000).split(b" ", 2)[1] == b"403"


def test_only_for_websocket() -> None:
    with pytest.raises(ValueError, match="origins needs a type with WebSocket, not tcp"):
        ListenerSettings.model_validate({"listen": "h:1", "origins": ["https://example.org"]})


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("https://example.org", "https://example.org"),
        ("HTTPS://Example.org:443", "https://example.org"),
        ("http://h:080", "http://h"),
        ("http://h:443", "http://h:443"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("capacitor://localhost", "capacitor://localhost"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("null", "null"),
        ("file://", "file://"),
    ],
)
def test_an_origin_is_as_browsers_send_it(given: str, origin: str) -> None:
    settings = ListenerSettings.model_validate({"listen": "h:1", "type": "ws", "origins": [given]})
    assert settings.origins == (origin,)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("https://*", "is no origin"),
        ("https://example.org/", "without a path"),
        ("https://*.example.org", "is no origin"),
        ("example.org", "expected SCHEME://HOST"),
        ("https://", "is no origin"),
        ("https://me@example.org", "is no origin"),
        ("https://example.org:65536", "is no origin"),
        ("https://ex\u00e4mple.org", "is no origin"),
        ("https://example.org\n", "is no origin"),
    ],
)
def test_what_can_never_match_is_refused(given: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ListenerSettings.model_validate({"listen": "h:1", "type": "ws", "origins": [given]})
