# SPDX-License-Identifier: Apache-2.0
"""Connections whose keep alive or connect timeout has passed: found without a look at all others."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from mqtt_nats.client import disconnect
from mqtt_nats.client.client import Client
from mqtt_nats.client.disconnect import end_silent
from mqtt_nats.codec import MqttError
from mqtt_nats.sessions.services import Registry
from mqtt_nats.sessions.session import State
from mqtt_nats.transport.connection import Connection
from mqtt_nats.transport.listener_settings import ConnectionSettings
from mqtt_nats.transport.turns import CLOCK_STEP, Clock, Hold, TimingWheel
from mqtt_nats.transport.write_buffer import FlushRound
from tests.harness.doubles import stands_for
from tests.transport.slow_handlers import LIMITS

BEGUN = 1000.0


@stands_for(ConnectionSettings)
class FakeSettings:
    """Stands for `ConnectionSettings`."""

    connect_timeout = 5.0
    max_outbound_bytes = 1 << 20


@stands_for(asyncio.Transport)
class FakeTransport:
    """Stands for `Transport`, with bytes that the client has not taken."""

    def __init__(self) -> None:
        self.fake_unsent = 0

    def get_write_buffer_size(self) -> int:
        return self.fake_unsent

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Nothing is read."""

    def abort(self) -> None:
        """It is closed."""


@stands_for(Client)
class FakeSilent:
    """Stands for `Client`, which sends nothing."""

    def __init__(self, registry: Registry[Any], clock: Clock, *, keep_alive: float, state: State = State.LIVE) -> None:
        settings = cast("ConnectionSettings", FakeSettings())
        self.connection = Connection(LIMITS, FlushRound(lambda flush: None), settings, clock, lambda _: None)
        self.fake_transport = FakeTransport()
        self.connection.transport = cast("asyncio.Transport", self.fake_transport)
        self.connection.expect_packets(keep_alive)
        self.connection.decoder.version = 4
        self.fake_registry = registry
        self.state = state
        self.version = 4
        self.unanswered = state is State.OPENING
        self.unanswered_since = BEGUN
        self.fake_ended: list[str] = []
        registry.enter(self)

    @property
    def alive(self) -> bool:
        return not self.fake_ended

    def end_connection(self, error: MqttError) -> None:
        self.fake_ended.append(str(error))
        self.fake_registry.leave(self)


@stands_for(TimingWheel)
class FakeChecks:
    """Stands for `TimingWheel`: notes who is due."""

    def __init__(self, wheel: TimingWheel[Any], due: list[Any]) -> None:
        self.put, self.discard = wheel.put, wheel.discard
        self.fake_wheel, self.fake_due = wheel, due

    def due(self, now: float) -> list[Any]:
        found = self.fake_wheel.due(now)
        self.fake_due.extend(found)
        return found


class World:
    """A gateway's clock and its connections; ``looks`` has the clients that were looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry: Registry[Any] = Registry()
        self.clock = Clock(BEGUN)
        self.looks: list[Any] = []
        monkeypatch.setattr(self.registry, "checks", FakeChecks(self.registry.checks, self.looks))

    def client(self, keep_alive: float, state: State = State.LIVE) -> FakeSilent:
        return FakeSilent(self.registry, self.clock, keep_alive=keep_alive, state=state)

    def tick(self, seconds: float = CLOCK_STEP) -> list[Any]:
        until = self.clock.now + seconds
        self.looks.clear()
        while self.clock.now < until:
            self.clock.set(self.clock.now + CLOCK_STEP)
            end_silent(self.registry, self.clock.now)
        return list(self.looks)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.mark.sources
def test_idle_clients_are_looked_at_when_their_keep_alive_may_have_passed(world: World) -> None:
    keeps, without = world.client(60.0), world.client(0.0)
    assert set(world.tick()) == {keeps, without}
    assert world.tick(80.0) == []
    keeps.connection.alive = world.clock.now  # it has sent a packet
    assert world.tick(85.0) == [keeps]
    assert (keeps.fake_ended, without.fake_ended) == ([], [])


@pytest.mark.sources
@pytest.mark.parametrize("keep_alive", [0.3, 1.0, 60.0, 65535.0])
def test_who_is_silent_for_too_long_is_ended_in_time(world: World, keep_alive: float) -> None:
    """One and a half times the keep alive, and two steps of the clock at most [MQTT-3.1.2-24]."""
    client = world.client(keep_alive)
    world.tick(keep_alive * 1.5)
    assert not client.fake_ended
    world.tick(3 * CLOCK_STEP)
    assert client.fake_ended == ["keep alive timeout"]
    assert world.tick(CLOCK_STEP) == []
    assert client not in world.registry.connections


@pytest.mark.sources
def test_a_client_from_which_nothing_is_read_lives_while_it_takes_bytes(world: World) -> None:
    client = world.client(10.0)
    world.tick()
    client.connection.hold(Hold.OUTBOUND)
    world.registry.checks.put(client, 0.0)
    for unsent in range(100, 0, -1):
        client.fake_transport.fake_unsent = unsent
        assert world.tick() == [client]
    assert not client.fake_ended
    world.tick(15.0)
    assert not client.fake_ended
    world.tick(1.5)
    assert client.fake_ended == ["keep alive timeout"]


@pytest.mark.sources
def test_a_connect_that_nats_does_not_answer_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disconnect, "refuse", lambda client, error: client.end_connection(error))
    client = world.client(0.0, State.OPENING)
    assert world.tick(5.0) == [client] * 10
    world.tick(1.0)
    assert client.fake_ended == ["NATS does not answer"]
