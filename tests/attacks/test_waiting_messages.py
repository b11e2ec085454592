# SPDX-License-Identifier: Apache-2.0
"""Messages that wait in memory for clients: `max_unread_bytes` bounds them, whatever they wait for and consist of."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.base.support import memory
from tests.conftest import GatewayFactory
from tests.harness import raw5
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import CONNACK, PUBACK, SUBACK
from tests.harness.raw5 import EXPIRY, USER, Raw5, prop

MIB = 1024 * 1024
UNREAD_MIB = 16
MESSAGES = 6000
PROPERTY = prop(USER, ("name", "v" * 60_000))
"""Most of the message: a payload would be the same."""

ENDED = "the client does not take its messages, and max_unread_bytes is exceeded"


@pytest.fixture
def gateway(nats_server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(nats_server, "--max-unread-bytes", f"{UNREAD_MIB}MiB")


def flood(gateway: Gateway, write: Callable[[int], bytes], qos: int) -> float:
    """Publish `MESSAGES` messages; MiB by which the gateway has grown."""
    before = memory(gateway.pid)
    with Raw5.open(gateway.port, "writer") as writer:
        for start in range(0, MESSAGES, 50):
            writer.send(b"".join(write(number) for number in range(start, start + 50)))
            for _ in range(50 if qos else 0):
                writer.expect(PUBACK)
            writer.ping()
    return (memory(gateway.pid) - before) / MIB


@pytest.mark.parametrize("late", [False, True], ids=["encoded", "encoded when sent"])
def test_subscribers_that_never_acknowledge(gateway: Gateway, late: bool) -> None:
    """Each has messages of its own, fewer than `max_queued`."""
    more = prop(EXPIRY, 3600) if late else b""
    with ExitStack() as stack:
        readers = [stack.enter_context(Raw5.open(gateway.port, f"reader-{number}")) for number in range(10)]
        for number, reader in enumerate(readers):
            reader.send(raw5.subscribe((f"unacknowledged/{number}", 1)))
            reader.expect(SUBACK)

        def write(number: int) -> bytes:
            topic = f"unacknowledged/{number % len(readers)}"
            return raw5.publish(topic, b"", PROPERTY, more, qos=1, id=number % 1000 + 1)

        grown = flood(gateway, write, 1)
        assert grown < 3 * UNREAD_MIB, grown
    assert ENDED in gateway.log


def test_messages_behind_retained_ones_that_a_client_does_not_take(gateway: Gateway) -> None:
    """Of hundreds of filters, each of which may keep back 4 MiB."""
    count = 300
    with (
        Raw5.open(gateway.port, "position_writer") as position_writer,
        Raw5(gateway.port, receive_buffer=4096) as reader,
    ):
        for number in range(count):
            position_writer.send(raw5.publish(f"behind/{number}/x", b"r", qos=1, id=number + 1, flags=1))
            position_writer.expect(PUBACK)
        reader.send(raw5.connect("reader") + raw5.subscribe(("unread", 0)))
        reader.expect(CONNACK)
        reader.expect(SUBACK)
        position_writer.send(b"".join(raw5.publish("unread", bytes(100_000)) for _ in range(50)))
        position_writer.ping()
        for start in range(0, count, 100):
            filters = [(f"behind/{number}/+", 0) for number in range(start, start + 100)]
            reader.send(raw5.subscribe(*filters, id=start + 1))
        grown = flood(gateway, lambda number: raw5.publish(f"behind/{number % count}/x", b"", PROPERTY), 0)
        assert grown < 3 * UNREAD_MIB, grown
    assert ENDED in gateway.log


def test_retained_messages_that_are_wanted_again_and_again(gateway: Gateway) -> None:
    """A page of them is read before each SUBACK, and the client takes none: further SUBSCRIBE packets wait."""
    with (
        Raw5.open(gateway.port, "position_writer") as position_writer,
        Raw5(gateway.port, receive_buffer=4096) as reader,
    ):
        for number in range(60):
            position_writer.send(raw5.publish(f"again/{number}", bytes(60_000), qos=1, id=number + 1, flags=1))
            position_writer.expect(PUBACK)
        before = memory(gateway.pid)
        reader.send(raw5.connect("reader"))
        reader.expect(CONNACK)
        reader.send(b"".join(raw5.subscribe(("again/#", 0), id=number) for number in range(1, 301)))
        most = 0.0
        for _ in range(20):
            position_writer.ping()
            most = max(most, (memory(gateway.pid) - before) / MIB)
            time.sleep(0.1)
        assert most < 3 * UNREAD_MIB, most
