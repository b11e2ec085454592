# SPDX-License-Identifier: Apache-2.0
"""Devices that connect again as soon as a connection is lost, and gateways that are ended and started again."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks import peers, proc
from benchmarks.generator import answers, packets
from benchmarks.generator.answers import RefusedError, packet_at
from benchmarks.generator.clients import Connection, LoadError, Loop

START_S: Final = 180.0
"""Seconds in which a gateway serves clients, or has ended."""

RETRY_S: Final = 0.1
"""Seconds after which a device connects again when no address has served it."""

LOOK_S: Final = 0.05
"""Seconds between two looks at a process."""

TOPIC: Final = "bench/crowd"
"""First levels of the devices' topics."""

SERVING: Final = re.compile(rf"serving: MQTT +{re.escape(peers.HOST)}:(\d+)")


class Gateway:
    """Process of a gateway on a port that it keeps when it is started again."""

    def __init__(self, url: str, options: Sequence[str], log: Path) -> None:
        self._command = [sys.executable, "-m", "mqtt_nats", "serve", "--nats", url, *options]
        self._log = log
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start the process; `ready` tells when it serves."""
        command = [*self._command, "--listen", f"{peers.HOST}:{self.port}"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def ready(self) -> bool:
        """Whether the process serves clients."""
        found = SERVING.search(self._log.read_text())
        if found is None and self.process.poll() is not None:
            lines = self._log.read_text().strip().splitlines()[-3:]
            raise peers.PeerError(f"the gateway ended with {self.process.returncode}: {' / '.join(lines)}")
        self.port = int(found[1]) if found is not None else self.port
        return found is not None

    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None


def wait(condition: Callable[[], bool], problem: str, meanwhile: Callable[[float], None] = time.sleep) -> None:
    """Wait until a condition is true.

    Args:
        meanwhile: called with seconds between two looks.

    Raises:
        PeerError: that takes more than `START_S`.
    """
    until = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > until:
            raise peers.PeerError(f"{problem} after {START_S:.0f} s")
        meanwhile(LOOK_S)


def cpu_seconds(gateways: Sequence[Gateway]) -> float:
    """Return the processor time of gateways, and of all children of this process that have ended, in seconds."""
    ended = os.times()
    living = sum(proc.cpu_seconds(one.process.pid) for one in gateways if not one.ended())
    return ended.children_user + ended.children_system + living


@contextmanager
def gateways(number: int, url: str, options: Sequence[str]) -> Iterator[list[Gateway]]:
    """So many gateways that serve clients; they are ended when the block ends."""
    found: list[Gateway] = []
    with TemporaryDirectory(prefix="mqtt-bench-") as name:
        try:
            for one in range(number):
                found.append(Gateway(url, options, Path(name) / f"gateway{one}.log"))
                wait(found[-1].ready, "a gateway does not serve")
            yield found
        finally:
            for each in found:
                each.process.terminate()
            for each in found:
                try:
                    each.process.wait(30)
                except subprocess.TimeoutExpired:
                    each.process.kill()
                    each.process.wait()


class Device(Connection):
    """Connection of a device, from connect() on."""

    def __init__(self, crowd: Crowd, sock: socket.socket, number: int) -> None:
        super().__init__(crowd.loop, sock, f"device{number:06}")
        self.crowd, self.number = crowd, number
        self.gone = False
        """Whether the connection is lost; its socket is closed at the end of the loop's turn."""
        self.cause = ""
        """Why the connection is lost, or CONNECT refused."""
        self.out += packets.connect(self.name, clean=False)
        self.loop.add(self, writing=True)

    def flush(self) -> None:
        try:
            super().flush()
        except LoadError as error:
            self.crowd.lost(self, str(error))

    def readable(self) -> None:
        try:
            end, start = self.fill(), 0
            while (found := packet_at(self.loop.view, start, end)) is not None:
                kind, body, start = found
                self._handle(kind, body)
            self.keep(start, end)
        except (LoadError, RefusedError) as error:
            self.crowd.lost(self, str(error))

    def _handle(self, kind: int, body: bytes) -> None:
        if kind == answers.CONNACK:
            present, _ = answers.connack(kind, body, 4)
            if present:
                self.crowd.served(self)
            else:
                self.send(packets.subscribe(f"{TOPIC}/{self.number:06}/+", 1))
        elif kind == answers.SUBACK:
            answers.suback(kind, body, 4, 1)
            self.crowd.served(self)
        elif kind & 0xF0 == packets.PUBLISH:
            at = 2 + int.from_bytes(body[:2])
            self.send(b"\x40\x02" + body[at : at + 2])
            self.crowd.got(self.number)
        else:
            raise LoadError(f"{self.name}: unexpected packet 0x{kind:02x}")


class Crowd:
    """Devices with durable sessions, one filter at QoS 1 each; who loses the connection tries the next address at once.

    Args:
        ports: of the gateways; a device begins with the one at its number, modulo their number.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        self.loop = Loop()
        self._ports = list(ports)
        self._at: list[int] = []
        """Place in the ports of each device's latest address."""
        self._tried: list[int] = []
        """Addresses that have failed since the device's connection was lost."""
        self._since: dict[int, float] = {}
        """Monotonic time in seconds at which each device that waits began to wait."""
        self._later: dict[int, float] = {}
        """Monotonic time in seconds at which each device tries again."""
        self.waits: list[float] = []
        """Seconds from the loss of a connection to CONNACK, or SUBACK for a new session."""
        self.messages: list[int] = []
        """Messages that each device has had, repetitions included."""
        self._lost: list[Device] = []
        self.failed: Counter[str] = Counter()
        """Connections that were refused, or lost before CONNACK, while devices came back, by cause."""

    @property
    def waiting(self) -> int:
        """Number of devices that are not served."""
        return len(self._since)

    def join(self, count: int, first: int | None = None, at_once: int = 100) -> None:
        """Let so many devices begin their sessions; all at one port, or at each in turn."""
        for _ in range(count):
            number = len(self._at)
            self._at.append(number % len(self._ports) if first is None else first)
            self._tried.append(0)
            self.messages.append(0)
            self._since[number] = time.monotonic()
            self._connect(number)
            while self.waiting >= at_once:
                self.turn(0.1)
        while self.waiting:
            self.turn(0.1)
        self.waits.clear()
        self.failed.clear()

    def turn(self, timeout: float) -> None:
        """Handle what is ready, and let devices try again."""
        if self._later:
            now = time.monotonic()
            for number in [one for one, due in self._later.items() if due <= now]:
                del self._later[number]
                self._connect(number)
            timeout = min(timeout, RETRY_S)
        self.loop.turn(timeout)
        lost, self._lost = self._lost, []
        for device in lost:
            self._leave(device)

    def longest(self) -> float:
        """Return the longest time in seconds for which a device has waited, those that still wait included."""
        now = time.monotonic()
        return max([*self.waits, *(now - since for since in self._since.values())], default=0.0)

    def served(self, device: Device) -> None:
        """Note that a device is served."""
        self.waits.append(time.monotonic() - self._since.pop(device.number))
        self._tried[device.number] = 0

    def got(self, number: int) -> None:
        """Count a message of a device."""
        self.messages[number] += 1

    def lost(self, device: Device, cause: str) -> None:
        """Let a device connect again when the turn ends: its connection is lost, or refused."""
        if not device.gone:
            device.gone, device.cause = True, cause.removeprefix(f"{device.name}: ")
            self._lost.append(device)

    def _leave(self, device: Device) -> None:
        self.loop.epoll.unregister(device.fd)
        del self.loop.connections[device.fd]
        device.sock.close()
        number = device.number
        if number in self._since:
            self._fail(number, device.cause)
        else:
            self._since[number] = time.monotonic()
            self._next(number)

    def _fail(self, number: int, cause: str) -> None:
        self.failed[cause] += 1
        self._tried[number] += 1
        if self._tried[number] % len(self._ports):
            self._next(number)
        else:
            self._later[number] = time.monotonic() + RETRY_S

    def _next(self, number: int) -> None:
        self._at[number] = (self._at[number] + 1) % len(self._ports)
        self._connect(number)

    def _connect(self, number: int) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex((peers.HOST, self._ports[self._at[number]]))
        if code in (0, errno.EINPROGRESS):
            Device(self, sock, number)
            return
        sock.close()
        self._fail(number, os.strerror(code))

    def close(self) -> None:
        """Close all connections."""
        self.loop.close()
