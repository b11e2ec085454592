# SPDX-License-Identifier: Apache-2.0
"""WebSocket frames that bring nothing of MQTT, in masses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtt_nats.transport.websocket import BARREN_MOST
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.integration.inprocess import running
from tests.transport.web import CONTINUATION, PING, PONG, Web, frame

FRAMES = {
    "ping": (frame(b"x" * 125, PING), b""),
    "pong": (frame(b"", PONG), b""),
    "empty": (frame(b""), b""),
    "fragment": (frame(b"", CONTINUATION, fin=False), frame(b"", fin=False)),
}


@pytest.fixture(scope="module")
def port(nats_server: NatsServer) -> Iterator[int]:
    with running(nats=(nats_server.url,), listeners=[{"listen": "127.0.0.1:0", "type": "ws"}]) as inside:
        yield inside.port


@pytest.mark.parametrize("kind", FRAMES)
def test_frames_that_bring_nothing(port: int, kind: str) -> None:
    """No rate of MQTT counts them, so they have one of their own; some at once are no harm."""
    one, begin = FRAMES[kind]
    with Web(port) as client:
        client.send(raw.connect())
        client.expect(raw.CONNACK)
        client.wire(begin + one * (BARREN_MOST - 1))
        if begin:
            client.wire(frame(raw.packet(0xC0), CONTINUATION, fin=False))
        else:
            client.send(raw.packet(0xC0))
        client.expect(raw.PINGRESP)
        client.wire(one * 500)
        assert client.closed() == 1008
        assert client.gone()
