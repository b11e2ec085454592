# SPDX-License-Identifier: Apache-2.0
"""Mutated packets for a running gateway: it closes or answers, and its other clients notice nothing."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from random import Random

import psutil

from tests.fuzz.mutation import mutated
from tests.harness import raw, raw5
from tests.harness.bystanders import Bystanders
from tests.harness.gateway import Gateway
from tests.harness.raw import Raw, ack, connect, field, packet, publish, subscribe, unsubscribe

ATTACKERS = 5
"""Client ids that the attacking connections use."""

MOST_GROWN = 150 * 1024 * 1024
"""Bytes by which a gateway may grow under attack."""


def seeds(client_id: str) -> list[bytes]:
    """Packets that are right, those that open a connection first: see :func:`opening`."""
    return [
        connect(client_id),
        connect(client_id, clean=False, keepalive=1),
        connect(client_id, flags=0xEE, tail=("fuzz/will", b"will", "user", "password")),
        connect(client_id, level=0x84),
        packet(0x10, field("MQTT") + b"\x05\x02\0\x3c\x05\x11\0\0\0\x0a" + field(client_id)),
        raw5.connect(client_id, raw5.prop(raw5.ALIAS_MAXIMUM, 5), raw5.prop(raw5.SESSION_EXPIRY, 60), clean=False),
        publish("fuzz/topic", b"payload"),
        publish("fuzz/topic", b"payload") * 20,
        publish("fuzz/topic", b"payload", qos=1, id=1, flags=1),
        publish("fuzz/topic", b"payload", qos=2, id=2),
        publish("fuzz/topic", b"payload", qos=2, id=2, flags=8) + ack(raw.PUBREL, 2),
        publish("fuzz/topic", b"", qos=1, id=3, flags=1),
        publish("fuzz/" + "\u20ac" * 300, bytes(3000), qos=1, id=4),
        subscribe(("fuzz/#", 2), ("fuzz/+/x", 1), ("#", 0), id=5),
        subscribe(("$share/group/fuzz", 1), ("$SYS/#", 0), id=6),
        unsubscribe("fuzz/#", "other", id=7),
        *(ack(kind, 1) for kind in (raw.PUBACK, raw.PUBREC, raw.PUBREL, raw.PUBCOMP)),
        packet(0xC0),
        packet(0xE0),
    ]


OPENING = 6
"""How many of the seeds are CONNECT packets."""


def attack(gateway: Gateway, random: Random, count: int, material: Sequence[bytes] = ()) -> int:
    """One connection that sends up to ``count`` packets, of which most are mutated; how many it got rid of.

    Args:
        material: more packets, of either version.
    """
    own = seeds(f"fuzz-{random.randrange(ATTACKERS)}")
    packets = [*own, *material]
    sent = 0
    with Raw(gateway.port) as client:
        if random.random() < 0.9:
            client.send(random.choice(own[:OPENING]))
            try:
                answer = client.receive()
            except (TimeoutError, AssertionError):
                return 1
            if answer is None:
                return 1
        client.socket.settimeout(0.001)
        for _ in range(count):
            data = random.choice(packets if random.random() < 0.5 else own)
            if random.random() < 0.7:
                data = mutated(data, random.choice(packets), random)
            sent += 1
            try:
                client.socket.sendall(data)
                if not client.socket.recv(65_536):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    return sent


def besiege(
    gateway: Gateway, bystanders: Sequence[Bystanders], count: int, seed: str, material: Sequence[bytes]
) -> int:
    """``count`` packets, over many connections; then everything must be as it was before.

    Returns:
        By how many bytes the gateway has grown.
    """
    random = Random(seed)
    process = psutil.Process(gateway.pid)
    before = process.memory_info().rss
    sent = checked = 0
    while sent < count:
        sent += attack(gateway, random, random.randint(1, 40), material)
        if sent - checked > 5000:
            checked = sent
            for one in bystanders:
                one.check()
    for one in bystanders:
        one.check()
    assert gateway.process.alive
    assert "Traceback" not in gateway.log
    assert "internal error" not in gateway.log
    assert "connection to NATS is lost" not in gateway.log
    grown = process.memory_info().rss - before
    assert grown < MOST_GROWN
    for number in range(ATTACKERS):  # whatever is left of the attackers' sessions can be had, and ended
        Raw.connected(gateway.port, f"fuzz-{number}").close()
    with socket.create_connection(("127.0.0.1", gateway.port)):
        pass
    return grown
