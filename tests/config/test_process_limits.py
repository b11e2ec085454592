# SPDX-License-Identifier: Apache-2.0
"""Open files: whether there are enough of them for what may connect, and the standard ones."""

import resource
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from mqtt_nats.config import process_limits
from mqtt_nats.config.process_limits import BESIDES, memory_bytes, warn_of_few, within_process
from mqtt_nats.config.settings import Settings
from tests.conftest import GatewayFactory
from tests.harness.nats import ROOT, NatsServer
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually, free_port


def test_fewer_open_files_than_connections(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """Said once, also by several workers, and the gateway starts."""
    gateway = gateway_factory(nats_server, "--max-connections", str(2**31 - 1), "--workers", "2")
    (line,) = [line for line in gateway.log.splitlines() if " WARNING " in line]
    assert "max_connections is 2147483647" in line
    assert f"but the limit is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}: " in line
    assert "Raise the limit (LimitNOFILE" in line


@pytest.mark.parametrize(
    ("allowed", "most", "warned"),
    [
        (1024, None, False),
        (1024, 1024 - BESIDES, False),
        (1024, 1025 - BESIDES, True),
        (resource.RLIM_INFINITY, 10**6, False),
    ],
)
def test_when_that_is_said(
    allowed: int, most: int | None, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, allowed))
    warn_of_few(Settings(max_connections=most))
    assert len(caplog.records) == warned


GIB = 1024**3


@pytest.mark.parametrize(
    ("files", "memory", "workers", "connections", "rate"),
    [
        (1024, 8 * GIB, 1, 1024 - BESIDES, 100.0),
        (20_000, 8 * GIB, 1, 20_000 - BESIDES, 2000.0),
        (resource.RLIM_INFINITY, 8 * GIB, 1, 131_072, 2000.0),
        (resource.RLIM_INFINITY, 8 * GIB, 4, 32_768, 2000.0),
        (1 << 20, GIB // 2, 1, 8192, 8192 / 9),
        (100, GIB, 1, 1, 100.0),
    ],
)
def test_limits_that_follow_from_the_process(
    files: int, memory: int, workers: int, connections: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    monkeypatch.setattr(process_limits, "memory_bytes", lambda: memory)
    found = within_process(Settings(workers=workers))
    assert found.max_connections == connections
    assert found.connect_rate == pytest.approx(rate)
    assert found.max_subscriptions_per_gateway == max(10_000, memory // workers // 4 // 2048)
    assert within_process(Settings(max_subscriptions_per_gateway=9)).max_subscriptions_per_gateway == 9
    given = Settings(max_connections=7, connect_rate=3, workers=workers)
    assert within_process(given).max_connections == min(7, connections)
    assert within_process(given).connect_rate == 3
    room = 6000 if files == resource.RLIM_INFINITY else max(1, files - BESIDES)
    assert within_process(Settings(max_connections=6000)).max_connections == min(6000, room)


@pytest.mark.parametrize(("text", "limit"), [("1000000\n", 1_000_000), ("max\n", None), ("", None)])
def test_the_memory_of_a_container(
    text: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "memory.max"
    file.write_text(text, encoding="ascii")
    monkeypatch.setattr(process_limits, "CGROUP_FILES", (file, tmp_path / "missing"))
    physical: int = psutil.virtual_memory().total
    assert memory_bytes() == (limit or pytest.approx(physical, rel=0.01))


@pytest.mark.processes
def test_the_soft_limit_of_open_files_is_raised() -> None:
    """As far as the hard one allows; a system with a limit of its own gets less."""
    code = (
        "import resource; from mqtt_nats.config import process_limits as found;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 900)); found.raise_open_files();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)); found.raise_open_files();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["(900, 900)"] * 2


def test_clients_that_there_are_no_descriptors_for(nats_server: NatsServer) -> None:
    """More are let in than `max_connections` says only where there is room: administrators get in all the same."""
    port, admin = free_port(), free_port()
    limit = BESIDES + 20
    listen = ["--listen", f"127.0.0.1:{port}", "--admin-listen", f"127.0.0.1:{admin}", "--nats", nats_server.url]
    serve = [sys.executable, "-m", "mqtt_nats", "serve", *listen, "--max-connections", "1000", "--connect-rate", "1000"]
    command = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *serve]
    pipe = subprocess.PIPE
    gateway = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    clients: list[socket.socket] = []
    try:
        eventually(partial(listens, port))
        eventually(partial(listens, admin))
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(limit)]
        refused = sum(closed(one) for one in clients)
        assert refused >= limit - 20
        answer = httpx.get(f"http://127.0.0.1:{admin}/healthz", timeout=10)
        assert answer.status_code == 200
    finally:
        for one in clients:
            one.close()
        gateway.terminate()
        _, said = gateway.communicate(timeout=60)
    assert f"the limit is {limit}: at most 20 clients can connect" in said


def closed(client: socket.socket) -> bool:
    """Whether the gateway has closed a connection before anything was sent."""
    client.settimeout(0.2)
    try:
        return not client.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True


FULL = Path("/dev/full")


def redirected(redirection: str, *arguments: str) -> subprocess.Popen[str]:
    """The command, as a shell starts it."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "mqtt_nats", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("line", ["check-config", "completion bash", "ctl streams list"])
def test_standard_output_is_full(nats_server: NatsServer, gateway_factory: GatewayFactory, line: str) -> None:
    arguments = line.split()
    if arguments[0] == "ctl":
        gateway_factory(nats_server)  # makes the streams
        arguments = ["ctl", "--nats", nats_server.url, *arguments[1:]]
    done = redirected(f">{FULL}", *arguments)
    _, said = done.communicate(timeout=60)
    assert (done.returncode, said) == (1, "mqtt-nats: standard output cannot be written: No space left on device\n")


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_descriptors_that_are_closed(nats_server: NatsServer, closed: str) -> None:
    """A gateway serves and ends all the same."""
    port = free_port()
    gateway = redirected(closed, "serve", "--listen", f"127.0.0.1:{port}", "--nats", nats_server.url)
    try:
        eventually(partial(listens, port))
        Raw5.open(port).close()
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(30) == 0
    finally:
        gateway.kill()
        gateway.communicate()
