# SPDX-License-Identifier: Apache-2.0
"""The chain of authenticators, who waits for them, and certificates: nobody gets in but by success."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from mqtt_nats.access.authenticator import ANONYMOUS, IGNORE, Allow, Credentials, Denied, Ignore
from mqtt_nats.access.certificates import CertificateUsers, Kind
from mqtt_nats.access.chain import Chain
from mqtt_nats.access.scram import Users
from mqtt_nats.authenticators.authentication_queue import AuthenticationQueue, source_of
from mqtt_nats.authenticators.tenancy import bound
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.transport.connection import Connection

pytestmark = pytest.mark.anyio

BAD = ReasonCode.BAD_USER_NAME_OR_PASSWORD
NOT = ReasonCode.NOT_AUTHORIZED
SECRET = "hunter2"


class FakeConnection:
    """A client's connection, as far as authenticators look at it."""

    peer = "192.0.2.1:5"
    host = "192.0.2.1"

    def __init__(self, certificate: Mapping[str, Any] | None = None) -> None:
        self.transport = self
        self._certificate = certificate

    def get_extra_info(self, name: str) -> Any:
        assert name == "ssl_object"
        return None if self._certificate is None else self

    def getpeercert(self) -> Mapping[str, Any] | None:
        return self._certificate


def credentials(
    username: str | None = None, password: bytes | None = None, certificate: Mapping[str, Any] | None = None
) -> Credentials:
    return Credentials("c1", username, password, cast(Connection, FakeConnection(certificate)))


class Says:
    """An authenticator that says always the same."""

    name = "says"

    def __init__(self, verdict: Any) -> None:
        self.verdict = verdict
        self.asked = 0

    async def check(self, credentials: Credentials) -> Allow | Ignore | Denied:
        self.asked += 1
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return cast(Allow, self.verdict)


ANN = Allow("ann")
NO = Denied("no", BAD)


@pytest.mark.parametrize(
    ("verdicts", "anonymous", "username", "expected"),
    [
        ([], True, None, ANONYMOUS),
        ([], True, "x", ANONYMOUS),  # nobody looks at names
        ([], False, None, NOT),
        ([], False, "x", NOT),
        ([ANN], False, "ann", ANN),
        ([NO], True, "ann", BAD),
        ([NO, ANN], True, "ann", BAD),
        ([IGNORE, ANN, NO], False, "ann", ANN),
        ([IGNORE], False, "ann", BAD),
        ([IGNORE], False, None, NOT),
        ([IGNORE, IGNORE], True, None, ANONYMOUS),
        ([IGNORE], True, "ann", BAD),  # a name that nobody knows is not anonymous
        ([RuntimeError(SECRET)], True, None, NOT),
        ([IGNORE, RuntimeError(SECRET), ANN], True, "ann", NOT),
        ([MqttError("busy", ReasonCode.SERVER_BUSY), ANN], True, "ann", ReasonCode.SERVER_BUSY),
        ([None], True, None, NOT),
        ([True, ANN], True, "ann", NOT),
    ],
)
async def test_who_decides(
    verdicts: Sequence[Any],
    anonymous: bool,
    username: str | None,
    expected: Allow | ReasonCode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    members = [Says(one) for one in verdicts]
    found = await Chain(members, None, anonymous).authenticate(credentials(username))
    if isinstance(expected, Allow):
        assert found == expected
    else:
        assert isinstance(found, Denied)
        assert found.reason is expected
    asked = [one.asked for one in members]
    decided = next((at for at, one in enumerate(verdicts) if one is not IGNORE), len(verdicts) - 1)
    assert asked == [1] * (decided + 1) + [0] * (len(asked) - decided - 1)
    assert SECRET not in caplog.text
    assert SECRET not in repr(found)
    failed = decided >= 0 and isinstance(verdicts[decided], RuntimeError)
    assert ("RuntimeError at test_chain.py:" in caplog.text) is failed


async def test_a_password_alone_is_not_anonymous() -> None:
    found = await Chain([Says(IGNORE)], None, True).authenticate(credentials(None, b"x"))
    assert isinstance(found, Denied)


def test_methods() -> None:
    assert Chain([], None, False).methods == ()
    assert Chain([], lambda: Users({}), False).methods == ("SCRAM-SHA-256",)


def test_credentials_do_not_show_the_password(caplog: pytest.LogCaptureFixture) -> None:
    one = credentials("ann", SECRET.encode())
    logging.getLogger("test").error("%s %r", one, one)
    assert "ann" in caplog.text
    assert SECRET not in caplog.text


# -- turns --------------------------------------------------------------------------------------


def test_one_source_does_not_keep_the_others_waiting() -> None:
    turns: AuthenticationQueue[str] = AuthenticationQueue(100)
    for number in range(50):
        turns.add("flood", f"f{number}")
    turns.add("a", "a0")
    turns.add("b", "b0")
    turns.add("a", "a1")
    assert [turns.next() for _ in range(6)] == ["f0", "a0", "b0", "f1", "a1", "f2"]
    assert len(turns) == 47


def test_when_it_is_full_the_largest_source_loses_its_last() -> None:
    turns: AuthenticationQueue[str] = AuthenticationQueue(3)
    assert [turns.add("flood", f"f{number}") for number in range(4)] == [None, None, None, "f3"]
    assert turns.add("a", "a0") == "f2"
    assert turns.add("a", "a1") == "a1"  # as many as the flood has: who comes last has to go
    assert turns.add("flood", "f9") == "f9"
    assert [turns.next() for _ in range(4)] == ["f0", "a0", "f1", None]
    assert len(turns) == 0


def test_who_gives_up_does_not_wait_any_more() -> None:
    turns: AuthenticationQueue[str] = AuthenticationQueue(3)
    turns.add("a", "a0")
    turns.remove("a", "a0")
    turns.remove("a", "a0")
    turns.remove("none", "x")
    assert len(turns) == 0
    assert turns.next() is None


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2:ffff::1%eth0", "2001:db8:1:2::"),
        ("", ""),
    ],
)
def test_what_counts_as_one_source(host: str, source: str) -> None:
    assert source_of(host) == source


# -- certificates -------------------------------------------------------------------------------


def certificate(*names: str, **more: str) -> dict[str, Any]:
    return {
        "subject": (*((("commonName", name),) for name in names), (("organizationName", "works"),)),
        "subjectAltName": tuple(more.items()),
    }


@pytest.mark.parametrize(
    ("kind", "shown", "username", "expected"),
    [
        ("cn", certificate("ann"), None, "ann"),
        ("cn", certificate("ann"), "ann", "ann"),
        ("cn", certificate("ann"), "bob", BAD),
        ("cn", certificate("ann"), "", BAD),
        ("cn", None, None, NOT),
        ("cn", None, "ann", NOT),
        ("cn", {}, "ann", NOT),
        ("cn", certificate(), "ann", NOT),
        ("cn", certificate("ann", "bob"), "ann", NOT),
        ("cn", certificate(""), None, NOT),
        ("cn", certificate("ann\0"), None, NOT),
        ("cn", certificate("ann\n"), None, NOT),
        ("dns", certificate("ann", DNS="lamp.example.org"), None, "lamp.example.org"),
        ("dns", certificate("ann"), None, NOT),
        ("email", certificate("ann", email="a@example.org"), None, "a@example.org"),
        ("uri", certificate("ann", URI="urn:lamp"), None, "urn:lamp"),
        ("uri", certificate("ann", DNS="lamp"), "ann", NOT),
    ],
)
async def test_certificates(
    kind: Kind, shown: Mapping[str, Any] | None, username: str | None, expected: str | ReasonCode
) -> None:
    """The password is not looked at: it lets nobody in."""
    chain = Chain([CertificateUsers(kind)], None, True)
    found = await chain.authenticate(credentials(username, b"whatever", shown))
    if isinstance(expected, ReasonCode):
        assert isinstance(found, Denied)
        assert found.reason is expected
    else:
        assert found == Allow(expected)


async def test_without_a_connection_there_is_no_certificate() -> None:
    one = credentials("ann")
    cast(Any, one.connection).transport = None
    assert isinstance(await CertificateUsers("cn").check(one), Denied)


async def test_the_users_of_a_tenant() -> None:
    """An authenticator's tenant is that of its users; none of them can be of another."""
    assert (await bound(Says(Allow("ann")), "acme").check(credentials("ann"))) == Allow("ann", tenant="acme")
    same = Allow("ann", tenant="acme")
    assert (await bound(Says(same), "acme").check(credentials("ann"))) is same
    assert isinstance(await bound(Says(Allow("ann", tenant="duck")), "acme").check(credentials("ann")), Denied)
    assert (await bound(Says(IGNORE), "acme").check(credentials("ann"))) is IGNORE
    one = Says(same)
    assert bound(one, None) is one
    assert bound(one, "acme").name == one.name
