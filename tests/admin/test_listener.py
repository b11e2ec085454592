# SPDX-License-Identifier: Apache-2.0
"""Running gateways, asked by HTTP and WebSocket."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from mqtt_nats.admin import administered
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.gateway import Gateway as GatewayProcess
from mqtt_nats.transport.listener_settings import Bound
from tests.admin.results import check_result
from tests.admin.support import PATIENCE, TOKEN, Admin, address, serving
from tests.backbone.certificates import Authority, Pair
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw5
from tests.harness.nats import NatsServer
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import aeventually, eventually

LISTEN = ("--admin-listen", "127.0.0.1:0")
ENV = {"MQTT_NATS_ADMIN_TOKEN": TOKEN}
HOSTILE = 'a/b <img src=x onerror="1"> \N{RIGHT-TO-LEFT OVERRIDE}ü'


@pytest.fixture(scope="module")
def admin(nats_server: NatsServer) -> Iterator[Admin]:
    """One gateway with a token, and who has it."""
    with serving(nats_server.url) as found:
        yield found


def value(text: str, name: str, **labels: str) -> float:
    """The sum of all samples that have these labels."""
    return sum(
        one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name == name and labels.items() <= one.labels.items()
    )


def test_what_passes_is_counted(admin: Admin) -> None:
    before = admin.metrics()
    with (
        Raw5.open(admin.port, "durable", prop(SESSION_EXPIRY, 600)) as durable,
        Raw5.open(admin.port, "regular") as regular,
        Raw5.open(admin.port, "publisher") as publisher,
    ):
        assert durable.subscribed(("counted", 1)) == (1,)
        assert regular.subscribed(("counted", 1), ("$share/group/counted/shared", 1)) == (1, 1)
        for number in range(3):
            publisher.deliver("counted", b"12345%d" % number)
            durable.receive_message(b"12345%d" % number)
            regular.receive_message(b"12345%d" % number)

        def counted() -> bool:
            now = admin.metrics()
            received = value(now, "mqtt_nats_messages_received_total", qos="1")
            sent = value(now, "mqtt_nats_messages_sent_total", qos="1")
            return (received, sent) == (
                value(before, "mqtt_nats_messages_received_total", qos="1") + 3,
                value(before, "mqtt_nats_messages_sent_total", qos="1") + 6,
            )

        eventually(counted, PATIENCE, what="counters")
        now = admin.metrics()
        for kind in ("received", "sent"):
            name = f"mqtt_nats_payload_{kind}_bytes_total"
            grown = value(now, name, qos="1") - value(before, name, qos="1")
            assert grown == {"received": 18, "sent": 36}[kind]
        assert value(now, "mqtt_nats_store_seconds_count") > value(before, "mqtt_nats_store_seconds_count")
        assert value(now, "mqtt_nats_sessions", kind="durable") == 1
        assert value(now, "mqtt_nats_subscriptions") == 3  # a shared one too
        assert value(now, "mqtt_nats_stream_messages", stream="$MQTT_msgs") >= 3
        assert value(now, "mqtt_nats_stream_messages", stream="$MQTT_pos") >= 0
        assert value(now, "mqtt_nats_nats_connected", link="main") == 1
    gone = {"how": "lost"}
    eventually(lambda: value(admin.metrics(), "mqtt_nats_disconnects_total", **gone) >= 3, PATIENCE, what="the ends")
    assert value(admin.metrics("?aggregated=true"), "mqtt_nats_connects_total") >= 3
    for wrong in ("?aggregated=1", "?x=1"):
        assert admin.http.get(f"/metrics{wrong}").status_code == 400


def test_verbs_over_http(admin: Admin, caplog: pytest.LogCaptureFixture) -> None:
    with Raw5.open(admin.port, HOSTILE) as client:
        path = f"/clients/{quote(HOSTILE, safe='')}"
        assert admin.get(path)["client"] == HOSTILE
        assert [one["client"] for one in admin.get("/clients", match="a/b*")["clients"]] == [HOSTILE]
        answer = admin.post("/clients/kick", clients=[HOSTILE], reason="enough")
        assert answer.status_code == 200
        assert [one["client"] for one in answer.json()["clients"]] == [HOSTILE]
        client.expect(raw5.DISCONNECT)
    assert admin.http.get(f"/api/v1{path}").status_code == 404
    assert admin.post("/clients/kick").status_code == 400
    assert "clients.kick by admin (administrator) from 127.0.0.1 over HTTP: " in caplog.text
    with httpx.Client(base_url=admin.url, timeout=PATIENCE) as stranger:
        for where in ("/metrics", "/api/v1/status", "/openapi.json", "/about"):
            assert stranger.get(where).status_code == 401
        assert stranger.get("/readyz").text == "ready\n"
        assert stranger.get("/healthz").text == "ok\n"
        assert "default-src 'none'" in stranger.get("/").headers["content-security-policy"]
        assert stranger.get("/nothing").status_code == 401
    assert admin.http.get("/nothing").json() == {"error": "the path /nothing does not exist"}
    assert TOKEN not in caplog.text


def test_a_ban_over_http_names_no_user_of_the_gateway(admin: Admin) -> None:
    banned = admin.post("/bans", kind="user", who="mallory")
    assert (banned.status_code, banned.json()["by"]) == (200, "admin, over HTTP")
    assert admin.post("/bans", kind="user", who="mallory", by="ann").json()["by"] == "ann (admin, over HTTP)"
    check_result(("bans", "add"), banned.json())
    check_result(("bans", "list"), admin.http.get("/api/v1/bans").json())
    check_result(("bans", "remove"), admin.http.delete("/api/v1/bans/user/mallory").raise_for_status().json())


async def talk(admin: Admin, *asked: Any, until: str) -> list[dict[str, Any]]:
    """Return the answers of the bridge, up to the first answer of a kind."""
    token = base64.urlsafe_b64encode(TOKEN.encode()).decode().rstrip("=")
    names = [Subprotocol("mqtt-nats"), Subprotocol(f"token.{token}")]
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(PATIENCE), connect(f"ws{admin.url[4:]}/bridge", subprotocols=names) as socket:
        assert socket.subprotocol == "mqtt-nats"
        for one in asked:
            await socket.send(one if isinstance(one, str | bytes) else json.dumps(one))
            async for text in socket:  # what is published before SUBACK may not come
                found.append(json.loads(text))
                if found[-1]["is"] in ("subscribed", "unsubscribed", "published", "error"):
                    break
        while not any(one["is"] == until for one in found):
            found.append(json.loads(await socket.recv()))
    return found


async def test_publish_and_subscribe_by_websocket(admin: Admin) -> None:
    for qos in range(3):
        found = await talk(
            admin,
            {"do": "subscribe", "filter": f"bridge/{qos}/#", "qos": qos},
            {"do": "publish", "topic": f"bridge/{qos}/ü", "payload": "<b>21.5</b>", "qos": qos, "retain": False},
            until="message",
        )
        assert {"is": "subscribed", "filter": f"bridge/{qos}/#", "qos": qos} in found
        message = {"is": "message", "topic": f"bridge/{qos}/ü", "qos": qos, "retain": False, "text": "<b>21.5</b>"}
        assert message | {"bytes": 11} in found
    found = await talk(
        admin,
        {"do": "publish", "topic": "bridge/kept", "payload": "x", "qos": 1, "retain": True},
        {"do": "subscribe", "filter": "bridge/kept"},
        {"do": "unsubscribe", "filter": "bridge/kept"},
        until="unsubscribed",
    )
    assert {"is": "published", "topic": "bridge/kept", "qos": 1} in found


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("{", "Invalid JSON"),
        (b"\xff", "Invalid JSON"),
        ({"do": "dance"}, "does not match any of the expected tags"),
        ({"do": "publish", "topic": "a/#"}, "contains a wildcard"),
        ({"do": "publish", "topic": "a", "qos": 3}, "less than or equal to 2"),
        ({"do": "publish", "topic": "a\0"}, "U+0000"),
        ({"do": "subscribe", "filter": "a#"}, "not the whole of the last level"),
        ({"do": "subscribe", "filter": "a", "x": 1}, "Extra inputs"),
        ('{"do": "publish", "topic": "\\ud800"}', "Invalid JSON"),
    ],
)
async def test_what_the_bridge_does_not_do(admin: Admin, asked: Any, text: str) -> None:
    found = await talk(admin, asked, until="error")
    assert text.lower() in found[-1]["text"].lower()


async def test_no_bridge_for_strangers(admin: Admin) -> None:
    with pytest.raises(InvalidStatus, match="403"):
        async with connect(f"ws{admin.url[4:]}/bridge"):
            pass


@pytest.mark.long
def test_ready_only_while_clients_are_served(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    nats = nats_factory()
    gateway = gateway_factory(nats, *LISTEN, "--drain-time", "5")
    with httpx.Client(base_url=address(gateway), timeout=PATIENCE) as http:

        def says(status: int, text: str) -> None:
            def said() -> bool:
                answer = http.get("/readyz")
                return answer.status_code == status and text in answer.text

            eventually(said, PATIENCE, what=f"{status} {text}")

        says(200, "ready")
        nats.stop()
        says(503, "not connected to NATS")
        assert http.get("/healthz").status_code == 200
        assert http.get("/metrics").status_code == 200
        nats.start()
        says(200, "ready")
        clients = [Raw5.open(gateway.port, f"draining-{number}") for number in range(4)]
        gateway.process.send(signal.SIGTERM)
        says(503, "draining")
        for one in clients:
            one.close()
    assert gateway.wait(PATIENCE) == 0


@pytest.mark.long
def test_workers_have_one_listener(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory(nats_server, *LISTEN, "--workers", "2", env=ENV)
    admin = Admin(address(gateway), gateway.port, TOKEN)
    try:
        clients = [Raw5.open(gateway.port, f"of-workers-{number}") for number in range(20)]
        for _ in range(3):
            with httpx.Client(base_url=admin.url, headers=admin.http.headers, timeout=PATIENCE) as http:
                each, together = http.get("/metrics").text, http.get("/metrics?aggregated=true").text
            per_worker = [value(each, "mqtt_nats_connects_total", worker=number) for number in ("1", "2")]
            assert sum(per_worker) == value(together, "mqtt_nats_connects_total") == len(clients)
            assert value(each, "mqtt_nats_worker_up") == 2
        for one in clients:
            one.close()
    finally:
        admin.http.close()


def made(path: Path, name: str) -> Authority:
    (path / name).mkdir()
    return Authority(path / name)


async def test_certificates_of_administrators(tmp_path: Path) -> None:
    """And what is said before the gateway is connected to NATS."""
    authority, stranger = made(tmp_path, "ours"), made(tmp_path, "theirs")
    own, known, unknown = authority.issue("127.0.0.1"), authority.issue("admin"), stranger.issue("admin")
    trusted = tmp_path / "trusted.pem"
    shutil.copy(authority.file, trusted)
    settings = Settings(
        admin_listen="127.0.0.1:0", admin_tls_cert=own.certificate, admin_tls_key=own.key, admin_tls_client_ca=trusted
    )
    gateway = GatewayProcess(settings)
    bound: list[Bound] = []

    @asynccontextmanager
    async def client(pair: Pair | None) -> AsyncIterator[httpx.AsyncClient]:
        context = ssl.create_default_context(cafile=str(authority.file))
        if pair is not None:
            context.load_cert_chain(str(pair.certificate), str(pair.key))
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{bound[0].port}", verify=context) as http:
            yield http

    async def let_in(pair: Pair | None) -> bool:
        async with client(pair) as http:
            try:
                return (await http.get("/healthz")).status_code == 200
            except httpx.TransportError:
                return False

    async with administered(gateway, bound.extend) as ready:
        ready([])
        assert [await let_in(one) for one in (known, unknown, None)] == [True, False, False]
        async with client(known) as http:
            answer = await http.get("/readyz")
            assert (answer.status_code, answer.text[:7]) == (503, "the gat")
            assert 'mqtt_nats_worker_up{worker="1"} 0.0' in (await http.get("/metrics")).text
        shutil.copy(stranger.file, trusted)
        gateway.reload()
        assert [await let_in(one) for one in (known, unknown, None)] == [False, True, False]


async def test_certificates_of_administrators_that_end(tmp_path: Path) -> None:
    """Also on connections that are open: by their time, by a list of revoked ones, and with their authority."""
    first, second = made(tmp_path, "first"), made(tmp_path, "second")
    own, trusted, lists = first.issue("127.0.0.1"), tmp_path / "trusted.pem", tmp_path / "lists.pem"
    shutil.copy(first.file, trusted)
    lists.write_bytes(first.revocations())
    settings = Settings(
        admin_listen="127.0.0.1:0",
        admin_tls_cert=own.certificate,
        admin_tls_key=own.key,
        admin_tls_client_ca=trusted,
        admin_tls_crl_file=lists,
    )
    gateway = GatewayProcess(settings)
    bound: list[Bound] = []

    async def opened(pair: Pair) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context(cafile=str(first.file))
        context.load_cert_chain(str(pair.certificate), str(pair.key))
        return await asyncio.open_connection("127.0.0.1", bound[0].port, ssl=context)

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection is there; each is asked more often than one that says nothing is ended."""
        try:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await writer.drain()
            return b" 200 " in await reader.readline() and await _rest(reader)
        except OSError:
            return False

    async with administered(gateway, bound.extend) as ready, AsyncExitStack() as stack:
        ready([])
        names = ("short", "revoked", "known")
        pairs = [first.issue(name, timedelta(seconds=4 if name == "short" else 3600)) for name in names]
        found = [await opened(pair) for pair in pairs]
        for _, writer in found:
            stack.callback(writer.close)
        assert [await served(*one) for one in found] == [True, True, True]

        async def state() -> list[bool]:
            return [await served(*one) for one in found]

        lists.write_bytes(first.revocations(pairs[1]))
        gateway.reload()
        assert (await state())[1:] == [False, True]
        await aeventually(lambda: _is(state(), [False, False, True]))
        again = [await opened(pair) for pair in pairs[1:]]
        for _, writer in again:
            stack.callback(writer.close)
        assert [await served(*one) for one in again] == [False, True]
        shutil.copy(second.file, trusted)
        lists.write_bytes(second.revocations())
        gateway.reload()
        assert await state() == [False, False, False]


async def _rest(reader: asyncio.StreamReader) -> bool:
    """Read the rest of an answer."""
    length = 0
    while (line := await reader.readline()).strip():
        if line.lower().startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    await reader.readexactly(length)
    return True


async def _is(found: Awaitable[list[bool]], expected: list[bool]) -> bool:
    return await found == expected
