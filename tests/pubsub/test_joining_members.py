# SPDX-License-Identifier: Apache-2.0
"""A client subscribes a filter that others have: copies that are on their way to the gateway are older."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from mqtt_nats.codec import Publish, Subscribe, Subscription
from tests.conftest import GatewayFactory
from tests.harness.nats import NatsServer
from tests.harness.proxy import Proxy
from tests.harness.rawclient import RawClient, key_of

pytestmark = pytest.mark.anyio

LATE = 0.5


class LateProxy(Proxy):
    """Brings late what nats-server sends to one connection of a gateway, which is known by its name."""

    def __init__(self, target: int) -> None:
        self.late = 0.0
        self.to: socket.socket | None = None
        """Where the late messages go."""
        self.name = b""
        super().__init__(target)

    def _forward(self, source: socket.socket, sink: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            if source.getpeername()[1] != self._target:  # the gateway says its name
                head = source.recv(65_536, socket.MSG_PEEK).partition(b'"name"')[2].split(b'"')[1]
                if head.endswith(self.name) and (self.name or b" " not in head.removeprefix(b"mqtt-nats ")):
                    self.to = source
        super()._forward(_Late(self, source, sink), sink, left)  # type: ignore[arg-type]


class _Late:
    """A socket whose data come late."""

    def __init__(self, proxy: LateProxy, source: socket.socket, sink: socket.socket) -> None:
        self._proxy, self._source, self._sink = proxy, source, sink

    def recv(self, size: int) -> bytes:
        data = self._source.recv(size)
        if self._sink is self._proxy.to:
            time.sleep(self._proxy.late)
        return data

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)


@pytest.fixture
def proxy(nats_server: NatsServer) -> Iterator[LateProxy]:
    with LateProxy(nats_server.port) as found:
        yield found


async def published(client: RawClient, topic: str, last: bytes) -> list[bytes]:
    """The messages of a topic up to ``last``."""
    payloads: list[bytes] = []
    while last not in payloads:
        packet = await client.packet()
        if isinstance(packet, Publish):
            assert packet.key == key_of(topic)
            payloads.append(packet.payload)
    return payloads


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("wild", [False, True])
async def test_what_is_on_its_way_to_the_gateway_is_older(
    nats_server: NatsServer, proxy: LateProxy, gateway_factory: GatewayFactory, wild: bool, qos: int
) -> None:
    """It was acknowledged before SUBSCRIBE. What the client publishes behind SUBSCRIBE is not older."""
    topic = f"new/{wild}{qos}"
    text = f"+/{wild}{qos}" if wild else topic
    proxy.name = b"wildcards" if wild else b""
    gateway = gateway_factory(proxy.url)
    other = gateway if wild else gateway_factory(nats_server.url)
    async with (
        await RawClient.connect(gateway.port, "first") as first,
        await RawClient.connect(gateway.port, "second") as second,
        await RawClient.connect(other.port, "publisher") as publisher,
    ):
        await first.subscribe(text, qos=qos)
        await publisher.deliver(topic, b"early", qos)
        await published(first, topic, b"early")
        proxy.late = LATE
        await publisher.deliver(topic, b"old", qos)
        second.send(
            Subscribe(second.next_id(), (Subscription(text, qos),)),
            Publish(1, False, False, key_of(topic), second.next_id(), b"own"),
        )
        own = await published(second, topic, b"own")
        proxy.late = 0.0
        await publisher.deliver(topic, b"new", qos)
        assert own + await published(second, topic, b"new") == [b"own", b"new"]
        assert sorted(await published(first, topic, b"new")) == [b"new", b"old", b"own"]
