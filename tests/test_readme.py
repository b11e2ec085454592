# SPDX-License-Identifier: Apache-2.0
"""The README's tour, run as written, with the real clients."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import GatewayFactory
from tests.harness.nats import ROOT
from tests.harness.shell import BUILD_WAIT, Shell, find_nats_cli, need
from tests.harness.waiting import eventually

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def shell_lines(prefix: str) -> list[str]:
    """The lines of the README's shell blocks that begin with ``prefix``."""
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith(prefix)]


@pytest.fixture(scope="module")
def nats_cli() -> str:
    return find_nats_cli()


@pytest.fixture
def shell(gateway_factory: GatewayFactory, tmp_path: Path) -> Iterator[Shell]:
    """Terminals in a directory in which `make run` has started the gateway and its nats-server."""
    data = tmp_path / "data"
    gateway = gateway_factory("", "--embedded", "--embedded-port", "0", "--data", str(data))
    (export,) = shell_lines("export ")
    name, _, value = export.removeprefix("export ").partition("=")
    shell = Shell({1883: gateway.port}, gateway.nats_url, tmp_path, {name: value.replace("$PWD", str(tmp_path))})
    yield shell
    shell.close()


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
@pytest.mark.timeout(BUILD_WAIT + 60)
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


def test_python_publisher(shell: Shell, tmp_path: Path) -> None:
    need("mosquitto_sub")
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert "nats://127.0.0.1:4222" in program
    shell.run("mosquitto_sub -p 1883 -i python -c -q 1 -t home/lamp -E")
    program = program.replace("nats://127.0.0.1:4222", shell.nats_url)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30, cwd=tmp_path)
    assert shell.run("mosquitto_sub -p 1883 -i python -c -q 1 -t home/lamp -C 1") == "off\n"


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_docs_are_all_listed() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
