# SPDX-License-Identifier: Apache-2.0
"""Taking the client ids of others, to keep them out: what holds nothing yields to whoever comes with the id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.test_session_quotas import QUOTA_EXCEEDED
from tests.attacks.test_session_users import KEPT, NOT_AUTHORIZED, PASSWORDS, User, hello, hello4, refused, ruled
from tests.base.support import Inside
from tests.conftest import NatsFactory
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import WILL_DELAY, Raw5, prop
from tests.harness.waiting import eventually

IDS = 100


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    """A gateway at which sessions of 3.1.1 clients never expire: those have no deadline."""
    with ruled(nats_server.url, tmp_path_factory.mktemp("squatted"), session_expiry_interval=None) as found:
        yield found


@pytest.fixture
def port(inside: Inside) -> int:
    return inside.ports[0]


def take(port: int, client_id: str, version: int) -> None:
    """A session of ann's, left at once."""
    with User(port) if version == 5 else Raw(port) as ann:
        ann.send(hello(client_id, "ann", KEPT) if version == 5 else hello4(client_id, "ann"))
        assert ann.expect(raw.CONNACK).body[1] == 0
        ann.send(b"\xe0\0" if version == 4 else raw5.disconnect())
        ann.expect_closed()


def gets_in(port: int, client_id: str, version: int, *, clean: bool) -> bool:
    """Whether bob's client gets in. Its session is a new one, and its own: what is stored waits for it."""
    with User(port) if version == 5 else Raw(port) as bob:
        data = hello(client_id, "bob", KEPT, clean=clean) if version == 5 else hello4(client_id, "bob", clean=clean)
        bob.send(data)
        answer = bob.receive()
        if answer is None or answer.body[1]:
            return False
        assert answer.body[0] == 0, "session present"
        if version == 5:
            assert isinstance(bob, User)
            assert bob.subscribed((f"bob/{client_id}", 1)) == (1,)
        else:
            assert bob.subscribe((f"bob/{client_id}", 1)) == [1]
    return True


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kept"])
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("taken", [4, 5])
def test_client_ids_that_were_taken(port: int, taken: int, version: int, clean: bool) -> None:
    """Their users get in, with a clean start or without, and have them from then on."""
    client_id = f"victim-{taken}-{version}-{clean}"
    take(port, client_id, taken)
    eventually(lambda: gets_in(port, client_id, version, clean=clean))
    if version == 4 and clean:
        return
    with Raw5.open(port, "watcher") as watcher:
        watcher.deliver(f"bob/{client_id}", b"waits")
    refused(port, client_id, "ann")
    with User.of(port, client_id, "bob") as bob:
        assert bob.present
        assert bob.receive_message().payload == b"waits"


@pytest.mark.long
def test_many_at_once(inside: Inside, port: int) -> None:
    """As many as one user takes in a row; it counts for none of them afterwards."""
    quotas = inside.gateway.account.services.quotas  # type: ignore[union-attr]
    for number in range(IDS):
        take(port, f"many-{number}", 4 + number % 2)
    for number in range(IDS):
        eventually(lambda: gets_in(port, f"many-{number}", 4 + number % 2, clean=bool(number % 3)))  # noqa: B023
    assert inside.call(lambda: sorted(use.sessions for use in quotas._uses.values()))[0] <= IDS // 10


def hold_subscription(ann: User) -> None:
    assert ann.subscribed(("ann/x", 0)) == (0,)


def hold_group(ann: User) -> None:
    assert ann.subscribed(("$share/g/ann/x", 1)) == (1,)


def hold_publish(ann: User) -> None:
    ann.send(raw5.publish("ann/out", b"held", qos=2, id=7))
    ann.answer(raw5.PUBREC, 7)


def owe_pubrel(ann: User) -> None:
    """The subscription has ended, and the message is not complete."""
    assert ann.subscribed(("ann/own", 2)) == (2,)
    ann.send(raw5.publish("ann/own", b"x", qos=2, id=9))
    ann.answer(raw5.PUBREC, 9)
    ann.send(raw5.ack(raw5.PUBREL, 9))
    found = [one for one in (ann.receive(), ann.receive()) if one is not None and one.kind != raw5.PUBCOMP]
    message = raw5.message(found[0])
    ann.send(raw5.ack(raw5.PUBREC, message.id))
    ann.answer(raw5.PUBREL, message.id)
    ann.send(raw5.unsubscribe("ann/own"))
    assert ann.answer(raw5.UNSUBACK).reasons == (0,)


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kept"])
@pytest.mark.parametrize("hold", [hold_subscription, hold_group, hold_publish, owe_pubrel])
def test_what_a_session_holds_keeps_it(port: int, hold: Callable[[User], Any], clean: bool) -> None:
    client_id = f"{hold.__name__}-{clean}"
    with User.of(port, client_id, "ann", clean=True) as ann:
        hold(ann)
    refused(port, client_id, "bob", clean=clean)
    with User.of(port, client_id, "ann") as ann:
        assert ann.present


def test_a_will_keeps_it_until_it_is_published(port: int) -> None:
    """A will that its client has removed does not."""
    will = raw5.will("ann/will", b"gone", prop(WILL_DELAY, 600))
    with User.of(port, "willing", "ann", KEPT, clean=True, will=will) as ann:
        ann.ping()
    refused(port, "willing", "bob", clean=True)
    with User.of(port, "willing", "ann", KEPT, will=will) as ann:
        assert ann.present
        ann.send(raw5.disconnect())
        ann.expect_closed()
    eventually(lambda: gets_in(port, "willing", 5, clean=False))


def test_a_session_in_use_is_not_lost(port: int) -> None:
    """A client that is connected keeps its id, whatever it holds; nobody else can disconnect it."""
    assert set(PASSWORDS) == {"ann", "bob"}
    with User.of(port, "used", "ann", clean=True) as ann:
        for clean in (True, False):
            refused(port, "used", "bob", clean=clean)
        assert ann.ping() == []


def test_how_many_one_user_keeps_that_holds_something(nats_factory: NatsFactory, tmp_path: Path) -> None:
    """As many as `max_sessions` says; their other users get in with any other id, and have quotas of their own."""
    with ruled(nats_factory().url, tmp_path, max_sessions=3) as inside:
        port = inside.ports[0]
        for number in range(3):
            with User.of(port, f"mine-{number}", "ann", clean=True) as ann:
                hold_subscription(ann)
        for number in range(3, 6):
            raw5.refused(port, hello(f"mine-{number}", "ann", KEPT, clean=True), QUOTA_EXCEEDED)
        for number in range(3):
            refused(port, f"mine-{number}", "bob", clean=True)
        for number in range(3, 6):
            assert gets_in(port, f"mine-{number}", 5, clean=True)


def test_how_many_one_user_keeps_that_stays_connected(nats_factory: NatsFactory, tmp_path: Path) -> None:
    """`max_sessions` does not count sessions that end with their connections: connections of an address bound them."""
    with (
        ruled(nats_factory().url, tmp_path, max_sessions=1, max_connections_per_address=4) as inside,
        ExitStack() as stack,
    ):
        port = inside.ports[0]

        def squat(number: int) -> bool:
            ann = stack.enter_context(User(port))
            ann.send(hello(f"mine-{number}", "ann", clean=True))
            return ann.receive() is not None

        assert [squat(number) for number in range(6)] == [True] * 4 + [False] * 2
        for number in range(6):
            bob = stack.enter_context(User(port, source="127.0.0.2"))
            bob.send(hello(f"mine-{number}", "bob", clean=True))
            assert bob.answer(raw5.CONNACK).reason == (NOT_AUTHORIZED if number < 4 else 0)
            bob.close()


def test_sessions_apart_keep_nobody_out(nats_factory: NatsFactory, tmp_path: Path) -> None:
    """Whoever has taken an id, connected or not, takes no place of another user."""
    with ruled(nats_factory().url, tmp_path, session_of_other_user="separate") as inside:
        port = inside.ports[0]
        with User.of(port, "away", "ann", clean=True) as ann:
            hold_subscription(ann)
        with User.of(port, "here", "ann", clean=True) as ann:
            hold_subscription(ann)
            for client_id in ("away", "here"):
                for version in (4, 5):
                    assert gets_in(port, client_id, version, clean=True)
            assert ann.ping() == []
