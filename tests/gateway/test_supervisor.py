# SPDX-License-Identifier: Apache-2.0
"""``serve --workers``: several gateways on one port, and what becomes of them when one dies, or their supervisor."""

import asyncio
import errno
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.supervisor import READY, Worker, reserve
from tests.conftest import GatewayFactory
from tests.harness import raw5
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import aeventually, eventually, free_port

CLIENTS = 60
KEPT = prop(SESSION_EXPIRY, 600)


def workers(gateway: Gateway) -> dict[int, psutil.Process]:
    """The worker processes, by process id."""
    children = psutil.Process(gateway.pid).children(recursive=True)
    return {one.pid: one for one in children if "mqtt_nats.gateway.worker" in one.cmdline()}


def gone(pids: set[int]) -> Callable[[], bool]:
    return lambda: not any(psutil.pid_exists(pid) for pid in pids)


@pytest.fixture
def gateway(nats_server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(nats_server, "--workers", "2", "--gateway-lease", "2")


@pytest.fixture
def clients(gateway: Gateway) -> Iterator[list[Raw5]]:
    """Durable sessions; which worker each is with is up to the kernel."""
    found = [Raw5.open(gateway.port, f"worker-client-{number}", KEPT) for number in range(CLIENTS)]
    yield found
    for client in found:
        client.close()


def served_by(gateway: Gateway, pid: int) -> int:
    """Connections of MQTT clients that a worker has."""
    found = workers(gateway)[pid].net_connections()
    return sum(one.laddr.port == gateway.port and one.status == "ESTABLISHED" for one in found)


def test_a_dead_worker(gateway: Gateway, clients: list[Raw5]) -> None:
    """Its clients find another at once, with everything; a new one takes its place."""
    first, second = workers(gateway)
    assert served_by(gateway, first) + served_by(gateway, second) == CLIENTS
    assert min(served_by(gateway, first), served_by(gateway, second)) >= CLIENTS // 10
    with Raw5.open(gateway.port) as publisher:
        for number, client in enumerate(clients):
            assert client.subscribed((f"workers/{number}", 1)) == (1,)
            publisher.deliver(f"workers/{number}", b"before")
            client.receive_message(b"before")
    os.kill(first, signal.SIGKILL)
    eventually(gone({first}))  # until then the kernel still deals connections out to it
    back = 0
    for number, client in enumerate(clients):
        try:
            client.quiet()
        except (AssertionError, OSError):
            back += 1
            with Raw5.open(gateway.port, f"worker-client-{number}", KEPT, clean=False) as again:
                assert again.present
                again.send(raw5.publish(f"workers/{number}", b"after", qos=1))
                while again.expect_one_of(raw5.PUBLISH, raw5.PUBACK) != raw5.PUBACK:
                    pass
    assert CLIENTS // 10 <= back < CLIENTS
    eventually(lambda: len(workers(gateway)) == 2)
    assert first not in workers(gateway)
    assert "was ended by signal 9: it is started again" in gateway.log


def test_stopping(gateway: Gateway, clients: list[Raw5]) -> None:
    """SIGTERM is passed on: each client hears why, and nothing is left."""
    pids = {gateway.pid, *workers(gateway)}
    gateway.process.send(signal.SIGTERM)
    for client in clients:
        client.ended(0x8B)
    assert gateway.wait() == 0
    assert gone(pids)()


def test_a_dead_supervisor(gateway: Gateway, clients: list[Raw5]) -> None:
    """Workers end with it, in good order."""
    pids = set(workers(gateway))
    gateway.process.send(signal.SIGKILL)
    gateway.wait()
    for client in clients:
        client.ended(0x8B)
    eventually(gone(pids))


def test_a_second_signal(gateway: Gateway, nats_server: NatsServer) -> None:
    """Cuts it short, for the workers too: NATS does not answer, so they cannot end in good order."""
    pids = set(workers(gateway))
    with Raw5.open(gateway.port, "cut-short", KEPT) as client:
        nats_server.pause()
        gateway.process.send(signal.SIGTERM)
        client.ended(0x8B)
    try:
        gateway.process.send(signal.SIGTERM)
        assert gateway.wait() == 128 + signal.SIGTERM
        eventually(gone(pids))
    finally:
        nats_server.resume()


def test_workers_that_cannot_start(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory("nats://127.0.0.1:1", "--workers", "2", start=False)
    gateway.launch()
    assert gateway.wait() == 1
    (line,) = gateway.log.splitlines()
    assert line.startswith("mqtt-nats: cannot connect to nats-server at nats://127.0.0.1:1")


NOISY = """
from mqtt_nats.hooks import MESSAGE_PUBLISH
from mqtt_nats.plugins import Plugin

class Noisy(Plugin):
    async def load(self):
        print("noisy is loaded", flush=True)
        self.gateway.on(MESSAGE_PUBLISH, self.see)

    def see(self, event, message):
        print("noisy saw", message.topic, "x" * 20_000, flush=True)
"""


def test_a_plugin_that_prints(nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    """Neither does the supervisor take that for an answer, nor does the worker wait for somebody to read it."""
    about = tmp_path / "noisy-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[mqtt_nats.plugins]\nnoisy = noisy:Noisy\n")
    (tmp_path / "noisy.py").write_text(NOISY)
    paths = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = {"PYTHONPATH": paths, "MQTT_NATS_PLUGINS": '{"noisy": {}}'}
    gateway = gateway_factory(nats_server, "--workers", "2", env=env)
    with Raw5.open(gateway.port) as client:
        for _ in range(40):  # more than a pipe holds
            client.deliver("noisy", b"x")
    eventually(lambda: gateway.log.count("noisy saw noisy") == 40)
    assert gateway.log.count("noisy is loaded") == 2


@pytest.mark.processes
async def test_a_worker_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That is a failed start, which is tried again, and nothing that ends the others."""
    worker = Worker(1, Settings(), "")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "nothing"))
        with pytest.raises(StartupError, match=r"worker 1 cannot be started: .*No such file"):
            await worker.start()
        patch.setattr(sys, "executable", shutil.which("false"))
        with pytest.raises(StartupError, match="worker 1 ended with status 1 before it was ready"):
            await worker.start()
    failures = [OSError(errno.EAGAIN, "nothing to be had"), RuntimeError("the handler is closed")]

    async def begin() -> str:
        if failures:
            raise failures.pop(0)
        return READY

    monkeypatch.setattr(worker, "_begin", begin)
    monkeypatch.setattr("mqtt_nats.gateway.supervisor.AGAIN_FIRST", 0.01)
    keeping = asyncio.get_running_loop().create_task(worker.keep_running())
    await aeventually(lambda: not failures and worker._ready)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping


def test_an_address_that_somebody_has(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """Also one who would share it."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        gateway = gateway_factory(nats_server, "--workers", "2", port=other.getsockname()[1], start=False)
        gateway.launch()
        assert gateway.wait() == 1
    assert "cannot listen on 127.0.0.1:" in gateway.log


def test_an_address_that_connections_linger_on(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """As after a gateway that has ended while clients were connected; who listens there is seen all the same."""
    host, port = "127.0.0.1", free_port()
    with socket.create_server((host, port)) as former, socket.create_connection((host, port)) as client:
        server, _ = former.accept()
        server.close()  # first, which is who keeps TIME_WAIT
        assert client.recv(1) == b""
    at_port = [one.status for one in psutil.net_connections("tcp4") if one.laddr == (host, port)]
    assert at_port == ["TIME_WAIT"]
    gateway = gateway_factory(nats_server, "--workers", "2", port=port)
    assert gateway.port == port
    with pytest.raises(StartupError, match="cannot listen on"):
        reserve(Settings(listen=f"{host}:{port}", workers=2))


def test_embedded(gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    """nats-server belongs to the supervisor."""
    gateway = gateway_factory("", "--embedded", "--embedded-port", "0", "--data", f"{tmp_path}/data", "--workers", "2")
    with Raw5.open(gateway.port, "embedded", KEPT) as client:
        client.subscribed(("embedded", 1))
        client.deliver("embedded/other", b"x")
    assert len(workers(gateway)) == 2
