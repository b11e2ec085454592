# SPDX-License-Identifier: Apache-2.0
"""The clients of the kit: how each is had, and which versions of MQTT it speaks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Protocol

from tests.clients import build
from tests.clients.bridge import Bridge
from tests.clients.build import PROGRAMS, MissingError
from tests.clients.node_red import NodeRed
from tests.clients.place import Place
from tests.clients.scenarios import Command, Library, Scenarios
from tests.clients.sparkplug import Sparkplug

PAHO_1 = "1.6.1"
MQTT_JS = "5.16.0"


class Client(Protocol):
    """One row of the table, for each version of MQTT."""

    name: str
    versions: Sequence[str]

    def prepare(self) -> Command:
        """Install and build it; ``MissingError`` where it cannot be had."""

    def scenarios(self, command: Command, place: Place, version: str) -> Scenarios:
        """What it does, by name of the scenario."""


def _python(program: str, package: str) -> Callable[[], Command]:
    """A package that the tests need anyway."""

    def prepare() -> Command:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise MissingError(f"{package} is not installed") from None
        return Command([sys.executable, str(PROGRAMS / program)], version)

    return prepare


def _paho_1() -> Command:
    path = build.pip(f"paho-mqtt=={PAHO_1}")
    return Command([sys.executable, str(PROGRAMS / "paho_python.py")], PAHO_1, {"PYTHONPATH": str(path)})


def _mqtt_js() -> Command:
    modules = build.npm(f"mqtt@{MQTT_JS}")
    env = {"NODE_PATH": str(modules), "NODE_EXTRA_CA_CERTS": "{authority}"}
    return Command([build.find("node"), str(PROGRAMS / "mqttjs.js")], MQTT_JS, env)


def _paho_c() -> Command:
    source = PROGRAMS / "paho_c" / "program.c"
    steps = [[build.find("cc", "gcc", "clang"), "-O1", "-o", "program", source.name, "-lpaho-mqtt3a"]]
    try:
        program = str(build.made("paho_c", [source], steps) / "program")
    except MissingError as error:
        raise MissingError(f"{error} (Debian: apt-get install libpaho-mqtt-dev)") from None
    return Command([program], build.output([program]))


def _go(name: str) -> Callable[[], Command]:
    """A module of Go, pinned in ``go.mod``."""

    def prepare() -> Command:
        steps = [[build.find("go"), "build", "-mod=mod", "-o", "program", "."]]
        program = build.made(name, build.sources(name), steps) / "program"
        return Command([str(program)], build.pinned(name, "go.mod", r"paho\S+ v(\S+)"))

    return prepare


def _rumqttc() -> Command:
    steps = [[build.find("cargo"), "build", "--quiet"]]
    program = build.made("rumqttc", build.sources("rumqttc"), steps) / "target" / "debug" / "program"
    return Command([str(program)], build.pinned("rumqttc", "Cargo.toml", r'rumqttc = .*"=([^"]+)"'))


def _java(name: str) -> Callable[[], Command]:
    """Packages of Maven Central, pinned in ``pom.xml``."""

    def prepare() -> Command:
        sources = build.sources(name)
        fetch = [build.find("mvn"), "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=lib"]
        compiled = [path.name for path in sources if path.suffix == ".java"]
        compile_all = [build.find("javac"), "-d", "classes", "-cp", "lib/*", *compiled]
        directory = build.made(name, sources, [fetch, compile_all])
        command = [
            build.find("java"),
            "-XX:TieredStopAtLevel=1",
            "-cp",
            f"{directory}/classes:{directory}/lib/*",
            "Main",
        ]
        return Command(command, build.pinned(name, "pom.xml", r"<artifactId>\S+\s+<version>([1-9]\S+)<"))

    return prepare


CHEAP: Sequence[Client] = (
    Library("paho-mqtt 2", _python("paho_python.py", "paho-mqtt")),
    Library("aiomqtt", _python("aiomqtt_python.py", "aiomqtt")),
    Library("gmqtt", _python("gmqtt_python.py", "gmqtt"), resumes_qos2=False),
)
"""Those that `make test` runs."""

CLIENTS: Sequence[Client] = (
    *CHEAP,
    Library("paho-mqtt 1.6", _paho_1),
    Library("MQTT.js", _mqtt_js, address="mqtt://127.0.0.1:{port}"),
    Library("MQTT.js, ws", _mqtt_js, address="ws://127.0.0.1:{ws}"),
    Library("MQTT.js, wss", _mqtt_js, address="wss://127.0.0.1:{wss}/mqtt"),
    Library("Paho C", _paho_c),
    Library("Paho Go", _go("paho_go"), versions=("3",), resumes_qos2=False),
    Library("autopaho (Go)", _go("autopaho"), versions=("5",)),
    Library("rumqttc (Rust)", _rumqttc, resumes_qos2=False),
    Library("Paho Java, mqttv3", _java("paho_java"), versions=("3",)),
    Library("Paho Java, mqttv5", _java("paho_java"), versions=("5",), resumes_qos2=False),
    Library("HiveMQ (Java)", _java("hivemq")),
    Bridge(),
    NodeRed(),
    Sparkplug(),
)
