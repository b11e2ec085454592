# SPDX-License-Identifier: Apache-2.0
"""The load generator as a client of MQTT 5.0: what it sends, what it takes for an answer, and whole runs."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import load, peers, stored
from benchmarks.__main__ import main
from benchmarks.generator.answers import Limits, RefusedError, connack, packet_at, shorten, suback
from benchmarks.generator.clients import Client, LoadError, Loop, Publisher, connect_all
from benchmarks.generator.packets import Batch, DeliveryError, Layout, Verifier, connect, subscribe
from benchmarks.job import Job
from benchmarks.scenarios import select
from tests.benchmarks.test_bench_run import SLOWLY

PROPERTIES = bytes.fromhex("03000161 26000162000163")
ALL_CONNACK = bytes.fromhex(
    "1100000e10 120001 61 13003c 150000 160000 1a000161 1c000161 1f000161 210005 220020 2401 2500 2600016200 0163 "
    "2700001000 2800 2900 2a00"
)


def test_connect_and_subscribe_bytes() -> None:
    """[MQTT-3.1.2-2] (5.0): level 5; properties behind the keep-alive and before the filters."""
    assert connect("ab", clean=True, keep_alive=10, version=5) == bytes.fromhex(
        "100f 00044d515454 05 02 000a 00 00026162"
    )
    with_expiry = connect("ab", clean=False, version=5, session_expiry=3600)
    assert with_expiry[8:] == bytes.fromhex("05 00 0258 05 11 00000e10 00026162")
    assert subscribe("a/+", 1, 5) == bytes.fromhex("8209 0001 00 0003 612f2b 01")


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("properties", [b"", PROPERTIES])
def test_publish_bytes(qos: int, properties: bytes) -> None:
    packet = bytes(Batch(Layout("a/b", 32, qos, properties), 7, 1).fill(8, 1, 0))
    packet_id = bytes.fromhex("0009") if qos else b""
    rest = (
        bytes.fromhex("0003612f62")
        + packet_id
        + bytes([len(properties)])
        + properties
        + bytes.fromhex("0000000700000008")
    )
    assert packet[2 : 2 + len(rest)] == rest
    assert packet[:2] == bytes((0x30 | qos << 1, len(packet) - 2))
    assert len(packet) == 2 + len(rest) + 32 - 8


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("offset", range(len(PROPERTIES) + 1))
def test_other_properties_are_noticed(count: int, offset: int) -> None:
    layout = Layout("a/b", 32, 1, PROPERTIES)
    data = bytearray(Batch(layout, 0, count).fill(0, count, 0))
    Verifier(layout).take(bytearray(data), 0, count)
    data[layout.source - len(PROPERTIES) - 1 + offset] ^= 1
    with pytest.raises(DeliveryError, match=r"properties .* instead of 0b 03"):
        Verifier(layout).take(data, 0, count)


def test_connack_with_every_property() -> None:
    body = bytes([1, 0, len(ALL_CONNACK)]) + ALL_CONNACK
    assert connack(0x20, body, 5) == (True, Limits(receive_maximum=5, maximum_qos=1, packet_size=4096, keep_alive=60))
    assert connack(0x20, bytes(3), 5) == (False, Limits())
    assert connack(0x20, b"\x01\x00", 4) == (True, Limits())
    for cut in range(1, len(body)):
        with pytest.raises(RefusedError):
            connack(0x20, body[:cut], 5)


@pytest.mark.parametrize(
    ("kind", "body", "version"),
    [
        (0x20, "0001", 4),  # unacceptable protocol version
        (0x20, "0001", 5),  # the same from a broker that does not know 5.0
        (0x20, "008400", 5),
        (0x20, "0000", 5),
        (0x20, "000000", 4),
        (0x20, "00000000", 5),
        (0x20, "0000020bff", 5),
        (0x20, "00000321ffff00", 5),
        (0xE0, "8b00", 5),
    ],
)
def test_connection_refused(kind: int, body: str, version: int) -> None:
    with pytest.raises(RefusedError):
        connack(kind, bytes.fromhex(body), version)


def test_subscription_granted_or_not() -> None:
    suback(0x90, bytes.fromhex("0001 01"), 4, 1)
    suback(0x90, bytes.fromhex("0001 00 01"), 5, 1)
    suback(0x90, bytes.fromhex("0001 04 1f000161 02"), 5, 2)
    for kind, body, version in ((0x90, "000187", 4), (0x90, "00010087", 5), (0x90, "00020001", 5), (0xE0, "8200", 5)):
        with pytest.raises(RefusedError, match="subscription refused"):
            suback(kind, bytes.fromhex(body), version, 1)


def test_packets_arrive_in_parts() -> None:
    data = b"\x90\x83\x01" + bytes(131)
    for end in range(len(data)):
        assert packet_at(data, 0, end) is None
    assert packet_at(data + b"\x20", 0, len(data) + 1) == (0x90, bytes(131), len(data))
    with pytest.raises(DeliveryError, match="no length"):
        packet_at(b"\x20\xff\xff\xff\xff\x01", 0, 6)


def shortened(text: str) -> tuple[str, int]:
    """The acknowledgements in 4 bytes each, and how many bytes are left."""
    data = bytearray.fromhex(text)
    end, used = shorten(data, len(data))
    return data[:end].hex(" ", 4), len(data) - used


def test_acknowledgements_of_any_length() -> None:
    assert shortened("40020001 40020002 4002") == ("40020001 40020002", 2)
    assert shortened("40020001 4003000210 4004000300 00 5002") == ("40020001 40020002 40020003", 2)
    assert shortened("4009000100 05 1f00026f6b 700200") == ("40020001", 3)
    assert shortened("") == ("", 0)


@pytest.mark.parametrize("text", ["40020001 4003000297", "e0018b", "40020001 e0018e", "d000 40020001", "400100"])
def test_other_answers_are_errors(text: str) -> None:
    data = bytearray.fromhex(text)
    with pytest.raises(DeliveryError):
        shorten(data, len(data))


@contextmanager
def broker(answer: str) -> Iterator[tuple[str, int]]:
    """Address of a broker that answers one CONNECT with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as pool:

        def answer_one() -> None:
            client, _ = server.accept()
            with client:
                assert client.recv(100)
                client.sendall(bytes.fromhex(answer))
                while client.recv(65536):
                    pass

        answering = pool.submit(answer_one)
        yield server.getsockname()[:2]
        answering.result(10)


@pytest.mark.parametrize(("connack", "sent"), [("200300 0000", 20), ("200600 0003210003", 3)])
def test_receive_maximum_is_obeyed(connack: str, sent: int) -> None:
    """[MQTT-3.3.4-7] (5.0)."""
    loop = Loop()
    with broker(connack) as address:
        (greeting,) = connect_all(loop, address, [Client("a", version=5)], timeout=10)
        layout = Layout("a/b", 32, 1, b"")
        publisher = Publisher(greeting, layout, 0, [], window=20, lag=20, stamp_every=1)
        assert [publisher.send_some(20), publisher.send_some(20)] == [sent, 0]
        loop.close()


@pytest.mark.parametrize("connack", ["200500 00022400", "200800 00052700000020"])
def test_what_a_broker_does_not_take_is_not_sent(connack: str) -> None:
    """[MQTT-3.2.2-11], [MQTT-3.2.2-15] (5.0)."""
    loop = Loop()
    with broker(connack) as address:
        (greeting,) = connect_all(loop, address, [Client("a", version=5)], timeout=10)
        with pytest.raises(LoadError, match="takes"):
            Publisher(greeting, Layout("a/b", 32, 1, b""), 0, [], window=20, lag=20, stamp_every=1)
        loop.close()


def test_a_keep_alive_that_would_need_pings_is_refused() -> None:
    loop = Loop()
    with broker("200600 000313003c") as address:
        with pytest.raises(LoadError, match="keep-alive of 60 s"):
            connect_all(loop, address, [Client("a", version=5)], timeout=10)
        loop.close()


FLOWS = ["pairs10-q1-durable", "pairs10-q2", "pairs10-q2-durable", "fanin50-q1", "latency-q1", "pairs10-q1-properties"]


@pytest.mark.processes
@pytest.mark.parametrize("name", FLOWS)
def test_flows_with_the_gateway(name: str) -> None:
    with peers.running("ours") as broker:
        (scenario,) = select([name], version=5)
        job = Job(name, peers.HOST, broker.port, seconds=0.3, warmup=0.1, processes=broker.processes, version=5)
        scenario = replace(scenario, rate=scenario.rate and SLOWLY)
        result = (load.latency if scenario.kind == "latency" else load.throughput)(job, scenario)
    assert isinstance(result["count"], int)
    assert result["count"] > 0


@pytest.mark.processes
def test_drain_needs_a_session_that_has_not_expired() -> None:
    with peers.running("ours") as broker:
        (scenario,) = select(["drain"])
        job = Job("drain", peers.HOST, broker.port, processes=broker.processes, clients=300, version=5)
        assert stored.drain(job, scenario)["count"] == 300


@pytest.mark.processes
def test_command_puts_3_1_1_beside_5_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.json"
    only = "pairs10-q0,pairs10-q0-properties"
    times = ["--rounds", "1", "--seconds", "0.2", "--warmup", "0.1"]
    assert main(["--v5", "--peers", "ours,nats,relay", "--only", only, *times, "--json", str(results)]) == 0
    output = capsys.readouterr().out
    assert "skipped: nats (it does not speak MQTT 5.0)" in output
    rows = [[text.strip() for text in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("| ")]
    assert rows[0] == ["scenario", "unit", "ours", "ours 3.1.1", "relay", "ours / ours 3.1.1", "ours / relay"]
    assert float(rows[1][5]) > 0.01
    assert [rows[2][3], rows[2][5]] == ["–", "–"]
    runs = json.loads(results.read_text())
    for name, column in (("pairs10-q0", "ours"), ("pairs10-q0", "ours 3.1.1"), ("pairs10-q0-properties", "ours")):
        assert runs[name][column][0]["count"] > 0


def test_scenarios_of_5_0_only() -> None:
    names = {each.name for each in select([], version=5)}
    assert {"pairs10-q0", "pairs10-q1-properties"} <= names
    with pytest.raises(ValueError, match="no scenario is called 'pairs10-q1-properties'"):
        select(["pairs10-q1-properties"])
