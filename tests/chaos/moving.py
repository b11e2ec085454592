# SPDX-License-Identifier: Apache-2.0
"""Sessions that move between consumers and records while an experiment runs: `session_positions = "auto"`.

Consumers of nobody come and go, so that the number of consumers is beyond `session_consumers` and below it in turn. A
session moves when its client connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Any, Final

import nats.errors
import nats.js.errors
import orjson

from tests.chaos.looking import Look, looking

POSITIONS: Final = ("consumers", "records", "auto")

BOUND: Final = 24
"""`session_consumers` of the gateways; an experiment has fewer than three quarters of so many consumers of its own."""

OTHERS: Final = 32
"""Consumers of nobody, with which the number is beyond the bound by more than a quarter."""

LEASE: Final = 4
"""Seconds of `gateway_lease`; gateways look at the number four times in this time."""

TURN: Final = 2.0
"""Seconds for which the number stays beyond the bound, or below it."""

EVERY: Final = 0.1
"""Seconds between two looks at the session records."""

AWAY: Final = (nats.errors.Error, nats.js.errors.Error, OSError, TimeoutError)
"""Errors of a nats-server that is killed at the moment."""


def arguments_for(positions: str) -> tuple[str, ...]:
    """Flags of gateways; empty ``positions``: none."""
    if not positions:
        return ()
    given: tuple[str, ...] = ("--session-positions", positions)
    if positions == "auto":
        given += ("--session-consumers", f"{BOUND}", "--gateway-lease", f"{LEASE}")
    return given


class Moves:
    """Counts the sessions that move at the nats-servers of an experiment, and gives them reasons to.

    Args:
        urls: NATS URLs; it may grow.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.to_records = self.to_consumers = 0
        self._urls = urls
        self._known: dict[tuple[str, str], bool] = {}
        """Whether a session, by NATS URL and client id, has no consumers."""

    @property
    def figures(self) -> dict[str, int | float | str]:
        """The moves that were seen; two between two looks are not."""
        return {"moved_to_records": self.to_records, "moved_to_consumers": self.to_consumers}

    @property
    def violations(self) -> list[str]:
        """A direction in which no session has moved."""
        return [f"no session has {name.replace('_', ' ')}" for name, count in self.figures.items() if not count]

    async def run(self) -> None:
        """Go on until cancelled."""
        begun = 0
        async with asyncio.TaskGroup() as tasks:
            while True:
                for url in self._urls[begun:]:
                    begun += 1
                    tasks.create_task(self._at(url))
                await asyncio.sleep(EVERY)

    async def _at(self, url: str) -> None:
        async with looking(url) as look, asyncio.TaskGroup() as tasks:
            tasks.create_task(_change_number(look))
            tasks.create_task(self._look(url, look))

    async def _look(self, url: str, look: Look) -> None:
        while not _is_cancelled():
            with contextlib.suppress(*AWAY):
                await self._count(url, look)
            await asyncio.sleep(EVERY)

    async def _count(self, url: str, look: Look) -> None:
        start = 1
        while True:
            body = {"next_by_subj": "$MQTT.sess.*", "seq": start}
            answer = await look.nats.request("$JS.API.DIRECT.GET.$MQTT_sess", orjson.dumps(body), timeout=2)
            headers = answer.headers or {}
            if "Nats-Sequence" not in headers:
                return
            start = int(headers["Nats-Sequence"]) + 1
            record = orjson.loads(answer.data)
            self._note((url, record["id"]), bool((record.get("v5") or {}).get("consumerless")))

    def _note(self, session: tuple[str, str], in_records: bool) -> None:
        before = self._known.get(session, in_records)
        self._known[session] = in_records
        self.to_records += in_records > before
        self.to_consumers += in_records < before


def _is_cancelled() -> bool:
    """Return whether the task was cancelled: a request of nats-py may swallow that and go on."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _change_number(look: Look) -> None:
    """Bring the number of consumers beyond the bound, and below it, in turn."""
    subject, config = "$MQTT.msgs.other", {"ack_policy": "explicit", "num_replicas": 1}
    names = [f"other{number}" for number in range(OTHERS)]

    def create(name: str) -> Awaitable[None]:
        body = {"stream_name": "$MQTT_msgs", "config": config | {"durable_name": name, "filter_subject": subject}}
        return _insist(look, f"CONSUMER.DURABLE.CREATE.$MQTT_msgs.{name}", body)

    while not _is_cancelled():
        await asyncio.gather(*map(create, names))
        await asyncio.sleep(TURN)
        await asyncio.gather(*(_insist(look, f"CONSUMER.DELETE.$MQTT_msgs.{name}") for name in names))
        await asyncio.sleep(TURN)


async def _insist(look: Look, subject: str, body: dict[str, Any] | None = None) -> None:
    """Make a request until it is answered."""
    while not _is_cancelled():
        with contextlib.suppress(*AWAY):
            await look.nats.request(f"$JS.API.{subject}", orjson.dumps(body) if body else b"", timeout=2)
            return
        await asyncio.sleep(EVERY)
