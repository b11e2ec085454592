# SPDX-License-Identifier: Apache-2.0
"""Coming with the client id of somebody else's session: nothing of it is read, released, ended or replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import nats
import orjson
import pytest

from mqtt_nats.access.passwords import set_password
from mqtt_nats.lifecycle import claim
from mqtt_streams.hashing import name_hash
from mqtt_streams.sessions import STREAM
from tests.base.support import Inside, running
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, field
from tests.harness.raw5 import SESSION_EXPIRY, WILL_DELAY, Raw5, prop

RULES = """
[[rules]]
effect = "allow"
user = "ann"
topics = ["ann/#", "both/#"]

[[rules]]
effect = "allow"
user = "bob"
topics = ["bob/#", "both/#"]

[[rules]]
effect = "allow"
client = ["watcher", "nobody"]
topics = "#"
"""

NOT_AUTHORIZED = 0x87
KEPT = prop(SESSION_EXPIRY, 600)
PASSWORDS = {"ann": "nna", "bob": "obb"}


class User(Raw5):
    """A client of a user."""

    @classmethod
    def of(cls, port: int, client_id: str, user: str, *parts: bytes, clean: bool = False, will: bytes = b"") -> Self:
        """A connection that is accepted; with ``will`` it has one at QoS 1."""
        client = cls(port)
        try:
            client.send(hello(client_id, user, *(parts or (KEPT,)), clean=clean, will=will))
            client.connack = client.answer(raw5.CONNACK, reason=0)
        except AssertionError:
            client.close()
            raise
        return client


def hello(client_id: str, user: str, *parts: bytes, clean: bool = False, will: bytes = b"") -> bytes:
    """A CONNECT packet; ``user`` empty: an anonymous client."""
    login = field(user) + field(PASSWORDS[user]) if user else b""
    flags = (0xC0 if user else 0) | (0x0C if will else 0)
    return raw5.connect(client_id, *parts, clean=clean, flags=flags, tail=will + login)


def hello4(client_id: str, user: str, *, clean: bool = False) -> bytes:
    """The same of a 3.1.1 client."""
    flags = (2 if clean else 0) | (0xC0 if user else 0)
    return raw.connect(client_id, flags=flags, tail=(user, PASSWORDS[user]) if user else ())


def refused(port: int, client_id: str, user: str, *, clean: bool = False) -> None:
    """Both versions are refused, and are not told whose the session is."""
    found = raw5.refused(port, hello(client_id, user, KEPT, clean=clean), NOT_AUTHORIZED)
    said = str(found.get(raw5.REASON_STRING))
    assert not any(name in said for name in PASSWORDS if name != user), said
    raw5.refused(port, hello(client_id, user, clean=clean), NOT_AUTHORIZED)
    with Raw(port) as client:
        client.send(hello4(client_id, user, clean=clean))
        (answer,) = client.expect_closed()
        assert (answer.kind, answer.body) == (raw.CONNACK, b"\0\x05")


@contextlib.contextmanager
def ruled(url: str, directory: Path, **settings: Any) -> Iterator[Inside]:
    rules, users = directory / "acl.toml", directory / "users"
    rules.write_text(RULES, encoding="utf-8")
    for name, password in PASSWORDS.items():
        set_password(users, name, password)
    with running(url, acl_file=rules, password_file=users, **settings) as found:
        yield found


@pytest.fixture(scope="module")
def port(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with ruled(nats_server.url, tmp_path_factory.mktemp("refusing")) as found:
        yield found.ports[0]


@pytest.fixture(scope="module")
def separate(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    directory = tmp_path_factory.mktemp("separate")
    with ruled(nats_server.url, directory, session_of_other_user="separate") as found:
        yield found.ports[0]


def fill(port: int, client_id: str) -> None:
    """A session of ann's that has messages half-way, messages that wait, and one that is held until PUBREL."""
    with User.of(port, client_id, "ann", clean=True) as ann, Raw5.open(port, "watcher") as watcher:
        assert ann.subscribed(("ann/kept", 2), ("ann/ended", 1), ("$share/g/ann/shared", 1)) == (2, 1, 1)
        watcher.deliver("ann/kept", b"sent", qos=2)
        assert ann.message(b"sent").qos == 2
        watcher.deliver("ann/ended", b"of an ended one")
        ann.message(b"of an ended one")
        ann.send(raw5.unsubscribe("ann/ended"))
        assert ann.answer(raw5.UNSUBACK).reasons == (0,)
        ann.send(raw5.publish("ann/out", b"held", qos=2, id=7))
        ann.answer(raw5.PUBREC, 7)
    with Raw5.open(port, "watcher") as watcher:
        watcher.deliver("ann/kept", b"waits")


def untouched(port: int, client_id: str, watcher: Raw5) -> None:
    """All of that is there, for ann."""
    with User.of(port, client_id, "ann") as ann:
        assert ann.present
        found = [ann.message() for _ in range(3)]
        assert [(one.payload, one.dup) for one in found] == [
            (b"sent", True),
            (b"of an ended one", True),
            (b"waits", False),
        ]
        ann.send(raw5.ack(raw5.PUBREL, 7))
        ann.answer(raw5.PUBCOMP, 7, 0)
        watcher.message(b"held")


@pytest.mark.parametrize("clean", [False, True], ids=["resumed", "clean"])
@pytest.mark.parametrize("user", ["bob", ""], ids=["another user", "anonymous"])
def test_a_session_of_another_user(port: int, user: str, clean: bool) -> None:
    """Nobody else gets in with its client id, resumes it, or ends it by a clean start; its user finds it as it was."""
    client_id = f"sensor-{user}-{clean}"
    fill(port, client_id)
    refused(port, client_id, user, clean=clean)
    with Raw5.open(port, "watcher") as watcher:
        watcher.subscribed(("ann/out", 0))
        untouched(port, client_id, watcher)


def test_at_another_gateway(port: int, nats_server: NatsServer, tmp_path: Path) -> None:
    """It refuses the other user as well, and serves the session's own."""
    fill(port, "roaming")
    with ruled(nats_server.url, tmp_path) as elsewhere:
        refused(elsewhere.ports[0], "roaming", "bob")
        with Raw5.open(port, "watcher") as watcher:
            watcher.subscribed(("ann/out", 0))
            untouched(elsewhere.ports[0], "roaming", watcher)


def test_an_anonymous_session(port: int) -> None:
    """It is that of anonymous clients: a user does not get it."""
    with Raw5.open(port, "nobody", KEPT, clean=False) as first:
        assert first.subscribed(("both/x", 1)) == (1,)
    refused(port, "nobody", "bob")
    with Raw5.open(port, "nobody", KEPT, clean=False) as again:
        assert again.present


@pytest.mark.parametrize("parts", [(KEPT,), ()], ids=["durable", "ends with its connection"])
def test_a_connection_of_another_user(port: int, parts: tuple[bytes, ...]) -> None:
    """It is not taken over."""
    with User.of(port, "connected", "ann", *(parts or (prop(SESSION_EXPIRY, 0),)), clean=True) as ann:
        refused(port, "connected", "bob")
        refused(port, "connected", "bob", clean=True)
        ann.quiet()


@pytest.mark.long
def test_a_will_of_another_user(port: int) -> None:
    """Its delay goes on: who is refused neither has it published, nor removed."""
    will = raw5.will("ann/will", b"gone", prop(WILL_DELAY, 5))
    with Raw5.open(port, "watcher") as watcher:
        watcher.subscribed(("ann/will", 1))
        User.of(port, "willing", "ann", KEPT, clean=True, will=will).close()
        refused(port, "willing", "bob", clean=True)
        watcher.quiet()
        watcher.receive_message(b"gone")


def test_a_session_of_its_own(separate: int) -> None:
    """Where the setting says so, each user has a session under the client id, also connected at the same time."""
    fill(separate, "shared-id")
    with Raw5.open(separate, "watcher") as watcher:
        watcher.subscribed(("ann/out", 0), ("bob/out", 0))
        with User.of(separate, "shared-id", "bob") as bob:
            assert not bob.present
            bob.quiet()
            assert bob.subscribed(("bob/in", 2), ("both/x", 1)) == (2, 1)
            bob.send(raw5.ack(raw5.PUBREL, 7))
            assert bob.answer(raw5.PUBCOMP, 7).reason == 0x92
            bob.send(raw5.publish("bob/out", b"bob's", qos=2, id=7))
            bob.answer(raw5.PUBREC, 7)
            untouched(separate, "shared-id", watcher)
            with User.of(separate, "shared-id", "ann") as ann:
                assert ann.subscribed(("both/x", 1)) == (1,)
                watcher.deliver("both/x", b"to both")
                bob.message(b"to both")
                payloads = [ann.message().payload for _ in range(4)]
                assert payloads[:2] == [b"sent", b"of an ended one"]
                assert sorted(payloads[2:]) == [b"to both", b"waits"]  # there is no order between topics
        with User.of(separate, "shared-id", "bob") as bob:
            assert bob.present
            assert bob.message().dup
            bob.send(raw5.ack(raw5.PUBREL, 7))
            bob.answer(raw5.PUBCOMP, 7, 0)
            watcher.message(b"bob's")
            with User.of(separate, "shared-id", "bob") as later:  # takes over its own, and nothing else
                bob.ended(0x8E)
                assert later.present


async def rewritten(url: str, client_id: str, *, listener: bool = False) -> None:
    """The session's record as nats-server's ``listener`` has it, or a gateway that has continued that session."""
    client = await nats.connect(url)
    try:
        subject = f"$MQTT.sess.{name_hash(client_id)}"
        found = await client.jetstream().get_last_msg(STREAM, subject)
        assert found.data is not None
        record = orjson.loads(found.data)
        assert record["v5"].pop("user") == "ann"
        if listener:
            del record["v5"]
        await client.jetstream().publish(subject, orjson.dumps(record))
    finally:
        await client.close()


@pytest.mark.parametrize("listener", [False, True], ids=["of a gateway", "of nats-server"])
@pytest.mark.parametrize("subscribed", [True, False], ids=["by what it reads", "by what it holds"])
async def test_a_record_without_a_user(port: int, nats_server: NatsServer, subscribed: bool, listener: bool) -> None:
    """It is for the first who may have all of it, and then for nobody else."""
    client_id = f"older-{subscribed}-{listener}"
    with User.of(port, client_id, "ann", clean=True) as ann:
        if subscribed:
            ann.subscribed(("ann/x", 1), ("both/x", 1))
        else:
            ann.send(raw5.publish("ann/out", b"held", qos=2, id=7))
            ann.answer(raw5.PUBREC, 7)
    await rewritten(nats_server.url, client_id, listener=listener)
    refused(port, client_id, "bob")
    refused(port, client_id, "bob", clean=True)
    with User.of(port, client_id, "ann") as ann:
        assert ann.present


async def test_a_record_without_a_user_is_claimed_once(port: int, nats_server: NatsServer) -> None:
    """Who may have all of it has it from then on, and the other one is refused."""
    with User.of(port, "claimed", "ann", clean=True) as ann:
        ann.subscribed(("both/x", 1))
    await rewritten(nats_server.url, "claimed")
    with User.of(port, "claimed", "bob") as bob:
        assert bob.present
    refused(port, "claimed", "ann")


TIGHTER = """
[[rules]]
effect = "allow"
user = "ann"
topics = ["ann/open/#", "both/#"]

[[rules]]
effect = "allow"
client = "watcher"
topics = "#"
"""


@pytest.mark.parametrize("positions", ["consumers", "records"])
@pytest.mark.parametrize("qos", [1, 2])
def test_what_was_sent_is_not_sent_again_where_rules_are_tightened(
    nats_server: NatsServer, tmp_path: Path, qos: int, positions: str
) -> None:
    """Neither of a subscription nor of an ended one, nor of a group; what is still permitted is sent again."""
    client_id = f"tightened-{qos}-{positions}"
    with ruled(nats_server.url, tmp_path, session_positions=positions) as inside:
        port = inside.ports[0]
        with User.of(port, client_id, "ann", clean=True) as ann, Raw5.open(port, "watcher") as watcher:
            filters = ("ann/#", "ann/ended/x", f"$share/{client_id}/ann/group", "both/+")
            assert ann.subscribed(*((text, qos) for text in filters)) == (qos,) * 4
            for topic in ("ann/secret", "ann/open/x", "both/x", "ann/ended/x"):
                watcher.deliver(topic, topic.encode(), qos=qos)
                assert ann.message(topic.encode()).qos == qos
            ann.send(raw5.unsubscribe("ann/ended/x"))
            assert ann.answer(raw5.UNSUBACK).reasons == (0,)
        (tmp_path / "acl.toml").write_text(TIGHTER, encoding="utf-8")
        inside.call(inside.gateway.reload)
        with User.of(port, client_id, "ann") as ann:
            assert ann.present
            packets = ann.ping()
            sent = [raw5.message(one) for one in packets if one.kind == raw5.PUBLISH]
            assert [(one.payload, one.dup) for one in sent] == [(b"ann/open/x", True), (b"both/x", True)]
            given_up = [raw5.answer(one) for one in packets if one.kind != raw5.PUBLISH]
            assert [one.kind for one in given_up] == [raw5.PUBREL] * (2 if qos == 2 else 0)
            for one in sent:
                ann.send(raw5.ack(raw5.PUBACK if qos == 1 else raw5.PUBREC, one.id))
        with User.of(port, client_id, "ann") as ann:  # nothing of it has stayed
            assert not [one for one in ann.ping() if one.kind == raw5.PUBLISH]


@pytest.mark.sources
@pytest.mark.parametrize("version", [4, 5])
def test_a_session_that_had_expired_at_the_first_look_only(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Another user may claim what has expired; should a second look find that it has not, it is not continued."""
    client_id = f"looked-at-{version}"

    answers = [True]

    async def has_expired(*_: object) -> bool:
        return answers.pop() if answers else False

    with ruled(nats_server.url, tmp_path) as inside:
        port = inside.ports[0]
        with User.of(port, client_id, "bob", clean=True) as bob:
            assert bob.subscribed(("bob/#", 1), ("both/#", 1)) == (1, 1)
        with Raw5.open(port, "watcher") as watcher:
            watcher.deliver("both/x", b"of bob")
        monkeypatch.setattr(claim, "has_expired", has_expired)
        with User(port) if version == 5 else Raw(port) as ann:
            ann.send(hello(client_id, "ann", KEPT) if version == 5 else hello4(client_id, "ann"))
            assert ann.expect(raw.CONNACK).body[:2] == b"\0\0"
            assert ann.ping() == []
        monkeypatch.undo()
        assert not answers
        with User.of(port, client_id, "ann", clean=True) as ann:
            assert ann.ping() == []
