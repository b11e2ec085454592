# SPDX-License-Identifier: Apache-2.0
"""Requests that the guard admits or refuses, and the headers of every answer for browsers."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from mqtt_nats.admin.access import guard as guards
from mqtt_nats.admin.access.administrators import SETTING, Administrators
from mqtt_nats.admin.access.guard import BODY_MOST, HEADERS, Guard, read_body
from tests.admin.support import TOKEN

NEAR = "http://127.0.0.1:9883"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


async def behind(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        return
    body = await read_body(receive)
    await send({"type": "http.response.start", "status": 200 if body is not None else 413, "headers": []})
    await send({"type": "http.response.body", "body": b"in"})


async def status(guard: Guard, path: str = "/metrics", base: str = NEAR, **given: Any) -> int:
    transport = httpx.ASGITransport(guard)
    async with httpx.AsyncClient(transport=transport, base_url=base) as client:
        answer = await client.request(given.pop("method", "GET"), path, **given)
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    if answer.status_code == 401:
        assert answer.headers["www-authenticate"].startswith("Bearer")
    return answer.status_code


def guard(token: str = "", proved: bool = False) -> Guard:
    return Guard(behind, {"/healthz"}, lambda: administrators(token), proved)


def administrators(token: str = "") -> Administrators:
    return Administrators({token.encode(): SETTING} if token else {})


async def test_too_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not make the gateway look dead."""
    monkeypatch.setattr(guards, "REQUESTS_MOST", 2)
    gate = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await gate.wait()
        await behind(scope, receive, send)

    found = Guard(slow, {"/healthz"}, administrators, False)
    under_way = [asyncio.ensure_future(status(found, "/slow")) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert await status(found) == 503
    assert await status(found, "/healthz") == 200
    gate.set()
    assert await asyncio.gather(*under_way) == [200, 200]
    assert await status(found) == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": f"Bearer {TOKEN[:-1]}"}, 401),
        ({"Authorization": f"Bearer {TOKEN}x"}, 401),
        ({"Authorization": "Bearer \xff"}, 401),
        ({"Authorization": f"bearer {TOKEN}"}, 200),
        (BEARER, 200),
    ],
)
async def test_tokens(headers: dict[str, str], expected: int) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    assert await status(guard(TOKEN), headers=encoded) == expected
    assert await status(guard(TOKEN), "/healthz", headers=encoded) == 200
    assert await status(guard(TOKEN), "/healthz/", headers=encoded) == expected


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (NEAR, 200),
        ("http://localhost:9883", 200),
        ("http://[::1]:9883", 200),
        ("http://evil.test:9883", 403),  # a name of somebody else's that leads here
        ("http://127.0.0.1.evil.test", 403),
        ("http://[bad", 403),
    ],
)
async def test_names_by_which_the_listener_is_asked(base: str, expected: int) -> None:
    host = {"Host": base.removeprefix("http://")}
    assert await status(guard(), headers=host) == expected
    assert await status(guard(TOKEN), headers=BEARER | host) == 200
    assert await status(guard(proved=True), headers=host) == 200


@pytest.mark.parametrize(
    ("origin", "expected"),
    [(NEAR, 200), ("http://evil.test", 403), ("null", 403), ("http://127.0.0.1:80", 403), ("http://[", 403), ("", 403)],
)
async def test_pages_of_others(origin: str, expected: int) -> None:
    for one in (guard(), guard(TOKEN), guard(proved=True)):
        assert await status(one, headers=BEARER | {"Origin": origin}, method="POST") == expected


LINK = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
FRAME = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
IMAGE = {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}


@pytest.mark.parametrize("site", ["cross-site", "same-site", "", "anything"])
@pytest.mark.parametrize(
    ("how", "path", "expected"),
    [
        (IMAGE, "/metrics", 403),
        (IMAGE, "/healthz", 403),
        (FRAME, "/healthz", 403),
        (LINK, "/metrics", 403),
        (LINK, "/healthz", 200),
        ({}, "/metrics", 403),
    ],
)
async def test_requests_of_other_pages_that_have_no_origin(
    site: str, how: dict[str, str], path: str, expected: int
) -> None:
    """GET for a picture, a script or a frame: a browser says of which site the page is. A link may be followed."""
    for one in (guard(), guard(TOKEN), guard(proved=True)):
        assert await status(one, path, headers=BEARER | {"Sec-Fetch-Site": site} | how) == expected
        assert await status(one, path, headers=BEARER | {"Sec-Fetch-Site": site} | how, method="POST") == 403
        for own in ("same-origin", "none"):
            assert await status(one, path, headers=BEARER | {"Sec-Fetch-Site": own} | how) == 200
    twice = [*BEARER.items(), ("Sec-Fetch-Site", "same-origin"), ("Sec-Fetch-Site", site)]
    assert await status(guard(), "/metrics", headers=twice) == 403


async def test_two_origins() -> None:
    headers = [*BEARER.items(), ("Origin", NEAR), ("Origin", "http://evil.test")]
    assert await status(guard(), headers=headers) == 403


async def test_bodies_are_limited() -> None:
    assert await status(guard(), method="POST", content=b"x" * BODY_MOST) == 200
    assert await status(guard(), method="POST", content=b"x" * (BODY_MOST + 1)) == 413

    async def chunks() -> Any:
        for _ in range(3):
            yield b"x" * (BODY_MOST // 2)

    assert await status(guard(), method="POST", content=chunks()) == 413
    assert await status(guard(), headers={"Content-Length": "-1"}) == 413


@pytest.mark.parametrize(
    ("headers", "subprotocols", "accepted"),
    [
        ([], [], False),
        ([], ["mqtt-nats", "token.!!"], False),
        ([], ["mqtt-nats", "token." + base64.urlsafe_b64encode(b"wrong").decode()], False),
        ([], ["mqtt-nats", "token." + base64.urlsafe_b64encode(TOKEN.encode()).decode().rstrip("=")], True),
        ([(b"authorization", f"Bearer {TOKEN}".encode())], [], True),
        ([(b"authorization", f"Bearer {TOKEN}".encode()), (b"origin", b"http://evil.test")], [], False),
        ([(b"authorization", f"Bearer {TOKEN}".encode()), (b"sec-fetch-site", b"cross-site")], [], False),
    ],
)
async def test_websockets(headers: list[tuple[bytes, bytes]], subprotocols: list[str], accepted: bool) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "websocket",
        "path": "/bridge",
        "headers": [(b"host", b"127.0.0.1:9883"), *headers],
        "subprotocols": subprotocols,
        "client": ("127.0.0.1", 1),
    }
    await guard(TOKEN)(scope, receive, send)
    assert [one["type"] for one in sent] == ["websocket.accept" if accepted else "websocket.close"]
