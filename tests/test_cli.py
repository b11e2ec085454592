# SPDX-License-Identifier: Apache-2.0
"""The command: what it says, how it exits, what it leaves behind."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import httpx
import paho.mqtt.client as mqtt
import psutil
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from mqtt_nats import __version__, cli
from mqtt_nats.base.errors import StartupError, first_error
from mqtt_nats.cli import _announce, _hints, _with_dashboard
from mqtt_nats.config.admin_settings import DASHBOARD_PORTS, free_dashboard_address
from mqtt_nats.config.build_info import build_and_reason
from mqtt_nats.config.options import GROUPS
from mqtt_nats.config.settings import Settings, flag_name, has_flag
from mqtt_nats.transport.listener_settings import Bound, parse_address
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.paho import stop
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.waiting import eventually

pytestmark = pytest.mark.processes

# A gateway that never gets ready, or never finishes its shutdown.
STUCK = """
import sys, types
import anyio
from mqtt_nats.cli import main
from mqtt_nats.transport.listener_settings import Bound

async def serve(settings, *, on_ready, stop, hangup):
    if {ready}:
        on_ready([Bound("127.0.0.1", 1, "tcp")])
    print("serving", flush=True)
    if {ready}:
        await stop.wait()
        print("draining", flush=True)
    await anyio.sleep_forever()

sys.modules["mqtt_nats.gateway.gateway"] = module = types.ModuleType("mqtt_nats.gateway.gateway")
module.serve = serve
sys.argv = ["mqtt-nats", "serve", *sys.argv[1:]]
main()
"""


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MQTT_NATS_")}
    command = [sys.executable, "-m", "mqtt_nats", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**clean, **env}, capture_output=True, text=True, timeout=60)


def assert_refused(done: subprocess.CompletedProcess[str], *named: str) -> None:
    """Exit status 1, one line on stderr, nothing else."""
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("mqtt-nats: ")
    for text in named:
        assert text in line


def test_version() -> None:
    assert run("--version").stdout == f"mqtt-nats {__version__} ({build_and_reason()})\n"


def test_help_names_every_setting_but_no_flag_for_a_secret() -> None:
    done = run("serve", "--help")
    assert done.returncode == 0
    for name in Settings.model_fields:
        assert bool(re.search(rf"^  {flag_name(name)}\b", done.stdout, re.MULTILINE)) is has_flag(name), name
    assert "--config FILE" in done.stdout


@pytest.mark.long
def test_help_has_groups_and_begins_with_listen() -> None:
    for command in ("serve", "check-config"):
        lines = run(command, "--help").stdout.splitlines()
        headings = [line.rstrip(":") for line in lines if line and line[0] != " " and line.endswith(":")]
        assert headings == ["Options", *GROUPS]
        assert lines[lines.index("Gateway:") + 1].startswith("  --listen HOST:PORT ")
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(Settings.model_fields)


@pytest.mark.long
def test_a_bad_setting_is_one_line(tmp_path: Path) -> None:
    assert_refused(run("serve", "--max-inflight", "many"), "max_inflight", "'many'")
    assert_refused(run("serve", MQTT_NATS_LISTEN="here"), "listen", "'here'", "HOST:PORT")
    assert_refused(run("serve", "--nats", "nats://127.0.0.1:1", "--embedded"), "--nats", "--embedded")
    file = tmp_path / "gateway.toml"
    file.write_text("listn = 1", encoding="utf-8")
    assert_refused(run("serve", "--config", str(file)), "'listn'", "'listen'", str(file))
    assert_refused(run("serve", "--connect-timeout", "soon"), "connect_timeout", "expected a duration such as 30s")


def test_every_bad_setting_has_a_line_with_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text("max_inflight = 0\nlistn = 1\n[[listeners]]\nlisten = 'x'\n", encoding="utf-8")
    done = run("serve", "--config", str(file), "--max-queued", "no", MQTT_NATS_BACKLOG="0")
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert len(lines) == 5
    for setting, origin in (
        ("'listn'", f"{file}, line 2"),
        ("max_inflight", f"({file}:1)"),
        ("listeners[1].listen", f"({file}:3)"),
        ("max_queued", "(--max-queued)"),
        ("backlog", "(MQTT_NATS_BACKLOG)"),
    ):
        assert any(line.startswith("mqtt-nats: ") and setting in line and origin in line for line in lines), setting


ENDS = """
import logging
import sys
import types
from mqtt_nats.base.errors import StartupError
from mqtt_nats.cli import main

async def serve(settings, *, on_ready, stop, hangup):
    for _ in range(50):
        logging.getLogger("mqtt_nats.nats").warning("the same")
    raise StartupError("the reason")

sys.modules["mqtt_nats.gateway.gateway"] = module = types.ModuleType("mqtt_nats.gateway.gateway")
module.serve = serve
sys.argv = ["mqtt-nats", "serve"]
main()
"""


def test_the_reason_of_an_end_is_the_last_line() -> None:
    """The summary of what the log has omitted comes before."""
    done = subprocess.run([sys.executable, "-c", ENDS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    *_, summary, reason = done.stderr.splitlines()
    assert "more records of this kind were omitted" in summary
    assert (done.returncode, reason) == (1, "mqtt-nats: the reason")


LOADED = """
import sys
from mqtt_nats.cli import main
sys.argv = ["mqtt-nats", "ctl", "--nats", "nats://127.0.0.1:1", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert end.code == 1
print(*(name for name in sys.modules if name.partition(".")[0] in ("mqtt_nats", "anyio", "uvloop", "httpx")))
"""


@pytest.mark.parametrize("line", ["status", "sessions list", "streams list"])
def test_a_command_of_operators_imports_what_it_needs(line: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED, *line.split()], cwd=ROOT, capture_output=True, text=True)
    assert "cannot connect to nats-server" in done.stderr
    loaded = done.stdout.split()
    assert not {"anyio", "uvloop", "httpx", "mqtt_nats.codec", "mqtt_nats.client", "mqtt_nats.gateway"} & set(loaded)
    commands = [name for name in loaded if name.startswith("mqtt_nats.ctl.commands.")]
    assert len(commands) == 1, commands


def test_an_unknown_flag_is_wrong_usage() -> None:
    done = run("serve", "--lisen", "127.0.0.1:0")
    assert done.returncode == 2
    assert "--listen" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_it_is_ready_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    process = LoggedProcess("stuck gateway", tmp_path / "log")
    process.start([sys.executable, "-c", STUCK.format(ready=False)], cwd=ROOT)
    try:
        wait_ready(process, "(serving)", 20)
        process.send(number)
        assert process.wait() == 0
        assert "Traceback" not in process.text
    finally:
        process.discard()


@pytest.mark.long
def test_a_second_signal_cuts_the_shutdown_short(tmp_path: Path) -> None:
    process = LoggedProcess("stuck gateway", tmp_path / "log")
    arguments = ["--embedded", "--embedded-port", "0", "--data", str(tmp_path / "data")]
    process.start([sys.executable, "-c", STUCK.format(ready=True), *arguments], cwd=ROOT)
    try:
        wait_ready(process, "(serving)", 20)
        children = psutil.Process(process.pid).children()
        assert [child.name() for child in children] == ["nats-server"]
        process.interrupt()
        wait_ready(process, "(draining)", 20)
        process.interrupt()
        assert process.wait() == 128 + signal.SIGINT
        assert "Traceback" not in process.text
        if sys.platform == "linux":
            eventually(lambda: not alive(children[0]), what="nats-server gone")
    finally:
        process.discard()
        for child in children:
            if alive(child):
                child.terminate()


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_beside_a_nats_server_until_a_signal(
    nats_server: NatsServer, gateway_factory: GatewayFactory, number: signal.Signals
) -> None:
    gateway = gateway_factory(nats_server)
    assert gateway.nats_url == nats_server.url
    assert f"INFO mqtt_nats.gateway: serving: MQTT  127.0.0.1:{gateway.port}  (MQTT 3.1.1, 5.0)" in gateway.log
    assert "Try in other terminals" not in gateway.log
    gateway.process.send(number)
    assert gateway.wait() == 0
    assert gateway.log.splitlines()[-1].endswith(" INFO mqtt_nats.gateway: stopped")


FILES = {"tls_cert": __file__, "tls_key": __file__}
TCP = Bound("0.0.0.0", 1884, "tcp")
TLS = Bound("127.0.0.1", 8883, "tls")


@pytest.mark.parametrize(
    ("given", "bound", "hints"),
    [
        ({"allow_anonymous": True, "listen": "0.0.0.0:1884"}, TCP, ["mqtt-nats sub", "mqtt-nats pub", "nats"]),
        ({"nats": "tls://h:1"}, TCP, ["mqtt-nats sub", "mqtt-nats pub"]),
        ({"nats_user": "u", "nats_password": "p"}, TCP, ["mqtt-nats sub", "mqtt-nats pub"]),
        ({"nats": "nats://u:p@h:1"}, TCP, ["mqtt-nats sub", "mqtt-nats pub"]),
        ({"password_file": __file__}, TCP, ["nats"]),
        ({"acl_file": __file__}, TCP, ["nats"]),
        (
            {"listeners": [{"listen": "127.0.0.1:8883", "type": "tls", "tls_cert": __file__, "tls_key": __file__}]},
            TLS,
            ["nats"],
        ),
        ({"nats_user": "u", "acl_file": __file__}, TCP, []),
    ],
)
def test_hints_are_commands_that_work_with_the_settings(
    given: dict[str, object],
    bound: Bound,
    hints: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _announce(Settings.load(given), [bound])
    shown = capsys.readouterr().out
    assert shown.startswith(f"mqtt-nats {__version__} ")
    assert [
        " ".join(line.split()[: 2 if "mqtt-nats" in line else 1])
        for line in shown.partition("Try in other terminals:\n")[2].splitlines()
    ] == hints
    assert "0.0.0.0 -p" not in shown


@pytest.mark.parametrize(("terminal", "kind"), [(False, "text"), (True, "json")])
def test_without_a_terminal_and_with_json_build_and_addresses_are_logged(
    terminal: bool,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    _announce(Settings.load({"log_format": kind}), [TCP])
    assert capsys.readouterr().out == ""
    assert caplog.messages == [
        f"mqtt-nats {__version__} ({build_and_reason()})",
        "serving: MQTT  0.0.0.0:1884  (MQTT 3.1.1, 5.0)",
        "serving: NATS  nats://127.0.0.1:4222  (running already)",
    ]


@contextlib.contextmanager
def on_terminal(directory: Path, *arguments: str) -> Iterator[str]:
    """Run `serve --embedded` with a terminal for its output, and its log in a file; yields the lines for people."""
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "mqtt_nats",
        "serve",
        "--embedded",
        "--embedded-port",
        "0",
        "--listen",
        "127.0.0.1:0",
    ]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MQTT_NATS_")}
    with open(ours, "rb", buffering=0) as terminal, (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--data", str(directory / "data"), *arguments], cwd=ROOT, env=clean, stdout=theirs, stderr=log
        )
        os.close(theirs)
        try:
            shown, end = "", time.monotonic() + 60
            while "nats stream ls -a" not in shown:
                assert select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0], shown
                shown += terminal.read(65536).decode()
            yield shown
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
def test_embedded_on_a_terminal_has_a_dashboard(tmp_path: Path, workers: str) -> None:
    with on_terminal(tmp_path, "--workers", workers, "--log-level", "debug") as shown:
        found = re.search(r"^ADMIN (http://127\.0\.0\.1:\d+/)#token=([\w-]{32})  ", shown, re.MULTILINE)
        assert found is not None, shown
        url, token = found.groups()
        assert "<title>mqtt-nats</title>" in httpx.get(url).text
        assert httpx.get(f"{url}api/v1/status").status_code == 401
        assert httpx.get(f"{url}api/v1/status", headers={"Authorization": f"Bearer {token}"}).status_code == 200
    texts = [one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()]
    assert any(b"admin listener is open on 127.0.0.1:" in one for one in texts)
    assert not [one for one in texts if token.encode() in one]


def test_embedded_on_a_terminal_without_a_dashboard(tmp_path: Path) -> None:
    with on_terminal(tmp_path, "--admin-listen", "off") as shown:
        assert "ADMIN" not in shown
    assert "admin listener" not in (tmp_path / "log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("given", "terminal"),
    [
        ({}, True),
        ({"embedded": True}, False),
        ({"embedded": True, "log_format": "json"}, True),
        ({"embedded": True, "admin_listen": "off"}, True),
        ({"embedded": True, "admin_listen": "127.0.0.1:9883"}, True),
    ],
)
def test_no_dashboard_that_nobody_could_log_in_at_or_that_the_settings_exclude(
    given: dict[str, object], terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    settings = Settings.load(given)
    assert _with_dashboard(settings) == (settings, "")
    _announce(settings, [TCP])
    assert "ADMIN" not in capsys.readouterr().out


def test_a_dashboard_without_the_extra_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "mqtt_nats.admin.listener", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    settings = Settings.load({"embedded": True})
    assert _with_dashboard(settings) == (settings, "")
    _announce(settings, [TCP])
    assert (
        "ADMIN none: the dashboard needs the extra `admin`: pip install 'mqtt-nats[admin]'\n" in capsys.readouterr().out
    )


def test_the_dashboard_takes_a_port_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        used, free = one.getsockname()[1], other.getsockname()[1]
        other.close()
        monkeypatch.setattr("mqtt_nats.config.admin_settings.DASHBOARD_PORTS", (used, free))
        assert free_dashboard_address(()) == f"127.0.0.1:{free}"
        assert free_dashboard_address({free}) == "127.0.0.1:0"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    listeners = [{"listen": f"127.0.0.1:{DASHBOARD_PORTS[0]}", "type": "ws"}]
    settings, _ = _with_dashboard(Settings.load({"embedded": True, "listeners": listeners}))
    assert settings.admin_listen not in (None, f"127.0.0.1:{DASHBOARD_PORTS[0]}")


def _is_startup_error(error: BaseException) -> bool:
    return isinstance(first_error(error), StartupError)


@pytest.mark.parametrize("taken", [True, False])
def test_a_port_of_the_dashboard_that_is_taken_before_the_gateway_listens(
    taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dashboard gets another port; any other error ends the start."""
    tried: list[str] = []

    @contextlib.asynccontextmanager
    async def without_server(settings: Settings) -> AsyncIterator[Settings]:
        yield settings

    with contextlib.ExitStack() as others:

        async def serve(settings: Settings, **_: object) -> None:
            assert settings.admin_listen is not None
            assert settings.admin_token is not None
            tried.append(settings.admin_listen)
            if len(tried) == 1:
                if taken:
                    others.enter_context(socket.create_server(parse_address(settings.admin_listen)))
                raise StartupError("something is wrong")

        monkeypatch.setattr("mqtt_nats.cli._with_server", without_server)
        monkeypatch.setattr("mqtt_nats.gateway.gateway.serve", serve)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        settings = Settings.load({"embedded": True, "listen": "127.0.0.1:0"})
        with contextlib.nullcontext() if taken else pytest.raises(ExceptionGroup, check=_is_startup_error):
            anyio.run(cli.run, settings)
    assert len(set(tried)) == (2 if taken else 1)


def test_embedded_ctrl_c_leaves_nothing_running(tmp_path: Path, gateway_factory: GatewayFactory) -> None:
    arguments = ["--embedded", "--embedded-port", "0", "--data", str(tmp_path / "data")]
    gateway = gateway_factory("", *arguments)
    data = tmp_path / "data"
    settings = Settings(data=data, nats=(gateway.nats_url,), nats_nkey=data / "nats.nk")
    context = f"export NATS_CONTEXT={data.resolve()}/nats.json"
    assert _hints(settings, [])[-2:] == [context, "nats stream ls -a"]
    children = psutil.Process(gateway.pid).children(recursive=True)
    assert [child.name() for child in children] == ["nats-server"]
    gateway.process.interrupt()
    assert gateway.wait() == 0
    assert not [child for child in children if alive(child)]
    log = (tmp_path / "data" / "nats-server.log").read_text(encoding="utf-8")
    assert "Server Exiting" in log  # it closed its store in an orderly way


@pytest.mark.long
def test_ctl_finds_an_embedded_server_at_any_port(tmp_path: Path, gateway_factory: GatewayFactory) -> None:
    """By its data directory, while it runs; then the error names the options."""
    data = ["--data", str(tmp_path / "data")]
    gateway = gateway_factory("", "--embedded", "--embedded-port", "0", *data)
    done = run("ctl", *data, "status", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["gateways"]) == 1
    gateway.process.interrupt()
    assert gateway.wait() == 0
    assert_refused(run("ctl", *data, "status"), "nats://127.0.0.1:4222", "--nats", "--data")


def test_embedded_finds_the_sessions_and_retained_messages_of_the_run_before(
    tmp_path: Path, gateway_factory: GatewayFactory
) -> None:
    gateway = gateway_factory("", "--embedded", "--embedded-port", "0", "--data", str(tmp_path / "data"))
    first = connect(gateway, "kept")
    first.subscribe("home/#", qos=1)
    eventually(lambda: first.granted, what="SUBACK")
    first.publish("home/door", b"shut", qos=1, retain=True).wait_for_publish(10)
    eventually(lambda: first.messages == [("home/door", b"shut", False)])
    first.close()
    other = connect(gateway, "other")
    other.publish("home/lamp", b"on", qos=1).wait_for_publish(10)
    other.close()

    gateway.restart()
    second = connect(gateway, "kept")
    assert second.session_present
    eventually(lambda: second.messages == [("home/lamp", b"on", False)])
    second.close()
    late = connect(gateway, "late")
    late.subscribe("home/#", qos=1)
    eventually(lambda: ("home/door", b"shut", True) in late.messages)
    late.close()


class Client(mqtt.Client):
    """A paho client that keeps what it was told."""

    def __init__(self, client_id: str) -> None:
        super().__init__(CallbackAPIVersion.VERSION2, client_id, clean_session=False)
        self.session_present: bool | None = None
        self.granted = False
        self.messages: list[tuple[str, bytes, bool]] = []
        self.on_connect = lambda client, data, flags, reason, properties: setattr(
            self, "session_present", flags.session_present
        )
        self.on_subscribe = lambda *_: setattr(self, "granted", True)
        self.on_message = lambda client, data, message: self.messages.append(
            (message.topic, bytes(message.payload), message.retain)
        )

    def close(self) -> None:
        self.disconnect()
        stop(self)


def connect(gateway: Gateway, client_id: str) -> Client:
    client = Client(client_id)
    client.connect(gateway.host, gateway.port)
    client.loop_start()
    eventually(lambda: client.session_present is not None, what="CONNACK")
    return client
