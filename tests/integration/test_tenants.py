# SPDX-License-Identifier: Apache-2.0
"""Clients of several NATS accounts on one gateway: whatever they have the same names for, they never meet."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import nats
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from mqtt_nats.access import passwords
from mqtt_nats.access.authenticator import Allow, Credentials, Denied, Ignore
from mqtt_nats.access.passwords import set_password
from mqtt_nats.admin.metrics import collect
from mqtt_nats.base.errors import StartupError
from mqtt_nats.client.account import Account
from mqtt_nats.config.accounts import TenantSettings
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl.commands import bans
from mqtt_nats.ctl.nats_connection import connected
from mqtt_nats.gateway.account import _not_here
from mqtt_nats.gateway.supervisor import dump
from mqtt_nats.hooks import CLIENT_AUTHENTICATE, MESSAGE_PUBLISH, Continue, Stop
from mqtt_nats.hooks.events import Published, Publishing
from mqtt_streams.gateway_subjects import ASK, RELOAD
from tests.access.test_passwords import CHEAP
from tests.admin.fakes import FakeListener, as_listener
from tests.conftest import _nats_factory
from tests.harness import raw5
from tests.harness.fence import fence
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, field
from tests.harness.raw5 import CONNACK, SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import eventually
from tests.integration.inprocess import PATIENCE, Running, running

NOT_AUTHORIZED, BANNED, ADMINISTRATIVE = 0x87, 0x8A, 0x98
NAMES = ("own", "acme", "duck")
ACCOUNTS = {name: {"nats_user": name, "nats_password": f"{name}-pw"} for name in NAMES}
USERS = {"own": "joe", "acme": "ann", "duck": "dan"}
_EACH = [f'{name}: {{jetstream: enabled, users: [{{user: {name}, password: "{name}-pw"}}]}}' for name in NAMES]
CONFIG = f"accounts {{ {', '.join(_EACH)} }}"


def given(server: NatsServer, **more: Any) -> dict[str, Any]:
    tenants = {name: ACCOUNTS[name] for name in NAMES[1:]}
    return {"nats": (server.url,), "tenants": tenants, **ACCOUNTS["own"], **more}


class Place(NamedTuple):
    """The gateway: a listener for everybody, and one that is a tenant's."""

    running: Running
    users: Path
    nats: NatsServer

    def account(self, name: str) -> Account:
        return self.running.gateway.tenants.accounts["" if name == "own" else name]

    def call(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return work()

        assert self.running.loop is not None
        return asyncio.run_coroutine_threadsafe(run(), self.running.loop).result(PATIENCE)

    def packet(self, name: str, client_id: str, *parts: bytes, flags: int = 0, tail: bytes = b"", **more: Any) -> bytes:
        """CONNECT of the user who is of this account."""
        tail += field(USERS[name]) + field("pw")
        return raw5.connect(client_id, *parts, flags=flags | 0xC0, tail=tail, **more)

    def open(self, name: str, client_id: str = "", *parts: bytes, **more: Any) -> Raw5:
        client = Raw5(self.running.port, patience=PATIENCE)
        client.send(self.packet(name, client_id, *parts, **more))
        client.connack = client.answer(CONNACK, reason=0)
        return client

    def everywhere(self, stack: ExitStack, client_id: str, *parts: bytes, **more: Any) -> dict[str, Raw5]:
        return {name: stack.enter_context(self.open(name, client_id, *parts, **more)) for name in NAMES}

    def ban(self, name: str, kind: str, who: str, *, lift: bool = False) -> None:
        """As ``mqtt-nats ctl bans``, with the credentials of an account."""

        async def run() -> None:
            async with connected(Settings(nats=(self.nats.url,), **ACCOUNTS[name])) as inbox:  # type: ignore[arg-type]
                asked: Any = {"kind": kind, "who": who}
                if lift:
                    await bans.remove(inbox, bans.Who(**asked))
                else:
                    await bans.add(inbox, bans.NewBan(**asked, lasts=3600, by="a test"))

        asyncio.run(run())


@pytest.fixture(scope="module")
def accounts(nats_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with _nats_factory(nats_backend, tmp_path_factory.mktemp("accounts")) as start:
        yield start(config=CONFIG)


@pytest.fixture(scope="module")
def place(accounts: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    users = tmp_path_factory.mktemp("users") / "passwords"
    listeners = (
        {"listen": "127.0.0.1:0"},
        {"listen": "127.0.0.1:0", "tenant": "duck", "allow_anonymous": True, "durable_sessions": False},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passwords, "DEVICE_COST", CHEAP)
        for name, user in USERS.items():
            set_password(users, user, "pw", None if name == "own" else name)
        set_password(users, "bad", "pw", "nowhere")
        with running(**given(accounts, password_file=users, listeners=listeners)) as found:
            yield Place(found, users, accounts)


def test_the_same_topics_and_client_ids(place: Place) -> None:
    """At each QoS, through each kind of subscription; nobody is taken over."""
    filters = ("same/#", 2), ("+/a", 0), ("$share/g/same/a", 1), ("#", 1)
    with ExitStack() as stack:
        readers = place.everywhere(stack, "reader")
        writers = place.everywhere(stack, "writer")
        for reader in readers.values():
            assert reader.subscribed(*filters) == (2, 0, 1, 1)
        for qos in (0, 1, 2):
            for name, writer in writers.items():
                writer.deliver("same/a", f"{name} {qos}".encode(), qos=qos)
        for name, reader in readers.items():
            wanted = sorted(f"{name} {qos}".encode() for qos in (0, 1, 2) for _ in range(2))
            assert sorted(reader.receive_message().payload for _ in wanted) == wanted
            reader.quiet()
    assert [place.account(name).services.settings.nats_user for name in NAMES] == list(NAMES)


def test_a_listener_of_a_tenant(place: Place) -> None:
    """Its anonymous clients are where the users of the tenant are, who may connect there too; others may not."""
    port = place.running.addresses[1].port
    with Raw5.open(port, "anonymous") as one, place.open("duck") as two, place.open("own") as other:
        assert two.subscribed(("of/duck", 1)) == other.subscribed(("of/duck", 1)) == (1,)
        one.deliver("of/duck", b"quack")
        assert two.receive_message().payload == b"quack"
        other.quiet()
    with Raw5(port, patience=PATIENCE) as client:
        client.send(place.packet("duck", "user"))
        client.answer(CONNACK, reason=0)
    raw5.refused(port, place.packet("acme", "user"), NOT_AUTHORIZED)
    raw5.refused(place.running.port, raw5.connect("", flags=0xC0, tail=field("bad") + field("pw")), NOT_AUTHORIZED)


def test_retained_messages(place: Place) -> None:
    with ExitStack() as stack:
        clients = place.everywhere(stack, "same")
        for name, client in clients.items():
            client.deliver("retained", name.encode(), flags=1)
        clients["acme"].deliver("retained", b"", flags=1)
        for name, client in clients.items():
            client.subscribed(("retained", 1))
            if name != "acme":
                assert client.receive_message().payload == name.encode()
            client.quiet()


def test_sessions(place: Place) -> None:
    """Messages wait for each of them; the end of one leaves the others alone."""
    kept = prop(SESSION_EXPIRY, 600)
    with ExitStack() as stack:
        for client in place.everywhere(stack, "lamp", kept).values():
            assert not client.present
            client.subscribed(("lamp/+", 1))
    with ExitStack() as stack:
        for name, client in place.everywhere(stack, "writer").items():
            client.deliver("lamp/state", name.encode())
    with place.open("acme", "lamp") as client:
        assert not client.present
        client.quiet()
    for name in ("own", "duck"):
        with place.open(name, "lamp", kept, clean=False) as client:
            assert client.present
            assert client.receive_message().payload == name.encode()
            client.quiet()


def test_takeover(place: Place) -> None:
    with ExitStack() as stack:
        clients = place.everywhere(stack, "same", prop(SESSION_EXPIRY, 600))
        with place.open("acme", "same", prop(SESSION_EXPIRY, 0), clean=False) as again:
            assert again.present
            clients["acme"].ended(0x8E)
            for name in ("own", "duck"):
                clients[name].quiet()


def test_wills(place: Place) -> None:
    with ExitStack() as stack:
        readers = place.everywhere(stack, "reader")
        for reader in readers.values():
            reader.subscribed(("will", 1))
        mortals = place.everywhere(stack, "mortal", flags=4 | 1 << 3, tail=raw5.will("will", "dead"))
        mortals["acme"].close()
        assert readers["acme"].receive_message().payload == b"dead"
        for name in ("own", "duck"):
            readers[name].quiet()
            mortals[name].quiet()


async def test_what_can_be_asked_for_in_the_account_of_a_tenant(place: Place, accounts: NatsServer) -> None:
    """Not that the gateway ends, or reads its files again."""
    service = await nats.connect(accounts.url, user="acme", password="acme-pw")
    identity = place.account("acme").services.identity.id
    answer = await service.request(ASK.decode(), orjson.dumps({"ask": "drain", "gateway": identity}), PATIENCE)
    assert "only from its own account" in orjson.loads(answer.data)["error"]
    answer = await service.request(RELOAD.decode(), orjson.dumps({"id": "x", "gateway": ""}), PATIENCE)
    assert orjson.loads(answer.data)["problems"] == _not_here()
    await service.close()


async def test_nats_clients_of_an_account(place: Place, accounts: NatsServer) -> None:
    """Those of the account see its clients, `$SYS` included, and nobody else does."""
    with ExitStack() as stack:
        clients = place.everywhere(stack, "same")
        for client in clients.values():
            client.subscribed(("from/nats", 0), ("$SYS/own/news", 0))
        service = await nats.connect(accounts.url, user="acme", password="acme-pw")
        heard = await service.subscribe("to.nats")
        await fence(service)
        for name, client in clients.items():
            client.deliver("to/nats", name.encode())
        assert (await heard.next_msg(PATIENCE)).data == b"acme"
        await service.publish("from.nats", b"hello")
        await service.publish("$MQTT_SYS.own.news", b"news")
        await fence(service)
        assert [clients["acme"].message().payload for _ in range(2)] == [b"hello", b"news"]
        for name in ("own", "duck"):
            clients[name].quiet()
        assert heard.pending_msgs == 0
        await service.close()


def test_metrics(place: Place) -> None:
    """Those of each account are told apart; what is of the process is there once."""
    gateway = place.running.gateway
    fake = FakeListener(gateway.settings)
    fake.gateway = gateway
    listener = as_listener(fake)

    def sample(name: str, **labels: str) -> float:
        assert place.running.loop is not None
        done = asyncio.run_coroutine_threadsafe(collect(listener, False, ""), place.running.loop).result(PATIENCE)
        (found,) = (
            one.value
            for family in text_string_to_metric_families(done[0].decode())
            for one in family.samples
            if one.name == name and labels.items() <= one.labels.items()
        )
        return found

    received = "mqtt_nats_messages_received_total"
    before = {name: sample(received, tenant=name, qos="1") for name in ("", "acme", "duck")}
    with place.open("acme") as client:
        client.deliver("counted", b"x", flags=2)
        assert sample("mqtt_nats_connections", tenant="acme") == 1
    after = {name: sample(received, tenant=name, qos="1") for name in ("", "acme", "duck")}
    assert after == {**before, "acme": before["acme"] + 1}
    assert sample("mqtt_nats_stream_messages", tenant="acme", stream="$MQTT_msgs") >= 1
    assert sample("mqtt_nats_cpu_seconds_total") > 0


def test_bans(place: Place) -> None:
    """Of a client id, a user and an address: they hold where they were set."""
    with ExitStack() as stack:
        clients = place.everywhere(stack, "culprit")
        place.ban("acme", "client", "culprit")
        clients["acme"].ended(ADMINISTRATIVE)
        raw5.refused(place.running.port, place.packet("acme", "culprit"), BANNED)
        for name in ("own", "duck"):
            clients[name].quiet()
    for name in ("own", "duck"):
        place.open(name, "culprit").close()
    place.ban("own", "client", "culprit")
    eventually(lambda: raw5.refused(place.running.port, place.packet("own", "culprit"), BANNED), PATIENCE)
    place.open("duck", "culprit").close()
    place.ban("acme", "client", "culprit", lift=True)
    place.ban("own", "client", "culprit", lift=True)
    place.ban("duck", "address", "127.0.0.1")
    eventually(lambda: raw5.refused(place.running.port, place.packet("duck", "any"), BANNED), PATIENCE)
    with Raw5(place.running.addresses[1].port, patience=PATIENCE) as client:  # before anything is read
        client.send(raw5.connect("any"))
        assert client.expect_closed() == []
    place.open("acme", "any").close()
    place.ban("duck", "address", "127.0.0.1", lift=True)

    def let_in() -> bool:
        with Raw5(place.running.addresses[1].port, patience=PATIENCE) as client:
            try:
                client.send(raw5.connect("any"))
                return client.receive() is not None
            except OSError:
                return False

    eventually(let_in, PATIENCE)


def test_hooks_are_those_of_the_account(place: Place) -> None:
    """Also on the way of messages, although the connection began at another account's listener."""

    def shout(event: Publishing, message: Any) -> Any:
        return Continue(Published("loud", message.payload.upper(), message.qos, message.retain, message.properties))

    hooks = place.account("acme").services.hooks
    entry = place.call(lambda: hooks.add(MESSAGE_PUBLISH, shout, owner="test"))
    try:
        with ExitStack() as stack:
            clients = place.everywhere(stack, "same")
            for client in clients.values():
                client.subscribed(("loud", 1), ("said", 1))
            for name, client in place.everywhere(stack, "writer").items():
                client.deliver("said", name.encode())
            found = {name: client.receive_message() for name, client in clients.items()}
            assert {name: (one.topic, one.payload) for name, one in found.items()} == {
                "own": ("said", b"own"),
                "acme": ("loud", b"ACME"),
                "duck": ("said", b"duck"),
            }
    finally:
        place.call(lambda: hooks.remove(entry))


def test_a_hook_says_the_tenant(place: Place) -> None:
    def believe(presented: Credentials, verdict: Allow | Ignore | Denied) -> Any:
        return Stop(Allow(presented.username, tenant="acme")) if presented.username == "hook" else None

    hooks = place.account("own").services.hooks
    entry = place.call(lambda: hooks.add(CLIENT_AUTHENTICATE, believe, owner="test"))
    try:
        with Raw5(place.running.port, patience=PATIENCE) as client, place.open("acme") as reader:
            client.send(raw5.connect("", flags=0x80, tail=field("hook")))
            client.answer(CONNACK, reason=0)
            reader.subscribed(("hooked", 1))
            client.deliver("hooked", b"here")
            assert reader.receive_message().payload == b"here"
    finally:
        place.call(lambda: hooks.remove(entry))


def test_a_user_who_is_of_another_tenant_now(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is connected has to come again, and then is there."""
    monkeypatch.setattr(passwords, "DEVICE_COST", CHEAP)
    set_password(place.users, "eve", "pw", "acme")
    place.running.reload()
    connect = raw5.connect("eve", flags=0xC0, tail=field("eve") + field("pw"))
    with Raw5(place.running.port, patience=PATIENCE) as client, place.open("duck") as reader:
        reader.subscribed(("moved", 1))
        client.send(connect)
        client.answer(CONNACK, reason=0)
        client.deliver("moved", b"acme")
        set_password(place.users, "eve", "pw", "duck")
        place.running.reload()
        client.ended(NOT_AUTHORIZED)
        with Raw5(place.running.port, patience=PATIENCE) as again:
            again.send(connect)
            again.answer(CONNACK, reason=0)
            again.deliver("moved", b"duck")
        assert reader.receive_message().payload == b"duck"


def test_sessions_of_a_listener_that_keeps_none(place: Place) -> None:
    """5.0 clients are told; those of 3.1.1 cannot be. What is there already goes on, and ends."""
    port = place.running.addresses[1].port
    with Raw5.open(port, "asks", prop(SESSION_EXPIRY, 600)) as client:
        assert client.connack.get(SESSION_EXPIRY) == 0
        client.subscribed(("kept", 1))
        client.send(raw5.disconnect(0, prop(SESSION_EXPIRY, 100)))
        assert client.expect_closed() == []
    with Raw5.open(port, "asks", prop(SESSION_EXPIRY, 600), clean=False) as client:
        assert not client.present
    with Raw5.open(port, "asks not") as client:
        assert client.connack.get(SESSION_EXPIRY) is None
    for _ in range(2):
        with Raw.connected(port, "old", clean=False) as old:
            old.subscribe(("kept", 1))
            assert place.call(lambda: place.account("duck").registry.clients["old"].durable) is False
    eventually(lambda: place.call(lambda: "old" not in place.account("duck").registry.clients), PATIENCE)
    with place.open("duck", "moves", prop(SESSION_EXPIRY, 600)) as client:
        client.subscribed(("kept", 1))
    with place.open("duck") as writer:
        writer.deliver("kept", b"waits")
    with Raw5(port, patience=PATIENCE) as client:
        client.send(place.packet("duck", "moves", prop(SESSION_EXPIRY, 600), clean=False))
        client.connack = client.answer(CONNACK, reason=0)
        assert client.present
        assert client.connack.get(SESSION_EXPIRY) == 0
        assert client.receive_message().payload == b"waits"
    with place.open("duck", "moves", prop(SESSION_EXPIRY, 600), clean=False) as client:
        assert not client.present


@pytest.mark.parametrize(
    ("tenants", "named"),
    [
        ({"acme": ACCOUNTS["own"]}, "the gateway and tenant 'acme' have the same NATS account"),
        ({"a": ACCOUNTS["duck"], "b": ACCOUNTS["duck"]}, "tenant 'a' and tenant 'b' have the same NATS account"),
    ],
)
def test_two_tenants_of_one_account(tenants: dict[str, Any], named: str, accounts: NatsServer) -> None:
    with (
        pytest.raises(BaseException) as caught,  # noqa: PT011
        running(**{**given(accounts), "tenants": tenants}),
    ):
        pass
    found: BaseException = caught.value
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, StartupError)
    assert named in str(found)
    assert "\n" not in str(found)


def test_settings() -> None:
    """Secrets are shown nowhere, and workers get them; the gateway's own credentials are not a tenant's."""
    settings = Settings(
        nats=("nats://a:1", "nats://b:2"),
        nats_user="own",
        nats_tls_hostname="h",
        tenants={
            "acme": TenantSettings(nats_user="acme", nats_password=SecretStr("hunter2"), mappings={"a.>": "b.>"}),
            "duck": TenantSettings(nats=("nats://me:hunter2@c",), nats_token=SecretStr("hunter2")),
        },
    )
    assert "hunter2" not in repr(settings)
    again = Settings(**json.loads(json.dumps(dump(settings))))
    assert again == settings
    acme, duck = again.of("acme"), again.of("duck")
    assert (acme.nats, acme.nats_user, acme.nats_tls_hostname, acme.mappings) == (
        settings.nats, "acme", "h", {"a.>": "b.>"}
    )  # fmt: skip
    assert (duck.nats, duck.nats_user, duck.nats_tls_hostname) == (("nats://me:hunter2@c",), None, None)
    assert again.of("") is again
