# SPDX-License-Identifier: Apache-2.0
"""A gateway that was stopped goes on when its sessions have moved: it does nothing for them."""

import os
import signal
import sys
import time

import nats
import pytest

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw5
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw5 import PUBACK, SESSION_EXPIRY, Raw5, prop, publish
from tests.harness.waiting import eventually
from tests.integration.conftest import Stored, stored

__all__ = ["stored"]

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

KEPT = prop(SESSION_EXPIRY, 600)


@pytest.fixture
def sleeper(nats_server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    """The gateway that is stopped; its lease is long enough."""
    return gateway_factory(nats_server, "--gateway-lease", "60")


@pytest.fixture
def other(nats_server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(nats_server, "--gateway-lease", "60")


def stop(gateway: Gateway) -> None:
    os.kill(gateway.pid, signal.SIGSTOP)
    eventually(lambda: _state(gateway.pid) == "T")


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]


async def test_a_session_that_has_moved(sleeper: Gateway, other: Gateway, stored: Stored) -> None:
    """What its former connection had sent meanwhile is not stored, and acknowledges nothing."""
    topic = f"standstill/{time.time_ns()}"
    with (
        Raw5.open(sleeper.port, "moving", KEPT) as former,
        Raw5.open(other.port) as publisher,
        Raw5(other.port) as now,
    ):
        former.subscribed((topic, 2))
        for number in range(4):
            publisher.deliver(topic, b"%d" % number, qos=1 + number % 2)
        found = [former.message() for _ in range(4)]
        stop(sleeper)
        begun = time.monotonic()
        last = await stored.last_sequence()
        for number in range(20):
            former.send(publish(f"{topic}/late", b"late", qos=1, id=number + 1))
        former.send(publish(f"{topic}/late", b"late", qos=2, id=100))
        now.send(raw5.connect("moving", KEPT, clean=False))
        eventually(lambda: time.monotonic() > begun + 3)
        os.kill(sleeper.pid, signal.SIGCONT)
        assert now.answer(raw5.CONNACK).id == 1
        again = [now.message() for _ in range(4)]
        assert [(one.payload, one.id, one.dup) for one in again] == [(one.payload, one.id, True) for one in found]
        former.ended(0x8E)
        eventually(lambda: "the gateway process did not run" in sleeper.log)
        publisher.deliver(topic, b"last")
        assert now.message(b"last").dup is False
        assert await stored.last_sequence() == last + 1
        assert await stored.count("$MQTT_qos2in", "$MQTT.qos2.in.moving.*") == 0


async def test_sessions_that_have_not_moved(sleeper: Gateway) -> None:
    """Everything goes on, in order, as if nothing had been."""
    topic = f"standstill/{time.time_ns()}"
    with Raw5.open(sleeper.port, "staying", KEPT) as client, Raw5.open(sleeper.port) as publisher:
        client.subscribed((topic, 1))
        stop(sleeper)
        begun = time.monotonic()
        for number in range(50):
            publisher.send(publish(topic, b"%d" % number, qos=1, id=number + 1))
        eventually(lambda: time.monotonic() > begun + 3)
        os.kill(sleeper.pid, signal.SIGCONT)
        for number in range(50):
            publisher.answer(PUBACK, number + 1)
            client.receive_message(b"%d" % number)
    eventually(lambda: "the gateway process did not run" in sleeper.log)


async def test_the_connection_to_nats_is_lost_meanwhile(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory
) -> None:
    """There is no signal to wait for: the session's record says whose it is."""
    server = nats_factory()
    sleeper, other = (gateway_factory(server, "--gateway-lease", "60") for _ in range(2))
    with (
        Raw5.open(sleeper.port, "cut off", KEPT) as former,
        Raw5.open(sleeper.port, "staying", KEPT) as staying,
    ):
        former.subscribed(("topic", 1))
        staying.subscribed(("topic", 1))
        stop(sleeper)
        begun = time.monotonic()
        server.restart()
        with Raw5(other.port) as now:
            now.send(raw5.connect("cut off", KEPT, clean=False))
            assert now.answer(raw5.CONNACK).id == 1
            former.send(publish("late", b"late", qos=1))
            staying.send(publish("topic", b"in time", qos=1))
            eventually(lambda: time.monotonic() > begun + 3)
            os.kill(sleeper.pid, signal.SIGCONT)
            former.ended(0x8E)
            now.receive_message(b"in time")
            assert {staying.expect_one_of(PUBACK, raw5.PUBLISH) for _ in range(2)} == {PUBACK, raw5.PUBLISH}
    client = await nats.connect(server.url)
    assert await Stored(client).last_sequence() == 1
    await client.close()
