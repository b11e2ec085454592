# SPDX-License-Identifier: Apache-2.0
"""What waits for durable sessions by ``ctl sessions``, whoever knows: consumers, a gateway, a stored position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson
import pytest
from click.testing import CliRunner

from mqtt_nats.cli import command
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl import gateway_requests as asking
from mqtt_nats.ctl.backlog import Load
from mqtt_nats.ctl.commands.sessions import _connected
from mqtt_nats.ctl.nats_connection import run_connected
from mqtt_streams.hashing import name_hash
from mqtt_streams.positions import Position, PositionStore, decode
from tests.conftest import GatewayFactory
from tests.ctl.conftest import Fleet
from tests.harness.nats import ROOT, NatsServer
from tests.harness.raw5 import PUBACK, SESSION_EXPIRY, Message, Raw5, ack, prop, publish
from tests.harness.waiting import eventually

DURABLE = prop(SESSION_EXPIRY, 1000)

WINDOW = 100


def ctl(url: str, *arguments: str) -> Any:
    done = CliRunner().invoke(command, ["ctl", "--nats", url, *arguments, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return orjson.loads(done.output)


class Said(NamedTuple):
    """Queued and in flight, by the list, by the session itself, and by its only subscription."""

    listed: tuple[int | None, int | None]
    shown: tuple[int | None, int | None]
    subscription: tuple[int | None, int | None]


def said(url: str, name: str) -> Said:
    (one,) = ctl(url, "sessions", "list", "--match", name)["sessions"]
    shown = ctl(url, "sessions", "show", name)
    (each,) = shown["subscribed"]
    return Said(*((found["queued"], found["inflight"]) for found in (one, shown, each)))


def position(url: str, name: str) -> Position:
    found = run_connected(Settings(nats=(url,)), lambda inbox: PositionStore(inbox).load(name_hash(name)))
    return decode(found.data) or Position("")


def load(url: str, name: str) -> Load | None:
    """What the gateway says that has the client."""
    clients, _ = run_connected(Settings(nats=(url,)), lambda inbox: _connected(inbox, loads=True))
    return clients[name].load if name in clients else None


def live(url: str, name: str) -> bool:
    """Whether the session's consumer lies dormant."""
    found = position(url, name)
    return bool(found.live) and not found.clean


def publish_all(port: int, topic: str, count: int) -> None:
    with Raw5.open(port) as publisher:
        for start in range(1, count + 1, 500):
            some = range(start, min(start + 500, count + 1))
            publisher.send(b"".join(publish(topic, b"%d" % number, qos=1, id=number) for number in some))
            for number in some:
                publisher.answer(PUBACK, number)


def received(client: Raw5, count: int) -> list[Message]:
    return [client.message() for _ in range(count)]


def subscribed(url: str, port: int, name: str) -> Raw5:
    """A client that the shared reader serves."""
    client = Raw5.open(port, name, DURABLE, clean=False)
    assert client.subscribed((f"{name}/+", 1)) == (1,)
    eventually(lambda: live(url, name))
    return client


@pytest.fixture
def name(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"c-{request.node.name.replace('_', '-')}"
    yield name
    eventually(lambda: fleet.json("sessions", "clean", name)["sessions"])


def test_a_client_that_is_connected(fleet: Fleet, name: str) -> None:
    """What `clients show` says of it, and what it has acknowledged counts no more."""
    url, port = fleet.server.url, fleet.one.port
    with subscribed(url, port, name) as client:
        publish_all(port, f"{name}/a", 250)
        messages = received(client, WINDOW)
        here = (150, WINDOW)
        assert said(url, name) == Said(here, here, (None, None))
        about = ctl(url, "clients", "show", name)
        assert (about["queued"], about["inflight"]) == here
        text = fleet.text("sessions", "show", name)
        assert "\nqueued     150, 100 in flight\n" in text
        assert f"{name}/+" in text
        assert "its gateway has them, counted above" in text
        client.send(b"".join(ack(PUBACK, one.id) for one in messages[:60]))
        received(client, 60)
        assert said(url, name).listed == said(url, name).shown == (90, WINDOW)


def test_a_filter_of_two_subjects_has_two_windows(fleet: Fleet, name: str) -> None:
    """As docs/configuration.md says of max_inflight."""
    url, port = fleet.server.url, fleet.one.port
    with Raw5.open(port, name, DURABLE, clean=False) as client:
        assert client.subscribed((f"{name}/#", 1)) == (1,)
        eventually(lambda: len(position(url, name).live) == 2)
        publish_all(port, f"{name}/a", 250)
        received(client, 2 * WINDOW)
        assert said(url, name) == Said((50, 200), (50, 200), (None, None))
        client.quiet()
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert "A filter that ends in `/#` counts as two subscriptions" in page


def test_a_client_that_has_yet_to_get_what_it_missed(fleet: Fleet, name: str) -> None:
    """What its gateway has not read yet waits in the stream."""
    url, port = fleet.server.url, fleet.one.port
    subscribed(url, port, name).close()
    eventually(lambda: position(url, name).clean)
    publish_all(port, f"{name}/a", 2500)
    assert said(url, name) == Said((2500, 0), (2500, 0), (2500, 0))
    with Raw5.open(fleet.two.port, name, DURABLE, clean=False) as client:
        taken = 0
        while (told := load(url, name)) is None or told.taken is None:
            taken += 1
            assert taken < 2000, "it is never given what it has missed by a reader of its own"
            client.receive_message()
        left = 2500 - taken
        eventually(lambda: said(url, name).shown == said(url, name).listed == (left - WINDOW, WINDOW))
        told = load(url, name)
        assert told is not None
        assert told.taken is not None


def test_a_client_that_is_away_and_has_acknowledged_all_but_the_first(fleet: Fleet, name: str) -> None:
    url, port = fleet.server.url, fleet.one.port
    with subscribed(url, port, name) as client:
        publish_all(port, f"{name}/a", 50)
        client.send(b"".join(ack(PUBACK, one.id) for one in received(client, 50)[1:]))
        client.quiet()
    eventually(lambda: position(url, name).clean)
    publish_all(port, f"{name}/b", 3)
    assert said(url, name) == Said((4, 0), (4, 0), (4, 0))


def test_a_gateway_was_killed(
    nats_server: NatsServer, gateway_factory: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sessions' consumers are where they were when the shared reader began."""
    monkeypatch.setattr(asking, "SILENCE_TIMEOUT", 1.0)  # it does not answer
    url = nats_server.url
    dying, other = gateway_factory(nats_server), gateway_factory(nats_server)
    with subscribed(url, dying.port, "c-killed") as client:
        publish_all(dying.port, "c-killed/a", 50)
        client.send(b"".join(ack(PUBACK, one.id) for one in received(client, 50)[:40]))
        client.quiet()
        eventually(lambda: len(position(url, "c-killed").pending) == 10)
        dying.kill()
        publish_all(other.port, "c-killed/a", 5)
        assert said(url, "c-killed") == Said((15, 0), (15, 0), (15, 0))
