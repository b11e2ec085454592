# SPDX-License-Identifier: Apache-2.0
"""Filters that are made to be slow to find, and topics that are new each: others are served meanwhile."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import pytest

from tests.conftest import GatewayFactory
from tests.harness import raw, raw5
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, Received
from tests.harness.raw5 import Raw5

LEVELS = 120
LATE = 2.0
"""Seconds that somebody else may wait for PINGRESP on a machine that is shared with other tests.

Where all takes longer it is half of that: who had to wait for the writer's messages would wait for most of it.
"""


def filters(levels: int, first: str) -> Iterator[str]:
    """Filters that all match topics of ``a`` in each level, and of something in the last."""
    numbers = random.Random(levels)
    while True:
        yield "/".join([first, *numbers.choices("a+", k=levels - 2), "+"])


def nothing_or(client: Raw) -> Received | None:
    """What has come already."""
    try:
        return client.receive(0.001)
    except TimeoutError:
        return None


@pytest.mark.parametrize(("version", "refused"), [(4, 0x80), (5, 0x97)])
def test_levels_of_a_session(
    nats_server: NatsServer, gateway_factory: GatewayFactory, version: int, refused: int
) -> None:
    """1,000 filters of 120 levels are more than a session has room for; what it has ended makes room again."""
    gateway = gateway_factory(nats_server, "--max-subscriptions", "1000")
    wanted = [(text, 0) for text in dict.fromkeys(itertools.islice(filters(LEVELS, "a"), 200))]
    room = (8 * 1000 + 128) // LEVELS

    def answer(client: Raw | Raw5, *some: tuple[str, int], id: int) -> list[int]:
        if isinstance(client, Raw5):
            return list(client.subscribed(*some, id=id))
        return client.subscribe(*some, id=id)

    with Raw5.open(gateway.port) if version == 5 else Raw.connected(gateway.port) as client:
        codes = [
            code for start in range(0, 200, 50) for code in answer(client, *wanted[start : start + 50], id=start + 1)
        ]
        assert codes == [0] * room + [refused] * (200 - room)
        assert answer(client, ("a/+", 0), wanted[0], id=900) == [0, 0]
        ended = wanted[0][0]
        client.send(raw5.unsubscribe(ended, id=901) if version == 5 else raw.unsubscribe(ended, id=901))
        client.expect(raw.UNSUBACK)
        assert answer(client, wanted[199], wanted[198], id=902) == [0, refused]


@pytest.mark.parametrize("levels", [16, LEVELS])
@pytest.mark.parametrize("qos", [0, 1])
def test_topics_that_match_every_filter(gateway: Gateway, levels: int, qos: int) -> None:
    """A few kilobytes on new topics, each of which matches thousands of filters, hold nobody up."""
    with Raw.connected(gateway.port, patience=60) as reader, Raw.connected(gateway.port, patience=60) as other:
        wanted = [(text, qos) for text in dict.fromkeys(itertools.islice(filters(levels, "a"), 1000))]
        for start in range(0, len(wanted), 100):
            some = wanted[start : start + 100]
            reader.subscribe(*some, id=start + 1)
        with Raw.connected(gateway.port, patience=60) as writer:
            topics = ["/".join(["a"] * (levels - 1)) + f"/{number}" for number in range(260)]
            started = time.monotonic()
            writer.send(b"".join(raw.publish(topic, b"x", qos=qos, id=at + 1) for at, topic in enumerate(topics)))
            waited = []
            came = 0
            while came < len(topics):
                begun = time.monotonic()
                other.ping()
                waited.append(time.monotonic() - begun)
                while (one := nothing_or(reader)) is not None:
                    assert one.topic == topics[came]
                    came += 1
                    if one.qos:
                        reader.send(raw.ack(raw.PUBACK, one.id))
            assert max(waited) < max(LATE, (time.monotonic() - started) / 2)
            writer.ping()
