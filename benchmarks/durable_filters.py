# SPDX-License-Identifier: Apache-2.0
"""Waiting times of a durable session with many filters: ``python -m benchmarks.durable_filters``.

Seconds from the packet to its answer. Each filter has a consumer. The last rows say how long nats-server takes to make
as many consumers, and to change them, without a gateway.
"""

from __future__ import annotations

import argparse
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks import peers
from benchmarks.generator import packets
from benchmarks.generator.packets import PUBACK, Layout
from benchmarks.report import table
from benchmarks.runner import machine
from benchmarks.storing import Connection

PATIENCE_S: Final = 60.0

AT_ONCE: Final = 100
"""Messages that are published at the same time."""

PINGREQ: Final = b"\xc0\0"
CONNACK, PUBLISH, SUBACK, PINGRESP = 2, 3, 9, 13

COMMAND: Final = f"{peers.OURS_COMMAND} --consumer-rate 1000000"
"""Without a wait for the rate at which one address may make consumers: rounds follow each other at once."""


class Session:
    """A connection that notes when packets come."""

    def __init__(self, port: int, client_id: str, *more: bytes, clean: bool = False) -> None:
        """Connect, with more packets in the same write as CONNECT."""
        self._socket = socket.create_connection((peers.HOST, port), PATIENCE_S)
        self._data = bytearray()
        self.begun = time.perf_counter()
        self.send(packets.connect(client_id, clean=clean), *more)

    def send(self, *data: bytes) -> None:
        """Write packets."""
        self._socket.sendall(b"".join(data))

    def close(self) -> None:
        """End it, in order."""
        self.send(b"\xe0\0")
        while self._socket.recv(65536):
            pass
        self._socket.close()

    def packets(self) -> Iterator[tuple[int, bytes]]:
        """Kind and bytes of each packet that comes."""
        while True:
            end = size = shift = 0
            for at, byte in enumerate(self._data[1:5], 2):
                size |= (byte & 127) << shift
                shift += 7
                if not byte & 128:
                    end = at + size
                    break
            if end and len(self._data) >= end:
                packet = bytes(self._data[:end])
                del self._data[:end]
                yield packet[0] >> 4, packet
                continue
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionError("the gateway has closed the connection")
            self._data += data

    def wait(self, *kinds: int) -> dict[int, float]:
        """Seconds since ``begun`` until the first packet of each kind."""
        found: dict[int, float] = {}
        for kind, packet in self.packets():
            found.setdefault(kind, time.perf_counter() - self.begun)
            if kind == SUBACK and max(packet[3:]) > 2:
                raise RuntimeError("filters were refused")
            if kind == PUBLISH:
                at = 2 + next(n for n, byte in enumerate(packet[1:]) if not byte & 128)
                at += 2 + int.from_bytes(packet[at : at + 2])
                self.send(b"%c\2%b" % (PUBACK, packet[at : at + 2]))
            if all(each in found for each in kinds):
                break
        return found


def publish(port: int, topics: Sequence[str]) -> None:
    """Have a message stored on each topic."""
    publisher = Session(port, "bench-publisher", clean=True)
    publisher.wait(CONNACK)
    for start in range(0, len(topics), AT_ONCE):
        some = topics[start : start + AT_ONCE]
        for number, topic in enumerate(some, 1):
            layout = Layout(topic, packets.MIN_PAYLOAD, 1)
            packet = bytearray(layout.template)
            packet[layout.packet_id : layout.packet_id + 2] = number.to_bytes(2)
            publisher.send(bytes(packet))
        for _ in some:
            publisher.wait(PUBACK >> 4)
    publisher.close()


def measure(port: int, filters: Sequence[str], waiting: int) -> dict[str, float]:
    """The times of one new session."""
    client_id = f"bench-{secrets.token_hex(4)}"
    first = Session(port, client_id)
    first.wait(CONNACK)
    first.begun = time.perf_counter()
    first.send(packets.subscribe_many(filters, 1), PINGREQ)
    subscribed = first.wait(SUBACK, PINGRESP)
    first.close()
    publish(port, filters[-waiting:])
    again = Session(port, client_id, PINGREQ)
    resumed = again.wait(PINGRESP, PUBLISH)
    again.close()
    end = Session(port, client_id, clean=True)
    end.wait(CONNACK)
    end.close()
    return {
        "SUBSCRIBE to SUBACK": subscribed[SUBACK],
        "PINGREQ behind SUBSCRIBE to PINGRESP": subscribed[PINGRESP],
        "CONNECT to PINGRESP, when the session goes on": resumed[PINGRESP],
        "CONNECT to the first message that has waited": resumed[PUBLISH],
    }


def bare(port: int, filters: int) -> dict[str, float]:
    """Return the seconds that nats-server takes to create as many consumers, all requested at once."""
    nats = Connection(port)
    try:
        name = secrets.token_hex(4)
        stream: dict[str, Any] = {"storage": "file", "num_replicas": 1, "max_consumers": -1}
        nats.send(nats.ask(f"STREAM.CREATE.{name}", name=name, subjects=[f"{name}.>"], **stream))
        nats.answer()
        found = {}
        for title, action in (("create", "create"), ("change", "update")):
            requests = b"".join(
                nats.ask(
                    f"CONSUMER.DURABLE.CREATE.{name}.c{number}",
                    stream_name=name,
                    action=action,
                    config={
                        "durable_name": f"c{number}",
                        "deliver_subject": f"deliver.{action}.{number}",
                        "deliver_policy": "by_start_sequence",
                        "opt_start_seq": 1,
                        "ack_policy": "explicit",
                        "filter_subject": f"{name}.{number}",
                        "max_ack_pending": 100,
                    },
                )
                for number in range(filters)
            )
            begun = time.perf_counter()
            nats.send(requests)
            for _ in range(filters):
                nats.answer()
            found[f"nats-server alone: {title} as many consumers"] = time.perf_counter() - begun
        return found
    finally:
        nats.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.durable_filters", description=__doc__)
    parser.add_argument("--filters", type=int, default=1000, metavar="N", help="of the session, at QoS 1 (1000)")
    parser.add_argument(
        "--waiting", type=int, default=1, metavar="N", help="messages that wait, on the last filters (1)"
    )
    parser.add_argument("--stored", type=int, default=0, metavar="N", help="messages on another topic before all (0)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="the table has medians over the rounds (3)")
    parser.add_argument("--ours", default=COMMAND, metavar="COMMAND", help="starts the gateway")
    given = parser.parse_args(arguments)
    if not 1 <= given.waiting <= given.filters or given.rounds <= 0:
        parser.error("there has to be a round, and a message that waits for one of the filters")
    filters = [f"site/{number:04}/state" for number in range(given.filters)]
    found: dict[str, list[float]] = {}
    with peers.running("ours", given.ours) as broker:
        publish(broker.port, ["bench/before"] * given.stored)
        for _ in range(given.rounds):
            times = measure(broker.port, filters, given.waiting) | bare(broker.nats_port, given.filters)
            for title, seconds in times.items():
                found.setdefault(title, []).append(seconds)
    rows = [[f"{given.filters:,} filters, QoS 1", "seconds"]]
    rows += [[title, f"{sorted(values)[len(values) // 2]:.3f}"] for title, values in found.items()]
    print(f"{machine(['ours'], given.ours)}\n\n" + "\n".join(table(rows)))


if __name__ == "__main__":
    main()
