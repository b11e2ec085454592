# SPDX-License-Identifier: Apache-2.0
"""Filters that start with a wildcard have a connection to NATS of their own: only that one is lost here."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.conftest import GatewayFactory
from tests.harness.nats import NatsServer
from tests.harness.proxy import Proxy
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio


class WildcardProxy(Proxy):
    """Knows which connection is the one for wildcards, by the name in its CONNECT."""

    def __init__(self, target: int) -> None:
        self.wild: list[socket.socket] = []
        super().__init__(target)

    def _forward(self, source: socket.socket, sink: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            if b"wildcards" in source.recv(65_536, socket.MSG_PEEK):
                self.wild = [source, sink]
        super()._forward(source, sink, left)

    def cut_wild(self) -> None:
        """End the connection for wildcards, and let no new one in."""
        self._down = True
        for end in self.wild:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(nats_server: NatsServer) -> Iterator[WildcardProxy]:
    with WildcardProxy(nats_server.port) as found:
        yield found


async def test_what_was_missed_is_delivered_once(proxy: WildcardProxy, gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory(proxy.url)
    async with (
        await RawClient.connect(gateway.port, "subscriber") as subscriber,
        await RawClient.connect(gateway.port, "publisher") as publisher,
    ):
        await subscriber.subscribe("#", qos=2)
        for number in range(20):
            if number == 5:
                await subscriber.messages(5)
                assert proxy.open == 3
                proxy.cut_wild()
                await aeventually(lambda: proxy.open == 2)
            qos = 1 + number % 2
            packet_id = publisher.publish(f"gap/{number}", b"%d" % number, qos)
            if qos == 1:
                await publisher.expect_ack(PUBACK, packet_id)
            else:
                await publisher.expect_ack(PUBREC, packet_id)
                publisher.ack(PUBREL, packet_id)
                await publisher.expect_ack(PUBCOMP, packet_id)
        proxy.restore()
        missed = await subscriber.messages(15, 20.0)
        assert sorted(int(message.payload) for message in missed) == list(range(5, 20))
        await publisher.deliver("gap/end", b"end", 1)
        await subscriber.message("gap/end", b"end")
        await subscriber.quiet()
    assert "the connection to NATS is lost" not in gateway.log
