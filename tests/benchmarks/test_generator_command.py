# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.generator`` against a gateway: each shape, and what it says when it is not let in."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks.generator.bench import Plan, _Run
from benchmarks.generator.command import bench
from benchmarks.generator.packets import DeliveryError
from mqtt_nats.access.passwords import set_password
from mqtt_nats.cli import command
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.process import LoggedProcess
from tests.harness.raw import Raw


def run(gateway: Gateway, *arguments: str) -> Result:
    return CliRunner().invoke(bench, [f"127.0.0.1:{gateway.port}", "--seconds", "0.5", *arguments])


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize(("publishers", "subscribers"), [(3, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("v5", [False, True], ids=["3.1.1", "5.0"])
def test_shapes(gateway: Gateway, qos: int, publishers: int, subscribers: int, v5: bool) -> None:
    arguments = ["--publishers", str(publishers), "--subscribers", str(subscribers), "--qos", str(qos), "--json"]
    done = run(gateway, *arguments, *(["--v5"] if v5 else []))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["plan"]["qos"] == qos
    assert "password" not in found["plan"]
    each = subscribers if publishers == 1 else 1
    assert 0 < found["delivered"] <= found["published"] * each
    assert 0.5 <= found["seconds"] < 5


def test_a_rate_and_what_people_read(gateway: Gateway) -> None:
    done = run(gateway, "--publishers", "2", "--subscribers", "2", "--rate", "400", "--qos", "1", "--seconds", "3")
    assert done.exit_code == 0, done.output
    published = re.search(r"^published +([\d,]+)/s$", done.stdout, re.MULTILINE)
    assert published is not None
    assert 100 <= int(published[1].replace(",", "")) <= 450
    assert re.search(
        r"^delay +p50 [\d.,]+ ms, p90 [\d.,]+ ms, p99 [\d.,]+ ms, max [\d.,]+ ms$", done.stdout, re.MULTILINE
    )
    assert "each came once and in order" in done.stdout
    assert re.search(r"^ +[123] s +\d+/s$", done.stderr, re.MULTILINE)


def test_durable_sessions_are_ended(gateway: Gateway, nats_server: NatsServer) -> None:
    done = run(gateway, "--durable", "--qos", "2", "--publishers", "2", "--subscribers", "2")
    assert done.exit_code == 0, done.output
    arguments = ["ctl", "--nats", nats_server.url, "sessions", "list", "--state", "disconnected", "--json"]
    listed = CliRunner().invoke(command, [*arguments, "--match", "mqtt-nats-bench-*"])
    assert json.loads(listed.stdout)["sessions"] == []


def test_users(nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    set_password(tmp_path / "users", "ann", "secret")
    gateway = gateway_factory(nats_server, "--password-file", str(tmp_path / "users"))
    done = run(gateway, "--user", "ann", "--password", "secret", "--publishers", "1", "--subscribers", "1")
    assert done.exit_code == 0, done.output
    for more in ([], ["--v5"]):
        done = run(gateway, "--user", "ann", "--password", "wrong", *more)
        assert done.exit_code == 1
        pattern = r"generator: mqtt-nats-bench-\S+: connection refused: bad user name or password \(.*\)\n"
        assert re.fullmatch(pattern, done.stderr)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--publishers", "3", "--subscribers", "2"], "as many publishers as subscribers, or one of either"),
        (["--qos", "3"], "3 is not in the range"),
        (["--payload", "16"], "16 is not in the range"),
        (["--topic", "a/#"], "'a/#' is no topic"),
        (["--topic", ""], "'' is no topic"),
    ],
)
def test_bad_input(gateway: Gateway, arguments: list[str], text: str) -> None:
    done = run(gateway, *arguments)
    assert done.exit_code == 2
    assert text in done.stderr


@pytest.mark.parametrize("address", ["1883", "localhost", "localhost:0", ":1883", "localhost:65536", "localhost:mqtt"])
def test_addresses(address: str) -> None:
    done = CliRunner().invoke(bench, [address])
    assert done.exit_code == 2
    assert "expected HOST:PORT" in done.stderr


def test_a_broker_at_an_ipv6_address(nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    """And a name with addresses of both kinds, where the broker listens at that of IPv4 only."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            port = server.getsockname()[1]
    except OSError:
        pytest.skip("there is no IPv6 here")
    config = tmp_path / "config.toml"
    config.write_text(f'[[listeners]]\nlisten = "[::1]:{port}"\n')
    gateway = gateway_factory(nats_server, "--config", str(config))
    for address in (f"[::1]:{port}", f"localhost:{gateway.port}"):
        done = CliRunner().invoke(bench, [address, "--seconds", "0.2", "--publishers", "1", "--subscribers", "1"])
        assert done.exit_code == 0, done.output
        assert "each came once and in order" in done.stdout


@pytest.mark.processes
def test_nobody_listens(tmp_path: Path) -> None:
    """As a program of its own."""
    process = LoggedProcess("bench", tmp_path / "bench.log")
    process.start([sys.executable, "-m", "benchmarks.generator", "127.0.0.1:1", "--seconds", "1"])
    assert process.wait() == 1
    assert "Connection refused" in process.text


def test_what_is_missing_is_an_error(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that was never sent is one that has not come."""
    monkeypatch.setattr("benchmarks.generator.bench.SETTLED", 1.0)
    run = _Run(Plan("127.0.0.1", gateway.port, 1, 1, qos=0))
    try:
        run.join()
        run.go(0.2, None)
        run.publishers[0].sent += 1
        with pytest.raises(DeliveryError, match=r"1 of .* deliveries are missing"):
            run.settle()
    finally:
        run.close()
    Raw.connected(gateway.port, "still-there").close()


def test_a_run_lasts_until_something_arrives(gateway: Gateway) -> None:
    """A gateway that gets no processor time for as long as the run has no rate of zero."""
    run = _Run(Plan("127.0.0.1", gateway.port, 1, 1, qos=0))
    try:
        run.join()
        os.kill(gateway.pid, signal.SIGSTOP)
        timer = threading.Timer(0.5, os.kill, (gateway.pid, signal.SIGCONT))
        timer.start()
        try:
            run.go(0.1, None)
        finally:
            timer.join()
        assert run.delivered > 0
        run.settle()
    finally:
        run.close()


def test_a_broker_that_delivers_nothing(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.generator.bench.SETTLED", 0.2)
    run = _Run(Plan("127.0.0.1", gateway.port, 1, 1, qos=0))
    try:
        run.join()
        os.kill(gateway.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeliveryError, match=r"^nothing has arrived in 0\.3 s$"):
                run.go(0.1, None)
        finally:
            os.kill(gateway.pid, signal.SIGCONT)
    finally:
        run.close()
