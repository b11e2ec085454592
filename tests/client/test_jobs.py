# SPDX-License-Identifier: Apache-2.0
"""Jobs of a client one after the other, what their failures mean, and which packets wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from mqtt_nats.client.authentication import Authentication
from mqtt_nats.client.jobs import JOBS_LOW, JOBS_MOST
from mqtt_nats.codec import (
    Ack,
    Disconnect,
    MqttError,
    NotAuthorized,
    Packet,
    PingReq,
    ProtocolError,
    Publish,
    ReasonCode,
    Subscribe,
    Subscription,
)
from mqtt_nats.protocol.qos2_receiver import State as Held
from mqtt_nats.sessions.session import State
from mqtt_nats.transport.connection import Hold
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from tests.client.fakes import FakeClientAccount, Runner, as_account
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.sources

PUBACK = Ack(4, 1, 0)
PUBREL = Ack(6, 1, 0)
SUBSCRIBE = Subscribe(1, (Subscription("a", 0),))


def publish(qos: int = 0, identifier: int = 0) -> Publish:
    return Publish(qos, False, False, b"\0\1a", identifier, b"x")


async def note(runner: Runner, word: str, error: BaseException | None = None) -> None:
    """A job that waits for something, and may fail."""
    await asyncio.sleep(0)
    runner.fake_log.append(word)
    if error is not None:
        raise error


# -- jobs -----------------------------------------------------------------------------------------------


async def test_jobs_run_one_after_the_other() -> None:
    runner = Runner()
    assert not runner.busy
    runner.do(note(runner, "one"))
    runner.do(note(runner, "two"))
    assert (runner.busy, runner.crowded()) == (True, True)
    await runner.fake_tasks.fake_settle()
    assert runner.fake_log == ["one", "two"]
    assert (runner.busy, runner.crowded()) == (False, False)
    runner.do(note(runner, "three"))
    assert len(runner.fake_tasks.fake_spawned) == 1
    assert runner.fake_tasks.fake_spawned[0].get_name() == "client"
    await runner.fake_tasks.fake_settle()
    assert runner.fake_log == ["one", "two", "three"]


async def test_a_client_that_has_ended_has_no_jobs() -> None:
    """A coroutine that is never awaited would be a warning, which fails this test."""
    runner = Runner(State.ENDED)
    runner.do(note(runner, "never"))
    assert (runner.busy, runner.fake_log) == (False, [])


async def test_a_client_with_many_jobs_is_not_read_from() -> None:
    runner = Runner()
    left: list[int] = []

    async def look() -> None:
        left.append(runner.fake_connection.holds)

    for _ in range(JOBS_MOST):
        runner.do(look())
    assert runner.fake_connection.holds == 0
    runner.do(look())
    assert runner.fake_connection.holds == Hold.JOBS
    await runner.fake_tasks.fake_settle()
    assert left.count(0) == JOBS_LOW - 1, "it is read from when few jobs wait"
    assert left[0] == Hold.JOBS
    assert left[-1] == 0


async def test_jobs_wait_for_nats() -> None:
    runner = Runner()
    online = runner.services.nats.online
    online.clear()
    runner.do(note(runner, "one"))
    await asyncio.sleep(0)
    assert (runner.fake_log, runner._idle) == ([], True)
    online.set()
    await runner.fake_tasks.fake_settle()
    assert runner.fake_log == ["one"]


async def test_a_client_whose_socket_closes_while_nats_is_away_ends() -> None:
    runner = Runner()
    runner.services.nats.online.clear()
    runner.wait([SUBSCRIBE])
    runner.order.leave(runner)
    runner.do(note(runner, "never"))
    await asyncio.gather(*runner.fake_tasks.fake_spawned, return_exceptions=True)
    assert runner.fake_log == ["lost", "left"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotAuthorized("a test"), ReasonCode.NOT_AUTHORIZED),
        (ApiError(503, 10023, "a test"), ReasonCode.SERVER_UNAVAILABLE),
        (RequestTimeout("a test"), ReasonCode.SERVER_UNAVAILABLE),
        (NoResponders("a test"), ReasonCode.SERVER_UNAVAILABLE),
        (TimeoutError("a test"), ReasonCode.SERVER_UNAVAILABLE),
        (ValueError("a test"), ReasonCode.UNSPECIFIED_ERROR),
        (asyncio.CancelledError(), ReasonCode.UNSPECIFIED_ERROR),
    ],
)
async def test_a_job_that_fails_ends_the_client(
    error: BaseException, reason: ReasonCode, caplog: pytest.LogCaptureFixture
) -> None:
    """The jobs behind it are dropped; the log tells only of what nobody expects, and a client gets no details of it."""
    runner = Runner()
    runner.do(note(runner, "one", error))
    runner.do(note(runner, "never"))
    await runner.fake_tasks.fake_settle()
    word, ended, left = runner.fake_log
    assert (word, left) == ("one", "left")
    assert isinstance(ended, MqttError)
    assert ended.reason == reason
    internal = reason is ReasonCode.UNSPECIFIED_ERROR
    assert ("client 'client': a job failed" in caplog.text) is internal
    assert ("a test" in str(ended)) is not internal


async def test_what_fails_after_the_end_is_not_said() -> None:
    runner = Runner()

    async def end() -> None:
        runner.end_connection(ProtocolError("a test"))
        raise ValueError("later")

    runner.do(end())
    await runner.fake_tasks.fake_settle()
    assert [str(one) for one in runner.fake_log] == ["a test", "left"]


async def test_a_cancelled_client_leaves() -> None:
    runner = Runner()
    begun = asyncio.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    runner.do(wait())
    runner.do(note(runner, "never"))
    (task,) = runner.fake_tasks.fake_spawned
    await begun.wait()
    runner.state = State.ENDED
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
    assert runner.fake_log == ["left"]
    assert not runner.busy


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
    runner.order.fail(error)
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


async def test_a_job_before_disconnect_goes_on() -> None:
    """[MQTT-3.14.4-1] (3.1.1): packets before DISCONNECT are still handled."""
    runner = Runner()
    runner.do(note(runner, "one"))
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
