# SPDX-License-Identifier: Apache-2.0
"""Wills at QoS 0: of all gateways that find one, the gateway publishes it that has deleted it."""

from __future__ import annotations

from mqtt_nats.lifecycle.will import publish_will
from tests.base.support import running
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, connect
from tests.harness.waiting import eventually


def test_a_will_that_two_find_is_published_once(nats_server: NatsServer) -> None:
    """The deletion succeeds for both, and tells each how many records it has removed."""
    with (
        running(nats_server.url) as inside,
        Raw.connected(inside.ports[0], "watch") as watch,
        Raw(inside.ports[0]) as one,
    ):
        assert watch.subscribe(("wills/#", 0)) == [0]
        one.send(connect("willing", flags=0x06, tail=("wills/willing", "gone")))
        one.expect(raw.CONNACK)
        account = inside.gateway.account
        assert account is not None
        eventually(lambda: inside.client("willing").will is not None)
        will = inside.client("willing").will
        assert will is not None
        assert will.seq
        for _ in range(2):
            inside.call(lambda: publish_will(account.wills, will))
        assert watch.expect(raw.PUBLISH).payload == b"gone"
        assert watch.ping() == []
        one.close()
        assert watch.ping() == []
