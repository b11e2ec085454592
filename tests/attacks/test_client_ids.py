# SPDX-License-Identifier: Apache-2.0
"""Client ids that are longer than is allowed: refused before anything is kept, in both versions."""

from __future__ import annotations

from functools import partial
from typing import Final

import pytest

from tests.base.support import PATIENCE, Inside, running
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import eventually

LONGEST: Final = 256
NOT_VALID: Final = 0x85
IDENTIFIER_REJECTED: Final = 2

SIGNS: Final = ("x", "é", "\u20ac", "\N{SNOWMAN}", "\U0001f600", "+")


def identifier(sign: str, length: int) -> str:
    """A client id of so many bytes."""
    size = len(sign.encode())
    return sign * (length // size) + "-" * (length % size)


def identifiers(length: int) -> list[str]:
    """Client ids of so many bytes, of characters that take one to four of them."""
    return [identifier(sign, length) for sign in SIGNS]


def answer(port: int, data: bytes) -> raw.Received:
    """CONNACK, of a connection that is closed again."""
    with Raw(port, patience=PATIENCE) as client:
        client.send(data)
        return client.expect(raw.CONNACK)


def refused(inside: Inside) -> int:
    """Connections that were refused for it."""
    account = inside.gateway.account
    assert account is not None
    return account.services.counters.refused.get("client_identifier_not_valid", 0)


def counted(inside: Inside, number: int) -> bool:
    """Whether so many connections were refused for it."""
    return refused(inside) == number


def test_longer_ones_are_refused(nats_server: NatsServer) -> None:
    """[MQTT-3.1.3-5] (3.1.1, 5.0) allows it beyond 23 bytes; [MQTT-3.1.3-8] (5.0), [MQTT-3.1.3-9] (3.1.1)"""
    with running(nats_server.url) as inside:
        (port,) = inside.ports
        account = inside.gateway.account
        assert account is not None
        for length in (LONGEST + 4, 1000, 7000):
            for client_id in identifiers(length):
                before = refused(inside)
                for clean in (True, False):
                    assert answer(port, raw.connect(client_id, clean=clean)).body[1] == IDENTIFIER_REJECTED
                    found = answer(port, raw5.connect(client_id, prop(SESSION_EXPIRY, 60), clean=clean))
                    assert raw5.answer(found).reason == NOT_VALID
                    bridge = raw.connect(client_id, clean=clean, level=0x84)
                    assert answer(port, bridge).body[1] == IDENTIFIER_REJECTED
                eventually(partial(counted, inside, before + 6), PATIENCE, what="what is counted")
        eventually(lambda: not inside.call(lambda: len(account.registry.connections)), PATIENCE)
        assert not inside.call(lambda: dict(account.registry.clients))


def test_a_packet_of_64_kb_with_one_is_not_even_read(nats_server: NatsServer) -> None:
    """It counts once, however many reads it comes in."""
    with running(nats_server.url) as inside:
        account = inside.gateway.account
        assert account is not None
        for data in (raw.connect("x" * 65_535), raw5.connect("x" * 65_535)):
            with Raw(inside.ports[0], patience=PATIENCE) as client:
                client.send(data)
                client.expect_closed()
        assert inside.call(lambda: dict(account.services.counters.refused)) == {"packet_too_large": 2}


@pytest.mark.parametrize("sign", SIGNS)
def test_those_of_the_longest_length_can_do_everything(nats_server: NatsServer, sign: str) -> None:
    client_id = identifier(sign, LONGEST)
    with running(nats_server.url) as inside:
        (port,) = inside.ports
        with Raw.connected(port, client_id, clean=False) as client:
            assert client.subscribe(("long", 2)) == [2]
        with Raw.connected(port) as other:
            for qos in (1, 2):
                other.send(raw.publish("long", b"x", qos=qos, id=qos))
            assert [other.expect(kind).id for kind in (raw.PUBACK, raw.PUBREC)] == [1, 2]
            other.send(raw.ack(raw.PUBREL, 2))
            other.expect(raw.PUBCOMP)
        with Raw5.open(port, client_id, prop(SESSION_EXPIRY, 0), clean=False) as again:
            found = [again.message() for _ in range(2)]
            assert sorted(one.qos for one in found) == [1, 2]


def test_the_limit_can_be_raised(nats_server: NatsServer) -> None:
    with running(nats_server.url, max_client_id_length=3000) as inside:
        assert answer(inside.ports[0], raw.connect("x" * 3000)).body[1] == 0
        assert answer(inside.ports[0], raw.connect("x" * 3001)).body[1] == IDENTIFIER_REJECTED
