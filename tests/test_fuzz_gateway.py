# SPDX-License-Identifier: Apache-2.0
"""Mutated packets against a running gateway: it closes or answers, and its other clients notice nothing.

``FUZZ_PACKETS`` sets how many (default 4,000), ``FUZZ_SEED`` repeats a run whose seed a failure has shown.
"""

import os
import random
import secrets
import socket
from collections.abc import Iterator

import psutil
import pytest

from tests.harness import raw
from tests.harness.bystanders import Bystanders
from tests.harness.gateway import Gateway
from tests.harness.raw import Raw, ack, connect, field, packet, publish, subscribe, unsubscribe

PACKETS = int(os.environ.get("FUZZ_PACKETS", "4000"))

INTERESTING = (0, 1, 2, 3, 4, 0x0F, 0x10, 0x23, 0x24, 0x2B, 0x2F, 0x30, 0x3F, 0x7F, 0x80, 0x82, 0xC0, 0xE0, 0xF0, 0xFF)


def seeds(client_id: str) -> list[bytes]:
    """Packets that are right."""
    return [
        connect(client_id),
        connect(client_id, clean=False, keepalive=1),
        connect(client_id, flags=0xEE, tail=("fuzz/will", b"will", "user", "password")),
        connect(client_id, level=0x84),
        packet(0x10, field("MQTT") + b"\x05\x02\0\x3c\x05\x11\0\0\0\x0a" + field(client_id)),
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


def mutated(data: bytes, random_: random.Random) -> bytes:
    """``data`` with one to four changes."""
    out = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        if not out:
            break
        position = random_.randrange(len(out))
        match random_.randrange(8):
            case 0:
                out[position] ^= 1 << random_.randrange(8)
            case 1:
                out[position] = random_.choice(INTERESTING)
            case 2:
                del out[position : position + random_.randint(1, 8)]
            case 3:
                out[position:position] = random_.randbytes(random_.randint(1, 8))
            case 4:
                out[position:position] = out[position : position + random_.randint(1, 40)]
            case 5:
                del out[position:]
            case 6:  # the remaining length
                out[1:2] = raw.remaining_length(random_.choice((0, 1, 2, 127, 128, len(out), 70_000, 268_435_455)))
            case _:
                out[position:position] = random_.choice(seeds("inserted"))
    return bytes(out)


def attack(gateway: Gateway, random_: random.Random, count: int) -> int:
    """One connection that sends up to ``count`` mutated packets; how many it got rid of."""
    client_id = f"fuzz-{random_.randrange(5)}"
    material = seeds(client_id)
    sent = 0
    with Raw(gateway.port) as client:
        if random_.random() < 0.9:
            client.send(random_.choice(material[:4]))
            try:
                answer = client.receive()
            except (TimeoutError, AssertionError):
                return 1
            if answer is None:
                return 1
        client.socket.settimeout(0.001)
        for _ in range(count):
            data = random_.choice(material) if random_.random() < 0.3 else mutated(random_.choice(material), random_)
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


@pytest.fixture
def bystanders(gateway: Gateway) -> Iterator[list[Bystanders]]:
    with Bystanders(gateway.port) as one, Bystanders(gateway.port) as two:
        yield [one, two]


@pytest.mark.slow
@pytest.mark.timeout(90 + PACKETS // 50)
def test_mutated_packets(gateway: Gateway, bystanders: list[Bystanders]) -> None:
    seed = os.environ.get("FUZZ_SEED") or secrets.token_hex(8)
    print(f"FUZZ_SEED={seed}")
    random_ = random.Random(seed)
    sent = 0
    before = psutil.Process(gateway.pid).memory_info().rss
    while sent < PACKETS:
        sent += attack(gateway, random_, random_.randint(1, 40))
    for one in bystanders:
        one.check()
    assert gateway.process.alive
    assert "Traceback" not in gateway.log
    assert "internal error" not in gateway.log
    assert "connection to NATS is lost" not in gateway.log
    assert psutil.Process(gateway.pid).memory_info().rss - before < 150 * 1024 * 1024
    for number in range(5):  # whatever is left of the attackers' sessions can be had, and ended
        Raw.connected(gateway.port, f"fuzz-{number}").close()
    with socket.create_connection(("127.0.0.1", gateway.port)):
        pass
