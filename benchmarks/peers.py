# SPDX-License-Identifier: Apache-2.0
"""The brokers: found, started with a fresh data directory on free ports of 127.0.0.1, and ended, by pid."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.generator import answers, packets
from benchmarks.generator.answers import RefusedError
from benchmarks.generator.packets import DeliveryError

HOST = "127.0.0.1"
START_TIMEOUT = 20.0

NATS_CONFIG = """\
server_name: bench
listen: "{host}:{nats}"
jetstream {{ store_dir: "{data}", sync_interval: "1s" }}
"""
"""The same for both NATS peers; `sync_interval` as in the shipped nats-server.conf."""

NATS_MQTT = """\
mqtt {{ listen: "{host}:{mqtt}", stream_replicas: 1 }}
"""

NATS_CLUSTER = """\
server_name: bench{number}
cluster {{ name: bench, listen: "{host}:{route}", routes: [{routes}] }}
"""

MOSQUITTO_CONFIG = """\
listener {mqtt} {host}
allow_anonymous true
user root
persistence false
max_queued_messages 0
max_inflight_messages 0
set_tcp_nodelay true
log_dest stderr
log_type error
"""

AMQTT_CONFIG = {
    "listeners": {"default": {"type": "tcp", "bind": "{host}:{mqtt}"}},
    "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
}

AEDES = Path(sys.prefix) / "aedes"
"""Where ``npm install --prefix`` has put aedes: in the virtual environment."""

EMQX_SETTINGS = {
    "NODE__DATA_DIR": "{data}",
    "NODE__NAME": "bench@{host}",
    "LOG__CONSOLE__LEVEL": "error",
    "LISTENERS__TCP__DEFAULT__BIND": "{host}:{mqtt}",
    "LISTENERS__SSL__DEFAULT__ENABLE": "false",
    "LISTENERS__WS__DEFAULT__ENABLE": "false",
    "LISTENERS__WSS__DEFAULT__ENABLE": "false",
    "DASHBOARD__LISTENERS__HTTP__BIND": "0",
    "MQTT__MAX_INFLIGHT": "65535",
    "MQTT__MAX_MQUEUE_LEN": "infinity",
}
"""Given as environment variables; without limits of its own on what may be queued, as mosquitto above."""

HOOKED = {"hooks-elsewhere": "Elsewhere", "hooks": "Everywhere"}
"""Our gateway with a plugin of :mod:`benchmarks.hooked`, by the name of the peer."""

PORTS = range(12_000, 32_000)
"""Ports of brokers: below those that kernels give to outgoing connections."""

OURS_COMMAND = "mqtt-nats serve --nats nats://{host}:{nats} --listen {host}:{mqtt} --max-inflight 1024"
"""As many messages in flight as nats-server's listener has by default (`max_ack_pending`)."""


class PeerError(Exception):
    """A broker that is not installed or does not start."""


@dataclass
class Running:
    """A broker that accepts MQTT connections; ``processes``: label → pid.

    ``data``: where all its files are; ``other_port``: of the second server, where there are two; ``nats_port``: 0 for a
    broker without NATS.
    """

    port: int
    data: Path
    other_port: int = 0
    nats_port: int = 0
    processes: dict[str, int] = field(default_factory=dict)


@dataclass
class _Start:
    """State that the starters of one broker share."""

    data: Path
    ports: list[dict[str, int]]
    """Of each server: `nats`, `mqtt` and `route`."""
    split: bool = False
    """Whether each server serves clients, ours by its own gateway, and streams have one replica; else the first one."""
    number: int = 0
    """The server that is being started."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    running: Running = field(init=False)

    def __post_init__(self) -> None:
        self.running = Running(self.ports[0]["mqtt"], self.data, self.ports[-1]["mqtt"])

    @property
    def cluster(self) -> bool:
        """Whether there is more than one server."""
        return len(self.ports) > 1

    def each(self, *, serving: bool = False) -> Iterator[None]:
        """Turn to one server after the other; ``serving``: only to those that serve clients."""
        for number in range(1 if serving and not self.split else len(self.ports)):
            self.number = number
            yield

    def label(self, program: str) -> str:
        """The name of a process."""
        return f"{program} {self.number + 1}" if self.cluster else program

    def values(self) -> dict[str, object]:
        routes = ", ".join(f'"nats://{HOST}:{each["route"]}"' for each in self.ports)
        ports = self.ports[self.number]
        return {
            "host": HOST,
            "data": self.data / f"store{self.number}",
            "number": self.number,
            "routes": routes,
        } | ports

    def write(self, name: str, text: str) -> str:
        path = self.data / name
        path.write_text(text)
        return str(path)

    def spawn(self, label: str, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        label = self.label(label)
        with (self.data / f"{label}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.data,
                start_new_session=True, env=os.environ | environment,
            )  # fmt: skip
        self.processes.append(process)
        self.running.processes[label] = process.pid
        return process

    def wait(self, label: str, ready: Callable[[], bool]) -> None:
        """Until a process of the server that we have turned to is ready."""
        label, until = self.label(label), time.monotonic() + START_TIMEOUT
        process = next(each for each in self.processes if each.pid == self.running.processes[label])
        while not ready():
            code = process.poll()
            if code is not None or time.monotonic() > until:
                lines = (self.data / f"{label}.log").read_text(errors="replace").strip().splitlines()[-3:]
                state = f"ended with code {code}" if code is not None else f"is not ready after {START_TIMEOUT:.0f} s"
                raise PeerError(f"{label} {state}: {' / '.join(lines) or 'no output'}")
            time.sleep(0.02)


def find(program: str) -> str | None:
    """Path of a program beside this Python, on PATH, or where distributions put servers."""
    beside = Path(sys.executable).parent / program
    if beside.is_file():
        return str(beside)
    return shutil.which(program, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/local/sbin")


def _required(program: str) -> str:
    found = find(program)
    if found is None:
        raise PeerError(f"{program} is not installed")
    return found


def _ours_command(command: str) -> list[str]:
    words = shlex.split(command)
    if found := find(words[0]):
        return [found, *words[1:]]
    if words[0] == "mqtt-nats" and importlib.util.find_spec("mqtt_nats.__main__") is not None:
        return [sys.executable, "-m", "mqtt_nats", *words[1:]]
    raise PeerError(f"{words[0]} is not installed")


def _start_nats(start: _Start, *, mqtt: bool, monitor: int = 0) -> None:
    parts = NATS_CONFIG + (NATS_MQTT if mqtt else "") + (NATS_CLUSTER if start.cluster else "")
    if monitor:
        parts += f'http: "{{host}}:{monitor}"\n'
    for _ in start.each():
        config = start.write(f"nats{start.number}.conf", parts.format(**start.values()))
        start.spawn("nats-server", [_required("nats-server"), "-c", config])
    for _ in start.each():
        start.wait("nats-server", partial(accepts, start.ports[start.number]["nats"]))
    start.running.nats_port = start.ports[0]["nats"]


def _nats(start: _Start, command: str) -> None:
    _start_nats(start, mqtt=True)


def _ours(start: _Start, command: str, plugin: str = "") -> None:
    words = _ours_command(command)
    environment = {}
    if plugin:
        words += ["--config", start.write("hooked.toml", f"[plugins.{plugin}]\n")]
        installed = start.data / "hooked-1.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: hooked\nVersion: 1\n")
        names = "".join(f"{each} = benchmarks.hooked:{each}\n" for each in HOOKED.values())
        (installed / "entry_points.txt").write_text(f"[mqtt_nats.plugins]\n{names}")
        environment["PYTHONPATH"] = f"{start.data}:{Path(__file__).parent.parent}"
    if start.split:
        words += ["--stream-replicas", "1"]
    _start_nats(start, mqtt=False)
    for _ in start.each(serving=True):
        start.spawn("gateway", [word.format(**start.values()) for word in words], **environment)


def _mosquitto(start: _Start, command: str) -> None:
    start.spawn(
        "mosquitto",
        [_required("mosquitto"), "-c", start.write("mosquitto.conf", MOSQUITTO_CONFIG.format(**start.values()))],
    )


def _amqtt(start: _Start, command: str) -> None:
    config = json.dumps(AMQTT_CONFIG).replace("{host}:{mqtt}", f"{HOST}:{start.ports[0]['mqtt']}")  # JSON is YAML
    start.spawn("amqtt", [_required("amqtt"), "-c", start.write("amqtt.yaml", config)])


def _aedes(start: _Start, command: str) -> None:
    module = AEDES / "node_modules" / "aedes" / "aedes.js"
    if not module.is_file():
        raise PeerError("aedes is not installed")
    script = Path(__file__).with_name("aedes.mjs")
    start.spawn("aedes", [_required("node"), str(script), str(module), HOST, str(start.ports[0]["mqtt"])])


def _emqx(start: _Start, command: str) -> None:
    program = _required("emqx")
    start.data.joinpath("store0").mkdir()
    settings = {f"EMQX_{name}": value.format(**start.values()) for name, value in EMQX_SETTINGS.items()}
    start.spawn("emqx", [program, "foreground"], **settings)


def _relay(start: _Start, command: str) -> None:
    script = Path(__file__).with_name("relay.py")
    start.spawn("relay", [sys.executable, str(script), str(start.ports[0]["mqtt"])])


def _least(start: _Start, command: str) -> None:
    _start_nats(start, mqtt=False)
    script, ports = Path(__file__).with_name("least.py"), start.ports[0]
    start.spawn("gateway", [sys.executable, str(script), str(ports["nats"]), str(ports["mqtt"])])


PEERS: dict[str, Callable[[_Start, str], None]] = {
    "ours": _ours,
    "nats": _nats,
    "mosquitto": _mosquitto,
    "aedes": _aedes,
    "amqtt": _amqtt,
    "emqx": _emqx,
    "relay": _relay,
    "least": _least,
    **{name: partial(_ours, plugin=plugin) for name, plugin in HOOKED.items()},
}
ON_NATS = ("ours", "nats", *HOOKED)
ALL = ("ours", "nats", "mosquitto", "aedes", "amqtt", "emqx")
"""All that are brokers."""


def version(peer: str, command: str = OURS_COMMAND) -> str:
    """Version of a peer, as its program prints it; ``command`` starts ours."""
    if peer == "ours":
        words = _ours_command(command)
        return _said([*words[: words.index("serve")], "--version"])
    if peer == "aedes":
        said = json.loads((AEDES / "node_modules" / "aedes" / "package.json").read_text())
        return f"aedes {said['version']}"
    arguments = {
        "nats": ["nats-server", "-v"],
        "mosquitto": ["mosquitto", "-h"],
        "amqtt": ["amqtt", "--version"],
        "emqx": ["emqx", "version"],
    }
    if peer not in arguments:
        return ""
    program, *rest = arguments[peer]
    return _said([_required(program), *rest])


def _said(command: list[str]) -> str:
    run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    lines = (run.stdout + run.stderr).strip().splitlines()
    return lines[0].strip() if lines else "unknown"


@contextmanager
def running(peer: str, command: str = OURS_COMMAND, *, split: bool = False, servers: int = 1) -> Iterator[Running]:
    """A fresh broker; ended, with everything it has started, when the block ends.

    ``split``: two servers of one cluster that both serve clients; only for those of `ON_NATS`. ``servers``: so many
    nats-servers for one gateway.
    """
    with _starting(2 if split else servers) as start:
        start.split = split
        PEERS[peer](start, command)
        program = next(reversed(start.running.processes)).split()[0]
        for _ in start.each(serving=True):
            start.wait(program, partial(greets, start.ports[start.number]["mqtt"]))
        yield start.running


@contextmanager
def nats_server() -> Iterator[str]:
    """The URL of a fresh nats-server with JetStream and without MQTT."""
    with _starting(1) as start:
        _start_nats(start, mqtt=False)
        yield f"nats://{HOST}:{start.running.nats_port}"


@contextmanager
def monitored_nats_server() -> Iterator[tuple[str, str, int]]:
    """The URL of a fresh nats-server with JetStream, the URL of its monitoring, and its process id."""
    with _starting(1) as start:
        (monitor,) = _free_ports(1)
        _start_nats(start, mqtt=False, monitor=monitor)
        pid = start.running.processes["nats-server"]
        yield f"nats://{HOST}:{start.running.nats_port}", f"http://{HOST}:{monitor}", pid


@contextmanager
def _starting(servers: int) -> Iterator[_Start]:
    with tempfile.TemporaryDirectory(prefix="mqtt-bench-", ignore_cleanup_errors=True) as directory:
        ports = _free_ports(3 * servers)
        names = ("nats", "mqtt", "route")
        start = _Start(Path(directory), [dict(zip(names, ports[at::servers], strict=True)) for at in range(servers)])
        try:
            yield start
        finally:
            for process in reversed(start.processes):
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the process, then SIGKILL to what is left of the session that it leads."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now; no outgoing connection of another process takes one of them meanwhile."""
    sockets: list[socket.socket] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(sockets) == count:
            break
        try:
            sockets.append(socket.create_server((HOST, port)))
        except OSError:
            continue
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def accepts(port: int) -> bool:
    """Whether something listens on a port."""
    try:
        socket.create_connection((HOST, port), 1).close()
    except OSError:
        return False
    return True


def greets(port: int, version: int = 4) -> bool:
    """Whether the broker accepts a CONNECT of this version of MQTT (4: 3.1.1)."""
    try:
        with socket.create_connection((HOST, port), 1) as sock:
            sock.settimeout(5)
            sock.sendall(packets.connect("probe", clean=True, version=version))
            answer = b""
            while (found := answers.packet_at(answer, 0, len(answer))) is None:
                if not (part := sock.recv(1024)):
                    return False
                answer += part
            answers.connack(*found[:2], version)
            sock.sendall(b"\xe0\x00")
            return True
    except (OSError, DeliveryError, RefusedError):
        return False
