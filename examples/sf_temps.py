# SPDX-License-Identifier: Apache-2.0
"""A year of hourly temperatures, reading by reading, to a subscriber that may be killed at any moment.

Three commands, each a process of its own; README.md beside this file says how to run them:

    publish     sends the data set ``sf-temps`` of the package vega_datasets with paho-mqtt
    subscribe   a durable subscriber that appends what it receives to a history file
    check       compares a history with the data set

The subscriber speaks MQTT through ``mqtt_nats.codec``, because exactly-once delivery to a process that can
die needs what paho-mqtt keeps in memory: the packet identifiers of QoS 2 messages that the broker has not
released yet. Here they are part of the history file.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mqtt_nats.codec import (
    PINGREQ,
    AckRun,
    ClientDecoder,
    Connack,
    Connect,
    Limits,
    Packet,
    Publish,
    PublishRun,
    Suback,
    Subscribe,
    Subscription,
    ack_bytes,
    encode,
)

KEEPALIVE = 10  # seconds
RETRY = 0.2  # seconds between two attempts to connect
PUBACK, PUBREC, PUBREL, PUBCOMP = 4, 5, 6, 7

LIMITS = Limits(
    max_packet_size=1 << 20, connect_packet_size=1 << 16, max_topic_levels=128, max_filters=1, max_user_properties=0
)


class Address(NamedTuple):
    """Where a gateway listens."""

    host: str
    port: int


def addresses(text: str) -> list[Address]:
    """Read ``HOST:PORT[,HOST:PORT...]``; ValueError when it is something else."""
    found = []
    for part in text.split(","):
        host, _, port = part.rpartition(":")
        found.append(Address(host or "127.0.0.1", int(port)))
    return found


def readings(count: int) -> Iterator[dict[str, Any]]:
    """The first ``count`` readings: ``sequence`` from 0, ``time`` (local, ISO 8601), ``temperature`` (°F)."""
    from vega_datasets import local_data

    with open(local_data.sf_temps.filepath, newline="", encoding="utf-8") as file:
        for sequence, row in enumerate(csv.DictReader(file)):
            if sequence == count:
                return
            when = row["date"].replace("/", "-").replace(" ", "T")
            yield {"sequence": sequence, "time": when, "temperature": float(row["temp"])}


# -- the publisher ------------------------------------------------------------------------------------------


def publish(options: argparse.Namespace) -> int:
    """Publish readings; every one is acknowledged when this returns.

    One thread does everything, and publishes only while CONNACK has been received: what paho-mqtt has in
    flight is then sent again, in order and with DUP, before anything new.
    """
    import paho.mqtt.client as paho
    from paho.mqtt.enums import CallbackAPIVersion

    client = paho.Client(CallbackAPIVersion.VERSION2, options.client_id, clean_session=False)
    client.max_inflight_messages_set(options.window)
    in_flight: dict[int, int] = {}  # packet identifier: sequence of the reading
    resent: set[int] = set()
    connections = 0

    def connected(*_: Any) -> None:
        nonlocal connections
        connections += 1
        resent.update(in_flight.values())

    def acknowledged(client: paho.Client, userdata: Any, mid: int, reason: Any, properties: Any) -> None:
        in_flight.pop(mid, None)

    client.on_connect = connected
    client.on_publish = acknowledged

    source = readings(options.count)
    reading = next(source, None)
    published = attempts = 0
    due = time.monotonic()
    while reading is not None or in_flight:
        if client.is_connected() or client.socket() is not None:
            client.loop(0.001 if options.rate else 0.02)
        else:
            if not options.qos:
                in_flight.clear()  # what was not sent at QoS 0 is lost
            target = options.gateways[attempts % len(options.gateways)]
            attempts += 1
            try:
                client.connect(target.host, target.port, KEEPALIVE)
            except OSError:
                time.sleep(RETRY)
        while client.is_connected() and reading is not None and len(in_flight) < options.window:
            if options.rate:
                now = time.monotonic()
                if now < due:
                    break
                due = max(due + 1 / options.rate, now - 0.05)  # an outage is not made up for
            info = client.publish(options.topic, json.dumps(reading), options.qos)
            if options.qos or not (info.rc or info.is_published()):
                in_flight[info.mid] = published
            published += 1
            reading = next(source, None)
    client.disconnect()
    while client.socket() is not None:
        client.loop(0.01)
    summary = {"published": published, "connections": connections, "resent": sorted(resent)}
    print(json.dumps(summary))
    return 0


# -- the subscriber -----------------------------------------------------------------------------------------


class History:
    """An append-only file of JSON lines: readings, and which QoS 2 packet identifiers are spoken for.

    A line with ``reading`` is a message; at QoS 2 its ``id`` is spoken for until a line ``released`` has the
    same number: a PUBLISH with such an identifier is a repetition. A line ``new_session`` frees them all.
    """

    def __init__(self, path: Path) -> None:
        self.held: set[int] = set()
        self.sequences: set[int] = set()
        complete = 0
        if path.exists():
            text = path.read_bytes()
            complete = text.rfind(b"\n") + 1  # a killed process may leave half a line
            for line in text[:complete].splitlines():
                self._take(json.loads(line))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._file, complete)
        os.lseek(self._file, 0, os.SEEK_END)
        self._lines: list[str] = []

    def _take(self, entry: dict[str, Any]) -> None:
        if "reading" in entry:
            self.sequences.add(entry["reading"]["sequence"])
            if entry["qos"] == 2:
                self.held.add(entry["id"])
        elif "released" in entry:
            self.held.discard(entry["released"])
        else:
            self.held.clear()

    def add(self, entry: dict[str, Any]) -> None:
        """Append an entry; it is in the file after the next :meth:`sync`."""
        self._take(entry)
        self._lines.append(json.dumps(entry) + "\n")

    def sync(self) -> None:
        """Return when every entry is on the disk: only then may it be acknowledged."""
        if self._lines:
            data = memoryview("".join(self._lines).encode())
            self._lines.clear()
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)


class Subscriber:
    """A durable MQTT session whose state on this side is a history file."""

    def __init__(self, history: History, options: argparse.Namespace) -> None:
        self._history = history
        self._options = options

    def session(self, address: Address, enough: Callable[[], bool]) -> None:
        """Receive from one gateway until ``enough`` or the connection ends.

        Raises:
            OSError: the connection failed, or the gateway refused it.
        """
        with socket.create_connection(address, timeout=KEEPALIVE / 2) as connection:
            decoder = ClientDecoder(LIMITS, 4)
            connect = Connect(4, self._options.client_id, clean_start=False, keepalive=KEEPALIVE)
            connection.sendall(encode(connect, 4))
            pinged = time.monotonic()
            while not enough():
                data = b""
                try:
                    data = connection.recv(1 << 16)
                    if not data:
                        raise ConnectionError("the gateway has closed the connection")
                except TimeoutError:
                    pass  # nothing to receive
                answer = b"".join([self._handle(packet) for packet in decoder.feed(data)])
                if decoder.error is not None:
                    raise ConnectionError(str(decoder.error))
                if time.monotonic() - pinged >= KEEPALIVE / 2:
                    answer += PINGREQ
                    pinged = time.monotonic()
                self._history.sync()
                if answer:
                    connection.sendall(answer)
            connection.sendall(b"\xe0\0")  # DISCONNECT

    def _handle(self, packet: Packet) -> bytes:
        """What to answer, once the history is on the disk."""
        match packet:
            case Publish(qos=1):
                self._store(packet)
                return ack_bytes(PUBACK, packet.packet_id)
            case Publish(qos=2):
                if packet.packet_id not in self._history.held:
                    self._store(packet)
                return ack_bytes(PUBREC, packet.packet_id)
            case PublishRun():  # QoS 0
                for payload in packet.payloads():
                    self._history.add({"id": 0, "qos": 0, "dup": False, "reading": json.loads(payload)})
                return b""
            case AckRun(kind=6):  # PUBREL
                for identifier in packet.ids:
                    if identifier in self._history.held:
                        self._history.add({"released": identifier})
                return b"".join([ack_bytes(PUBCOMP, identifier) for identifier in packet.ids])
            case Connack():
                if packet.code:
                    raise ConnectionError(f"the gateway refuses the connection with return code {packet.code}")
                if not packet.session_present:
                    self._history.add({"new_session": True})
                return encode(Subscribe(1, (Subscription(self._options.topic, self._options.qos),)), 4)
            case Suback() if packet.codes == (self._options.qos,):
                print(f"subscribed, {len(self._history.sequences)} readings so far", flush=True)
                return b""
            case Suback():
                raise ConnectionError(f"the gateway refuses the subscription: {packet.codes}")
            case _:
                return b""

    def _store(self, packet: Publish) -> None:
        reading = json.loads(packet.payload)
        self._history.add({"id": packet.packet_id, "qos": packet.qos, "dup": packet.dup, "reading": reading})


def subscribe(options: argparse.Namespace) -> int:
    """Receive readings until ``--count`` different ones are in the history."""
    history = History(options.history)
    subscriber = Subscriber(history, options)
    attempts = 0

    def enough() -> bool:
        return len(history.sequences) >= options.count and not history.held

    while not enough():
        try:
            subscriber.session(options.gateways[attempts % len(options.gateways)], enough)
        except OSError as error:
            print(f"not connected: {error}", flush=True)
            time.sleep(RETRY)
        attempts += 1
    return 0


# -- the comparison -----------------------------------------------------------------------------------------


def _entries(path: Path) -> list[dict[str, Any]]:
    """The messages of a history, in the order of their arrival."""
    lines = path.read_bytes() if path.exists() else b""
    entries = [json.loads(line) for line in lines[: lines.rfind(b"\n") + 1].splitlines()]
    return [entry for entry in entries if "reading" in entry]


def compare(path: Path, count: int) -> dict[str, Any]:
    """What a history has more, less or otherwise than the first ``count`` readings of the data set.

    ``repeated`` are readings received again, ``repeated_without_dup`` those of them that came without the DUP
    flag, ``out_of_order`` those whose first copy came after the first copy of a later reading.
    """
    expected = {reading["sequence"]: reading for reading in readings(count)}
    first: dict[int, None] = {}
    repeated, without_dup, late, altered = [], [], [], []
    newest = -1
    for entry in _entries(path):
        reading = entry["reading"]
        sequence = reading["sequence"]
        if reading != expected.get(sequence):
            altered.append(sequence)
        if sequence in first:
            repeated.append(sequence)
            if not entry["dup"]:
                without_dup.append(sequence)
            continue
        first[sequence] = None
        if sequence < newest:
            late.append(sequence)
        newest = max(newest, sequence)
    return {
        "expected": len(expected),
        "received": len(first),
        "lost": [sequence for sequence in expected if sequence not in first],
        "repeated": repeated,
        "repeated_without_dup": without_dup,
        "out_of_order": late,
        "altered": altered,
    }


def check(options: argparse.Namespace) -> int:
    """Print the comparison; 0 when the history keeps the promise of ``--qos``."""
    result = compare(options.history, options.count)
    print(json.dumps(result))
    wrong = result["altered"] + result["out_of_order"]
    if options.qos:
        wrong += result["lost"]
    if options.qos != 1:
        wrong += result["repeated"]
    return 1 if wrong else 0


def _arguments() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--qos", type=int, choices=(0, 1, 2), default=2)
    common.add_argument("--count", type=int, default=8759, help="readings; the data set has 8,759")
    network = argparse.ArgumentParser(add_help=False)
    network.add_argument(
        "--gateways",
        type=addresses,
        default=[Address("127.0.0.1", 1883)],
        metavar="HOST:PORT,...",
        help="gateways, tried in turn (127.0.0.1:1883)",
    )
    network.add_argument("--topic", default="sf/temperature")
    file = argparse.ArgumentParser(add_help=False)
    file.add_argument("--history", type=Path, default=Path("sf-temps.jsonl"), help="file (sf-temps.jsonl)")
    parser = argparse.ArgumentParser(description="A year of hourly temperatures over MQTT.")
    commands = parser.add_subparsers(required=True, metavar="publish | subscribe | check")
    sender = commands.add_parser("publish", parents=[common, network], help="send the data set")
    sender.add_argument("--client-id", default="sf-station")
    sender.add_argument("--window", type=int, default=50, help="messages in flight (50)")
    sender.add_argument("--rate", type=float, default=0.0, help="readings per second (0: as fast as possible)")
    sender.set_defaults(run=publish)
    receiver = commands.add_parser("subscribe", parents=[common, network, file], help="receive it")
    receiver.add_argument("--client-id", default="sf-history")
    receiver.set_defaults(run=subscribe)
    checker = commands.add_parser("check", parents=[common, file], help="compare the history with the data set")
    checker.set_defaults(run=check)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one of the three commands; the exit status."""
    options = _arguments().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
