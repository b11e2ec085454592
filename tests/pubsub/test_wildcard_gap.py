# SPDX-License-Identifier: Apache-2.0
"""Filters that start with a wildcard have a connection to NATS of their own: only that one is lost here."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from mqtt_nats.codec import Subscription
from tests.conftest import GatewayFactory
from tests.harness.nats import NatsServer
from tests.harness.proxy import Proxy
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5
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


KINDS: dict[str, tuple[dict[str, Any], Subscription, dict[str, Any]]] = {
    "plain": ({}, Subscription("+/plain", 1), {}),
    "alias": ({"topic_alias_maximum": 5}, Subscription("+/alias", 1), {}),
    "size": ({"maximum_packet_size": 10_000}, Subscription("+/size", 2), {}),
    "identifier": ({}, Subscription("+/identifier", 1), {"subscription_identifier": [7]}),
    "no-local": ({}, Subscription("+/no-local", 2, no_local=True), {}),
    "as-published": ({}, Subscription("+/as-published", 1, retain_as_published=True), {}),
}


async def test_every_kind_of_subscriber_gets_what_was_missed(
    proxy: WildcardProxy, gateway_factory: GatewayFactory
) -> None:
    """Also those whose packets are their own."""
    gateway = gateway_factory(proxy.url)
    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(await RawClient5.connect5(gateway.port, "publisher"))
        subscribers = {}
        for kind, (wanted, subscription, more) in KINDS.items():
            client = await RawClient5.connect5(gateway.port, f"a-{kind}", **wanted)
            subscribers[kind] = await stack.enter_async_context(client)
            await client.subscribe5(subscription, **more)
        proxy.cut_wild()
        await aeventually(lambda: proxy.open == 2)
        for kind in KINDS:
            await publisher.deliver(f"gap/{kind}", b"missed", 1)
        proxy.restore()
        for client in subscribers.values():
            (found,) = await client.messages(1, 20.0)
            assert (found.payload, found.qos) == (b"missed", 1)
        for client in subscribers.values():
            await client.quiet()
