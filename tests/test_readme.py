# SPDX-License-Identifier: Apache-2.0
"""The README's tour, run as written, with the real clients."""

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.process import LoggedProcess
from tests.harness.waiting import eventually

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
_BUILD_WAIT = 480  # seconds


def shell_lines(prefix: str) -> list[str]:
    """The lines of the README's shell blocks that begin with ``prefix``."""
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith(prefix)]


@pytest.fixture(scope="module")
def nats_cli(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The nats CLI: from PATH, else built with Go and kept in the user's cache."""
    if found := shutil.which("nats"):
        return found
    if shutil.which("go") is None:
        pytest.skip("neither `nats` nor `go` is installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mqtt-nats-tests"
    cache.mkdir(parents=True, exist_ok=True)
    built = cache / "nats"
    if not built.exists():
        script = str(ROOT / "scripts" / "build-nats-cli")
        try:
            done = subprocess.run([script, str(cache)], capture_output=True, text=True, timeout=_BUILD_WAIT)
        except subprocess.TimeoutExpired:
            pytest.skip(f"the nats CLI was not built within {_BUILD_WAIT} s")
        if done.returncode:
            pytest.skip(f"the nats CLI could not be built: {done.stderr.strip()[-300:]}")
    return str(built)


class Shell:
    """Runs commands of the README against one gateway and its nats-server."""

    def __init__(self, gateway: Gateway, nats_url: str, directory: Path) -> None:
        self.gateway = gateway
        self.nats_url = nats_url
        self.directory = directory
        self._background: list[LoggedProcess] = []

    def arguments(self, line: str) -> list[str]:
        words = shlex.split(line)
        if "-p" in words:
            at = words.index("-p") + 1
            assert words[at] == "1883"
            words[at] = str(self.gateway.port)
        return words

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "NATS_URL": self.nats_url, "XDG_CONFIG_HOME": str(self.directory), "TERM": "dumb"}

    def run(self, line: str) -> str:
        done = subprocess.run(
            self.arguments(line),
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        return done.stdout

    def run_on_terminal(self, line: str) -> str:
        """``run`` for a program that insists on a terminal; returns what it has shown."""
        ours, theirs = pty.openpty()
        with open(ours, "rb", buffering=0) as terminal:
            process = subprocess.Popen(self.arguments(line), env=self.env, stdin=theirs, stdout=theirs, stderr=theirs)
            os.close(theirs)
            shown = b""
            with process:
                while select.select([terminal], [], [], 30)[0]:
                    try:
                        part = terminal.read(65536)
                    except OSError:  # Linux: the other side is closed
                        break
                    if not part:
                        break
                    shown += part
                else:
                    process.kill()
            assert process.returncode == 0, f"{line}\n{shown!r}"
        return shown.decode()

    def start(self, line: str) -> LoggedProcess:
        process = LoggedProcess(line, self.directory / f"{len(self._background)}.log")
        self._background.append(process)
        process.start(self.arguments(line), self.env)
        return process

    def close(self) -> None:
        for process in self._background:
            process.discard()


@pytest.fixture
def shell(nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(gateway_factory(nats_server), nats_server.url, tmp_path)
    yield shell
    shell.close()


def need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"`{program}` is not installed")


def test_mqtt_tour(shell: Shell) -> None:
    need("mosquitto_pub", "mosquitto_sub")
    live_sub, live_pub, absent_sub, absent_pub, back_sub, retained_pub, retained_sub = shell_lines("mosquitto_")
    subscriber = shell.start(live_sub)

    def heard() -> bool:
        shell.run(live_pub)
        return "home/kitchen 21.5\n" in subscriber.text

    assert eventually(heard)
    shell.run(absent_sub)
    shell.run(absent_pub)
    assert shell.run(back_sub) == "on\n"
    shell.run(retained_pub)
    assert shell.run(retained_sub) == "shut\n"


@pytest.mark.slow
@pytest.mark.timeout(_BUILD_WAIT + 60)
def test_nats_tour(shell: Shell, nats_cli: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need("mosquitto_pub", "mosquitto_sub")
    monkeypatch.setenv("PATH", f"{Path(nats_cli).parent}{os.pathsep}{os.environ['PATH']}")
    sub, pub, pub_live, pub_stored, list_streams, view_messages, view_retained = shell_lines("nats ")

    # NATS to MQTT and to NATS, at QoS 0
    mqtt = shell.start("mosquitto_sub -p 1883 -t home/# -v")
    nats = shell.start(sub)

    def heard() -> bool:
        shell.run(pub)
        return "home/kitchen 22.0\n" in mqtt.text and "22.0" in nats.text

    assert eventually(heard)

    # NATS to an absent MQTT session, at QoS 1; the live copy reaches the subscriber at QoS 0
    shell.run("mosquitto_sub -p 1883 -i absent -c -q 1 -t home/lamp -E")
    shell.run(pub_live)
    shell.run(pub_stored)
    assert shell.run("mosquitto_sub -p 1883 -i absent -c -q 1 -t home/lamp -C 1") == "off\n"
    eventually(lambda: "home/lamp off\n" in mqtt.text)

    # MQTT to NATS
    shell.run("mosquitto_pub -p 1883 -t home/door -r -q 1 -m shut")
    eventually(lambda: "home.door" in nats.text)

    streams = shell.run(list_streams)
    for name in re.findall(r"^\| `(\$MQTT_\w+)` \|", TEXT, re.MULTILINE):
        assert name in streams
    stored = shell.run_on_terminal(view_messages)
    assert "$MQTT.msgs.home.lamp" in stored
    assert "shut" in stored
    assert "$MQTT.rmsgs.home.door" in shell.run_on_terminal(view_retained)


def test_python_publisher(shell: Shell) -> None:
    need("mosquitto_sub")
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert "nats://127.0.0.1:4222" in program
    shell.run("mosquitto_sub -p 1883 -i python -c -q 1 -t home/lamp -E")
    program = program.replace("nats://127.0.0.1:4222", shell.nats_url)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
    assert shell.run("mosquitto_sub -p 1883 -i python -c -q 1 -t home/lamp -C 1") == "off\n"


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_docs_are_all_listed() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
