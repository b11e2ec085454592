# SPDX-License-Identifier: Apache-2.0
"""SCRAM-SHA-256: the exchange, byte by byte, and what it does not tell."""

import base64
import re

import pytest
from scramp import ScramClient

from mqtt_nats.access.authenticator import Challenge, Denied, Success
from mqtt_nats.access.scram import MESSAGE_MOST, ScramExchange, Users
from mqtt_nats.access.verifiers import MECHANISM, NOBODY, Verifier, make

# The example of RFC 7677, section 3
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
CLIENT_FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SERVER_FIRST = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
CLIENT_FINAL = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def verifier(password: str, iterations: int = 4096, salt: bytes = SALT) -> Verifier:
    salt, stored, server, count = MECHANISM.make_auth_info(password, iteration_count=iterations, salt=salt)
    return Verifier(count, salt, stored, server)


@pytest.fixture
def users() -> Users:
    return Users({"user": verifier("pencil"), "other": make("other"), NOBODY: make("nobody")})


async def exchange(users: Users, name: str, password: str) -> tuple[str, Challenge | Success | Denied]:
    """Run an exchange with scramp's client; the server's first message and its verdict."""
    server = ScramExchange(lambda: users, "server-nonce")
    client = ScramClient(["SCRAM-SHA-256"], name, password)
    first = await server.step(client.get_client_first().encode())
    assert isinstance(first, Challenge)
    client.set_server_first(first.data.decode())
    verdict = await server.step(client.get_client_final().encode())
    if isinstance(verdict, Success):
        client.set_server_final(verdict.data.decode())  # the server has proved that it knows the user
    return first.data.decode(), verdict


async def test_the_example_of_rfc_7677(users: Users) -> None:
    server = ScramExchange(lambda: users, NONCE)
    assert await server.step(CLIENT_FIRST) == Challenge(SERVER_FIRST)
    assert await server.step(CLIENT_FINAL) == Success(SERVER_FINAL, "user")


async def test_the_first_message_is_asked_for_when_it_is_missing(users: Users) -> None:
    server = ScramExchange(lambda: users, NONCE)
    assert await server.step(None) == Challenge(b"")
    assert await server.step(CLIENT_FIRST) == Challenge(SERVER_FIRST)


@pytest.mark.parametrize("name", ["user", "other", "us\u00ader"])
async def test_a_right_password(users: Users, name: str) -> None:
    """SASLprep maps a soft hyphen to nothing."""
    password = "other" if name == "other" else "pen\u00adcil"
    _, verdict = await exchange(users, name, password)
    assert isinstance(verdict, Success)
    assert verdict.user == name.replace("\u00ad", "")


@pytest.mark.parametrize("name", ["user", "nobody at all", "a" * 200, "naïve", "a,b=c"])
async def test_a_wrong_password_and_an_unknown_user_fail_alike(users: Users, name: str) -> None:
    first, verdict = await exchange(users, name, "wrong")
    assert isinstance(verdict, Denied)
    assert "invalid-proof" in verdict.why
    again, _ = await exchange(users, name, "wrong again")
    salt = re.search(",s=([^,]+),i=4096$", first)
    assert salt is not None
    assert len(base64.b64decode(salt[1])) == 16
    assert salt[0] in again  # the same whenever it is asked for


async def test_unknown_users_differ_from_each_other(users: Users) -> None:
    assert users.find("one") != users.find("two")


async def test_unknown_users_look_the_same_on_every_gateway_that_has_the_file() -> None:
    nobody = make("x")
    one, two = (Users({NOBODY: nobody, "user": make(password)}) for password in ("a", "b"))
    assert one.find("unknown") == two.find("unknown")
    assert Users({}).find("unknown") != Users({}).find("unknown")
    assert one.find("unknown").server_key != nobody.server_key


async def test_unknown_users_look_like_most(users: Users) -> None:
    odd = verifier("x", 10_000, bytes(40))
    found = Users({"one": odd, "two": odd, "three": make("x")}).find("unknown")
    assert (found.iterations, len(found.salt)) == (10_000, 40)


async def test_the_line_of_nobody_is_no_user() -> None:
    users = Users({NOBODY: verifier("pencil")})
    server = ScramExchange(lambda: users, NONCE)
    verdict = await server.step(CLIENT_FIRST.replace(b"n=user", b"n="))
    assert isinstance(verdict, Denied)
    assert users.find(NOBODY) != verifier("pencil")


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xfe",
        b"hello",
        b"n,,",
        b"n,,n=user",
        b"n,,n=user,r=",
        b"n,,r=abc,n=user",
        b"n,,n=us\0er,r=abc",
        b"n,,n=a=b,r=abc",
        b"n,,m=ext,n=user,r=abc",
        b"y=,,n=user,r=abc",
        b"p=tls-unique,,n=user,r=abc",  # no channel binding here
        b"n,,n=user,r=" + b"x" * MESSAGE_MOST,
        CLIENT_FINAL,
    ],
)
async def test_a_bad_first_message(users: Users, message: bytes) -> None:
    server = ScramExchange(lambda: users, NONCE)
    assert isinstance(await server.step(message), Denied)
    for later in (CLIENT_FIRST, CLIENT_FINAL, None):  # and that is the end of it
        assert isinstance(await server.step(later), Denied)


@pytest.mark.parametrize(
    "message",
    [
        None,
        b"",
        b"\xff",
        CLIENT_FIRST,
        CLIENT_FINAL[:-1],
        CLIENT_FINAL.replace(b"c=biws", b"c=eSws"),  # another channel binding than announced
        CLIENT_FINAL.replace(b"rOprNGf", b"rOprNGg"),
        CLIENT_FINAL.replace(b"hNlF", b"hNlG"),
        CLIENT_FINAL.partition(b",p=")[0],
        CLIENT_FINAL.replace(b"dHzb", b"dHzc"),
        CLIENT_FINAL.partition(b",p=")[0] + b",p=AAAA",
        CLIENT_FINAL.partition(b",p=")[0] + b",p=",
        CLIENT_FINAL + b"x" * MESSAGE_MOST,
    ],
)
async def test_a_bad_final_message(users: Users, message: bytes | None) -> None:
    server = ScramExchange(lambda: users, NONCE)
    await server.step(CLIENT_FIRST)
    assert isinstance(await server.step(message), Denied)
    assert isinstance(await server.step(CLIENT_FINAL), Denied)  # no second try


async def test_nothing_follows_success(users: Users) -> None:
    server = ScramExchange(lambda: users, NONCE)
    await server.step(CLIENT_FIRST)
    assert isinstance(await server.step(CLIENT_FINAL), Success)
    assert isinstance(await server.step(CLIENT_FINAL), Denied)


def test_keys_are_not_shown() -> None:
    assert repr(verifier("pencil")) == "Verifier(iterations=4096)"
