# SPDX-License-Identifier: Apache-2.0
"""An authenticator that fails, hangs or refuses: nobody gets in, and the others notice nothing."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

import mqtt_nats.gateway.gateway
from mqtt_nats.access.authenticator import Allow, Challenge, Credentials, Denied, Exchange, Success
from mqtt_nats.client import authentication as authenticating
from mqtt_nats.codec import ReasonCode
from mqtt_nats.config.access_control import AccessControl
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.gateway import Gateway
from mqtt_nats.transport.connection import Connection
from mqtt_nats.transport.listener_settings import Bound
from tests.harness import raw, raw5
from tests.harness.bystanders import Bystanders
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, connect
from tests.harness.waiting import eventually


class FakeExchange:
    """Does what the client's data says."""

    async def step(self, data: bytes | None) -> Challenge | Success | Denied:
        match data:
            case b"raise":
                raise RuntimeError("broken", "secret-password")
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

    immediate = False
    methods = ("FAKE", "BROKEN")

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def begin(self, method: str, client_id: str, connection: Connection) -> Exchange:
        if method == "BROKEN":
            raise RuntimeError("broken", "secret-password")
        return FakeExchange()

    async def authenticate(self, credentials: Credentials) -> Allow | Denied:
        self.seen.append(repr(credentials))
        match credentials.username:
            case "raise":
                raise RuntimeError("broken", "secret-password")
            case "timeout":
                raise TimeoutError
            case "cancel":
                await asyncio.sleep(3600)
            case "banned":
                return Denied("", ReasonCode.BANNED)
            case "wrong":
                return Denied("", ReasonCode.BAD_USER_NAME_OR_PASSWORD)
            case "busy":
                return Denied("", ReasonCode.SERVER_BUSY)
        return Allow(credentials.username)


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def gateways(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> list[Gateway]:
    """The gateways in this process, which have the fake authenticator."""
    found: list[Gateway] = []

    def make(settings: Settings) -> Gateway:
        found.append(Gateway(settings))
        return found[-1]

    monkeypatch.setattr(mqtt_nats.gateway.gateway, "Gateway", make)
    monkeypatch.setattr(AccessControl, "door", lambda self, listener: fake)
    return found


@pytest.fixture
def port(nats_server: NatsServer, gateways: list[Gateway]) -> Iterator[int]:
    """Port of a gateway in this process."""
    ready: list[Bound] = []
    started = threading.Event()
    control: list[Callable[[], Any]] = []

    async def main() -> None:
        stop = anyio.Event()
        loop = asyncio.get_running_loop()
        control.append(lambda: loop.call_soon_threadsafe(stop.set))

        def on_ready(addresses: list[Bound]) -> None:
            ready.extend(addresses)
            started.set()

        settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), temporary_refusals="connack")
        await mqtt_nats.gateway.gateway.serve(settings, on_ready=on_ready, stop=stop)

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


def test_denied(port: int, fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
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
    assert "RuntimeError at test_access.py" in caplog.text
    assert "secret" not in caplog.text


DENIED = {"raise": 0x87, "timeout": 0x87, "banned": 0x8A, "wrong": 0x86, "busy": 0x89}


def test_denied_with_5(port: int) -> None:
    """[MQTT-3.1.4-2] (5.0)"""
    for user, reason in DENIED.items():
        raw5.refused(port, raw5.connect("user", flags=0x80, tail=raw.field(user)), reason)
    with raw5.Raw5.open(port, "user", flags=0xC0, tail=raw.field("good") + raw.field("x")) as client:
        client.quiet()


@pytest.mark.long
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


def exchange(port: int, *messages: bytes, method: str = "FAKE") -> raw5.Answer:
    """Authenticate by a method, with these messages; what follows the answers to all but the last."""
    with raw5.Raw5(port) as client:
        client.send(raw5.connect("user", *parts(messages[0], method)))
        for one in messages[1:]:
            assert client.answer(raw5.AUTH, reason=0x18).get(raw5.DATA) == b"more"
            client.send(raw5.auth(0x18, *parts(one, method)))
        (found,) = client.expect_closed()
        return raw5.answer(found)


def parts(data: bytes, method: str = "FAKE") -> tuple[bytes, bytes]:
    return raw5.prop(raw5.METHOD, method), raw5.prop(raw5.DATA, data)


def test_a_method_that_fails_or_refuses(port: int) -> None:
    """[MQTT-4.12.0-4] (5.0)"""
    with Bystanders(port) as bystanders:
        for found in (
            exchange(port, b"raise"),
            exchange(port, b"deny"),
            exchange(port, b"x", b"raise"),
            exchange(port, b"x", b"x", b"deny"),
            exchange(port, b"x", method="BROKEN"),
            exchange(port, *[b"x"] * 8),
        ):
            assert (found.kind, found.reason) == (raw.CONNACK, 0x87)
            assert "not for the client" not in str(found.properties)
        with raw5.Raw5.open(port, "user", *parts(b"success")) as client:
            assert client.connack.get(raw5.DATA) == b"welcome"
            client.quiet()
        bystanders.check()


def again(port: int, *messages: bytes) -> int:
    """Authenticate, then once more with these messages; the reason code of DISCONNECT, 0 without one."""
    with raw5.Raw5.open(port, "user", *parts(b"success")) as client:
        client.send(raw5.auth(0x19, *parts(messages[0])))
        for one in messages[1:]:
            client.answer(raw5.AUTH, reason=0x18)
            client.send(raw5.auth(0x18, *parts(one)))
        found = raw5.answer(client.receive() or pytest.fail("closed without a word"))
        if found.kind == raw5.AUTH:
            assert found.properties == [(raw5.METHOD, "FAKE"), (raw5.DATA, b"welcome")]
            client.quiet()
        else:
            assert client.expect_closed() == []
        return found.reason


@pytest.mark.long
def test_a_re_authentication_that_fails_or_refuses(port: int) -> None:
    """[MQTT-4.12.1-2] (5.0)"""
    with Bystanders(port) as bystanders:
        for messages in ([b"raise"], [b"deny"], [b"x", b"raise"], [b"another"], [b"x"] * 8):
            assert again(port, *messages) == 0x87
        assert again(port, b"success") == 0
        assert again(port, *[b"x"] * 7, b"success") == 0
        bystanders.check()


@pytest.mark.long
def test_an_authenticator_that_is_slow(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authenticating, "AUTHENTICATION_MOST_S", 0.5)
    monkeypatch.setattr(authenticating, "AUTHENTICATION_TURN_MOST_S", 0.5)
    raw5.refused(port, raw5.connect("user", flags=0x80, tail=raw.field("cancel")), 0x87)
    assert exchange(port, b"wait").reason == 0x87
    with raw5.Raw5.open(port, "user", *parts(b"success")) as client:
        client.send(raw5.auth(0x19, *parts(b"wait")) + raw.packet(0xC0))
        client.expect(raw.PINGRESP)  # it can wait
        client.ended(0x87)


@pytest.mark.long
def test_who_goes_away_in_an_exchange_leaves_nothing(
    port: int, gateways: list[Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticating, "AUTHENTICATION_MOST_S", 0.5)
    account = gateways[0].account
    assert account is not None
    for step in (b"x", b"wait"):
        with raw5.Raw5(port) as client:
            client.send(raw5.connect("user", *parts(step)))
            if step == b"x":
                client.answer(raw5.AUTH)
        with raw5.Raw5.open(port, "user", *parts(b"success")) as client:
            client.send(raw5.auth(0x19, *parts(step)) + (b"" if step == b"x" else raw.packet(0xC0)))
            client.expect(raw5.AUTH if step == b"x" else raw.PINGRESP)
    eventually(lambda: not account.registry.connections, what="no connection left")
