# SPDX-License-Identifier: Apache-2.0
"""An authenticator that fails, hangs or refuses: nobody gets in, and the others notice nothing."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

import mqtt_nats.gateway
from mqtt_nats.access.authenticator import Challenge, Credentials, Denied, Exchange, Success
from mqtt_nats.codec import ReasonCode
from mqtt_nats.config import Settings
from mqtt_nats.connection.connection import Connection
from tests.harness import raw, raw5
from tests.harness.bystanders import Bystanders
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, connect


class FakeExchange:
    """Does what the client's data says."""

    async def step(self, data: bytes | None) -> Challenge | Success | Denied:
        match data:
            case b"raise":
                raise RuntimeError("broken")
            case b"deny":
                return Denied("not for the client")
            case b"success":
                return Success(b"welcome", "user")
            case b"another":
                return Success(b"", "another")
            case b"wait":
                await asyncio.sleep(3600)
        return Challenge(b"more")


class Fake:
    """Does what the user name says."""

    methods = ("FAKE", "BROKEN")

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def begin(self, method: str, client_id: str, connection: Connection) -> Exchange:
        if method == "BROKEN":
            raise RuntimeError("broken")
        return FakeExchange()

    async def authenticate(self, credentials: Credentials) -> ReasonCode:
        self.seen.append(repr(credentials))
        match credentials.username:
            case "raise":
                raise RuntimeError("broken")
            case "timeout":
                raise TimeoutError
            case "cancel":
                await asyncio.sleep(3600)
            case "banned":
                return ReasonCode.BANNED
            case "wrong":
                return ReasonCode.BAD_USER_NAME_OR_PASSWORD
            case "busy":
                return ReasonCode.SERVER_BUSY
        return ReasonCode.SUCCESS


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def port(nats_server: NatsServer, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Port of a gateway in this process, with the fake authenticator."""
    monkeypatch.setattr(mqtt_nats.gateway, "LocalAccess", lambda settings: fake)
    ready: list[tuple[str, int]] = []
    started = threading.Event()
    control: list[Callable[[], Any]] = []

    async def main() -> None:
        stop = anyio.Event()
        loop = asyncio.get_running_loop()
        control.append(lambda: loop.call_soon_threadsafe(stop.set))

        def on_ready(addresses: list[tuple[str, int]]) -> None:
            ready.extend(addresses)
            started.set()

        settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,))
        await mqtt_nats.gateway.serve(settings, on_ready=on_ready, stop=stop)

    thread = threading.Thread(target=lambda: anyio.run(main), daemon=True)
    thread.start()
    assert started.wait(20)
    yield ready[0][1]
    control[0]()
    thread.join(20)
    assert not thread.is_alive()


def answer(port: int, user: str) -> bytes:
    with Raw(port) as client:
        client.send(connect(f"user-{user}", flags=0xC2, tail=(user, "secret-password")))
        (found,) = client.expect_closed()
        assert found.kind == raw.CONNACK
        return found.body


def test_denied(port: int, fake: Fake) -> None:
    with Bystanders(port) as bystanders, Raw(port) as hanging:
        hanging.send(connect("hanging", flags=0x82, tail=("cancel",)))
        assert answer(port, "raise") == b"\0\x05"
        assert answer(port, "timeout") == b"\0\x05"
        assert answer(port, "banned") == b"\0\x05"
        assert answer(port, "wrong") == b"\0\x04"
        assert answer(port, "busy") == b"\0\x03"
        with Raw(port) as client:
            client.send(connect("user", flags=0xC2, tail=("good", "secret-password")))
            assert client.expect(raw.CONNACK).body == b"\0\0"
            client.ping()
        bystanders.check()
    assert not any("secret" in text for text in fake.seen)


DENIED = {"raise": 0x87, "timeout": 0x87, "banned": 0x8A, "wrong": 0x86, "busy": 0x89}


def test_denied_with_5(port: int) -> None:
    """[MQTT-3.1.4-2] (5.0)"""
    for user, reason in DENIED.items():
        raw5.refused(port, raw5.connect("user", flags=0x80, tail=raw.field(user)), reason)
    with raw5.Raw5.open(port, "user", flags=0xC0, tail=raw.field("good") + raw.field("x")) as client:
        client.quiet()


def test_a_failing_authenticator_does_not_touch_the_session(port: int) -> None:
    """Who is denied takes over nobody's session."""
    with Raw.connected(port, "victim", clean=False) as victim:
        assert victim.subscribe(("t", 1)) == [1]
        for clean in (0, 2):
            with Raw(port) as client:
                client.send(connect("victim", flags=0x80 | clean, tail=("raise",)))
                (found,) = client.expect_closed()
                assert found.body == b"\0\x05"
        assert victim.ping() == []
