# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats pub``, ``sub`` and ``request`` against a gateway: QoS, sessions, retained messages, wills, properties."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import raw5
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.process import LoggedProcess
from tests.harness.raw import Raw
from tests.harness.raw5 import CORRELATION, RESPONSE_TOPIC, Raw5
from tests.harness.waiting import eventually
from tests.mqtt_clients.support import PATIENCE, printed, run, start

VERSIONS = pytest.mark.parametrize("version", ["3.1.1", "5.0"])


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    found = Gateway(tmp_path_factory.mktemp("gateway") / "log", nats_server.url)
    found.start()
    yield found
    assert found.term() == 0
    assert "Traceback" not in found.log
    found.process.discard()


def heard(process: LoggedProcess, port: str, topic: str, text: str) -> None:
    """Publish ``text`` until a subscriber has printed it."""

    def arrived() -> bool:
        printed("pub", "-p", port, "-t", topic, "-m", text)
        return text in process.text

    eventually(arrived, PATIENCE)


@VERSIONS
@pytest.mark.parametrize("qos", ["0", "1", "2"])
def test_each_qos_live(gateway: Gateway, tmp_path: Path, qos: str, version: str) -> None:
    port, topic = str(gateway.port), f"live/{version}/{qos}"
    subscriber = start(tmp_path / "log", "sub", "-V", version, "-p", port, "-t", topic, "-q", qos, "-F", "%t %p %q")
    try:
        heard(subscriber, port, topic, "ready")
        assert printed("pub", "-V", version, "-p", port, "-t", topic, "-q", qos, "-m", "21.5") == ""
        eventually(lambda: f"{topic} 21.5 {qos}\n" in subscriber.text, PATIENCE)
        subscriber.send(signal.SIGINT)
        assert subscriber.wait() == 0
        assert "mqtt-nats" not in subscriber.text
    finally:
        subscriber.discard()


@pytest.mark.long
@VERSIONS
@pytest.mark.parametrize("qos", ["1", "2"])
def test_a_session_waits(gateway: Gateway, qos: str, version: str) -> None:
    """Each message comes once, also when they are fetched in two parts."""
    topic = f"session/{version}/{qos}"
    session = ("-V", version, "-p", str(gateway.port), "-i", f"s{qos}{version}", "-c", "-q", qos, "-t", topic)
    assert printed("sub", *session, "-E") == ""
    lines = b"".join(b"%d\n" % number for number in range(300))
    assert printed("pub", "-p", str(gateway.port), "-V", version, "-t", topic, "-q", qos, "-l", given=lines) == ""
    first, second = printed("sub", *session, "-C", "100"), printed("sub", *session, "-C", "200")
    assert (first + second).encode() == lines
    assert run("sub", *session, "-W", "0.5").stdout == b""


@pytest.mark.long
def test_retained(gateway: Gateway) -> None:
    port = str(gateway.port)
    printed("pub", "-p", port, "-t", "kept/door", "-r", "-q", "1", "-m", "shut")
    assert printed("sub", "-p", port, "-t", "kept/#", "-C", "1", "-F", r"%r\t%t\t%p\t%%") == "1\tkept/door\tshut\t%\n"
    without = run("sub", "-p", port, "-t", "kept/#", "-R", "-W", "0.5")
    assert (without.returncode, without.stdout) == (27, b"")
    printed("pub", "-p", port, "-t", "kept/door", "-r", "-q", "1", "-n")
    assert run("sub", "-p", port, "-t", "kept/#", "-W", "0.5").stdout == b""


@pytest.mark.long
def test_will(gateway: Gateway, tmp_path: Path) -> None:
    """It is published after SIGKILL, not after SIGTERM, which is a DISCONNECT."""
    port = str(gateway.port)
    will = ("--will-topic", "will/state", "--will-payload", "offline", "--will-qos", "1", "--will-retain")
    sensor = start(tmp_path / "sensor", "sub", "-p", port, "-t", "will/orders", "-i", "sensor", *will)
    watcher = start(tmp_path / "watcher", "sub", "-p", port, "-t", "will/state", "-q", "1", "-v")
    try:
        heard(watcher, port, "will/state", "ready")
        heard(sensor, port, "will/orders", "report")
        sensor.send(signal.SIGTERM)
        assert sensor.wait() == 0
        sensor.start(sensor_command(port, will))
        heard(sensor, port, "will/orders", "again")
        assert "offline" not in watcher.text
        sensor.send(signal.SIGKILL)
        eventually(lambda: "will/state offline\n" in watcher.text, PATIENCE)
    finally:
        sensor.discard()
        watcher.discard()
    assert printed("sub", "-p", port, "-t", "will/state", "-C", "1", "-v") == "will/state offline\n"


def sensor_command(port: str, will: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "mqtt_nats", "sub", "-p", port, "-t", "will/orders", "-i", "sensor", *will]


@pytest.mark.long
def test_properties_both_ways(gateway: Gateway) -> None:
    port = str(gateway.port)
    session = ("-p", port, "-i", "properties", "-c", "-x", "600", "-q", "1", "-t", "props/a")
    printed("sub", *session, "-E")
    users = ("--user-property", "unit=celsius", "--user-property", "a=b=c", "--response-topic", "props/b")
    given = ("--content-type", "text/plain", "--correlation-data", "42", "--expiry", "600", "--utf8", *users)
    for _ in range(2):
        printed("pub", "-p", port, "-t", "props/a", "-q", "1", "-m", "21,5 °C", *given)
    shown = printed("sub", *session, "-C", "1", "-F", "%p|%C|%D|%F|%P|%R|%l|%x")
    assert shown == "21,5 °C|text/plain|42|1|unit:celsius a:b=c|props/b|8|32312c3520c2b043\n"
    found = json.loads(printed("sub", *session, "-C", "1", "-F", "%j"))
    expiry = found["properties"].pop("message-expiry-interval")
    assert 500 < expiry <= 600
    assert (found["topic"], found["payload"], found["qos"], found["payloadlen"]) == ("props/a", "21,5 °C", 1, 8)
    assert found["properties"] == {
        "payload-format-indicator": 1,
        "content-type": "text/plain",
        "response-topic": "props/b",
        "correlation-data": "42",
        "user-property": [["unit", "celsius"], ["a", "b=c"]],
    }


def test_subscription_options(gateway: Gateway) -> None:
    port = str(gateway.port)
    printed("pub", "-p", port, "-t", "options/a", "-r", "-q", "1", "-m", "kept")
    without = run("sub", "-p", port, "-t", "options/#", "--retain-handling", "2", "-W", "0.5")
    assert (without.returncode, without.stdout) == (27, b"")
    as_published = ("sub", "-p", port, "-t", "options/#", "--retain-as-published", "-C", "1", "-F", "%r")
    assert printed(*as_published) == "1\n"
    both = ("sub", "-p", port, "-t", "options/a", "-t", "other/+", "--no-local", "-C", "1", "-v")
    assert printed(*both) == "options/a kept\n"


@pytest.mark.parametrize("qos", ["0", "1", "2"])
def test_request(gateway: Gateway, tmp_path: Path, qos: str) -> None:
    """The answer is printed, whether it has the correlation data or not."""
    with Raw5.open(gateway.port) as lamp:
        lamp.send(raw5.subscribe((f"lamp/{qos}", 0)))
        lamp.answer(raw5.SUBACK)
        arguments = ("-t", f"lamp/{qos}", "-e", f"answers/{qos}", "-q", qos, "-m", "state?", "--correlation-data", "7")
        asked = start(tmp_path / "log", "request", "-p", str(gateway.port), *arguments, "-F", "%t %p %D")
        try:
            message = raw5.message(lamp.expect(raw5.PUBLISH))
            assert (message.payload, message.get(RESPONSE_TOPIC)) == (b"state?", f"answers/{qos}")
            correlation = message.get(CORRELATION)
            lamp.send(raw5.publish(f"answers/{qos}", b"on", raw5.prop(CORRELATION, correlation)))
            assert asked.wait() == 0
            assert asked.text == f"answers/{qos} on 7\n"
        finally:
            asked.discard()


def test_a_request_without_answer(gateway: Gateway) -> None:
    done = run("request", "-p", str(gateway.port), "-t", "nobody", "-e", "answers/x", "-n", "-W", "0.5")
    assert (done.returncode, done.stdout, done.stderr) == (27, b"", b"mqtt-nats: no answer within 0.5 s\n")


def test_payloads_from_file_and_input(gateway: Gateway, tmp_path: Path) -> None:
    port = str(gateway.port)
    session = ("-p", port, "-i", "payloads", "-c", "-q", "1", "-t", "payloads")
    printed("sub", *session, "-E")
    content = bytes(range(256)) * 300
    file = tmp_path / "payload"
    file.write_bytes(content)
    printed("pub", "-p", port, "-t", "payloads", "-q", "1", "-f", str(file))
    printed("pub", "-p", port, "-t", "payloads", "-q", "1", "-s", given=content)
    printed("pub", "-p", port, "-t", "payloads", "-q", "1", "-n")
    assert run("sub", *session, "-C", "3").stdout == (content + b"\n") * 2 + b"\n"


def test_lines_are_published_as_they_come(gateway: Gateway, tmp_path: Path) -> None:
    """Not only at the end of the input; the connection is kept alive meanwhile."""
    port = str(gateway.port)
    subscriber = start(tmp_path / "log", "sub", "-p", port, "-t", "lines", "-q", "1")
    heard(subscriber, port, "lines", "ready")
    command = [sys.executable, "-m", "mqtt_nats", "pub", "-p", port, "-t", "lines", "-q", "1", "-l", "-k", "1"]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE) as publisher:
            assert publisher.stdin is not None
            publisher.stdin.write(b"first\nsec")
            publisher.stdin.flush()
            eventually(lambda: "first\n" in subscriber.text, PATIENCE)
            assert "sec" not in subscriber.text
            publisher.stdin.write(b"ond\nlast")
            publisher.stdin.close()
            assert publisher.wait(PATIENCE) == 0
        eventually(lambda: subscriber.text.endswith("first\nsecond\nlast\n"), PATIENCE)
    finally:
        subscriber.discard()


@pytest.mark.long
def test_keep_alive(gateway: Gateway) -> None:
    """Three times the keep alive without a message: the gateway has not closed the connection."""
    done = run("sub", "-p", str(gateway.port), "-t", "silent", "-k", "1", "-W", "3")
    assert (done.returncode, done.stderr) == (27, b"mqtt-nats: the time of --timeout is over\n")


def test_a_session_is_taken_over(gateway: Gateway, tmp_path: Path) -> None:
    port = str(gateway.port)
    first = start(tmp_path / "log", "sub", "-p", port, "-i", "twice", "-t", "twice")
    try:
        heard(first, port, "twice", "ready")
        with Raw.connected(gateway.port, "twice"):
            assert first.wait() == 1
        text = "mqtt-nats: the server has disconnected: session taken over (reason code 0x8e)"
        assert text in first.text
    finally:
        first.discard()


@pytest.mark.long
def test_what_reads_the_output_may_leave(gateway: Gateway) -> None:
    port = str(gateway.port)
    printed("pub", "-p", port, "-t", "pipe/a", "-r", "-q", "1", "-m", "x")
    command = [sys.executable, "-m", "mqtt_nats", "sub", "-p", port, "-t", "pipe/#"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"x\n"
        process.stdout.close()
        heard_by_nobody = ("pub", "-p", port, "-t", "pipe/b", "-m", "y")

        def ended() -> bool:
            printed(*heard_by_nobody)
            return process.poll() is not None

        eventually(ended, PATIENCE)
        assert process.stderr.read() == b""
        assert process.returncode == 1
