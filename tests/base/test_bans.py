# SPDX-License-Identifier: Apache-2.0
"""Bans are everywhere at once, end by themselves, and outlast NATS; who flaps is slowed down, then banned."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import orjson
import pytest
from click.testing import CliRunner

from mqtt_nats.access.authenticator import Allow, Credentials
from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.errors import StartupError
from mqtt_nats.cli import command as cli
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl.commands import bans as ctl
from mqtt_nats.ctl.nats_connection import connected
from mqtt_nats.ctl.verb import seconds
from mqtt_streams.bans import ban_subject, read_ban
from mqtt_streams.stored import get_last
from tests.base.support import PATIENCE, Inside, banned, everywhere, let_in, running
from tests.conftest import NatsFactory
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually

ADMINISTRATIVE, NOT_AUTHORIZED = 0x98, 5
PROXIED = {"proxy_protocol": ["127.0.0.0/8"]}


def header(host: str) -> bytes:
    """What a proxy says."""
    return f"PROXY TCP4 {host} 198.51.100.1 40312 1883\r\n".encode()


@pytest.fixture(scope="module")
def pair(nats_server: NatsServer) -> Iterator[tuple[Inside, Inside]]:
    """Two gateways of one cluster, each with a plain listener and one behind a proxy."""
    with running(nats_server.url, {}, PROXIED) as one, running(nats_server.url, {}, PROXIED) as two:
        yield one, two


Kind = Literal["client", "user", "address", "user-client", "address-client"]


class Command:
    """``mqtt-nats ctl bans``, without a process."""

    def __init__(self, server: NatsServer) -> None:
        self._settings = Settings(nats=(server.url,))

    def _run(self, work: Any) -> Any:
        async def run() -> Any:
            async with connected(self._settings) as inbox:
                return await work(inbox)

        return asyncio.run(run())

    def add(self, kind: Kind, value: str, lasts: float = 3600, reason: str = "") -> Any:
        return self._run(lambda inbox: ctl.add(inbox, ctl.NewBan(kind=kind, who=value, lasts=lasts, reason=reason)))

    def remove(self, kind: Kind, value: str) -> Any:
        return self._run(lambda inbox: ctl.remove(inbox, ctl.Who(kind=kind, who=value)))

    def listed(self) -> Any:
        return self._run(ctl.listed)

    def stored(self, kind: str, value: str) -> Any:
        async def look(inbox: RequestInbox) -> Any:
            found = await get_last(inbox, "KV_MQTT_bans", ban_subject(kind, value))
            return None if found is None else read_ban(found.payload)

        return self._run(look)


@pytest.fixture
def command(nats_server: NatsServer) -> Command:
    return Command(nats_server)


def refused_311(port: int, client_id: str) -> None:
    with Raw(port) as client:
        client.send(raw.connect(client_id))
        assert client.expect(raw.CONNACK, PATIENCE).body == bytes((0, NOT_AUTHORIZED))
        assert client.expect_closed(PATIENCE) == []


def test_a_client_id(pair: tuple[Inside, Inside], command: Command) -> None:
    """Who is connected, at whichever gateway, is disconnected; who comes again is refused at every one."""
    one, two = pair
    with Raw5.open(one.ports[0], "culprit") as client, Raw5.open(two.ports[0], "another") as another:
        said = command.add("client", "culprit", reason="it knows why")
        assert (said["kind"], said["value"], said["reason"]) == ("client", "culprit", "it knows why")
        client.ended(ADMINISTRATIVE)
        everywhere(pair, lambda port: banned(port, "culprit"))
        for inside in pair:
            refused_311(inside.ports[0], "culprit")
        another.quiet()
    (found,) = command.listed()
    assert (found["kind"], found["value"], found["reason"]) == ("client", "culprit", "it knows why")
    assert "by hand" in found["by"]
    command.remove("client", "culprit")
    assert command.listed() == []
    everywhere(pair, lambda port: let_in(port, "culprit"))
    with pytest.raises(StartupError, match="client culprit is not banned"):
        command.remove("client", "culprit")


def test_a_user(nats_server: NatsServer, command: Command) -> None:
    """Who has proved to be this user, under whichever client id; who only has the name as a client id is another."""

    async def believe(credentials: Credentials) -> Allow:
        return Allow(credentials.username)

    def connect(port: int, client_id: str, user: str) -> Raw:
        client = Raw(port, patience=PATIENCE)
        client.send(raw.connect(client_id, flags=0x82, tail=(user,)))
        return client

    with running(nats_server.url) as inside:
        port = inside.ports[0]
        door = inside.gateway.doors[inside.gateway.listeners[0]]
        inside.call(lambda: setattr(door, "authenticate", believe))
        with connect(port, "m1", "mallory") as culprit, connect(port, "mallory", "alice") as other:
            culprit.expect(raw.CONNACK)
            other.expect(raw.CONNACK)
            command.add("user", "mallory")
            assert culprit.expect_closed(PATIENCE) == []
            assert other.ping() == []
            with connect(port, "m2", "mallory") as again:
                assert again.expect(raw.CONNACK).body == bytes((0, NOT_AUTHORIZED))
        command.remove("user", "mallory")


def test_a_network(pair: tuple[Inside, Inside], command: Command) -> None:
    """Closed before anything is read; others behind the same proxy go on."""
    one, two = pair
    port = two.ports[1]

    def connects(host: str) -> bool:
        with Raw(port) as client:
            client.send(header(host) + raw.connect())
            return client.receive(PATIENCE) is not None

    with Raw(one.ports[1]) as inside, Raw(one.ports[1]) as outside:
        inside.send(header("192.0.2.7") + raw.connect("inside"))
        outside.send(header("198.51.100.7") + raw.connect("outside"))
        inside.expect(raw.CONNACK)
        outside.expect(raw.CONNACK)
        command.add("address", "192.0.2.0/24")
        assert inside.expect_closed(PATIENCE) == []
        eventually(lambda: not connects("192.0.2.9"), PATIENCE)
        assert connects("192.0.3.9")
        assert outside.ping() == []
    command.remove("address", "192.0.2.0/24")
    eventually(lambda: connects("192.0.2.9"), PATIENCE)


def test_who_resets_at_once_is_banned_too(nats_server: NatsServer, command: Command) -> None:
    """When the gateway accepts such a connection, the kernel does not say any more whose it was."""

    def reset(inside: Inside, topic: str) -> None:
        inside.loop.call_soon_threadsafe(time.sleep, 0.3)
        time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", inside.ports[0])) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(raw.connect(topic) + raw.publish(topic))

    with running(nats_server.url, {}, PROXIED) as inside, Raw(inside.ports[1]) as witness:
        witness.send(header("192.0.2.7") + raw.connect("witness"))
        witness.expect(raw.CONNACK)
        witness.subscribe(("reset/#", 0))
        command.add("address", "127.0.0.1")
        try:
            account = inside.gateway.account
            assert account is not None
            eventually(lambda: inside.call(lambda: account.banning.address("127.0.0.1")), PATIENCE)
            for number in range(3):
                reset(inside, f"reset/{number}")
            time.sleep(1)
            assert witness.ping() == []
            eventually(lambda: inside.connections == 1, PATIENCE)
        finally:
            command.remove("address", "127.0.0.1")


def test_a_ban_ends_by_itself(pair: tuple[Inside, Inside], command: Command) -> None:
    port = pair[0].ports[0]
    command.add("client", "short", 2)
    eventually(lambda: banned(port, "short"), PATIENCE)
    eventually(lambda: let_in(port, "short"), PATIENCE)
    eventually(lambda: command.stored("client", "short") is None, PATIENCE, what="the end of what is stored")


def test_a_gateway_that_starts_later_knows(
    nats_server: NatsServer, pair: tuple[Inside, Inside], command: Command
) -> None:
    command.add("client", "early", 0)
    with running(nats_server.url) as late:
        assert banned(late.ports[0], "early")  # from its first moment
    command.remove("client", "early")


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [("address", "192.0.2.1/24", "not the network"), ("address", "x", "not a network"), ("client", "", "empty name")],
)
def test_who_cannot_be_banned(command: Command, kind: Kind, value: str, text: str) -> None:
    with pytest.raises(StartupError, match=text):
        command.add(kind, value)


@pytest.mark.parametrize(
    ("text", "length"), [("90", 90), ("90s", 90), ("15m", 900), ("2h", 7200), ("7d", 604_800), ("always", 0)]
)
def test_times(text: str, length: float) -> None:
    assert seconds(text) == length


@pytest.mark.parametrize("text", ["", "0", "-1", "1w", "1,5h", "s", "\u0661s"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(StartupError, match="is not a duration such as"):
        seconds(text)


def test_the_commands(nats_server: NatsServer, pair: tuple[Inside, Inside]) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["ctl", "--nats", nats_server.url, "bans", *arguments])
        if isinstance(done.exception, StartupError):
            return str(done.exception)
        assert done.exit_code in (0, 2), done.output
        return done.output

    assert "user mal\\u{1b}lory is banned until always" in run("add", "user", "mal\x1blory", "--for", "always")
    assert "mal\\u{1b}lory" in run("list")
    (found,) = orjson.loads(run("list", "--json"))
    assert (found["kind"], found["value"], found["until"]) == ("user", "mal\x1blory", 0.0)
    assert "is not banned any more" in run("remove", "user", "mal\x1blory")
    assert run("remove", "user", "mal\x1blory").startswith("user mal\\u{1b}lory is not banned: ")
    assert "is not a duration" in run("add", "client", "x", "--for", "ever")


def test_who_has_no_name_bans(
    nats_server: NatsServer, pair: tuple[Inside, Inside], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user id is in no list of users; who lifts a ban is not looked up at all."""

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("getpass.getuser", nobody)

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["ctl", "--nats", nats_server.url, "bans", *arguments])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    run("add", "user", "nameless")
    (found,) = orjson.loads(run("list", "--json"))
    assert found["by"] == f"uid {os.getuid()}, by hand"
    run("remove", "user", "nameless")


def test_what_is_stored_by_others_does_no_harm(pair: tuple[Inside, Inside], nats_server: NatsServer) -> None:
    """Whatever is in the bucket, a gateway reads on."""
    for value in (b"", b"x", b"[]", b'{"kind":"planet","value":"x","until":0}', b'{"kind":"client","value":1}'):
        assert (read_ban(value) is None) == (b"planet" not in value)
    account = pair[0].gateway.account
    assert account is not None
    banning = account.banning
    pair[0].call(lambda: banning._arrived(b"", b"", b"", b'{"kind":"address","value":"x/y","until":0}'))
    Raw.connected(pair[0].ports[0]).close()


@pytest.mark.long
def test_clients_that_flap(nats_factory: NatsFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """More and more slowly, then not at all, anywhere, for a while."""
    monkeypatch.setattr("mqtt_nats.base.flapping.SLOWEST", 2.0)
    server = nats_factory()
    limits = {"flapping_connects": 6, "flapping_window": 60, "flapping_ban": 4}
    with running(server.url, **limits) as one, running(server.url) as two, Raw5.open(one.ports[0], "calm") as calm:
        times: list[float] = []
        codes: list[int] = []
        while codes[-1:] != [NOT_AUTHORIZED]:
            begun = time.monotonic()
            with Raw(one.ports[0], patience=PATIENCE) as client:
                client.send(raw.connect("flapping"))
                codes.append(client.expect(raw.CONNACK).body[1])
            times.append(time.monotonic() - begun)
            assert len(codes) < 12
        assert set(codes[:-1]) == {0}
        assert len(codes) >= limits["flapping_connects"]
        assert max(times) > 0.6
        everywhere([two], lambda port: banned(port, "flapping"))
        stored = Command(server).stored("address-client", "127.0.0.1/flapping")
        assert isinstance(stored, dict)
        assert stored["reason"] == "it connects too often"
        calm.quiet()
        Raw.connected(one.ports[0], "yet-another").close()
        everywhere([one, two], lambda port: let_in(port, "flapping"))


def test_users_cannot_have_others_banned(nats_factory: NatsFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client id counts for the user who has come with it, or for the address of anonymous clients."""
    monkeypatch.setattr("mqtt_nats.base.flapping.SLOWEST", 0.2)
    server = nats_factory()
    limits = {"flapping_connects": 4, "flapping_window": 600, "flapping_ban": 600}

    async def believe(credentials: Credentials) -> Allow:
        return Allow(credentials.username)

    def code(port: int, client_id: str, user: str | None, host: str = "192.0.2.1") -> int:
        with Raw(port, patience=PATIENCE) as client:
            more: dict[str, Any] = {} if user is None else {"flags": 0x82, "tail": (user,)}
            client.send(header(host) + raw.connect(client_id, **more))
            return client.expect(raw.CONNACK).body[1]

    with running(server.url, {**PROXIED}, **limits) as one, running(server.url, {**PROXIED}) as two:
        for inside in (one, two):
            door = inside.gateway.doors[inside.gateway.listeners[0]]
            inside.call(partial(setattr, door, "authenticate", believe))
        near, far = one.ports[0], two.ports[0]
        assert code(near, "lamp", "ann") == 0
        for user, host in (("o/p", "192.0.2.66"), (None, "192.0.2.67")):
            found = [code(near, "lamp", user, host) for _ in range(6)]
            assert found[:3] == [0] * 3
            assert found[-1] == NOT_AUTHORIZED
            eventually(lambda u=user, h=host: code(far, "lamp", u, h) == NOT_AUTHORIZED)  # type: ignore[misc]
            for port in (near, far):
                assert code(port, "other", user, host) == 0
        for port in (near, far):  # until the session of the user before has ended, it is another user's
            eventually(lambda p=port: code(p, "lamp", None, "192.0.2.1") == 0)  # type: ignore[misc]
            eventually(lambda p=port: code(p, "lamp", "ann", "192.0.2.67") == 0)  # type: ignore[misc]
        command = Command(server)
        assert {(each["kind"], each["value"]) for each in command.listed()} == {
            ("user-client", "o%2Fp/lamp"),
            ("address-client", "192.0.2.67/lamp"),
        }
        command.remove("user-client", "o%2Fp/lamp")
        eventually(lambda: code(near, "lamp", "o/p") == 0)
        eventually(lambda: code(far, "lamp", "ann", "192.0.2.2") == 0)
        with Raw(far, patience=PATIENCE) as client:
            client.send(header("192.0.2.2") + raw.connect("lamp", flags=0x82, tail=("ann",)))
            assert client.expect(raw.CONNACK).body == b"\0\0"
            command.add("address-client", "192.0.2.2/lamp")
            assert client.ping() == []
            command.add("user-client", "ann/lamp")
            assert client.expect_closed(PATIENCE) == []


def test_strangers_cannot_have_others_banned(nats_factory: NatsFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not let in counts for his address only."""
    monkeypatch.setattr("mqtt_nats.base.flapping.SLOWEST", 0.2)
    server = nats_factory()
    limits = {"flapping_connects": 4, "flapping_connects_per_address": 8, "flapping_window": 600, "flapping_ban": 600}
    with running(server.url, {**PROXIED}, **limits) as inside:
        account = inside.gateway.account
        assert account is not None
        port = inside.ports[0]
        denied = 0

        class Deny:
            methods = ()

            async def authenticate(self, credentials: object) -> Any:
                nonlocal denied
                denied += 1
                raise PermissionError("nobody")

        door = inside.gateway.doors[inside.gateway.listeners[0]]
        honest = door.authenticate
        inside.call(lambda: setattr(door, "authenticate", Deny().authenticate))
        refusals = 0
        while refusals < 20:
            with Raw(port, patience=PATIENCE) as client:
                client.send(header("192.0.2.66") + raw.connect("victim"))
                found = client.receive()
                if found is None:  # banned: closed before anything is read
                    break
                assert found.body[1] != 0
                refusals += 1
        assert 8 <= refusals < 20
        assert denied <= refusals
        inside.call(lambda: setattr(door, "authenticate", honest))
        with Raw(port) as client:  # from elsewhere
            client.send(header("192.0.2.1") + raw.connect("victim"))
            assert client.expect(raw.CONNACK, PATIENCE).body == b"\0\0"
        stored = Command(server).stored("address", "192.0.2.66/32")
        assert isinstance(stored, dict)


def test_bans_while_nats_is_away(nats_factory: NatsFactory) -> None:
    """What is known holds; what is new holds here, and everywhere once NATS is back."""
    server = nats_factory()
    limits = {"flapping_connects": 2, "flapping_window": 600, "flapping_ban": 600}
    with running(server.url, **limits) as one, running(server.url) as two:
        command = Command(server)
        command.add("client", "known")
        everywhere([one], lambda port: banned(port, "known"))
        Raw.connected(one.ports[0], "new").close()
        server.stop()
        account = one.gateway.account
        assert account is not None
        eventually(lambda: not account.services.nats.online.is_set(), PATIENCE)
        one.call(lambda: account.banning._flaps("client", "new"))
        server.start()
        # While nothing is answered a CONNECT waits for NATS; whoever is banned is refused in any case.
        for client_id in ("known", "new"):
            everywhere([one, two], partial(banned, client_id=client_id))
        assert isinstance(command.stored("client", "new"), dict)
