# SPDX-License-Identifier: Apache-2.0
"""Processor time of nats-server for a stored message, in the ways there are: ``python -m benchmarks.storing``.

A message is acknowledged by itself, or with the others of a fast batch (nats-server 2.14: ADR-50); a held record is
removed by its sequence, or with all of its client up to one.
"""

from __future__ import annotations

import argparse
import json
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from benchmarks import peers, proc
from benchmarks.report import table
from benchmarks.runner import machine

STREAM: Final = {"storage": "file", "num_replicas": 1, "max_msgs_per_subject": -1, "allow_batched": True}
HEADERS: Final = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:0123456789ab0123456789ab\r\n\r\n"
PAYLOAD: Final = bytes(128)
WINDOW: Final = 200
"""Messages without an acknowledgement, and held records: of ten clients, twenty each."""
CLIENTS: Final = 10
BATCH: Final = 10
"""Messages of a fast batch for each acknowledgement."""


class NobodyListens(Exception):
    """No server has the stream of a subject yet."""


class Connection:
    """A NATS connection that asks and counts answers."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((peers.HOST, port))
        self._file = self._socket.makefile("rb")
        self.send(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB answer.> 1\r\n')

    def close(self) -> None:
        """End it."""
        self._file.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Write frames."""
        self._socket.sendall(data)

    def answer(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            NobodyListens: nats-server says so.
            RuntimeError: it is an error.
        """
        while True:
            words = self._file.readline().split()
            if words[0] == b"PING":
                self.send(b"PONG\r\n")
            elif words[0] in (b"MSG", b"HMSG"):
                data = self._file.read(int(words[-1]) + 2)
                if data.startswith(b"NATS/1.0 503"):
                    raise NobodyListens
                found: dict[str, Any] = json.loads(data)
                if "error" in found or found.get("type") == "err":
                    raise RuntimeError(f"nats-server: {found}")
                return found

    def ask(self, subject: str, **body: object) -> bytes:
        """The frame of a request."""
        data = json.dumps(body).encode()
        return b"PUB %b answer.api %d\r\n%b\r\n" % (f"$JS.API.{subject}".encode(), len(data), data)

    def create(self) -> str:
        """Make a stream; returns its name, with which its subjects begin."""
        name = secrets.token_hex(4)
        self.send(self.ask(f"STREAM.CREATE.{name}", name=name, subjects=[f"{name}.>"], **STREAM))
        self.answer()
        return name


def message(subject: str, reply: str) -> bytes:
    """The frame of a message that is stored."""
    size = len(HEADERS)
    head = f"HPUB {subject} {reply} {size} {size + len(PAYLOAD)}".encode()
    return b"%b\r\n%b%b\r\n" % (head, HEADERS, PAYLOAD)


def one_by_one(nats: Connection, stream: str, count: int) -> None:
    """Each message has its acknowledgement."""
    sent = 0
    for got in range(count):
        more = range(sent, min(count, got + WINDOW))
        if len(more) >= BATCH or len(more) + sent == count:
            nats.send(b"".join(message(f"{stream}.{number % CLIENTS}", f"answer.{number}") for number in more))
            sent += len(more)
        nats.answer()


def in_a_batch(nats: Connection, stream: str, count: int) -> None:
    """An acknowledgement says how far the batch is stored."""
    name = secrets.token_hex(8)
    sent = got = 0
    while got < count:
        frames = []
        while sent < min(count, got + WINDOW):
            sent += 1
            step = 0 if sent == 1 else 2 if sent == count else 1  # begin, append, commit
            reply = f"answer.{name}.{BATCH}.fail.{sent}.{step}.$FI"
            frames.append(message(f"{stream}.{sent % CLIENTS}", reply))
        nats.send(b"".join(frames))
        found = nats.answer()
        got = count if "batch" in found else max(got, int(found["seq"]))


def _held(nats: Connection, stream: str, count: int) -> Iterator[list[int]]:
    for start in range(0, count, WINDOW):
        some = range(start, start + WINDOW)
        nats.send(b"".join(message(f"{stream}.{one % CLIENTS}.{one}", f"answer.{one}") for one in some))
        yield [int(nats.answer()["seq"]) for _ in some]


def hold_and_remove(nats: Connection, stream: str, count: int) -> None:
    """Each record is removed by its sequence."""
    for sequences in _held(nats, stream, count):
        nats.send(b"".join(nats.ask(f"STREAM.MSG.DELETE.{stream}", seq=one, no_erase=True) for one in sequences))
        for _ in sequences:
            nats.answer()


def hold_and_purge(nats: Connection, stream: str, count: int) -> None:
    """The records of each client go together."""
    for sequences in _held(nats, stream, count):
        last = max(sequences) + 1
        some = [{"filter": f"{stream}.{client}.*", "seq": last} for client in range(CLIENTS)]
        nats.send(b"".join(nats.ask(f"STREAM.PURGE.{stream}", **one) for one in some))
        if sum(int(nats.answer()["purged"]) for _ in some) != len(sequences):
            raise RuntimeError("other records were removed")


WAYS: Final[dict[str, Callable[[Connection, str, int], None]]] = {
    "stored, each with an acknowledgement": one_by_one,
    f"stored in a fast batch, an acknowledgement for each {BATCH}": in_a_batch,
    "held, and removed one by one": hold_and_remove,
    f"held, and removed together with {WINDOW // CLIENTS - 1} others": hold_and_purge,
}


def measure(nats: Connection, pid: int, way: Callable[[Connection, str, int], None], count: int) -> float:
    """Seconds of nats-server's processor time per message."""
    stream = nats.create()
    begun = proc.cpu_seconds(pid)
    way(nats, stream, count)
    return (proc.cpu_seconds(pid) - begun) / count


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storing", description=__doc__)
    parser.add_argument("--count", type=int, default=40_000, metavar="N", help="messages, a multiple of 200 (40000)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="the table has medians over the rounds (5)")
    given = parser.parse_args(arguments)
    if given.count <= 0 or given.count % WINDOW or given.rounds <= 0:
        parser.error(f"--count has to be a multiple of {WINDOW}, and --rounds 1 at least")
    found: dict[str, list[float]] = {title: [] for title in WAYS}
    with peers.running("nats") as broker:
        nats = Connection(broker.nats_port)
        for _ in range(given.rounds):
            for title, way in WAYS.items():
                found[title].append(measure(nats, next(iter(broker.processes.values())), way, given.count))
        nats.close()
    rows = [["a message of 128 bytes", "nats-server, µs"]]
    for title, values in found.items():
        rows.append([title, f"{sorted(values)[len(values) // 2] * 1e6:.1f}"])
    print(f"{machine(['nats'])}\n\n" + "\n".join(table(rows)))


if __name__ == "__main__":
    main()
