# SPDX-License-Identifier: Apache-2.0
"""What a flood sends: functions that attack the gateway on a port until a time of ``time.monotonic``.

Whatever the gateway does to its attackers is no failure: only the canaries, the memory and the log count.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import time
from collections.abc import Iterator

from tests.harness import raw, raw5
from tests.harness.raw import Raw
from tests.harness.raw5 import ALIAS, SESSION_EXPIRY, prop

NEVER: int = 0xFFFFFFFF
PATIENCE_S = 5.0


class Attacker(Raw):
    """A connection that takes whatever happens to it, and does not read what it is sent unless it is asked to."""

    def __init__(self, port: int) -> None:
        self.gone = False
        try:
            super().__init__(port, patience=PATIENCE_S)
        except OSError:
            self.socket.close()
            raise

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError:
            self.gone = True

    def answered(self) -> bool:
        """Read one packet; false when there is none."""
        try:
            self.gone = self.receive() is None
        except (AssertionError, OSError):
            self.gone = True
        return not self.gone

    def drain(self) -> None:
        """Read what has come."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(1 << 20):
                pass
            self.gone = True
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True
        finally:
            with contextlib.suppress(OSError):
                self.socket.settimeout(self.patience)


def attacker(port: int, data: bytes) -> Attacker | None:
    """A connection that has sent its CONNECT and has been answered; None where it is not let in."""
    try:
        made = Attacker(port)
    except OSError:
        return None
    made.send(data)
    if not made.gone and made.answered():
        return made
    made.close()
    return None


def _going_on(until: float) -> Iterator[int]:
    for number in itertools.count():
        if time.monotonic() >= until:
            return
        yield number


def deep_filters(port: int, until: float) -> None:
    """1,000 filters of 120 levels made of `a` and `+`; publishes on new topics below them, 260 in one write."""
    name = secrets.token_hex(4)
    reader = attacker(port, raw.connect(f"deep-{name}"))
    writer = attacker(port, raw.connect(f"deep-writer-{name}"))
    filters = [
        "/".join("+" if (number * 2654435761 >> bit) & 1 else "a" for bit in range(120)) for number in range(1000)
    ]
    if reader is not None:
        for start in range(0, 1000, 250):
            reader.send(raw.subscribe(*((text, 0) for text in filters[start : start + 250]), id=start + 1))
            reader.answered()
    for number in _going_on(until):
        if writer is None or writer.gone:
            _end(writer)
            writer = attacker(port, raw.connect(f"deep-writer-{name}"))
            continue
        writer.send(b"".join(raw.publish("a/" * 119 + f"{number}-{each}", b"x") for each in range(260)))
        if reader is not None:
            reader.drain()
    _end(reader, writer)


def _end(*those: Attacker | None) -> None:
    for one in those:
        if one is not None:
            one.close()


def stored_sessions(port: int, until: float) -> None:
    """CONNECT with an empty client id, a session that never expires and ten filters; closed again."""
    data = raw5.connect("", prop(SESSION_EXPIRY, NEVER))
    for number in _going_on(until):
        one = attacker(port, data)
        if one is not None:
            one.send(raw5.subscribe(*((f"session/{number}/{each}", 1) for each in range(10))))
            one.answered()
            one.close()


def long_client_ids(port: int, until: float) -> None:
    """A client id of 64 KB and a filter that is refused, and empty publishes at QoS 1 under it."""
    for number in _going_on(until):
        client_id = b"%05d" % number + b"\xc2\xa0" * 32_000
        for data in (raw.connect(client_id), raw5.connect(client_id)):
            one = attacker(port, data)
            if one is not None:
                one.send(raw.subscribe(("$MQTT/sub/x", 1)))
                one.send(b"".join(raw.publish("long", qos=1, id=each) for each in range(1, 500)))
                one.close()


def half_open(port: int, until: float) -> None:
    """CONNECT packets of 8 and 60 KB of which the last byte never comes, on 2,000 connections at a time."""
    begun = [raw.connect("half-open", flags=0x06, tail=("will", bytes(size)))[:-1] for size in (8100, 60_000)]
    held: list[socket.socket] = []
    for number in _going_on(until):
        one = socket.socket()
        one.settimeout(1.0)
        try:
            one.connect(("127.0.0.1", port))
            one.sendall(begun[number % 2])
            held.append(one)
        except OSError:
            one.close()
        if len(held) > 2000:
            held.pop(0).close()
    for one in held:
        one.close()


def overlapping_filters(port: int, until: float) -> None:
    """A durable session with 1,000 filters that match one topic, on which somebody publishes at QoS 1."""
    name = secrets.token_hex(4)
    topic = "/".join("overlap")
    filters = [
        "/".join(sign if number >> bit & 1 else "+" for bit, sign in enumerate("overlap")) for number in range(128)
    ]
    filters += [f"{text.rsplit('/', 1)[0]}/#" for text in filters]
    reader = attacker(port, raw.connect(f"overlap-{name}", clean=False))
    writer = attacker(port, raw.connect(f"overlap-writer-{name}"))
    if reader is not None:
        for start in range(0, len(filters), 64):
            reader.send(raw.subscribe(*((text, 1) for text in filters[start : start + 64]), id=start + 1))
            reader.answered()
    for _ in _going_on(until):
        if writer is None or writer.gone:
            _end(writer)
            writer = attacker(port, raw.connect(f"overlap-writer-{name}"))
            continue
        writer.send(b"".join(raw.publish(topic, b"x" * 100, qos=1, id=each) for each in range(1, 50)))
        writer.answered()
        writer.drain()
        if reader is not None:
            reader.drain()
    _end(reader, writer)


def remembered_topics(port: int, until: float) -> None:
    """60 permitted clients that publish on ever new long topics, with topic aliases."""
    clients: list[Attacker | None] = [attacker(port, raw5.connect(f"many-{number}")) for number in range(60)]
    for number in _going_on(until):
        place = number % 60
        one = clients[place]
        if one is None or one.gone:
            _end(one)
            clients[place] = attacker(port, raw5.connect(f"many-{place}"))
            continue
        one.send(
            b"".join(
                raw5.publish(f"many/{number}/{each}/" + "x" * 2500, b"x", prop(ALIAS, each)) for each in range(1, 33)
            )
        )
        one.drain()
    _end(*clients)


def refused_subscriptions(port: int, until: float) -> None:
    """SUBSCRIBE packets of which every filter is refused."""
    filters = [(f"$MQTT/sub/{number}/" + "x" * 200, 1) for number in range(100)]
    one: Attacker | None = None
    for number in _going_on(until):
        if one is None or one.gone:
            _end(one)
            one = attacker(port, raw5.connect(f"refused-{number}"))
            continue
        one.send(raw5.subscribe(*filters, id=number % 65_000 + 1))
        one.answered()
    _end(one)


def malformed_packets(port: int, until: float) -> None:
    """Connections that end with a violation of the protocol, before CONNECT and after."""
    bad = (b"\x00\x00", b"\x10\xff\xff\xff\xff\xff", raw.connect(level=77), raw.publish("early", b"x"))
    for number in _going_on(until):
        try:
            stranger = Attacker(port)
        except OSError:
            continue
        stranger.send(bad[number % len(bad)])
        stranger.answered()
        stranger.close()
        one = attacker(port, (raw5 if number % 2 else raw).connect(f"malformed-{number}"))
        if one is not None:
            one.send((b"\x36\x05\0\1x\0\1", b"\x82\x02\0\1", b"\x30\x03\0\1+")[number % 3])
            one.answered()
            one.close()


def wrong_passwords(port: int, until: float) -> None:
    """Strangers with long names and wrong passwords."""
    for number in _going_on(until):
        name = f"stranger-{number}-".ljust(60_000, "x")
        one = attacker(port, raw.connect(f"wrong-{number}", flags=0xC2, tail=(name, b"wrong")))
        _end(one)


def new_connections(port: int, until: float) -> None:
    """Connections that come and go as fast as possible."""
    for number in _going_on(until):
        _end(attacker(port, raw.connect(f"new-{number}")))


def tiny_packets(port: int, until: float) -> None:
    """Publishes on ever new topics and pings, some hundreds in each write, of ten clients."""
    clients: list[Attacker | None] = [None] * 10
    for number in _going_on(until):
        place = number % 10
        one = clients[place]
        if one is None or one.gone:
            _end(one)
            clients[place] = attacker(port, raw.connect(f"tiny-{place}"))
            continue
        one.send(b"".join(raw.publish(f"t/{number}/{each}", b"") + b"\xc0\0" for each in range(500)))
        one.drain()
    _end(*clients)
