# SPDX-License-Identifier: Apache-2.0
"""Somebody between us and nats-server takes TLS out of what it says: nothing is sent to it in the clear."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.errors import Error as NatsError

from mqtt_nats.access.authenticator import Allow, Denied
from mqtt_nats.access.settings import NatsSettings
from mqtt_nats.authenticators.nats_users import LINE_MOST, NatsUsers
from mqtt_nats.backbone.connect import open_link
from mqtt_nats.config.accounts import TenantSettings
from mqtt_nats.config.nats_connect import nats_access, nats_options
from mqtt_nats.config.settings import Settings
from pyspark_mqtt_nats.errors import ConnectError
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.options import Options
from tests.access.test_chain import credentials
from tests.backbone.certificates import Authority
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio

STRIPPED = b'INFO {"server_id":"x","version":"2.12.0","max_payload":1048576,"headers":true}\r\n'
SECURE = STRIPPED.replace(b"}", b',"tls_required":true}')
ANN = credentials("ann", b"pencil")


class Between:
    """A server in the place of nats-server."""

    def __init__(self, greeting: bytes) -> None:
        self.greeting = greeting
        self.url = ""
        self.received: list[bytes] = []
        """All that came, one for each connection, in the order of their ends."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Greet, and write down what comes."""
        writer.write(self.greeting)
        try:
            self.received.append(await reader.read())
        except OSError:
            self.received.append(b"")
        writer.close()


@asynccontextmanager
async def between(greeting: bytes = STRIPPED) -> AsyncIterator[Between]:
    found = Between(greeting)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield found


async def heard(server: Between) -> bytes:
    """What the server has got; it must have been asked."""
    await aeventually(lambda: server.received)
    return b"".join(server.received)


def settings(tmp_path: Path, url: str, how: str) -> Settings:
    """Settings of a gateway that insist on TLS, each in its way."""
    authority = Authority(tmp_path)
    pair = authority.issue("gateway")
    ways: dict[str, dict[str, Any]] = {
        "ca": {"nats": (url,), "nats_tls_ca": authority.file},
        "certificate": {"nats": (url,), "nats_tls_cert": pair.certificate, "nats_tls_key": pair.key},
        "hostname": {"nats": (url,), "nats_tls_hostname": "nats.example"},
        "another URL": {"nats": (url, "tls://127.0.0.1:1")},
    }
    login: dict[str, Any] = {"nats_user": "gateway", "nats_password": "secret"}
    return Settings(**login, **ways[how])


HOW = pytest.mark.parametrize("how", ["ca", "certificate", "hostname", "another URL"])


@HOW
async def test_the_gateway_sends_no_login(tmp_path: Path, how: str) -> None:
    """Nor does `mqtt-nats ctl`, which connects in the same way."""

    async def nothing() -> None:
        return

    async with between() as server:
        options = nats_options(settings(tmp_path, server.url, how))
        with pytest.raises(NatsError, match="offers no TLS"):
            await open_link(options, name="x", no_echo=False, on_online=nothing, on_offline=nothing)
        assert await heard(server) == b""


@HOW
async def test_the_authenticator_sends_no_password(tmp_path: Path, how: str) -> None:
    async with between() as server:
        users = NatsUsers(NatsSettings(type="nats", account="*"), nats_access(settings(tmp_path, server.url, how)))
        assert isinstance(await users.check(ANN), Denied)
        assert await heard(server) == b""


@pytest.mark.parametrize("order", [1, -1])
async def test_the_authenticators_own_servers(order: int) -> None:
    """One URL with `tls://` is enough, wherever it stands."""
    async with between() as server:
        urls = (server.url, "tls://127.0.0.1:1")[::order]
        own = NatsSettings(type="nats", account="*", servers=urls)
        users = NatsUsers(own, nats_access(Settings(nats=("nats://127.0.0.1:1",))))
        assert isinstance(await users.check(ANN), Denied)
        assert await heard(server) == b""


async def test_a_tenant_of_a_gateway_with_tls(tmp_path: Path) -> None:
    """A tenant on the gateway's nats-servers has the gateway's TLS, whatever of it is the tenant's own."""
    for how in ("ca", "certificate", "hostname", "another URL"):
        general = settings(tmp_path, "nats://127.0.0.1:1", how)
        found = general.model_copy(update={"tenants": {"a": TenantSettings()}}).of("a")
        assert nats_options(found).get("tls") is not None, how
    apart = Settings(nats=("tls://127.0.0.1:1",), tenants={"a": TenantSettings(nats=("nats://127.0.0.1:2",))}).of("a")
    assert "tls" not in nats_options(apart)


@pytest.mark.parametrize("more", [{}, {"tlsHostname": "nats.example"}])
async def test_spark_sends_no_login(more: dict[str, str]) -> None:
    async with between() as server:
        urls = server.url if more else f"{server.url},tls://127.0.0.1:1"
        given = {"servers": urls, "user": "u", "password": "secret", "connectTimeout": "1", **more}
        with pytest.raises(ConnectError, match="offers no TLS"):
            await asyncio.to_thread(Connection, Options.parse(given).access)
        assert await heard(server) == b""


INJECTED = b"PONG\r\nMSG x 1 71\r\n" + b'{"data":{"user":"ann","account":"A"}}'.ljust(71) + b"\r\n"


async def test_what_is_said_before_tls_is_not_taken_for_said_under_it(tmp_path: Path) -> None:
    """An answer that somebody has written behind INFO lets nobody in, and nothing of it is read by the gateway."""

    async def nothing() -> None:
        return

    async with between(SECURE + INJECTED) as server:
        of = settings(tmp_path, server.url, "ca")
        users = NatsUsers(NatsSettings(type="nats", account="*", permissions="wanted"), nats_access(of))
        assert not isinstance(await users.check(ANN), Allow)
        with pytest.raises(NatsError, match="between INFO and the TLS handshake"):
            await open_link(nats_options(of), name="x", no_echo=False, on_online=nothing, on_offline=nothing)
        assert b"".join(server.received) == b""  # no handshake was begun either


LOGGED_IN = b'{"data":{"user":"ann","account":"A"}}'


def padded(info: bytes, size: int) -> bytes:
    """INFO of so many bytes."""
    return info.replace(b"{", b'{"x":"%b",' % (b"x" * (size - len(info) - len(b'"x":"",'))))


@pytest.mark.parametrize("size", [200, LINE_MOST])
async def test_nothing_that_came_before_tls_is_left_to_be_read_under_it(tmp_path: Path, size: int) -> None:
    """The server itself refuses the password, over TLS; INFO may be as long as one read."""
    authority = Authority(tmp_path)
    pair = authority.issue("nats")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    said = b"PONG\r\nMSG x 1 %d\r\n%b\r\n" % (len(LOGGED_IN), LOGGED_IN)
    attempts = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        # The first login is that of nobody, which has to be refused.
        writer.write(padded(SECURE, size) + (said if attempts > 1 else b""))
        try:
            await writer.start_tls(context)
            await reader.readuntil(b"PING\r\n")
            writer.write(b"-ERR 'Authorization Violation'\r\n")
            await writer.drain()
        except (OSError, EOFError):
            pass
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        given = Settings(nats=(url,), nats_tls_ca=authority.file, nats_tls_hostname="nats")
        users = NatsUsers(NatsSettings(type="nats", account="*"), nats_access(given))
        assert isinstance(await users.check(ANN), Denied)
        assert attempts == 2


@HOW
async def test_a_reconnect_to_an_announced_server_sends_no_login(tmp_path: Path, how: str) -> None:
    """The first server has TLS, announces one that has none, and ends the connection."""
    (tmp_path / "server").mkdir()
    authority = Authority(tmp_path / "server")
    pair = authority.issue("nats.example")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    up, changed = asyncio.Event(), asyncio.Event()

    async def noted() -> None:
        changed.set()

    async with between() as plain:
        announced = plain.url.removeprefix("nats://").encode()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(SECURE.replace(b"}", b',"connect_urls":["%b"]}' % announced))
            await writer.start_tls(context)
            await reader.readuntil(b"PING\r\n")
            writer.write(b"PONG\r\n")
            await up.wait()
            writer.close()

        first = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"nats://127.0.0.1:{first.sockets[0].getsockname()[1]}"
        trusting = ssl.create_default_context(cafile=str(authority.file))
        options = nats_options(settings(tmp_path, url, how)) | {"tls": trusting, "tls_hostname": "nats.example"}
        try:
            link = await open_link(options, name="x", no_echo=False, on_online=noted, on_offline=noted)
        finally:
            first.close()
        up.set()
        try:
            await asyncio.wait_for(changed.wait(), 30)
            assert await heard(plain) == b""
            assert not link.online
        finally:
            await link.close()
