# SPDX-License-Identifier: Apache-2.0
"""Which packets of a client wait for those before them, and what the end of the connection waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from mqtt_nats.client.authentication import Authentication
from mqtt_nats.codec import (
    Ack,
    Disconnect,
    NotAuthorized,
    Packet,
    PingReq,
    ProtocolError,
    Publish,
)
from mqtt_nats.protocol.qos2_receiver import State as Held
from mqtt_nats.sessions.session import State
from mqtt_nats.transport.connection import Hold
from tests.client.fakes import FakeClientAccount, Runner, as_account
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.sources

PUBACK = Ack(4, 1, 0)
PUBREL = Ack(6, 1, 0)


def publish(qos: int = 0, identifier: int = 0) -> Publish:
    return Publish(qos, False, False, b"\0\1a", identifier, b"x")


# -- packets that wait ------------------------------------------------------------------------------------


async def test_packets_behind_a_request_wait_until_it_has_taken_effect() -> None:
    """[MQTT-4.6.0-2] (5.0)"""
    runner = Runner()
    effective, answered = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await effective.wait()
        runner.in_force()
        await answered.wait()

    runner.request(work)
    assert runner.waits
    assert runner.holds_up(publish())
    runner.wait([publish(), PUBACK, PingReq(), PUBREL])
    assert runner.fake_log == [PUBACK, PingReq()], "these depend on nothing"
    runner.proceed()
    assert runner.fake_again == []
    effective.set()
    await aeventually(lambda: bool(runner.fake_again))
    assert runner.fake_again == [publish(), PUBREL]
    assert (runner.busy, runner.waits, runner.holds_up(publish())) == (True, False, False)
    answered.set()
    await runner.fake_tasks.fake_settle()
    assert runner.fake_account.claims.fake_served == [runner.hash]


async def test_each_request_counts_once() -> None:
    runner = Runner()

    async def work() -> None:
        runner.in_force()
        runner.in_force()

    for _ in range(2):
        runner.request(work)
    runner.wait([publish()])
    await runner.fake_tasks.fake_settle()
    assert runner.fake_again == [publish()]


async def test_a_request_that_fails_lets_nothing_wait() -> None:
    runner = Runner()

    async def work() -> None:
        raise NotAuthorized("a test")

    runner.request(work)
    runner.wait([publish()])
    await runner.fake_tasks.fake_settle()
    assert [str(one) for one in runner.fake_log] == ["a test", "left"]


@pytest.mark.parametrize(
    ("state", "handled"),
    [(State.OPENING, []), (State.RESUMING, [PingReq()]), (State.LIVE, [PUBACK, PingReq()])],
)
async def test_what_need_not_wait(state: State, handled: list[Packet]) -> None:
    """[MQTT-3.1.4-5] (3.1.1), [MQTT-3.12.4-1] (5.0): behind CONNECT everything waits, PINGREQ until CONNACK."""
    runner = Runner(state)
    runner.wait([PUBACK, PingReq(), publish()])
    assert runner.fake_log == handled
    runner.proceed()
    assert runner.fake_again == ([publish()] if state is State.LIVE else [])


async def test_after_connack_pings_are_answered_while_the_session_is_resumed() -> None:
    runner = Runner(State.OPENING)
    runner.fake_connection.hold(Hold.HANDSHAKE)
    runner.wait([PingReq(), publish()])
    runner.resuming()
    assert (runner.state, runner.fake_log) == (State.RESUMING, [PingReq()])
    assert not runner.fake_connection.holds & Hold.HANDSHAKE
    runner.fake_connection.hold(Hold.HANDSHAKE)
    runner.resuming()
    assert runner.fake_connection.holds & Hold.HANDSHAKE, "it was read on once"


async def test_a_packet_identifier_is_used_again_after_pubcomp() -> None:
    """[MQTT-4.3.3-12] (5.0): rumqttc does so before PUBCOMP."""
    runner = Runner()
    assert not runner.holds_up(publish(2, 7))
    runner.fake_hold(7, Held.HELD)
    assert not runner.holds_up(publish(2, 7)), "its repetition"
    runner.fake_hold(7, Held.RELEASING)
    assert not runner.holds_up(publish(2, 8))
    assert not runner.holds_up(publish(1, 7)), "identifiers of QoS 1 are others"
    assert not runner.waits
    assert runner.holds_up(publish(2, 7))
    runner.wait([publish(2, 7), publish()])
    runner.proceed()
    assert runner.fake_again == []
    del runner.inbound.machine.states[7]
    runner.proceed()
    assert runner.fake_again == [publish(2, 7), publish()]


async def test_a_violation_comes_behind_the_packets_before_it() -> None:
    """[MQTT-4.8.0-1] (3.1.1)"""
    runner = Runner()
    error = ProtocolError("a test")
    runner.wait([publish()])
    runner.broken(error)
    runner.proceed()
    assert runner.fake_connection.fake_again == [([publish()], None, error)]
    assert not runner.waits


# -- the end ----------------------------------------------------------------------------------------------


async def test_packets_before_the_end_are_handled_first() -> None:
    runner = Runner()
    runner.order.request()
    runner.wait([publish()])
    assert runner.outlasts(None)
    assert runner.fake_log == ["silent"]
    assert (runner.unserved, runner.waits) == (True, True)
    assert not runner.outlasts(None), "the second time it ends"
    runner.order.obey()
    runner.in_force()
    assert runner.fake_connection.fake_again == [([publish()], runner, None)]
    assert not runner.unserved


def offline(runner: Runner) -> None:
    runner.services.nats.online.clear()


def authenticating(runner: Runner) -> None:
    runner.state = State.OPENING
    runner.authentication = cast("Authentication", object())


@pytest.mark.parametrize("why", [Runner.give_up, offline, authenticating, lambda runner: runner.order.take_packets()])
async def test_otherwise_the_connection_ends_at_once(why: Callable[[Runner], object]) -> None:
    """The session has moved, NATS is away, no session is open yet, or no packet waits."""
    runner = Runner()
    runner.wait([publish()])
    why(runner)
    assert not runner.outlasts(None)
    assert runner.fake_log == []


async def note(runner: Runner) -> None:
    """A job."""
    runner.fake_log.append("one")


async def test_a_job_before_disconnect_goes_on() -> None:
    """[MQTT-3.14.4-1] (3.1.1): packets before DISCONNECT are still handled."""
    runner = Runner()
    runner.do(note(runner))
    assert not runner.outlasts(None)
    runner.hear_disconnect()
    assert (runner.ended, runner.ended_by_client, runner.unserved) == (True, True, True)
    assert runner.outlasts(None)
    await runner.fake_tasks.fake_settle()
    assert runner.fake_log == ["silent", "one"]
    assert runner.fake_connection.fake_again == [([], runner, None)]


@pytest.mark.parametrize(
    ("keeps", "taken", "state"),
    [(False, False, State.LIVE), (True, False, State.LIVE), (True, True, State.LIVE), (True, False, State.ENDED)],
)
async def test_packets_of_a_session_that_has_moved_are_not_served(keeps: bool, taken: bool, state: State) -> None:
    runner = Runner(state)
    runner.fake_connection.keeps = keeps
    if taken:
        runner.give_up()
    assert runner.unserved is (keeps and not taken and state is State.LIVE)


@pytest.mark.parametrize(("hung_up", "state"), [(False, State.LIVE), (True, State.LIVE), (False, State.ENDED)])
async def test_who_has_ended_the_connection(hung_up: bool, state: State) -> None:
    runner = Runner(state)
    runner.fake_connection.hung_up = hung_up
    assert runner.ended_by_client is hung_up
    assert runner.ended is (state is State.ENDED)
    assert runner.holds_up(Disconnect()) is (state is State.ENDED)


async def test_a_client_belongs_to_the_account_of_its_user() -> None:
    runner = Runner()
    other = FakeClientAccount()
    runner.move(as_account(other))
    found = (runner.account, runner.services, runner.path, runner.ingress, runner.delivery)
    assert [id(one) for one in found] == [
        id(one) for one in (other, other.services, other.services.path, other.ingress, other.delivery)
    ]
