# SPDX-License-Identifier: Apache-2.0
"""Pages of other sites do not use a browser's way to the gateway."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from mqtt_nats.transport.listener_settings import ListenerSettings
from tests.base.support import PATIENCE, Inside, running
from tests.harness.nats import NatsServer
from tests.transport.web import request


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer) -> Iterator[Inside]:
    origins = ["HTTPS://Example.ORG:443", "http://localhost:8000"]
    with running(nats_server.url, {"type": "ws", "origins": origins}, {"type": "ws"}) as found:
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
        (1, "https://evil.example", b"101"),
    ],
)
def test_origins(inside: Inside, listener: int, origin: str | None, status: bytes) -> None:
    with closing(socket.create_connection(("127.0.0.1", inside.ports[listener]), PATIENCE)) as plain:
        plain.sendall(request(Origin=origin))
        assert plain.recv(1000).split(b" ", 2)[1] == status


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
        ("*", "leave origins out"),
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
