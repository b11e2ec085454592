# SPDX-License-Identifier: Apache-2.0
"""docs/tour.md, run as written, with the real clients: what it prints is what the page says."""

import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.process import LoggedProcess
from tests.harness.shell import BUILD_WAIT, Shell, find_nats_cli, need
from tests.harness.waiting import eventually

PAGE = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")


class Step(NamedTuple):
    """A section of the page: commands of its shell blocks, its other blocks."""

    commands: list[str]
    printed: list[str]
    program: str


def step(title: str) -> Step:
    """The section with this title."""
    (text,) = [part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(f"{title}\n")]
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    return Step(
        [line for language, block in blocks if language == "sh" for line in block.splitlines()],
        [block for language, block in blocks if language == "text"],
        "".join(block for language, block in blocks if language == "python"),
    )


class Stage(NamedTuple):
    """A shell, the gateway on the documented port 1883, and the second one on 1884."""

    shell: Shell
    first: Gateway
    second: Gateway


@pytest.fixture
def stage(nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path) -> Iterator[Stage]:
    need("mosquitto_pub", "mosquitto_sub", "mosquitto_rr")
    first, second = gateway_factory(nats_server), gateway_factory(nats_server)
    shell = Shell({1883: first.port, 1884: second.port}, nats_server.url, tmp_path)
    yield Stage(shell, first, second)
    shell.close()


@pytest.fixture
def nats_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the nats CLI on PATH."""
    monkeypatch.setenv("PATH", str(Path(find_nats_cli()).parent), prepend=":")


def heard(process: LoggedProcess, send: str, shell: Shell, text: str) -> None:
    """Repeat a command until a subscriber has printed ``text``."""

    def arrived() -> bool:
        shell.run(send)
        return text in process.text

    eventually(arrived, 20)


def masked(text: str) -> str:
    """Without numbers and names that differ from run to run."""
    text = re.sub(r"^\[#\d+\]", "[#]", text, flags=re.MULTILINE)
    return re.sub(r"^(Nmqtt-Client: ).*$", r"\1...", text, flags=re.MULTILINE)


def nats_messages(text: str) -> list[tuple[str, list[str], str]]:
    """(first line, headers, payload) of what `nats sub` has printed; it prints headers in any order."""
    found = []
    for part in re.split(r"^(?=\[#)", masked(text), flags=re.MULTILINE)[1:]:
        head, _, payload = part.partition("\n\n")
        first, *headers = head.splitlines()
        if "ready" not in first:
            found.append((first, sorted(headers), payload.strip()))
    return found


@pytest.mark.slow
@pytest.mark.timeout(BUILD_WAIT + 60)
@pytest.mark.usefixtures("nats_cli")
def test_properties(stage: Stage) -> None:
    shell = stage.shell
    (mqtt_sub, nats_sub, mqtt_pub, nats_pub), (mqtt_text, nats_text), _ = step("Properties are headers")
    mqtt, nats = shell.start(mqtt_sub), shell.start(nats_sub)
    heard(mqtt, "nats pub home.ready x", shell, "home/ready x")
    heard(nats, "nats pub home.ready x", shell, "home.ready")
    shell.run(mqtt_pub)
    shell.run(nats_pub)
    eventually(lambda: "294.6" in mqtt.text and "294.6" in nats.text)
    shown = [line.rstrip() for line in mqtt.text.splitlines() if "ready" not in line]
    assert shown == mqtt_text.splitlines()
    received = nats_messages(nats.text)
    assert received == nats_messages(nats_text)
    assert len(received) == 2


@pytest.mark.slow
@pytest.mark.timeout(BUILD_WAIT + 60)
@pytest.mark.usefixtures("nats_cli")
def test_mqtt_answers_nats(stage: Stage, tmp_path: Path) -> None:
    (nats_request, mqtt_request), (text,), program = step("A NATS client asks, an MQTT client answers")
    file = tmp_path / "lamp.py"
    file.write_text(program.replace("1883", str(stage.first.port)), encoding="utf-8")
    lamp = stage.shell.start(f"{sys.executable} {file}")
    watch = stage.shell.start("nats sub home.lamp.get")
    eventually(lambda: "Subscribing" in watch.text)
    # Not merely somewhere: nats says "no responders" as long as the lamp has not subscribed.
    eventually(lambda: stage.shell.attempt(nats_request, 2).strip() == "on", 20, what=f"an answer {lamp.text}")
    printed = stage.shell.run(nats_request).strip() + "\n" + stage.shell.run(mqtt_request)
    assert printed == text


@pytest.mark.slow
@pytest.mark.timeout(BUILD_WAIT + 60)
@pytest.mark.usefixtures("nats_cli")
def test_nats_answers_mqtt(stage: Stage) -> None:
    (nats_reply, mqtt_request), (text,), _ = step("An MQTT client asks, a NATS client answers")
    thermostat = stage.shell.start(nats_reply)
    eventually(lambda: "Listening on" in thermostat.text)
    eventually(lambda: "21.5" in stage.shell.attempt("nats request home.thermostat x", 2), 20)
    assert stage.shell.run(mqtt_request).strip() == text.strip()


def test_shared_subscription(stage: Stage) -> None:
    """Each job is done once; who gets it is not said."""
    (serve, first_sub, second_sub, publish), texts, _ = step("One job each: a shared subscription over two gateways")
    assert serve.split()[1:] == ["serve", "--nats", "nats://127.0.0.1:4222", "--listen", "127.0.0.1:1884"]
    assert re.findall(r"\d", "".join(texts)) == list("135246")
    workers = [stage.shell.start(first_sub), stage.shell.start(second_sub)]
    give, publish = publish.split(" | ")
    assert give == "seq 6"

    def jobs() -> list[str]:
        return [line.split()[1] for worker in workers for line in worker.text.splitlines()]

    def both_work() -> bool:
        stage.shell.run("mosquitto_pub -p 1883 -t jobs -q 1 -m ready")
        return all("ready" in worker.text for worker in workers)

    eventually(both_work, 20)
    stage.shell.run(publish, given="1\n2\n3\n4\n5\n6\n")
    eventually(lambda: len([job for job in jobs() if job != "ready"]) >= 6)
    stage.shell.run("mosquitto_pub -p 1883 -t jobs -q 1 -m end")
    eventually(lambda: "end" in jobs())
    assert sorted(job for job in jobs() if job.isdigit()) == list("123456")

    # a worker whose gateway is gone gets nothing more
    stage.second.kill()
    workers[1].discard()
    stage.shell.run(publish, given="7\n8\n9\n")
    eventually(lambda: set(jobs()) >= set("789"), 60)


def test_message_expiry(stage: Stage) -> None:
    (leave, stale, fresh, back), (text,), _ = step("A message that is only worth something for a while")
    for command in (leave, stale, fresh):
        stage.shell.run(command)
    time.sleep(5)
    printed = stage.shell.run(back)
    assert re.fullmatch(r"fresh, (\d+) s left\n", text)
    match = re.fullmatch(r"fresh, (\d+) s left\n", printed)
    assert match is not None, printed
    assert 50 <= int(match.group(1)) <= 55


def sensors(stage: Stage) -> tuple[LoggedProcess, str, str]:
    """The watcher, which hears already; the command of the sensor; what the watcher prints in the end."""
    (watch, sensor), (text,), _ = step("A will with a delay")
    watcher = stage.shell.start(watch)
    heard(watcher, "mosquitto_pub -p 1883 -t home/sensor/state -m ready", stage.shell, "ready")
    return watcher, sensor, text


def present(stage: Stage, watcher: LoggedProcess, command: str) -> LoggedProcess:
    """Start the sensor, and wait until it is there: it gets an order."""
    sensor = stage.shell.start(command)
    heard(sensor, "mosquitto_pub -p 1883 -t home/sensor/orders -m report", stage.shell, "report")
    return sensor


def shown(watcher: LoggedProcess) -> str:
    return "".join(line for line in watcher.text.splitlines(keepends=True) if "ready" not in line)


def kill(process: LoggedProcess) -> float:
    """SIGKILL; the time of it."""
    process.send(signal.SIGKILL)
    process.wait()
    return time.monotonic()


def test_will_with_delay(stage: Stage) -> None:
    watcher, command, text = sensors(stage)
    killed = kill(present(stage, watcher, command))
    again = present(stage, watcher, command)
    time.sleep(killed + 7 - time.monotonic())
    assert shown(watcher) == ""
    killed = kill(again)
    eventually(lambda: shown(watcher) == text, 15)
    assert 4.5 < time.monotonic() - killed < 11


@pytest.mark.slow
def test_will_of_a_sensor_whose_gateway_is_killed(stage: Stage) -> None:
    watcher, command, text = sensors(stage)
    sensor = present(stage, watcher, command)
    stage.second.kill()
    sensor.discard()
    eventually(lambda: shown(watcher) == text, 75)


@pytest.mark.slow
def test_delay_goes_on_without_the_gateway(stage: Stage) -> None:
    watcher, command, text = sensors(stage)
    killed = kill(present(stage, watcher, command))
    stage.second.kill()
    eventually(lambda: shown(watcher) == text, 75)
    assert time.monotonic() - killed > 4.5


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
