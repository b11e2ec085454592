# SPDX-License-Identifier: Apache-2.0
"""The benchmark command from end to end, against a process that hands on bytes and against a real broker."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import load, peers, stored
from benchmarks.__main__ import main
from benchmarks.generator.packets import DeliveryError
from benchmarks.job import Job
from benchmarks.scenarios import select

pytestmark = pytest.mark.processes

SLOWLY = 300
"""Messages per second where a scenario has a rate: other tests run at the same time."""


def test_command_measures_and_reports(tmp_path: Path) -> None:
    report, results = tmp_path / "docs" / "report.md", tmp_path / "results.json"
    arguments = [
        "--peers",
        "nats,relay",
        "--only",
        "pairs10-q0",
        "--rounds",
        "2",
        "--seconds",
        "0.2",
        "--warmup",
        "0.1",
    ]
    assert main([*arguments, "--report", str(report), "--json", str(results)]) == 0
    runs = json.loads(results.read_text())["pairs10-q0"]
    for peer in ("nats", "relay"):
        assert [run["metrics"]["rate"] > 0 and run["count"] > 0 for run in runs[peer]] == [True, True]
    text = report.read_text()
    assert "nats-server: v2." in text
    assert "10 pairs, batched, QoS 0" in text
    assert "Void" not in text


@pytest.mark.parametrize("name", ["pairs10-q1", "pairs10-q1-durable"])
def test_least_gateway_in_pure_python(name: str) -> None:
    with peers.running("least") as broker:
        (scenario,) = select([name])
        job = Job(name, peers.HOST, broker.port, seconds=0.3, warmup=0.1, processes=broker.processes)
        result = load.throughput(job, scenario)
    assert isinstance(result["count"], int)
    assert result["count"] > 0


@pytest.mark.parametrize("name", ["pairs10-q1-durable", "pairs10-q2", "fanin50-q1", "latency-q1"])
def test_flows_with_a_broker(name: str) -> None:
    with peers.running("nats") as broker:
        (scenario,) = select([name])
        job = Job(name, peers.HOST, broker.port, seconds=0.3, warmup=0.1, processes=broker.processes)
        scenario = replace(scenario, rate=scenario.rate and SLOWLY)
        result = (load.latency if scenario.kind == "latency" else load.throughput)(job, scenario)
    assert isinstance(result["count"], int)
    assert result["count"] > 0


@pytest.mark.parametrize("name", ["from-nats", "to-nats", "split-q1"])
def test_nats_clients_and_two_servers(name: str) -> None:
    """Each side where it should be: the other server, or NATS, is not given where it is not needed."""
    (scenario,) = select([name])
    with peers.running("ours", split=scenario.split) as broker:
        job = Job(name, peers.HOST, broker.port, seconds=0.3, warmup=0.1, processes=broker.processes)
        if scenario.split:
            job = replace(job, subscribers_port=broker.other_port)
        else:
            job = replace(job, nats_port=broker.nats_port)
        result = load.throughput(job, scenario)
        assert len(broker.processes) == (4 if scenario.split else 2)
    assert isinstance(result["count"], int)
    assert result["count"] > 0


@pytest.mark.parametrize("version", [4, 5])
def test_retained_messages(version: int) -> None:
    with peers.running("ours") as broker:
        (scenario,) = select(["retained"])
        job = Job("retained", peers.HOST, broker.port, processes=broker.processes, clients=3000, version=version)
        result = stored.retained(job, scenario)
    assert result["count"] == 3000
    assert isinstance(result["metrics"], dict)
    assert set(result["metrics"]) == {"rate", "growth", "growth nats-server", "growth gateway"}


def test_missing_deliveries_make_the_result_void(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs that share a topic get each other's messages; the relay knows no wildcards, so fan-in gets nothing."""
    monkeypatch.setattr(load, "DRAIN_TIMEOUT", 0.2)
    monkeypatch.setattr(load.Traffic, "topic", staticmethod(lambda publisher: f"bench/{publisher // 2 * 2:05}"))
    (scenario,) = select(["pairs10-q0"])
    with peers.running("relay") as broker, pytest.raises(DeliveryError, match="went to the wrong subscriber"):
        load.throughput(Job(scenario.name, peers.HOST, broker.port, seconds=0.2, warmup=0.1), scenario)
    (scenario,) = select(["fanin50-q0"])
    with peers.running("relay") as broker, pytest.raises(DeliveryError, match=r"^nothing has arrived in 0\.[34] s$"):
        load.throughput(Job(scenario.name, peers.HOST, broker.port, seconds=0.2, warmup=0.1), scenario)


def test_a_window_lasts_until_something_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that gets no processor time for as long as a window has no rate of zero; what is missing then, is."""
    (scenario,) = select(["pairs10-q0"])
    with peers.running("relay") as broker:
        (pid,) = broker.processes.values()
        traffic = load.Traffic(Job(scenario.name, peers.HOST, broker.port), scenario)
        traffic.loop.ready.update(traffic.publishers)
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
        timer.start()
        try:
            assert traffic.flow(0.1, lambda: 0.05) > 0
            traffic.settle()
            monkeypatch.setattr(load, "DRAIN_TIMEOUT", 0.2)
            traffic.publishers[0].sent += 1
            with pytest.raises(DeliveryError, match=r" 1 of [0-9]+ deliveries are missing"):
                traffic.settle()
        finally:
            traffic.loop.close()
            timer.join()


def test_peer_that_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    command = "python -c 'print(1); raise SystemExit(\"no such thing\")'"
    assert (
        main(["--peers", "ours,relay", "--only", "pairs10-q0", "--rounds", "1", "--seconds", "0.1", "--ours", command])
        == 0
    )
    assert "skipped: ours (gateway ended with code 1: 1 / no such thing)" in capsys.readouterr().out
