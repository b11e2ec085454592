# SPDX-License-Identifier: Apache-2.0
"""Supervisor of several gateways on one port: starts workers, restarts dead workers, and passes signals on.

The workers share the port by SO_REUSEPORT: the kernel distributes new connections. Each worker is a gateway of its
own, with its own connections to NATS and its own lease. When a worker dies, another gateway settles its sessions
and wills, as between machines. A worker reads its settings, including secrets, from its standard input, and runs while
that is open: when the supervisor is gone, a worker ends in good order, or at once if it was ending already. A worker
reports on a socket of its own that it is ready, or why it is not; its standard output is the supervisor's, since
plugins may print there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import anyio
from pydantic import BaseModel, SecretStr

from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.settings import Settings, cannot_listen
from mqtt_nats.gateway.sighup import ReloadSignal
from mqtt_nats.transport.every_address import expand
from mqtt_nats.transport.listener_settings import Bound, join_address, parse_address

log = logging.getLogger("mqtt_nats.workers")

READY: Final = "ready"
FAILED: Final = "failed"

DRAINED: Final = 75
"""Exit status of a worker that was drained by request: the worker is not started again."""

WORKER_END_MOST_S: Final = 20.0
"""Maximum seconds for a worker's end after SIGTERM, besides `drain_time`; a worker takes 15 at most."""

AGAIN_FIRST: Final = 0.1
AGAIN_MOST: Final = 10.0
"""First and maximum seconds before a worker is restarted; doubled each time, until one has run for `STEADY` seconds."""

STEADY: Final = 10.0


async def supervise(
    settings: Settings, *, on_ready: Callable[[list[Bound]], None], stop: anyio.Event, hangup: ReloadSignal
) -> None:
    """Run ``settings.workers`` gateways until ``stop`` is set.

    Args:
        on_ready: called once with the addresses, when all gateways serve clients.
        hangup: its signal is passed on to all gateways.

    Raises:
        StartupError: a gateway cannot start at the first attempt.
    """
    settings, held = reserve(settings)

    def reload() -> None:
        for worker in workers:
            worker.reload()

    try:
        group = secrets.token_hex(8)
        workers = [Worker(number, settings, group) for number in range(1, settings.workers + 1)]
        hangup.call(reload)
        try:
            async with asyncio.TaskGroup() as starting:
                for worker in workers:
                    starting.create_task(worker.start())
            found = [Bound(*parse_address(one.listen), one.type) for one in settings.all_listeners]
            if settings.admin_listen is not None:
                found.append(Bound(*parse_address(settings.admin_listen), "admin"))
            on_ready(found)
            async with asyncio.TaskGroup() as tasks:
                keepers = [tasks.create_task(worker.keep_running()) for worker in workers]
                keepers.append(tasks.create_task(_end_with(keepers[:], stop)))
                await stop.wait()
                for keeper in keepers:
                    keeper.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.gather(*(worker.terminate() for worker in workers))
    finally:
        for one in held:
            one.close()


async def _end_with(keepers: list[asyncio.Task[None]], stop: anyio.Event) -> None:
    """Stop the supervisor when all workers were drained."""
    await asyncio.wait(keepers)
    stop.set()


def reserve(settings: Settings) -> tuple[Settings, list[socket.socket]]:
    """Return the settings with ports that all workers can share, and the sockets that reserve the ports.

    Raises:
        StartupError: another process uses an address.
    """
    held: list[socket.socket] = []
    try:
        found = [one.model_copy(update={"listen": _reserve(one.listen, held)}) for one in settings.all_listeners]
        admin = settings.admin_listen and _reserve(settings.admin_listen, held)
    except StartupError:
        for one in held:
            one.close()
        raise
    given: dict[str, Any] = {"listeners": tuple(found)}
    if admin is not None:
        given["admin_listen"] = admin
    if len(found) > len(settings.listeners):
        given |= {"listen": found[0].listen, "listeners": tuple(found[1:])}
    return settings.model_copy(update=given), held


def _reserve(listen: str, held: list[socket.socket]) -> str:
    """Reserve an address by a socket of each family; return the address with its port."""
    host, port = parse_address(listen)
    try:
        for each in expand(host):
            port = _hold(each, port, held)
    except OSError as error:
        raise StartupError(cannot_listen(listen, error)) from None
    return join_address(host, port)


def _hold(host: str, port: int, held: list[socket.socket]) -> int:
    """Bind a socket that others may share, add it to ``held``, and return its port; raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with _bindable(family, kind) as probe:  # not shared: the bind fails if the port is in use
        probe.bind(address)
        port = probe.getsockname()[1]
        probe.listen(1)
    one = _bindable(family, kind)
    held.append(one)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind((address[0], port))
    return port


def _bindable(family: int, kind: int) -> socket.socket:
    one = socket.socket(family, kind)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger there
    if family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return one


class Worker:
    """Worker: one gateway process, restarted when it dies."""

    def __init__(self, number: int, settings: Settings, group: str) -> None:
        self.number = number
        self._ending = WORKER_END_MOST_S + settings.drain_time
        self._values = {"number": number, "group": group, "settings": dump(settings)}
        self._process: asyncio.subprocess.Process | None = None
        self._ready = False
        self._changed = False
        """Whether files have changed since the worker was started; a worker learns of it when it is ready."""

    async def start(self) -> None:
        """Start the worker and wait until it serves clients.

        Raises:
            StartupError: the worker does not start.
        """
        self._ready = self._changed = False
        try:
            line = await self._begin()
        except (OSError, RuntimeError) as error:  # no process, descriptor or memory is available
            raise StartupError(f"worker {self.number} cannot be started: {error}") from None
        assert self._process is not None
        word, _, text = line.partition(" ")
        if word != READY:
            if word != FAILED:
                self._signal(signal.SIGKILL)  # the process is no worker: it has sent an unknown line
            code = await self._process.wait()
            raise StartupError(text or f"worker {self.number} ended with status {code} before it was ready")
        self._ready = True
        if self._changed:
            self._signal(signal.SIGHUP)

    async def _begin(self) -> str:
        """Start the process; return its report line, empty if the process ends without a report.

        Raises:
            OSError, RuntimeError: the process cannot be started.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                values = json.dumps({**self._values, "tell": theirs.fileno()})
                process = self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "mqtt_nats.gateway.worker",
                    stdin=asyncio.subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C in the terminal is for the supervisor
                )
            ours.setblocking(False)
            said = b""
            try:
                assert process.stdin is not None
                process.stdin.write(values.encode() + b"\n")
                await process.stdin.drain()
                loop = asyncio.get_running_loop()
                while not said.endswith(b"\n") and (some := await loop.sock_recv(ours, 4096)):
                    said += some
            except (OSError, RuntimeError):
                pass  # the process has ended already; uvloop raises RuntimeError then
        return said.decode(errors="replace").rstrip("\n")

    def reload(self) -> None:
        """Have the worker read its files again."""
        self._changed = True
        if self._ready:
            self._signal(signal.SIGHUP)

    async def keep_running(self) -> None:
        """Restart the worker whenever it ends, until cancelled, or until the worker was drained."""
        wait = AGAIN_FIRST
        now = asyncio.get_running_loop().time
        while True:
            process = self._process
            assert process is not None
            since = now()
            code = await process.wait()
            if now() - since > STEADY:
                wait = AGAIN_FIRST
            if code == DRAINED:
                log.warning("worker %d (process %d) was drained: it is not started again", self.number, process.pid)
                return
            how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
            log.error("worker %d (process %d) %s: it is started again", self.number, process.pid, how)
            while True:
                await asyncio.sleep(wait)
                wait = min(2 * wait, AGAIN_MOST)
                try:
                    await self.start()
                    break
                except StartupError as error:
                    log.error("worker %d does not start: %s", self.number, error)

    async def terminate(self) -> None:
        """End the worker: in good order within `WORKER_END_MOST_S` and `drain_time`, else by SIGKILL."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._ending):
                await process.wait()
        except TimeoutError:
            log.warning("worker %d (process %d) did not end in time", self.number, process.pid)
            self._signal(signal.SIGKILL)
            await process.wait()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            pass


def dump(settings: Settings) -> dict[str, Any]:
    """Return the settings that are not defaults as JSON values, for a worker."""
    found: dict[str, Any] = {}
    for name in settings.model_fields_set - {"embedded", "embedded_port", "data"}:
        found[name] = _plain(getattr(settings, name))
    return found


def _plain(value: Any) -> Any:
    """Return a value of the settings as a JSON value, secrets included."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value
