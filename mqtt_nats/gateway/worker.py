# SPDX-License-Identifier: Apache-2.0
"""``python -m mqtt_nats.gateway.worker``: one gateway of several, started by :mod:`mqtt_nats.gateway.supervisor`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from functools import partial

import anyio
from anyio.abc import TaskStatus

from mqtt_nats.base.errors import StartupError, first_error
from mqtt_nats.base.logs import configure
from mqtt_nats.config.settings import Settings
from mqtt_nats.config.worker_identity import PLACE, WorkerIdentity
from mqtt_nats.gateway.shutdown import run_to_end
from mqtt_nats.gateway.sighup import ReloadSignal
from mqtt_nats.gateway.supervisor import DRAINED, FAILED, READY
from mqtt_nats.transport.listener_settings import Bound

log = logging.getLogger("mqtt_nats.gateway")


class Report:
    """Report to the supervisor: one line about the start, written to the descriptor that the supervisor has given."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # else a plugin's child process would keep it open
        self._descriptor: int | None = descriptor

    def say(self, line: str) -> None:
        """Send the line, unless a line was sent already."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            with open(descriptor, "w", encoding="utf-8") as pipe:
                pipe.write(f"{line}\n")
        except OSError:
            pass  # the supervisor is gone, which `stop_when_alone` notices


async def run(report: Report, settings: Settings) -> bool:
    """Serve until SIGTERM, or until the supervisor is gone; return True when the worker was drained instead."""
    from mqtt_nats.gateway.gateway import serve

    stop = anyio.Event()
    hangup = ReloadSignal()
    told = False

    def say_ready(addresses: list[Bound]) -> None:
        report.say(READY)

    async def stop_on_signal(*, task_status: TaskStatus[None]) -> None:
        nonlocal told
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                if number == signal.SIGHUP:
                    hangup.act()
                else:
                    told = True
                    stop.set()

    async def stop_when_alone() -> None:
        nonlocal told
        await anyio.wait_readable(sys.stdin)  # end of file: the supervisor is gone
        if stop.is_set():
            os._exit(1)
        told = True
        stop.set()

    async with anyio.create_task_group() as group:
        await group.start(stop_on_signal)
        group.start_soon(stop_when_alone)
        await serve(settings, on_ready=say_ready, stop=stop, hangup=hangup)
        group.cancel_scope.cancel()
    return not told


def main() -> int:
    """Read the settings and serve; return the exit status."""
    given = json.loads(sys.stdin.readline())
    report = Report(given["tell"])
    settings = Settings(**given["settings"])
    PLACE.set(WorkerIdentity(given["group"], given["number"], settings.workers))
    configure(settings.log_level, settings.log_format, given["number"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    failure: BaseException | None = None
    drained = False
    try:
        drained = run_to_end(partial(run, report), settings)
        log.info("stopped")
    except* StartupError as group:
        failure = first_error(group)
    if failure is not None:
        report.say(f"{FAILED} {failure}")
        return 1
    return DRAINED if drained else 0


if __name__ == "__main__":
    sys.exit(main())
