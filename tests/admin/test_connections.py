# SPDX-License-Identifier: Apache-2.0
"""Connections to the admin listener that want nothing, want too much, or are not there any more."""

from __future__ import annotations

import asyncio
import base64
import gc
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

from mqtt_nats.admin import administered, bridge, connections, listener
from mqtt_nats.admin.connections import MOST_CONNECTIONS, SPARE, notice_the_end
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.gateway import Gateway as GatewayProcess
from mqtt_nats.transport.listener_settings import Bound
from tests.admin.support import PATIENCE, TOKEN, Admin, serving
from tests.backbone.certificates import Authority
from tests.harness.nats import NatsServer
from tests.harness.waiting import aeventually, eventually

FIRST_LOOK = 20.0
"""`HEAD_SECONDS` while tests look who is let in: a slow machine opens all of `MANY` and answers in less."""

SHORT = 3.0
"""`HEAD_SECONDS` while tests wait until those who send nothing are gone."""

TLS = ssl.create_default_context()
"""Unused where no TLS is spoken, but httpx would make one for each client, which takes longer than an answer."""

MANY = MOST_CONNECTIONS + SPARE + 30
BEGINNINGS = (b"", b"GET / HT", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET / HT")


@pytest.fixture
def admin(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Admin]:
    monkeypatch.setattr(listener, "PING_INTERVAL", 2.0)
    monkeypatch.setattr(listener, "PING_TIMEOUT", 2.0)
    monkeypatch.setattr(bridge, "BRIDGES", 1)
    with serving(nats_server.url) as found:
        yield found


def opened(admin: Admin, data: bytes = b"") -> socket.socket:
    port = httpx.URL(admin.url).port
    found = socket.create_connection(("127.0.0.1", port), PATIENCE)
    found.sendall(data)
    return found


def fresh(admin: Admin, path: str) -> int:
    """The status of an answer on a connection of its own."""
    with httpx.Client(base_url=admin.url, timeout=PATIENCE, headers=admin.http.headers, verify=TLS) as http:
        return http.get(path).status_code


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_who_sends_no_request_keeps_nobody_out(admin: Admin, beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are; and after a while they are gone."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", FIRST_LOOK)
    with ExitStack() as stack:
        begun = time.monotonic()
        for _ in range(MANY):
            stack.enter_context(opened(admin, beginning))
        for path in ("/healthz", "/readyz", "/metrics", "/api/v1/hooks"):
            assert fresh(admin, path) == 200
        assert time.monotonic() - begun < FIRST_LOOK, "those who send no request were still there"
    monkeypatch.setattr(connections, "HEAD_SECONDS", SHORT)
    with ExitStack() as stack:
        for one in [stack.enter_context(opened(admin, beginning)) for _ in range(MANY)]:
            try:
                while one.recv(65_536):
                    pass
            except ConnectionResetError:
                pass
    assert fresh(admin, "/healthz") == 200


def test_who_is_asked_for_something_stays(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection with a request under way does not make room, nor one that only took long to say what it wants."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 5.0)
    ask = f"GET /api/v1/trace?topic=x&lasts=3600 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with opened(admin) as asking, ExitStack() as stack:
        time.sleep(1)
        asking.sendall(ask.encode())
        said = asking.recv(65_536)
        assert b"200 OK" in said
        for _ in range(MANY):
            stack.enter_context(opened(admin))
        asking.settimeout(20)
        time.sleep(5)
        while b"\r\n\r\n" not in said or b"tracing" not in said:
            said += asking.recv(65_536)
        assert asking.recv(65_536)  # an empty line: it goes on


def test_a_browser_that_has_vanished_is_not_counted(admin: Admin) -> None:
    """It answers no ping. Another page finds room then."""
    token = base64.urlsafe_b64encode(TOKEN.encode()).decode().rstrip("=")
    ask = (
        "GET /bridge HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
        f"Sec-WebSocket-Protocol: mqtt-nats, token.{token}\r\n\r\n"
    )

    def let_in(page: socket.socket) -> bool:
        said = b""
        while b"connected" not in said and b"pages are here" not in said:
            some = page.recv(65_536)
            assert some, said
            said += some
        return b"connected" in said

    def finds_room() -> bool:
        with opened(admin, ask.encode()) as page:
            return let_in(page)

    with ExitStack() as stack:

        def vanishes() -> bool:
            """Its socket stays open, and nobody reads from it again."""
            return let_in(stack.enter_context(opened(admin, ask.encode())))

        eventually(vanishes, PATIENCE, what="the gateway")
        assert not finds_room()
        eventually(finds_room, PATIENCE, what="room")


async def test_who_does_not_speak_tls_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, few are kept; and after a while they are gone."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", FIRST_LOOK)
    authority = Authority(tmp_path)
    own = authority.issue("127.0.0.1")
    settings = Settings(
        admin_listen="127.0.0.1:0", admin_token=SecretStr(TOKEN), admin_tls_cert=own.certificate, admin_tls_key=own.key
    )
    bound: list[Bound] = []

    @asynccontextmanager
    async def silent(port: int) -> AsyncIterator[Callable[[], int]]:
        """Many who send nothing; yields how many of them have been sent away."""
        found = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MANY)]
        waiting = [asyncio.ensure_future(reader.read(1)) for reader, _ in found]
        try:
            yield lambda: sum(one.done() for one in waiting)
        finally:
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for _, writer in found:
                writer.close()

    async with administered(GatewayProcess(settings), bound.extend) as ready:
        ready([])
        port = bound[0].port
        context = ssl.create_default_context(cafile=str(authority.file))
        async with silent(port) as gone:
            async with httpx.AsyncClient(
                base_url=f"https://127.0.0.1:{port}", verify=context, timeout=PATIENCE
            ) as http:
                assert (await http.get("/healthz")).status_code == 200
            await aeventually(lambda: gone() >= MANY - MOST_CONNECTIONS, FIRST_LOOK)
            assert gone() <= MANY - MOST_CONNECTIONS + 1
        monkeypatch.setattr(connections, "HEAD_SECONDS", SHORT)
        async with silent(port) as gone:
            await aeventually(lambda: gone() == MANY, FIRST_LOOK)


@pytest.mark.parametrize("field", ["Sec-WebSocket-Protocol: token.\xff", "Sec-WebSocket-Extensions: \xff"])
def test_a_websocket_whose_header_is_no_text(admin: Admin, field: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is told so, and nothing is kept of it."""
    ask = (
        "GET /bridge HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n{field}\r\n\r\n"
    )
    for _ in range(5):
        with opened(admin, ask.encode("latin-1")) as page:
            assert page.recv(65_536).startswith(b"HTTP/1.1 400 ")
            assert page.recv(65_536) == b""
    assert not [one for one in caplog.records if one.exc_info]
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, WSProtocol)]


def test_the_kernel_looks_whether_somebody_is_there() -> None:
    """Accepted connections have what the socket has that listens."""
    with socket.socket() as listening:
        notice_the_end(listening)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
