# SPDX-License-Identifier: Apache-2.0
"""Client ids that have one hash, by which nats-server's listener and gateways keep sessions: each has its own."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import nats
import orjson
import pytest

from mqtt_streams import hashing
from mqtt_streams.hashing import name_hash, second_key
from mqtt_streams.sessions import STREAM
from tests.base.support import Inside, running
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import SESSION_EXPIRY, WILL_DELAY, Raw5, prop
from tests.harness.waiting import aeventually, eventually

PAIRS = (("device-1954068", "device-21015175"), ("device-4763190", "device-8723357"))
"""Found by trying: each is one hash."""

THREE = ("device-a", "device-b", "device-c")
"""Nobody has found three: `one_hash` has them collide."""

KEPT = prop(SESSION_EXPIRY, 600)


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer) -> Iterator[Inside]:
    with running(nats_server.url) as found:
        yield found


@pytest.fixture
def port(inside: Inside) -> Iterator[int]:
    yield inside.ports[0]
    for client_id in (one for pair in PAIRS for one in pair):
        Raw5.open(inside.ports[0], client_id).close()


def subject(key: str) -> str:
    """Where a session is kept."""
    return f"$MQTT.sess.{key}" if len(key) == 8 else f"$MQTT.sess.second.{key}"


def test_the_pairs_collide() -> None:
    for one, other in PAIRS:
        assert name_hash(one) == name_hash(other)
        assert len({name_hash(one), second_key(one, ""), second_key(other, ""), second_key(other, "ann")}) == 4


@pytest.fixture
def one_hash(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The client ids of `THREE` have one hash; their second keys stay as they are."""
    same = {client_id.encode() for client_id in THREE}
    with monkeypatch.context() as patch:
        patch.setattr(hashing, "sha256", lambda data: sha256(b"same" if data in same else data))
        name_hash.cache_clear()
        assert len({name_hash(client_id) for client_id in THREE}) == 1
        yield
        for client_id in THREE:
            Raw5.open(port, client_id).close()
    name_hash.cache_clear()


@pytest.mark.sources
@pytest.mark.usefixtures("one_hash")
def test_three_sessions(port: int) -> None:
    """Each is as two are; and who comes when the first key is free gets it, and keeps it."""
    each_has_its_own(port, THREE)
    for client_id in (THREE[1], THREE[2]):
        assert present(port, client_id)
        Raw5.open(port, client_id).close()
    for client_id in reversed(THREE):
        assert not present(port, client_id)
        Raw5.open(port, client_id, KEPT).close()
    for client_id in THREE:
        assert present(port, client_id)


@pytest.mark.parametrize("pair", PAIRS)
def test_two_sessions(port: int, pair: tuple[str, str]) -> None:
    """Both are durable, have messages of their own that wait and are half-way, and end by themselves."""
    each_has_its_own(port, pair)


def each_has_its_own(port: int, ids: tuple[str, ...]) -> None:
    """Sessions of client ids that have one hash; that of the first one has ended then."""
    for client_id in ids:
        with Raw5.open(port, client_id, KEPT) as client, Raw5.open(port) as publisher:
            assert client.subscribed((f"to/{client_id}", 2), ("to/both", 1), ("$share/g/to/group", 1)) == (2, 1, 1)
            publisher.deliver(f"to/{client_id}", b"half-way", qos=2)
            client.message(b"half-way")
            client.send(raw5.publish(f"from/{client_id}", client_id.encode(), qos=2, id=9))
            client.answer(raw5.PUBREC, 9)
    with Raw5.open(port) as other:
        other.subscribed(("from/#", 0))
        other.deliver("to/both", b"waits")
        for client_id in (*ids, *ids):
            with Raw5.open(port, client_id, KEPT, clean=False) as client:
                assert client.present
                sent = client.message(b"half-way")
                assert sent.dup
                client.message(b"waits")
        for client_id in ids:
            with Raw5.open(port, client_id, KEPT, clean=False) as client:
                client.receive_message(b"half-way")
                client.receive_message(b"waits")
                client.send(raw5.ack(raw5.PUBREL, 9))
                client.answer(raw5.PUBCOMP, 9, 0)
                other.message(client_id.encode())
        Raw5.open(port, ids[0]).close()
        for client_id in ids[1:]:
            with Raw5.open(port, client_id, KEPT, clean=False) as client:
                assert client.present  # although the place that it did not get is free now
                settled(client)
                other.deliver(f"to/{client_id}", b"more")
                client.receive_message(b"more")


def settled(client: Raw5) -> None:
    """The record of a PUBREL that the client has answered may still have been there when it came back."""
    client.send(raw.packet(0xC0))
    while (one := client.receive()) is not None and one.kind == raw.PUBREL:
        client.send(raw5.ack(raw.PUBCOMP, raw5.answer(one).id))
    assert one is not None
    assert one.kind == raw.PINGRESP


@pytest.mark.parametrize("clean", [False, True])
def test_nobody_is_locked_out_or_told(port: int, clean: bool) -> None:
    """Also by connections whose sessions end with them, of both versions, at the same time."""
    one, other = PAIRS[0]
    with Raw5.open(port, one) as first, Raw(port) as older:
        older.send(raw.connect(other, clean=clean))
        assert older.expect(raw.CONNACK).body == b"\0\0"
        assert older.subscribe((f"{clean}/x", 1)) == [1]
        first.deliver(f"{clean}/x", b"through", qos=1)
        assert older.expect(raw.PUBLISH).payload == b"through"
        with Raw5.open(port, other, clean=clean) as later:
            older.expect_closed()
            assert later.present is not clean
            first.quiet()


def test_a_clean_start_ends_the_session_at_the_second_key(port: int, nats_server: NatsServer) -> None:
    """Also where the first key is free by now, and the new session ends with its connection."""
    one, other = PAIRS[1]
    with Raw5.open(port, one, KEPT) as first:
        with Raw5.open(port, other, KEPT) as second:
            second.subscribed(("old", 1))
        first.send(raw5.disconnect(0, prop(SESSION_EXPIRY, 0)))
        first.expect_closed()
    eventually(lambda: not present(port, one))
    assert present(port, other)
    with Raw5.open(port, other):
        pass
    eventually(lambda: not present(port, other))


def test_another_gateway_hears_of_second_keys(port: int, inside: Inside, nats_server: NatsServer) -> None:
    """It has looked before there were any, and does not look again until it hears of one, or has lost NATS."""
    one, other = PAIRS[0]
    with running(nats_server.url) as elsewhere:
        account = elsewhere.gateway.account
        assert account is not None
        Raw5.open(elsewhere.ports[0], "looks").close()
        eventually(lambda: not account.claims.second_keys)
        first = Raw5.open(port, one, KEPT)
        Raw5.open(port, other, KEPT).close()
        eventually(lambda: account.claims.second_keys)
        first.send(raw5.disconnect(0, prop(SESSION_EXPIRY, 0)))
        first.expect_closed()
        first.close()
        with Raw5.open(elsewhere.ports[0], other, KEPT, clean=False) as again:
            assert again.present
        Raw5.open(elsewhere.ports[0], other).close()
        eventually(lambda: not present(elsewhere.ports[0], other))


def present(port: int, client_id: str) -> bool:
    """Whether the client has a session; it keeps that, and gets none."""
    with Raw5.open(port, client_id, KEPT, clean=False) as client:
        if not client.present:
            client.send(raw5.disconnect(0, prop(SESSION_EXPIRY, 0)))
            client.expect_closed()
        return client.present


async def test_the_record_at_the_first_key_is_as_nats_server_has_it(port: int, nats_server: NatsServer) -> None:
    """The other one is beside it."""
    one, other = PAIRS[0]
    for client_id in (one, other):
        Raw5.open(port, client_id, KEPT).close()
    client = await nats.connect(nats_server.url)
    try:
        js = client.jetstream()
        keys = {name_hash(one): one, second_key(other, ""): other}
        for key, client_id in keys.items():
            found = await js.get_last_msg(STREAM, subject(key))
            record = orjson.loads(found.data or b"")
            assert record["id"] == client_id
    finally:
        await client.close()


@pytest.mark.long
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "ended"])
async def test_wills_and_deadlines(nats_server: NatsServer, gateway_factory: GatewayFactory, kill: bool) -> None:
    """Of both, by another gateway."""
    lease = "5" if kill else "60"  # a gateway looks for dead ones when it has run for its own lease
    gateway = gateway_factory(nats_server.url, "--gateway-lease", lease)
    other = gateway_factory(nats_server.url, "--gateway-lease", lease)
    with Raw5.open(other.port) as watcher:
        watcher.subscribed(("wills/#", 1))
        clients = []
        for client_id in PAIRS[1]:
            will = raw5.will(f"wills/{client_id}", client_id.encode(), prop(WILL_DELAY, 1))
            clients.append(Raw5.open(gateway.port, client_id, prop(SESSION_EXPIRY, 3), flags=0x0C, tail=will))
        if kill:
            gateway.kill()
        for client in clients:
            client.close()
        assert {watcher.receive_message().payload for _ in range(2)} == {one.encode() for one in PAIRS[1]}
    nc = await nats.connect(nats_server.url)

    async def left() -> list[str]:
        info = await nc.jetstream().stream_info(STREAM, subjects_filter="$MQTT.sess.>")
        keys = (name_hash(PAIRS[1][0]), second_key(PAIRS[1][1], ""))
        return [key for key in keys if subject(key) in (info.state.subjects or {})]

    async def nothing() -> bool:
        return not await left()

    try:
        await aeventually(nothing)
    finally:
        await nc.close()


async def stored(url: str, key: str) -> int:
    """How many records a session has."""
    client = await nats.connect(url)
    try:
        info = await client.jetstream().stream_info(STREAM, subjects_filter=subject(key))
        return sum((info.state.subjects or {}).values())
    finally:
        await client.close()


@pytest.mark.parametrize("kept", [True, False])
def test_sessions_under_second_keys_outlive_their_gateway(nats_factory: NatsFactory, kept: bool) -> None:
    """Each is served as before."""
    url = nats_factory().url
    one, other = PAIRS[0]
    properties = (KEPT,) if kept else ()
    with running(url) as gateway, Raw5.open(gateway.ports[0], one, KEPT):
        Raw5.open(gateway.ports[0], other, *properties).close()
    with running(url) as gateway:
        for client_id in (one, other):
            with Raw5.open(gateway.ports[0], client_id, KEPT, clean=False) as client:
                assert client.present == (kept or client_id == one)
