# SPDX-License-Identifier: Apache-2.0
"""The README and then docs/tour.md, in a fresh directory, run as written: what is printed is what the pages say."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtt_streams.definitions import EVERY
from tests.conftest import GatewayFactory
from tests.harness.nats import ROOT
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.shell import BUILD_WAIT, Shell, find_nats_cli
from tests.harness.waiting import eventually, free_port

README = (ROOT / "README.md").read_text(encoding="utf-8")
TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")

ACTIVATE = ". .venv/bin/activate"
EXPORT = "export NATS_CONTEXT=$PWD/data/nats.json"


def blocks(page: str, title: str, language: str) -> list[str]:
    """The blocks in a language of the section with this title; commands without those that prepare a terminal."""
    (text,) = [part for part in re.split(r"^## ", page, flags=re.MULTILINE) if part.startswith(f"{title}\n")]
    found = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return [block.replace(f"{ACTIVATE}\n", "") for block in found]


def commands(page: str, title: str) -> list[str]:
    return "".join(blocks(page, title, "sh")).splitlines()


@pytest.fixture
def shell(gateway_factory: GatewayFactory, tmp_path: Path) -> Iterator[Shell]:
    """Terminals in a directory in which `make run` has started the gateway and its nats-server."""
    data = tmp_path / "data"
    gateway = gateway_factory("", "--embedded", "--embedded-port", "0", "--data", str(data))
    name, _, value = EXPORT.removeprefix("export ").partition("=")
    ports = {1883: gateway.port, 1884: free_port()}
    shell = Shell(ports, gateway.nats_url, tmp_path, {name: value.replace("$PWD", str(tmp_path))})
    yield shell
    shell.close()


def heard(process: LoggedProcess, send: str, shell: Shell, text: str) -> None:
    """Repeat a command until a subscriber has printed ``text``."""

    def arrived() -> bool:
        shell.run(send)
        return text in process.text

    eventually(arrived, 20)


def printed(process: LoggedProcess) -> str:
    """What a subscriber has printed, without the messages that showed that it is there."""
    return "".join(line for line in process.text.splitlines(keepends=True) if "ready" not in line)


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
@pytest.mark.timeout(BUILD_WAIT + 240)
def test_readme_then_tour(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ROOT / "Makefile").read_text(encoding="utf-8").count("serve --embedded --data ./data") == 1
    assert re.findall(r"```sh\n(.*?)```", TOUR, re.DOTALL)[0].splitlines() == [ACTIVATE, EXPORT]
    monkeypatch.setenv("PATH", str(Path(find_nats_cli()).parent), prepend=os.pathsep)
    ten_commands(shell)
    same_topics(shell, tmp_path)
    stored_messages(shell)
    properties(shell)
    mqtt_answers_nats(shell, tmp_path)
    nats_answers_mqtt(shell)
    shared_subscription(shell)
    message_expiry(shell)
    will_with_delay(shell)


def test_the_steps_that_need_nothing_else(shell: Shell) -> None:
    ten_commands(shell)
    shared_subscription(shell)
    message_expiry(shell)
    will_with_delay(shell)


def ten_commands(shell: Shell) -> None:
    subscribe, publish, session, retained, operator = (
        block.splitlines() for block in blocks(README, "Ten commands", "sh")
    )
    texts = blocks(README, "Ten commands", "text")
    assert len([*subscribe, *publish, *session, *retained, *operator]) == 10
    (live,) = [shell.start(line) for line in subscribe]
    heard(live, "mqtt-nats pub -t home/ready -m x", shell, "home/ready x")
    (line,) = publish
    assert shell.run(line) == ""
    eventually(lambda: printed(live) == texts[0])
    assert [shell.run(line) for line in session] == ["", "", texts[1]]
    assert [shell.run(line) for line in retained] == ["", texts[2]]
    sessions, stored, streams = (shell.run(line) for line in operator)
    assert "lamp" in sessions
    assert "home/door" in stored
    assert [name for name in EVERY if name not in streams] == []


def same_topics(shell: Shell, tmp_path: Path) -> None:
    title = "NATS clients are on the same topics"
    mqtt_sub, nats_sub, pub, pub_live, pub_stored, back = commands(TOUR, title)
    texts, (program,) = blocks(TOUR, title, "text"), blocks(TOUR, title, "python")
    mqtt, nats = shell.start(mqtt_sub), shell.start(nats_sub)
    heard(mqtt, "nats pub home.kitchen ready", shell, "ready")
    heard(nats, "nats pub home.kitchen ready", shell, "ready")
    shell.run(pub)
    eventually(lambda: printed(mqtt) == texts[0])
    eventually(lambda: "22.0" in nats.text)
    shell.run(pub_live)
    shell.run(pub_stored)
    assert shell.run(back) == texts[1]
    file = tmp_path / "publish.py"
    file.write_text(program.replace("nats://127.0.0.1:4222", shell.nats_url), encoding="utf-8")
    shell.run(f"{sys.executable} {file}")
    assert shell.run(back) == texts[1]


def stored_messages(shell: Shell) -> None:
    list_streams, messages, retained = commands(TOUR, "Stored messages are in streams")
    streams = shell.run(list_streams)
    assert [name for name in EVERY if name not in streams] == []
    assert "$MQTT.msgs.home.lamp" in shell.run_on_terminal(messages)
    shown = shell.run_on_terminal(retained)
    assert "$MQTT.rmsgs.home.door" in shown
    assert "shut" in shown


def properties(shell: Shell) -> None:
    title = "Properties are headers"
    mqtt_sub, nats_sub, mqtt_pub, nats_pub = commands(TOUR, title)
    mqtt_text, nats_text = blocks(TOUR, title, "text")
    mqtt, nats = shell.start(mqtt_sub), shell.start(nats_sub)
    heard(mqtt, "nats pub home.attic ready", shell, "ready")
    heard(nats, "nats pub home.attic ready", shell, "ready")
    count = nats.text.count("[#")
    shell.run(mqtt_pub)
    shell.run(nats_pub)
    eventually(lambda: "294.6" in mqtt.text and "294.6" in nats.text)
    assert [line.rstrip() for line in printed(mqtt).splitlines()] == mqtt_text.splitlines()
    assert nats_messages(nats.text)[count:] == nats_messages(nats_text)


def mqtt_answers_nats(shell: Shell, tmp_path: Path) -> None:
    title = "A NATS client asks, an MQTT client answers"
    (nats_request, mqtt_request), (text,) = commands(TOUR, title), blocks(TOUR, title, "text")
    (program,) = blocks(TOUR, title, "python")
    file = tmp_path / "lamp.py"
    file.write_text(program.replace("1883", shell.arguments("x -p 1883")[2]), encoding="utf-8")
    lamp = shell.start(f"{sys.executable} {file}")
    # nats says "no responders" as long as the lamp has not subscribed.
    eventually(lambda: shell.attempt(nats_request, 2).strip() == "on", 20, what=f"an answer {lamp.text}")
    assert shell.run(nats_request).strip() + "\n" + shell.run(mqtt_request) == text


def nats_answers_mqtt(shell: Shell) -> None:
    title = "An MQTT client asks, a NATS client answers"
    (nats_reply, mqtt_request), (text,) = commands(TOUR, title), blocks(TOUR, title, "text")
    thermostat = shell.start(nats_reply)
    eventually(lambda: "Listening on" in thermostat.text)
    eventually(lambda: "21.5" in shell.attempt("nats request home.thermostat x", 2), 20)
    assert shell.run(mqtt_request) == text


def second_gateway(shell: Shell) -> LoggedProcess:
    """Start it as the page says; it finds the login at nats-server in ./data."""
    serve = commands(TOUR, "One job each: a shared subscription over two gateways")[0]
    process = shell.start(serve)
    wait_ready(process, r"\bMQTT +127\.0\.0\.1:(\d+)", 30)
    return process


def shared_subscription(shell: Shell) -> None:
    """Each job is done once; who gets it is not said."""
    title = "One job each: a shared subscription over two gateways"
    (_, first_sub, second_sub, publish), texts = commands(TOUR, title), blocks(TOUR, title, "text")
    assert re.findall(r"\d", "".join(texts)) == list("135246")
    second = second_gateway(shell)
    workers = [shell.start(first_sub), shell.start(second_sub)]
    give, publish = publish.split(" | ")
    assert give == "seq 6"

    def jobs() -> list[str]:
        return [line.split()[1] for worker in workers for line in worker.text.splitlines()]

    def both_work() -> bool:
        shell.run("mqtt-nats pub -t jobs -q 1 -m ready")
        return all("ready" in worker.text for worker in workers)

    eventually(both_work, 20)
    shell.run(publish, given="1\n2\n3\n4\n5\n6\n")
    eventually(lambda: len([job for job in jobs() if job != "ready"]) >= 6)
    shell.run("mqtt-nats pub -t jobs -q 1 -m end")
    eventually(lambda: "end" in jobs())
    assert sorted(job for job in jobs() if job.isdigit()) == list("123456")

    # a worker whose gateway is gone gets nothing more
    kill(second)
    workers[1].discard()
    shell.run(publish, given="7\n8\n9\n")
    eventually(lambda: set(jobs()) >= set("789"), 60)


def message_expiry(shell: Shell) -> None:
    *before, back = commands(TOUR, "A message that expires")
    (text,) = blocks(TOUR, "A message that expires", "text")
    assert [shell.run(command) for command in before] == ["", "", ""]
    time.sleep(5)
    assert re.fullmatch(r"fresh, (\d+) s left\n", text)
    shown = shell.run(back)
    match = re.fullmatch(r"fresh, (\d+) s left\n", shown)
    assert match is not None, shown
    assert 50 <= int(match.group(1)) <= 55


def will_with_delay(shell: Shell) -> None:
    second_gateway(shell)
    watcher, command, text = sensors(shell)
    killed = kill(present(shell, command))
    again = present(shell, command)
    time.sleep(max(0.0, killed + 7 - time.monotonic()))
    assert printed(watcher) == ""
    killed = kill(again)
    eventually(lambda: printed(watcher) == text, 15)
    assert 4.5 < time.monotonic() - killed < 11


def sensors(shell: Shell) -> tuple[LoggedProcess, str, str]:
    """The watcher, which is subscribed; the command of the sensor; what the watcher prints in the end."""
    (watch, sensor), (text,) = commands(TOUR, "A will with a delay"), blocks(TOUR, "A will with a delay", "text")
    watcher = shell.start(watch)
    heard(watcher, "mqtt-nats pub -t home/sensor/state -m ready", shell, "ready")
    return watcher, sensor, text


def present(shell: Shell, command: str) -> LoggedProcess:
    """Start the sensor, and wait until it is there: it gets an order."""
    sensor = shell.start(command)
    heard(sensor, "mqtt-nats pub -t home/sensor/orders -m report", shell, "report")
    return sensor


def kill(process: LoggedProcess) -> float:
    """SIGKILL; the time of it."""
    process.send(signal.SIGKILL)
    process.wait()
    return time.monotonic()


@pytest.mark.slow
def test_will_of_a_sensor_whose_gateway_is_killed(shell: Shell) -> None:
    second = second_gateway(shell)
    watcher, command, text = sensors(shell)
    sensor = present(shell, command)
    kill(second)
    sensor.discard()
    eventually(lambda: printed(watcher) == text, 75)


@pytest.mark.slow
def test_delay_goes_on_without_the_gateway(shell: Shell) -> None:
    second = second_gateway(shell)
    watcher, command, text = sensors(shell)
    killed = kill(present(shell, command))
    kill(second)
    eventually(lambda: printed(watcher) == text, 75)
    assert time.monotonic() - killed > 4.5


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", TOUR):
        assert (ROOT / "docs" / target).exists(), target
