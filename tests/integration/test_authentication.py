# SPDX-License-Identifier: Apache-2.0
"""Enhanced authentication, packet by packet: SCRAM-SHA-256 at CONNECT and while the connection goes on."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scramp import ScramClient

from mqtt_nats.access.verifiers import delete_user, set_password
from mqtt_nats.config.settings import Settings
from tests.conftest import GatewayFactory
from tests.harness import raw, raw5
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw5 import (
    AUTH,
    CONNACK,
    DATA,
    MAXIMUM_PACKET_SIZE,
    METHOD,
    SESSION_EXPIRY,
    Raw5,
    auth,
    prop,
)
from tests.integration.inprocess import running

SCRAM = "SCRAM-SHA-256"
CONTINUE, AGAIN = 0x18, 0x19


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with two users, ann and bob, whose passwords are their names backwards."""
    file = tmp_path_factory.mktemp("access") / "users"
    set_password(file, "ann", "nna")
    set_password(file, "bob", "bob")
    return file


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, users: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that knows the users, and lets others in too."""
    found = Gateway(
        tmp_path_factory.mktemp("gateway") / "log",
        nats_server.url,
        arguments=["--scram-file", str(users), "--allow-anonymous"],
    )
    found.start()
    yield found
    found.process.discard()
    assert "Traceback" not in found.log, found.log


def credentials(name: str = "ann", password: str | None = None) -> ScramClient:
    return ScramClient([SCRAM], name, name[::-1] if password is None else password)


def method(name: str = SCRAM) -> bytes:
    return prop(METHOD, name)


def data(value: str | bytes) -> bytes:
    return prop(DATA, value.encode() if isinstance(value, str) else value)


def begin(port: int, scram: ScramClient, client_id: str = "", *parts: bytes, clean: bool = True) -> Raw5:
    """A connection that has been sent the server's first message."""
    client = Raw5(port)
    try:
        client.send(raw5.connect(client_id, method(), data(scram.get_client_first()), *parts, clean=clean))
        challenge(client, scram)
    except AssertionError:
        client.close()
        raise
    return client


def challenge(client: Raw5, scram: ScramClient) -> None:
    """[MQTT-4.12.0-2] [MQTT-4.12.0-5] (5.0)"""
    found = client.answer(AUTH, reason=CONTINUE)
    assert [id for id, _ in found.properties] == [METHOD, DATA]
    assert found.get(METHOD) == SCRAM
    scram.set_server_first(found.get(DATA).decode())


def final(scram: ScramClient) -> bytes:
    return auth(CONTINUE, method(), data(scram.get_client_final()))


@contextmanager
def entered(
    port: int, client_id: str = "", *parts: bytes, name: str = "ann", clean: bool = True, present: bool = False
) -> Iterator[Raw5]:
    """A client that has authenticated."""
    scram = credentials(name)
    with begin(port, scram, client_id, *parts, clean=clean) as client:
        client.send(final(scram))
        client.connack = client.answer(CONNACK, int(present), 0)
        assert client.connack.get(METHOD) == SCRAM
        scram.set_server_final(client.connack.get(DATA).decode())
        yield client


def again(client: Raw5, scram: ScramClient) -> None:
    """Begin a re-authentication, up to the server's first message."""
    client.send(auth(AGAIN, method(), data(scram.get_client_first())))
    challenge(client, scram)


def renewed(client: Raw5, scram: ScramClient) -> None:
    """The server accepts a re-authentication, and proves itself."""
    found = client.answer(AUTH, reason=0)
    assert found.get(METHOD) == SCRAM
    scram.set_server_final(found.get(DATA).decode())


def refusal(client: Raw5) -> raw5.Answer:
    """The gateway must send CONNACK, nothing else, and close."""
    (one,) = client.expect_closed()
    found = raw5.answer(one)
    assert (found.kind, found.id) == (CONNACK, 0)
    assert METHOD not in dict(found.properties)
    return found


# -- CONNECT ------------------------------------------------------------------------------------


def test_a_user_with_the_right_password(gateway: Gateway) -> None:
    """[MQTT-4.12.0-2] [MQTT-4.12.0-5] (5.0)"""
    topic = secrets.token_hex(6)
    with entered(gateway.port) as client, Raw5.open(gateway.port) as other:
        assert client.subscribed((topic, 1)) == (1,)
        other.deliver(topic, b"hello")
        assert client.receive_message(b"hello").topic == topic
        client.deliver("elsewhere", bytes(100_000))  # more than a stranger may send


def test_the_first_message_may_be_asked_for(gateway: Gateway) -> None:
    scram = credentials()
    with Raw5(gateway.port) as client:
        client.send(raw5.connect("", method()))
        assert client.answer(AUTH, reason=CONTINUE).properties == [(METHOD, SCRAM)]
        client.send(auth(CONTINUE, method(), data(scram.get_client_first())))
        challenge(client, scram)
        client.send(final(scram))
        assert client.answer(CONNACK, reason=0).get(METHOD) == SCRAM
        client.quiet()


def test_a_session_that_is_resumed(gateway: Gateway) -> None:
    name = secrets.token_hex(6)
    expiry = prop(SESSION_EXPIRY, 60)
    with entered(gateway.port, name, expiry, clean=False) as client:
        assert client.subscribed((name, 1)) == (1,)
    with Raw5.open(gateway.port) as other:
        other.deliver(name, b"meanwhile")
    with entered(gateway.port, name, expiry, clean=False, present=True) as client:
        client.receive_message(b"meanwhile")
        client.quiet()
    with entered(gateway.port, name, clean=True):
        pass  # it ends the session


def test_a_wrong_password_and_an_unknown_user_are_answered_alike(gateway: Gateway) -> None:
    """[MQTT-4.12.0-4] (5.0)"""
    answers = []
    for name in ("ann", "nobody"):
        scram = credentials(name, "wrong")
        with begin(gateway.port, scram) as client:
            client.send(final(scram))
            answers.append(refusal(client))
    assert answers[0] == answers[1]
    assert answers[0].reason == 0x87


@pytest.mark.parametrize("name", ["SCRAM-SHA-1", "scram-sha-256", "SCRAM-SHA-256-PLUS", "", "\u00ad"])
def test_a_method_that_is_not_served(gateway: Gateway, name: str) -> None:
    """[MQTT-4.12.0-1] (5.0)"""
    raw5.refused(gateway.port, raw5.connect("", method(name), data("n,,n=ann,r=abc")), 0x8C)


def test_without_users_no_method_is_served(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """[MQTT-4.12.0-1] (5.0)"""
    gateway = gateway_factory(nats_server)
    raw5.refused(gateway.port, raw5.connect("", method(), data("n,,n=ann,r=abc")), 0x8C)


def test_without_a_method_there_is_no_auth(gateway: Gateway) -> None:
    """[MQTT-4.12.0-6] (5.0)"""
    with Raw5.open(gateway.port, "", flags=0xC0, tail=raw.field("ann") + raw.field("wrong")) as client:
        assert not {METHOD, DATA} & set(dict(client.connack.properties))


IN_THE_EXCHANGE: dict[str, tuple[Callable[[ScramClient], bytes], int]] = {
    "AUTH with another method": (lambda scram: final(scram).replace(b"256", b"512"), 0x8C),  # [MQTT-4.12.0-5] (5.0)
    "AUTH without method": (lambda _: auth(CONTINUE), 0x82),
    "AUTH in its shortest form": (lambda _: raw.packet(0xF0), 0x82),
    "AUTH 0x19": (lambda scram: auth(AGAIN, method(), data(scram.get_client_final())), 0x82),  # [MQTT-4.12.0-3] (5.0)
    "AUTH 0x00": (lambda scram: auth(0, method(), data(scram.get_client_final())), 0x82),
    "AUTH 0x87": (lambda _: auth(0x87, method()), 0x82),
    "AUTH with flags": (lambda scram: b"\xf1" + final(scram)[1:], 0x81),
    "AUTH with data twice": (lambda _: auth(CONTINUE, method(), data("a"), data("a")), 0x82),
    "two AUTH": (lambda scram: (one := final(scram)) + one, 0x82),
    "AUTH without data": (lambda _: auth(CONTINUE, method()), 0x87),
    "AUTH with rubbish": (lambda _: auth(CONTINUE, method(), data(b"\xff" * 100)), 0x87),
    "AUTH with the largest data": (lambda _: auth(CONTINUE, method(), data(bytes(8_000))), 0x87),
    "AUTH larger than CONNECT may be": (lambda _: auth(CONTINUE, method(), data(bytes(65_530))), 0x95),
    # [MQTT-3.1.2-30] (5.0)
    "PINGREQ": (lambda _: raw.packet(0xC0), 0x82),
    "PUBLISH": (lambda _: raw5.publish("authentication/none", b"x"), 0x82),
    "PUBLISH with a wildcard": (lambda _: raw5.publish("#", b"x", qos=1), 0x82),
    "SUBSCRIBE": (lambda _: raw5.subscribe(("#", 0)), 0x82),
    "AUTH and PUBLISH": (lambda scram: final(scram) + raw5.publish("authentication/none", b"x"), 0x82),
    "AUTH and what is no packet": (lambda scram: final(scram) + b"\x0f\0", 0x81),
    "CONNECT": (lambda _: raw5.connect(""), 0x82),
    "what is no packet": (lambda _: b"\0\0", 0x81),
}


@pytest.mark.parametrize("what", IN_THE_EXCHANGE)
def test_out_of_place_before_connack(gateway: Gateway, what: str) -> None:
    """[MQTT-4.12.0-4] (5.0)"""
    packet, reason = IN_THE_EXCHANGE[what]
    scram = credentials()
    with Raw5.open(gateway.port) as watcher:
        watcher.subscribed(("authentication/#", 0))
        with begin(gateway.port, scram) as client:
            client.send(packet(scram))
            assert refusal(client).reason == reason
        watcher.quiet()


def test_nothing_may_come_with_connect(gateway: Gateway) -> None:
    """[MQTT-3.1.2-30] (5.0)"""
    first = credentials().get_client_first()
    connect = raw5.connect("", method(), data(first))
    for more in (auth(CONTINUE, method(), data(first)), raw.packet(0xC0), b"\xff"):
        with Raw5(gateway.port) as client:
            client.send(connect + more)
            assert refusal(client).reason == (0x81 if more == b"\xff" else 0x82)


@pytest.mark.parametrize("more", [b"", raw5.disconnect(0, prop(SESSION_EXPIRY, 5)), raw.packet(0xC0)])
def test_the_client_may_give_up(gateway: Gateway, more: bytes) -> None:
    scram = credentials()
    with begin(gateway.port, scram) as client:
        client.send(raw5.disconnect() + more)
        assert client.expect_closed() == []
    with begin(gateway.port, scram := credentials()) as client:
        client.send(final(scram) + raw5.disconnect())
        assert client.expect_closed() == []
    begin(gateway.port, credentials()).close()


def test_who_does_not_get_in_takes_no_session_over(gateway: Gateway) -> None:
    name = secrets.token_hex(6)
    with entered(gateway.port, name) as owner:
        scram = credentials("ann", "wrong")
        with begin(gateway.port, scram, name) as client:
            owner.quiet()
            client.send(final(scram))
            assert refusal(client).reason == 0x87
        owner.quiet()
        with entered(gateway.port, name):
            owner.ended(0x8E)


def test_a_client_that_answers_for_ever(gateway: Gateway) -> None:
    with Raw5(gateway.port) as client:
        client.send(raw5.connect("", method()))
        for _ in range(7):
            client.answer(AUTH, reason=CONTINUE)
            client.send(auth(CONTINUE, method(), data(b"")))
        assert refusal(client).reason == 0x87


def test_a_challenge_larger_than_the_client_takes(gateway: Gateway) -> None:
    """[MQTT-3.1.2-24] (5.0)"""
    first = data(credentials().get_client_first())
    raw5.refused(gateway.port, raw5.connect("", method(), first, prop(MAXIMUM_PACKET_SIZE, 100)), 0x95)


def test_auth_explains_nothing(gateway: Gateway) -> None:
    """[MQTT-3.15.2-2], [MQTT-3.15.2-3] (5.0): no reason string, no user properties, whether or not there is room."""
    first = data(credentials().get_client_first())
    size = 10_000
    for _ in range(2):
        with Raw5(gateway.port) as client:
            client.send(raw5.connect("", method(), first, prop(MAXIMUM_PACKET_SIZE, size)))
            one = client.expect(AUTH)
            assert len(raw.packet(one.first, one.body)) <= size
            assert [id for id, _ in raw5.answer(one).properties] == [METHOD, DATA]
            size = len(raw.packet(one.first, one.body))


@pytest.mark.long
def test_an_exchange_that_stalls(nats_server: NatsServer, users: Path, gateway_factory: GatewayFactory) -> None:
    """The time for CONNECT is that of the whole exchange."""
    gateway = gateway_factory(nats_server, "--scram-file", str(users), "--connect-timeout", "3")
    started = time.monotonic()
    with entered(gateway.port) as bystander, Raw5(gateway.port) as slow:
        with begin(gateway.port, credentials()) as client:
            slow.send(raw5.connect("", method()))
            slow.answer(AUTH)
            time.sleep(1)
            scram = credentials()
            slow.send(auth(CONTINUE, method(), data(scram.get_client_first())))
            challenge(slow, scram)
            for one in (client, slow):
                assert refusal(one).reason == 0x87
        assert 2.4 < time.monotonic() - started < Settings().connect_timeout
        bystander.quiet()
        again(bystander, credentials())
        bystander.ended(0x87)


# -- re-authentication --------------------------------------------------------------------------


def test_re_authentication(gateway: Gateway) -> None:
    """[MQTT-4.12.0-5] (5.0)"""
    topic = secrets.token_hex(6)
    with entered(gateway.port) as client, Raw5.open(gateway.port) as other:
        client.subscribed((topic, 1))
        for _ in range(3):
            scram = credentials()
            again(client, scram)
            other.deliver(topic, b"meanwhile")  # everything else goes on
            client.receive_message(b"meanwhile")
            assert client.subscribed((f"{topic}/more", 0)) == (0,)
            client.deliver("elsewhere", b"x")
            client.send(final(scram))
            renewed(client, scram)
        client.quiet()


def test_a_re_authentication_that_fails(gateway: Gateway) -> None:
    """[MQTT-4.12.1-2] (5.0)"""
    topic = secrets.token_hex(6)
    with Raw5.open(gateway.port) as watcher:
        watcher.subscribed((topic, 0))
        for scram in (credentials("ann", "wrong"), credentials("nobody"), credentials("bob")):
            with Raw5(gateway.port) as client:
                first = credentials()
                parts = method(), data(first.get_client_first())
                client.send(raw5.connect("", *parts, flags=4, tail=raw5.will(topic, "gone")))
                challenge(client, first)
                client.send(final(first))
                client.answer(CONNACK, reason=0)
                again(client, scram)
                client.send(final(scram))
                client.ended(0x87)
            assert watcher.message(b"gone")


OUT_OF_TURN: dict[str, tuple[Callable[[ScramClient], bytes], int]] = {
    # [MQTT-4.12.1-1] (5.0)
    "another method": (lambda scram: auth(AGAIN, method("SCRAM-SHA-1"), data(scram.get_client_first())), 0x8C),
    "no method": (lambda _: auth(AGAIN), 0x82),
    "0x18 without an exchange": (lambda scram: auth(CONTINUE, method(), data(scram.get_client_first())), 0x82),
    "0x00": (lambda scram: auth(0, method(), data(scram.get_client_first())), 0x82),
    "twice": (lambda scram: (one := auth(AGAIN, method(), data(scram.get_client_first()))) + one, 0x82),
    "no message": (lambda _: auth(AGAIN, method(), data("rubbish")), 0x87),
}


@pytest.mark.parametrize("what", OUT_OF_TURN)
def test_auth_out_of_turn(gateway: Gateway, what: str) -> None:
    packet, reason = OUT_OF_TURN[what]
    with entered(gateway.port) as client:
        client.send(packet(credentials()))
        client.ended(reason)


@pytest.mark.parametrize("reason", [AGAIN, CONTINUE])
def test_auth_of_a_client_without_a_method(gateway: Gateway, reason: int) -> None:
    """[MQTT-4.12.0-7] (5.0)"""
    with Raw5.open(gateway.port) as client:
        client.send(auth(reason, method(), data(credentials().get_client_first())))
        client.ended(0x82)


IN_A_RE_AUTHENTICATION: dict[str, tuple[Callable[[ScramClient], bytes], int]] = {
    # [MQTT-4.12.0-5] (5.0)
    "another method": (lambda scram: final(scram).replace(b"256", b"512"), 0x8C),
    "0x19": (lambda scram: auth(AGAIN, method(), data(scram.get_client_final())), 0x82),
    "answers twice": (lambda scram: (one := final(scram)) + one, 0x82),
}


@pytest.mark.parametrize("what", IN_A_RE_AUTHENTICATION)
def test_out_of_turn_in_a_re_authentication(gateway: Gateway, what: str) -> None:
    packet, reason = IN_A_RE_AUTHENTICATION[what]
    with entered(gateway.port) as client:
        scram = credentials()
        again(client, scram)
        client.send(packet(scram))
        client.ended(reason)


def test_the_first_message_of_a_re_authentication_may_be_asked_for(gateway: Gateway) -> None:
    with entered(gateway.port) as client:
        scram = credentials()
        client.send(auth(AGAIN, method()))
        assert client.answer(AUTH, reason=CONTINUE).properties == [(METHOD, SCRAM)]
        client.send(auth(CONTINUE, method(), data(scram.get_client_first())))
        challenge(client, scram)
        client.send(final(scram))
        renewed(client, scram)


# -- who gets in --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def closed(nats_server: NatsServer, users: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that lets only its users in."""
    arguments = ["--scram-file", str(users), "--no-allow-anonymous"]
    found = Gateway(tmp_path_factory.mktemp("closed") / "log", nats_server.url, arguments=arguments)
    found.start()
    yield found
    found.process.discard()
    assert "Traceback" not in found.log, found.log


def test_no_anonymous_clients(closed: Gateway) -> None:
    for packet in (raw5.connect("x"), raw5.connect("x", flags=0xC0, tail=raw.field("ann") + raw.field("nna"))):
        raw5.refused(closed.port, packet, 0x87)
    for packet in (raw.connect("x"), raw.connect("x", flags=0xC2, tail=("ann", "nna"))):
        with raw.Raw(closed.port) as client:
            client.send(packet)
            (answer,) = client.expect_closed()
            assert (answer.first, answer.body) == (0x20, b"\0\x05")
    with entered(closed.port) as client:
        client.quiet()
    assert "nna" not in closed.log


def test_startup_errors(nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    file = tmp_path / "users"
    for text, arguments, named in (
        (None, ["--scram-file", str(file)], "scram_file"),
        ("ann:nna\n", ["--scram-file", str(file)], f"{file}, line 1: expected user:SCRAM-SHA-256"),
        (None, ["--no-allow-anonymous"], "no client can connect"),
    ):
        if text is not None:
            file.write_text(text, encoding="utf-8")
        gateway = gateway_factory(nats_server, *arguments, start=False)
        gateway.launch()
        assert gateway.wait() == 1
        (line,) = gateway.log.splitlines()
        assert line.startswith("mqtt-nats: ")
        assert named in line
        assert "nna" not in line


def test_a_user_that_is_removed_before_it_has_proven_anything(nats_server: NatsServer, tmp_path: Path) -> None:
    """What the file says when the proof comes decides, not what it said when the challenge was sent."""
    file = tmp_path / "users"
    set_password(file, "ann", "nna")
    set_password(file, "bob", "bob")
    ann, bob = credentials("ann"), credentials("bob")
    with (
        running(nats=(nats_server.url,), scram_file=file) as gateway,
        begin(gateway.port, ann) as late,
        begin(gateway.port, bob) as good,
    ):
        delete_user(file, "ann")
        gateway.reload()
        late.send(final(ann))
        assert raw5.answer(late.expect_closed()[0]).reason == 0x87
        good.send(final(bob))
        good.answer(CONNACK, 0, 0)
