# SPDX-License-Identifier: Apache-2.0
"""docs/nats.md: its tables against the code, its commands run as written, with the real clients."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtt_nats.ingress.request_reply import KNOWN_BYTES, KNOWN_FOR, KNOWN_MOST
from mqtt_nats.messages.properties import SHOWN_MOST
from mqtt_streams import headers
from mqtt_streams.subjects import encode_topic, filter_to_subjects, subject_to_topic, system_subject
from tests.conftest import GatewayFactory
from tests.harness.nats import ROOT, NatsServer
from tests.harness.shell import BUILD_WAIT, Shell, find_nats_cli
from tests.harness.waiting import eventually

PAGE = (ROOT / "docs" / "nats.md").read_text(encoding="utf-8")

with_clients = pytest.mark.usefixtures("nats_cli")


def section(title: str) -> str:
    """The part of the page under a heading; an empty title is what comes before the first."""
    (text,) = [part for part in re.split(r"^#+ ", PAGE, flags=re.MULTILINE) if part.startswith(f"{title}\n")]
    return text


def blocks(title: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section(title), re.DOTALL)


def commands(title: str) -> list[str]:
    return "".join(blocks(title, "sh")).splitlines()


def rows(title: str) -> list[list[str]]:
    """The cells of all tables of a section, without heads."""
    lines = [line for line in section(title).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_topics_and_subjects() -> None:
    table = rows("Topics and subjects")
    assert len(table) > 10
    for cells in table:
        (topic,) = code(cells[0])
        subjects = code(cells[1])
        if "+" in topic or "#" in topic:
            assert sorted(filter_to_subjects(topic)) == sorted(subjects)
        else:
            assert [system_subject(topic) if topic.startswith("$SYS/") else encode_topic(topic)] == subjects
            assert subject_to_topic(subjects[0]) == topic


def test_every_header_is_named() -> None:
    text = section("Headers and properties")
    shown = {
        *(headers.USER, headers.CONTENT_TYPE, headers.CONTENT_TYPE_ENCODED, headers.FORMAT, headers.EXPIRY),
        *(headers.REPLY, headers.CORRELATION, headers.PUB, headers.RETAIN, headers.CLIENT, headers.ID),
        *(headers.MSG_ID, headers.TTL),
    }
    assert [name for name in shown if f"`{name}`" not in text] == []


def test_numbers() -> None:
    assert f"within {KNOWN_FOR:.0f} seconds" in section("Requests from NATS to MQTT")
    assert f"for {KNOWN_FOR:.0f} seconds" in section("Requests from MQTT to NATS")
    assert f"at most {KNOWN_MOST:,} requests each way, in at most {KNOWN_BYTES >> 20} MiB" in section("Limits")
    assert f"the first {SHOWN_MOST:,}" in section("Headers and properties")


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


@pytest.fixture
def nats_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the nats CLI on PATH."""
    monkeypatch.setenv("PATH", str(Path(find_nats_cli()).parent), prepend=":")


@pytest.fixture
def shell(nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path) -> Iterator[Shell]:
    """A shell for commands that name port 1883."""
    shell = Shell({1883: gateway_factory(nats_server).port}, nats_server.url, tmp_path)
    yield shell
    shell.close()


def answered(shell: Shell, request: str) -> str:
    """What a request prints, if it is answered."""
    try:
        return shell.run(request)
    except AssertionError:
        return ""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(BUILD_WAIT + 60)
@with_clients
def test_same_topics(shell: Shell) -> None:
    mqtt_sub, nats_sub, nats_pub, mqtt_pub = commands("Sharing topics with NATS clients")
    mqtt, nats = shell.start(mqtt_sub), shell.start(nats_sub)

    def ready() -> bool:
        shell.run("nats pub home.ready x")
        return "ready" in mqtt.text and "ready" in nats.text

    eventually(ready, 20)
    shell.run(nats_pub)
    shell.run(mqtt_pub)
    eventually(lambda: "21.5" in mqtt.text and "21.5" in nats.text)
    shown = [line for line in mqtt.text.splitlines(keepends=True) if "ready" not in line]
    assert ["".join(shown)] == blocks("Sharing topics with NATS clients", "text")


@pytest.mark.slow
@pytest.mark.timeout(BUILD_WAIT + 60)
@with_clients
def test_qos_1_from_nats(shell: Shell) -> None:
    *before, back = commands("QoS and retained messages")
    for command in before:
        shell.run(command)
    assert [shell.run(back)] == blocks("QoS and retained messages", "text")


@pytest.mark.slow
@pytest.mark.timeout(BUILD_WAIT + 60)
@with_clients
def test_headers(shell: Shell) -> None:
    nats_sub, mqtt_pub = commands("Headers and properties")
    nats = shell.start(nats_sub)

    def ready() -> bool:
        shell.run("nats pub home.ready x")
        return "ready" in nats.text

    eventually(ready, 20)
    shell.run(mqtt_pub)
    eventually(lambda: "open\n" in nats.text)
    (text,) = blocks("Headers and properties", "text")

    def sorted_lines(printed: str) -> list[str]:
        """The nats CLI prints headers in any order."""
        printed = re.sub(r"^(\[#)\d+|^(Nmqtt-Client: ).*$", r"\1\2", printed, flags=re.MULTILINE)
        return sorted(line for line in printed.splitlines() if line)

    found = nats.text[nats.text.rindex("[#") :]
    assert sorted_lines(found) == sorted_lines(text)


@pytest.mark.slow
@pytest.mark.timeout(BUILD_WAIT + 60)
@with_clients
def test_request_from_nats(shell: Shell, tmp_path: Path) -> None:
    (program,) = blocks("Requests from NATS to MQTT", "python")
    (request,) = commands("Requests from NATS to MQTT")
    file = tmp_path / "door.py"
    file.write_text(program.replace('"127.0.0.1", 1883', '"127.0.0.1", ' + shell.arguments("x -p 1883")[2]))
    door = shell.start(f"{sys.executable} {file}")
    eventually(lambda: "open" in answered(shell, request), 20, what=f"an answer {door.text}")
    assert [shell.run(request).strip() + "\n"] == blocks("Requests from NATS to MQTT", "text")


@pytest.mark.slow
@pytest.mark.timeout(BUILD_WAIT + 60)
@with_clients
def test_request_from_mqtt(shell: Shell) -> None:
    nats_reply, request = commands("Requests from MQTT to NATS")
    thermostat = shell.start(nats_reply)
    eventually(lambda: "21.5" in answered(shell, "nats request home.thermostat x"), 20, what=thermostat.text)
    assert [shell.run(request)] == blocks("Requests from MQTT to NATS", "text")
