# SPDX-License-Identifier: Apache-2.0
"""A session that is claimed again while it is still being resumed."""

from tests.harness.gateway import Gateway
from tests.harness.raw5 import SESSION_EXPIRY, prop
from tests.v5.conftest import Opener


def test_former_connections_hear_why(gateway: Gateway, second_gateway: Gateway, open5: Opener, name: str) -> None:
    """[MQTT-3.1.4-3] (5.0): whoever has got CONNACK gets DISCONNECT 0x8E, however soon the next one comes."""
    expiry = prop(SESSION_EXPIRY, 600)
    clients = [open5(name, expiry)]
    clients[0].subscribed((f"{name}/a", 1), (f"{name}/b", 2), (f"{name}/c", 1))
    for turn in range(30):
        clients.append(open5(name, expiry, clean=False, to=(second_gateway, gateway)[turn % 2]))
        assert clients[-1].present
    for client in clients[:-1]:
        client.ended(0x8E)
    clients[-1].quiet()
