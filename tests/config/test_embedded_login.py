# SPDX-License-Identifier: Apache-2.0
"""Who gets into the embedded nats-server: who can read its login, and nobody else of the machine."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import nkeys
import psutil
import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.cli import _hints
from mqtt_nats.config.embedded_login import CONTEXT, LOCK, SEED, find_login, find_server, make_login, seed_for
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.embedded import SERVER_NAME, run_server
from pyspark_mqtt_nats.jobs import flags
from pyspark_mqtt_nats.options import Options
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT
from tests.harness.shell import find_nats_cli

PRIVATE = (SEED, CONTEXT, "nats-server.conf", "nats-server.log")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def _no_umask(tmp_path: Path) -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def answer(port: int, seed: Path | None = None, **login: str) -> bytes:
    """What nats-server answers to a login; with a seed its nkey signs what the server wants to have signed."""
    with socket.create_connection(("127.0.0.1", port), 10) as plain, plain.makefile("rb") as lines:
        info = json.loads(lines.readline().removeprefix(b"INFO "))
        if seed is not None:
            pair = nkeys.from_seed(bytearray(seed.read_bytes().strip()))
            signed = urlsafe_b64encode(pair.sign(info["nonce"].encode())).rstrip(b"=").decode()
            login = {"nkey": pair.public_key.decode(), "sig": signed}
        plain.sendall(b"CONNECT %b\r\nPING\r\n" % json.dumps({"verbose": False, **login}).encode())
        return lines.readline()


@pytest.mark.processes
@pytest.mark.usefixtures("_no_umask")
async def test_strangers_are_refused(tmp_path: Path) -> None:
    """Without the login nobody gets in, and only the owner of the data can read it."""
    data = tmp_path / "data"
    async with run_server(data, 0) as server:
        other = make_login(tmp_path)
        strangers: list[dict[str, Any]] = [
            {},
            {"user": "gateway", "pass": ""},
            {"auth_token": server.login.public},
            {"nkey": server.login.public},
            {"seed": other.seed},
        ]
        for login in strangers:
            assert b"Authorization Violation" in await asyncio.to_thread(answer, server.port, **login)
        assert await asyncio.to_thread(answer, server.port, data / SEED) == b"PONG\r\n"
        assert [mode(data / name) for name in PRIVATE] == [0o600] * len(PRIVATE)
        assert mode(data) == 0o700
        seed = (data / SEED).read_text(encoding="ascii").strip()
        for process in (psutil.Process(server.pid), psutil.Process()):
            assert seed not in " ".join(process.cmdline())
        assert seed not in (data / "nats-server.conf").read_text(encoding="utf-8")


@pytest.mark.processes
@pytest.mark.usefixtures("_no_umask")
async def test_files_of_earlier_versions_are_closed(tmp_path: Path) -> None:
    for name in ("nats-server.log", CONTEXT):
        (tmp_path / name).touch(0o666)
    async with run_server(tmp_path, 0):
        assert [mode(tmp_path / name) for name in PRIVATE] == [0o600] * len(PRIVATE)


@pytest.mark.processes
async def test_the_server_has_a_short_name(tmp_path: Path) -> None:
    """`ctl` shows the name of the server in its tables."""

    def info(port: int) -> dict[str, Any]:
        with socket.create_connection(("127.0.0.1", port), 10) as plain, plain.makefile("rb") as lines:
            found: dict[str, Any] = json.loads(lines.readline().removeprefix(b"INFO "))
            return found

    async with run_server(tmp_path, 0) as server:
        assert (await asyncio.to_thread(info, server.port))["server_name"] == SERVER_NAME


@pytest.mark.processes
async def test_the_login_stays(tmp_path: Path) -> None:
    """Of each data directory its own, as long as it is there; its file is closed where it was not."""
    async with run_server(tmp_path, 0) as server:
        first = server.login
    (tmp_path / SEED).chmod(0o644)
    async with run_server(tmp_path, 0) as server:
        assert server.login == first
        assert mode(tmp_path / SEED) == 0o600
        assert json.loads((tmp_path / CONTEXT).read_bytes())["url"] == server.url
    (tmp_path / "other").mkdir()
    assert make_login(tmp_path / "other").public != first.public


@pytest.mark.parametrize("what", ["writable", "link", "directory", "garbage", "another kind"])
def test_a_login_that_somebody_else_may_have_made(tmp_path: Path, what: str) -> None:
    login = make_login(tmp_path)
    if what == "writable":
        login.seed.chmod(0o622)
    elif what == "link":
        login.seed.rename(tmp_path / "elsewhere")
        login.seed.symlink_to(tmp_path / "elsewhere")
    elif what == "directory":
        login.seed.unlink()
        login.seed.mkdir()
    else:
        login.seed.write_text("SUA" if what == "garbage" else "SAAA", encoding="ascii")
    with pytest.raises(StartupError) as caught:
        make_login(tmp_path)
    assert str(login.seed) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_command_finds_the_server_that_runs(tmp_path: Path) -> None:
    """At any port, while somebody has the lock; where a server or a login is given, that counts."""
    login = make_login(tmp_path)
    url = "nats://127.0.0.1:4333"

    def found(**given: Any) -> tuple[tuple[str, ...], Path | None]:
        settings = find_server(Settings.load_nats({"data": str(tmp_path), **given}))
        return settings.nats, settings.nats_nkey

    default = ("nats://127.0.0.1:4222",), None
    assert found() == default
    (tmp_path / CONTEXT).write_text(json.dumps({"url": url, "nkey": str(login.seed)}), encoding="utf-8")
    (tmp_path / LOCK).touch()
    assert found() == default, "it does not run"
    with (tmp_path / LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert found() == ((url,), login.seed)
        assert found(nats="nats://nats.example") == (("nats://nats.example",), None)
        assert found(nats="nats://127.0.0.1:4222") == default
        assert found(nats_user="u")[0] == default[0]
        (tmp_path / CONTEXT).write_text("[]", encoding="utf-8")
        assert found() == default


def test_who_finds_the_login(tmp_path: Path) -> None:
    """It is used for the server of the data directory, where no other login is given, and for no other server."""
    login = make_login(tmp_path)
    (tmp_path / CONTEXT).write_text(
        json.dumps({"url": "nats://127.0.0.1:4222", "nkey": str(login.seed)}), encoding="utf-8"
    )

    def found(*urls: str, **more: Any) -> Path | None:
        return find_login(Settings(nats=urls, data=tmp_path, **more)).nats_nkey

    assert find_login(Settings(data=tmp_path)).nats_nkey == login.seed
    for url in ("nats://127.0.0.1:4222", "nats://localhost", "nats://localhost:4222"):
        assert found(url) == login.seed
    for url in ("nats://127.0.0.1:4223", "nats://nats.example", "tls://127.0.0.1", "nats://me@127.0.0.1"):
        assert found(url) is None
    assert found("nats://127.0.0.1:4222", "nats://nats.example") is None
    assert found("nats://127.0.0.1:4222", nats_user="u", nats_password="p") is None
    login.seed.unlink()
    assert found("nats://127.0.0.1:4222") is None
    (tmp_path / CONTEXT).write_text("[]", encoding="utf-8")
    assert seed_for(tmp_path, ("nats://127.0.0.1:4222",)) is None


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, "nats://127.0.0.1:4222"),
        ({"servers": "nats://h:1,nats://i:2"}, "nats://h:1,nats://i:2"),
        ({"SERVERS": "nats://h:1"}, "nats://h:1"),
        ({"creds": "x"}, None),
        ({"Token": "x"}, None),
    ],
)
def test_jobs_of_spark_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], asked: str | None
) -> None:
    login = make_login(tmp_path)
    seen: list[str] = []

    def find(servers: tuple[str, ...]) -> Path:
        seen.append(",".join(servers))
        return login.seed

    context = click.Context(click.Command("x"), obj=find)
    context.meta[flags.SOURCE] = dict(given)
    monkeypatch.setattr(Options, "parse", lambda values: Options())
    options = flags.source_options(context, "batch", {})
    assert seen == ([] if asked is None else [asked])
    assert options.get("nkey") == (None if asked is None else str(login.seed))


@pytest.fixture
def embedded(gateway_factory: GatewayFactory, tmp_path: Path) -> Gateway:
    return gateway_factory(
        "", "--embedded", "--embedded-port", "0", "--data", str(tmp_path / "data"), env={"MQTT_NATS_NATS_USER": "other"}
    )


def ctl(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mqtt_nats", "ctl", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "streams", ROOT / "spark")))}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.long
def test_ctl_and_other_gateways_log_in_by_themselves(
    embedded: Gateway, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    url = embedded.nats_url
    for cwd, more in ((tmp_path, ()), (ROOT, ("--data", str(tmp_path / "data")))):
        done = ctl("--nats", url, *more, "cluster", "status", cwd=cwd)
        assert done.returncode == 0, done.stderr
    done = ctl("--nats", url, "cluster", "status")
    assert done.returncode == 1
    assert re.fullmatch(r"mqtt-nats: nats-server at \S+ refuses the credentials: .*--data\)\n", done.stderr)
    second = gateway_factory(url, "--data", str(tmp_path / "data"), "--workers", "2")
    assert second.nats_url == url


def test_what_it_prints_shows_the_streams(embedded: Gateway, tmp_path: Path) -> None:
    """The commands for the nats CLI work as they are printed; without the context the CLI is a stranger."""
    cli = find_nats_cli()
    data = tmp_path / "data"
    export, command = _hints(Settings(data=data, nats=(embedded.nats_url,), nats_nkey=data / "nats.nk"), [])[-2:]
    env = {name: value for name, value in os.environ.items() if not name.startswith("NATS_")}
    env |= {"PATH": f"{Path(cli).parent}{os.pathsep}{env['PATH']}", "XDG_CONFIG_HOME": str(tmp_path)}
    for script, status in ((f"{export}\n{command}", 0), (f"nats --server {embedded.nats_url} stream ls -a", 1)):
        done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        assert ("$MQTT_msgs" in done.stdout) is (status == 0)
