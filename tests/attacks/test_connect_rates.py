# SPDX-License-Identifier: Apache-2.0
"""Rates of connections: an address that connects too often, or may not connect, does not keep others out."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from mqtt_nats.base.admission import ADMITTED
from tests.base.support import PATIENCE, running
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually

FLOOD = 20
DENIED = b"PROXY TCP4 203.0.113.9 198.51.100.1 40312 1883\r\n"
PERMITTED = b"PROXY TCP4 192.0.2.7 198.51.100.1 40312 1883\r\n"


@pytest.mark.parametrize("sends", [b"", raw.connect()], ids=["nothing", "CONNECT"])
def test_connections_that_their_address_refuses_do_not_delay_others(nats_server: NatsServer, sends: bytes) -> None:
    """The flooding address may have four clients by its own rate; the listener's rate allows five at once."""
    rates = {"connect_rate": 1.25, "connect_rate_per_address": 0.5}
    with running(nats_server.url, rates, rate_burst=4) as inside, ExitStack() as stack:
        (port,) = inside.ports
        flood = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE, ("127.0.0.2", 0)))
            for _ in range(FLOOD)
        ]
        for one in flood[:6]:
            one.sendall(sends)
        for one in flood[6:]:
            assert one.recv(1) == b""
        with Raw.connected(port, "other"):
            assert inside.client("other").connection.admission == ADMITTED


def test_denied_clients_of_a_proxy_do_not_delay_others(nats_server: NatsServer) -> None:
    listener = {"connect_rate": 1, "proxy_protocol": ["127.0.0.0/8"], "addresses": ["deny 203.0.113.0/24", "allow all"]}
    with running(nats_server.url, listener, rate_burst=1) as inside:
        (port,) = inside.ports
        for _ in range(FLOOD):
            with Raw(port) as client:
                client.send(DENIED)
                assert client.expect_closed(PATIENCE) == []
        with Raw(port) as client:
            client.send(PERMITTED + raw.connect("other"))
            assert client.expect(raw.CONNACK, PATIENCE).body == b"\0\0"
            assert inside.client("other").connection.admission == ADMITTED
        eventually(lambda: inside.connections == 0, PATIENCE)
