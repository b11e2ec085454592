# SPDX-License-Identifier: Apache-2.0
"""Sessions that nobody comes back to: their number, their time and their consumers are bounded, also over gateways."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import nats
import orjson
import pytest

from mqtt_nats.access.passwords import set_password
from mqtt_nats.lifecycle import claim
from mqtt_nats.sessions.record import save_record
from mqtt_nats.sessions.session import Session
from mqtt_streams.hashing import name_hash
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.quotas import note_subject, quota_of
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.shared import STREAM as SHARED
from tests.base.support import Inside, running
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, field
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import aeventually, eventually

QUOTA_EXCEEDED = 0x97
WEEK = 604_800
NEVER = 0xFFFFFFFF
KEPT = prop(SESSION_EXPIRY, 600)


@pytest.fixture
def nats_url(nats_factory: object, nats_server: NatsServer) -> str:
    return nats_server.url


async def expiry_of(url: str, client_id: str) -> int | None:
    client = await nats.connect(url)
    try:
        found = await client.jetstream().get_last_msg(SESSIONS, f"$MQTT.sess.{name_hash(client_id)}")
        expiry: int | None = orjson.loads(found.data or b"")["v5"]["expiry"]
        return expiry
    finally:
        await client.close()


def end(port: int, *client_ids: str) -> None:
    """End the sessions of these clients."""
    for client_id in client_ids:
        Raw5.open(port, client_id).close()


async def test_the_longest_expiry(nats_server: NatsServer) -> None:
    """A week by default: CONNACK says so, and DISCONNECT does not go beyond either; 3.1.1 has a setting of its own."""
    with running(nats_server.url, session_expiry_interval=None) as inside:
        port = inside.ports[0]
        for asked, told in ((NEVER, WEEK), (WEEK + 1, WEEK), (WEEK, None), (60, None)):
            with Raw5.open(port, "kept", prop(SESSION_EXPIRY, asked)) as client:
                assert client.connack.get(SESSION_EXPIRY) == told
                assert await expiry_of(nats_server.url, "kept") == min(asked, WEEK)
        with Raw5.open(port, "kept", KEPT) as client:
            client.send(raw5.disconnect(0, prop(SESSION_EXPIRY, NEVER)))
            client.expect_closed()
        assert await expiry_of(nats_server.url, "kept") == WEEK
        Raw.connected(port, "older", clean=False).close()
        assert await expiry_of(nats_server.url, "older") is None
        end(port, "kept", "older")
    with running(nats_server.url, max_session_expiry_interval=None) as inside:
        with Raw5.open(inside.ports[0], "kept", prop(SESSION_EXPIRY, NEVER)) as client:
            assert client.connack.get(SESSION_EXPIRY) is None
            assert await expiry_of(nats_server.url, "kept") is None
        end(inside.ports[0], "kept")


def refused(port: int, client_id: str) -> None:
    """A new durable session is refused in both versions; one that ends with its connection is not."""
    for clean in (True, False):
        raw5.refused(port, raw5.connect(client_id, KEPT, clean=clean), QUOTA_EXCEEDED)
    with Raw(port) as older:
        older.send(raw.connect(client_id, clean=False))
        (answer,) = older.expect_closed()
        assert (answer.kind, answer.body) == (raw.CONNACK, b"\0\x03")
    Raw5.open(port, client_id).close()


@pytest.mark.long
def test_sessions_of_one_address(nats_server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    """At every gateway; who has one comes back to it, or begins it anew, and one that ends makes room."""
    caplog.set_level(logging.WARNING)
    with running(nats_server.url, max_sessions=3) as one, running(nats_server.url, max_sessions=3) as other:
        for number in range(3):
            Raw5.open(one.ports[0], f"s{number}", KEPT).close()
        for inside in (one, other):
            refused(inside.ports[0], "s3")
            with Raw5.open(inside.ports[0], "s1", KEPT, clean=False) as again:
                assert again.present
            Raw5.open(inside.ports[0], "s1", KEPT).close()
            refused(inside.ports[0], "s3")
            account = inside.gateway.account
            assert account is not None
            assert account.services.counters.limited["max_sessions"] >= 6
        end(one.ports[0], "s0")
        Raw5.open(one.ports[0], "s3", KEPT).close()
        refused(other.ports[0], "s0")
        end(one.ports[0], "s1", "s2", "s3")
        eventually(lambda: begins(other, "s4"))  # it is not told by the first one, but finds out
        end(other.ports[0], "s4")
    text = "limit max_sessions is reached by anonymous clients of 127.0.0.1"
    found = [one for one in caplog.records if one.getMessage().startswith(f"{text}:")]
    assert found
    assert {one.__dict__["once"] for one in found} == {"max_sessions anonymous clients of 127.0.0.1"}, (
        "logged each time"
    )


def begins(inside: Inside, client_id: str) -> bool:
    """Whether a client gets a durable session."""
    with Raw5(inside.ports[0]) as client:
        client.send(raw5.connect(client_id, KEPT))
        return client.answer(raw5.CONNACK).reason == 0


def test_sessions_of_one_user(nats_server: NatsServer, tmp_path: Path) -> None:
    """A user who has used his up does not keep others out, nor anonymous clients of the same address."""
    users = tmp_path / "users"
    for name in ("ann", "bob"):
        set_password(users, name, name)
    with running(nats_server.url, max_sessions=2, password_file=users) as inside:
        port = inside.ports[0]

        def hello(client_id: str, user: str) -> bytes:
            return raw5.connect(client_id, KEPT, flags=0xC0, tail=field(user) + field(user))

        def answered(client_id: str, user: str) -> int:
            with Raw5(port) as client:
                client.send(hello(client_id, user))
                return client.answer(raw5.CONNACK).reason

        assert [answered(f"a{number}", "ann") for number in range(3)] == [0, 0, QUOTA_EXCEEDED]
        assert [answered(f"b{number}", "bob") for number in range(3)] == [0, 0, QUOTA_EXCEEDED]
        for number in range(2):
            Raw5.open(port, f"c{number}", KEPT).close()
        refused(port, "c2")
        end(port, "c0", "c1")


@pytest.mark.long
def test_sessions_that_expire_make_room(nats_server: NatsServer) -> None:
    with running(nats_server.url, max_sessions=1) as inside:
        Raw5.open(inside.ports[0], "short", prop(SESSION_EXPIRY, 3)).close()
        refused(inside.ports[0], "later")
        eventually(lambda: begins(inside, "later"))
        end(inside.ports[0], "later")


@pytest.mark.long
async def test_a_session_that_was_removed_without_its_note(nats_server: NatsServer) -> None:
    """Who is refused because of it is let in once that is found out."""
    with running(nats_server.url, max_sessions=1) as inside:
        Raw5.open(inside.ports[0], "gone", KEPT).close()
        client = await nats.connect(nats_server.url)
        try:
            js = client.jetstream()
            await js.purge_stream(SESSIONS, subject=f"$MQTT.sess.{name_hash('gone')}")
            eventually(lambda: begins(inside, "later"))
            end(inside.ports[0], "later")
            subjects = note_subject(quota_of("", "127.0.0.1"), "*")
            assert not (await js.stream_info(SHARED, subjects_filter=subjects)).state.subjects
        finally:
            await client.close()


async def test_a_session_whose_record_names_no_quota(nats_server: NatsServer) -> None:
    """nats-server's listener has served it: it counts from when its client is back."""
    with running(nats_server.url, max_sessions=1) as inside:
        with Raw5.open(inside.ports[0], "older", KEPT) as first:
            first.subscribed(("a/#", 1))
        client = await nats.connect(nats_server.url)
        try:
            js = client.jetstream()
            subject, note = f"$MQTT.sess.{name_hash('older')}", note_subject(quota_of("", "127.0.0.1"), "*")
            record = orjson.loads((await js.get_last_msg(SESSIONS, subject)).data or b"")
            assert record["v5"].pop("quota")
            await js.publish(subject, orjson.dumps(record))
            await js.purge_stream(SHARED, subject=note)
            with Raw5.open(inside.ports[0], "older", KEPT, clean=False) as again:
                assert again.present

                async def noted() -> bool:
                    found = await js.get_last_msg(SHARED, note_subject(quota_of("", "127.0.0.1"), name_hash("older")))
                    return found.data == b"2"

                await aeventually(noted)
            end(inside.ports[0], "older")
            assert not (await js.stream_info(SHARED, subjects_filter=note)).state.subjects
        finally:
            await client.close()


@pytest.mark.parametrize("kind", ["user", "gateway"])
async def test_consumers(nats_server: NatsServer, kind: str) -> None:
    """A filter that ends in # has two; what is refused leaves no consumer, and what is had can be had again."""
    setting = {"user": "max_durable_consumers", "gateway": "max_durable_consumers_per_gateway"}[kind]
    with running(nats_server.url, **{setting: 5}) as inside:
        port = inside.ports[0]
        with Raw5.open(port, "first", KEPT) as first, Raw5.open(port, "second", KEPT) as second:
            assert first.subscribed(("a/#", 1), ("b", 1), ("zero/#", 0)) == (1, 1, 0)
            assert second.subscribed(("c", 1), ("d/#", 2), ("e", 2), ("f", 1)) == (1, QUOTA_EXCEEDED, 2, QUOTA_EXCEEDED)
            assert first.subscribed(("a/#", 2), ("b", 1)) == (2, 1)
            first.send(raw5.unsubscribe("b"))
            assert first.answer(raw5.UNSUBACK).reasons == (0,)
            assert second.subscribed(("f", 1), ("g", 1)) == (1, QUOTA_EXCEEDED)
            with Raw.connected(port, "older", clean=False) as older:
                assert older.subscribe(("x", 1), ("y", 0)) == [0x80, 0]
            with Raw5.open(port) as regular:
                assert regular.subscribed(("x/#", 2)) == (2,)
        if kind == "user":  # also while nobody is connected
            with Raw5.open(port, "third", KEPT) as third:
                assert third.subscribed(("x", 1)) == (QUOTA_EXCEEDED,)
        client = await nats.connect(nats_server.url)
        try:
            names = [one.name for one in await client.jetstream().consumers_info(MESSAGES)]
            keys = tuple(f"{name_hash(one)}_" for one in ("first", "second", "third", "older"))
            assert len([name for name in names if name.startswith(keys)]) == 5
        finally:
            await client.close()
        end(port, "first", "second", "third", "older")
        with Raw5.open(port, "fourth", KEPT) as fourth:
            assert fourth.subscribed(("x/#", 1), ("y/#", 1), ("z", 1)) == (1, 1, 1)
        end(port, "fourth")


@pytest.mark.sources
def test_a_connection_that_ends_while_the_next_one_claims(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session's consumers count once: the next connection has those of the former one."""
    arrived, go_on = threading.Event(), asyncio.Event()

    async def held(client: Session, expected: int) -> int:
        arrived.set()
        await go_on.wait()
        return await save_record(client, expected)

    with running(nats_server.url, max_durable_consumers=4) as inside, ExitStack() as stack:
        port, account = inside.ports[0], inside.gateway.account
        assert account is not None
        first = stack.enter_context(Raw5.open(port, "moves", KEPT))
        assert first.subscribed(("a", 1), ("b", 1)) == (1, 1)
        next_one = stack.enter_context(Raw5(port))
        with monkeypatch.context() as patched:
            patched.setattr(claim, "save_record", held)
            next_one.send(raw5.connect("moves", KEPT, clean=False))
            assert arrived.wait(30)
            first.close()
            eventually(lambda: inside.call(lambda: not account.registry.clients))
            inside.call(go_on.set)
            assert next_one.answer(raw5.CONNACK).reason == 0
        assert inside.call(lambda: account.services.quotas.consumers) == 2
        assert next_one.subscribed(("c", 1), ("d", 1), ("e", 1)) == (1, 1, QUOTA_EXCEEDED)
        next_one.send(raw5.disconnect(0, prop(SESSION_EXPIRY, 0)))
        next_one.expect_closed()


@pytest.mark.parametrize("positions", ["consumers", "records"])
def test_the_rate_of_consumers(nats_server: NatsServer, positions: str) -> None:
    """SUBACK comes later; where it would be too late the filters are refused at once. Others do not wait."""
    settings = {"session_positions": positions}
    with running(nats_server.url, consumer_rate=10, rate_burst=1, rate_pause=2, **settings) as inside:
        port = inside.ports[0]
        with Raw5.open(port, "many", KEPT) as client, Raw5.open(port) as regular:
            started = time.monotonic()
            assert client.subscribed(*((f"r/{number}", 1) for number in range(20))) == (1,) * 20
            assert time.monotonic() - started >= 0.9
            assert regular.subscribed(("r/#", 1)) == (1,)
            assert client.subscribed(*((f"s/{number}", 1) for number in range(40))) == (QUOTA_EXCEEDED,) * 40
            client.quiet()
        end(port, "many")


@pytest.mark.long
def test_the_rate_of_new_sessions(nats_server: NatsServer) -> None:
    """CONNACK comes later, and then CONNECT is refused. Sessions that go on, and clean ones, do not count."""
    with running(nats_server.url, session_rate=5, rate_burst=1) as inside, ExitStack() as stack:
        port = inside.ports[0]
        started = time.monotonic()
        names = [f"fast-{number}" for number in range(60)]
        clients = [stack.enter_context(Raw5(port)) for _ in names]
        for name, client in zip(names, clients, strict=True):
            client.send(raw5.connect(name, KEPT))
        answers = [client.answer(raw5.CONNACK).reason for client in clients]
        assert set(answers) == {0, QUOTA_EXCEEDED}
        elapsed = time.monotonic() - started
        assert 20 <= answers.count(0) <= 6 + 5 * elapsed  # a burst of five, then one after the other
        assert elapsed >= 3
        there = [name for name, answer in zip(names, answers, strict=True) if answer == 0]
        for name in there:
            with Raw5.open(port, name, KEPT, clean=False) as again:
                assert again.present
        for number in range(40):
            Raw5.open(port, f"clean-{number}").close()
        end(port, *there)


def test_everything_at_once(nats_server: NatsServer) -> None:
    """Those who ask at the same time get no more together than one after the other."""
    with running(nats_server.url, max_sessions=5, max_durable_consumers=10) as inside, ExitStack() as stack:
        clients = [stack.enter_context(Raw5(inside.ports[0])) for _ in range(30)]
        for number, client in enumerate(clients):
            client.send(raw5.connect(f"once-{number}", KEPT))
        there = [client for client in clients if client.answer(raw5.CONNACK).reason == 0]
        assert len(there) == 5
        for number, client in enumerate(there):
            client.send(raw5.subscribe(*((f"{number}/{at}", 1) for at in range(6))))
        granted = [client.answer(raw5.SUBACK).reasons.count(1) for client in there]
        assert sum(granted) == 10, granted
        for client in there:
            client.send(raw5.disconnect(0, prop(SESSION_EXPIRY, 0)))
            client.expect_closed()
