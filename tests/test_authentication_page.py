# SPDX-License-Identifier: Apache-2.0
"""docs/authentication.md: from an open gateway to one with TLS, users and rules, every command run as written."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mqtt_nats.config.settings import Settings
from tests.harness.nats import ROOT, NatsServer
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.shell import need
from tests.harness.waiting import eventually, free_port

PAGE = (ROOT / "docs" / "authentication.md").read_text(encoding="utf-8")
PATIENCE = 30.0


def section(title: str) -> str:
    (text,) = [part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(f"{title}\n")]
    return text


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


class Terminal:
    """Runs the page's commands in a directory, with another port and nats-server."""

    def __init__(self, directory: Path, nats: NatsServer) -> None:
        self.directory = directory
        self.port = free_port()
        programs = directory / "bin"
        programs.mkdir()
        script = programs / "mqtt-nats"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mqtt_nats "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        sources = [str(ROOT), str(ROOT / "streams"), str(ROOT / "spark")]
        self.env = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(sources),
            "MQTT_NATS_NATS": nats.url,
        }

    def here(self, text: str) -> str:
        """With the port that is free, on loopback."""
        return text.replace("0.0.0.0:8883", f"127.0.0.1:{self.port}").replace("-p 8883", f"-p {self.port}")

    def run(self, lines: str) -> tuple[int, str]:
        """Status and output of commands."""
        done = subprocess.run(
            ["sh", "-c", self.here(lines)],
            cwd=self.directory,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout

    def start(self, line: str, log: str) -> LoggedProcess:
        process = LoggedProcess(line, self.directory / log)
        process.start(["sh", "-c", f"exec {self.here(line)}"], self.env, self.directory)
        return process


@pytest.mark.long
def test_from_open_to_closed(nats_server: NatsServer, tmp_path: Path) -> None:
    need("openssl")
    text = section("From open to closed")
    users, certificate, serve, watch, publish, wrong, denied, change = blocks(text, "sh")
    terminal = Terminal(tmp_path, nats_server)
    for file in blocks(text, "toml"):
        name = re.match(r"# (\S+)\n", file)
        assert name is not None
        (tmp_path / name[1]).write_text(terminal.here(file), encoding="utf-8")
    assert terminal.run(users) == (0, "ann added\nlamp added\n")
    status, output = terminal.run(certificate)
    assert status == 0, output
    assert serve == "mqtt-nats serve --embedded --config gateway.toml\n"
    gateway = terminal.start("mqtt-nats serve --config gateway.toml", "gateway.log")  # with the nats-server of the test
    watcher: LoggedProcess | None = None
    try:
        wait_ready(gateway, r"\bMQTTS +127\.0\.0\.1:(\d+)", PATIENCE)
        watcher = terminal.start(watch.strip(), "watch.log")

        def heard() -> bool:
            assert terminal.run(publish) == (0, "")
            assert watcher is not None
            return "device/lamp/state on\n" in watcher.text

        eventually(heard, PATIENCE)
        for line in wrong.splitlines():
            status, output = terminal.run(line)
            assert status != 0, line
            assert "refused" in output.lower() or "--cafile" not in line, output
        assert gateway.text.count("no authenticator knows the user") == 1
        assert gateway.text.count("wrong password") == 1
        assert gateway.text.count("anonymous clients are not allowed") == 1
        status, output = terminal.run(denied)
        assert "not authorized" in output.lower()
        delete, hangup = change.splitlines()
        assert terminal.run(delete) == (0, "lamp removed\n")
        assert hangup == "kill -HUP PID"
        gateway.send(signal.SIGHUP)
        eventually(lambda: "files are read again" in gateway.text, PATIENCE)
        eventually(lambda: terminal.run(publish)[0] != 0, PATIENCE)
        assert "off" not in watcher.text
        assert "open" not in watcher.text
        for secret in ("ann-secret", "lamp-secret"):
            assert secret not in gateway.text
            assert secret not in (tmp_path / "passwords").read_text(encoding="utf-8")
        gateway.send(signal.SIGTERM)
        assert gateway.wait(PATIENCE) == 0
    finally:
        gateway.discard()
        if watcher is not None:
            watcher.discard()


@pytest.mark.parametrize("number", range(4))
def test_its_configurations_are_valid(number: int, tmp_path: Path) -> None:
    """All but those of the walk, with files that are there."""
    text = blocks(PAGE.replace(section("From open to closed"), ""), "toml")[number]
    text = text.replace("/etc/mqtt-nats/", f"{tmp_path}/")
    for name in ("passwords", "cert.pem", "key.pem", "clients.pem"):
        (tmp_path / name).touch()
    if "listen" not in text:
        text = f'listen = "0.0.0.0:1883"\n{text}'  # it is not open
    config = tmp_path / "gateway.toml"
    config.write_text(text, encoding="utf-8")
    Settings.load({}, config)


def test_all_configurations_are_tested() -> None:
    assert len(blocks(PAGE.replace(section("From open to closed"), ""), "toml")) == 4
