# SPDX-License-Identifier: Apache-2.0
"""Publishers and subscribers that go on through whatever is done to the servers, and say at the end what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.checker import EVERYTHING, Promises, Verdict, check
from tests.chaos.client import ChaosClient
from tests.chaos.history import Event, History, read
from tests.chaos.messages import ClientWill, Message
from tests.harness.waiting import aeventually

PATIENCE = 120.0
"""Seconds for CONNACK, SUBACK and UNSUBACK: whatever the servers stand in between."""

REDELIVERED = 45.0
"""Seconds within which another member has got what a group's member did not acknowledge: JetStream waits for 30."""

LEAST = 30.0
"""Seconds that each wait at the end has at least, however long those before it took; less where all have less."""


class Workload:
    """Every subscriber gets every message. Publisher ``p<i>`` publishes on ``<prefix>/<i>/<k>``, all ``k`` in turn.

    Args:
        directory: for the histories, one for each client.
        ports: where the servers listen; the clients begin at different ones.
        publishers: how many.
        subscribers: how many, with sessions that outlive their connections.
        qos: of publications and subscriptions.
        messages: of each publisher; 0: until :meth:`stop`.
        rate: messages per second of each publisher; 0: as fast as the acknowledgements come.
        topics: of each publisher.
        size: bytes of a payload, at least.
        version: 4 or 5, of all clients.
        max_inflight: unacknowledged messages of each publisher.
        ack_after: seconds that a subscriber's application takes before a message is acknowledged.
        keepalive: seconds.
        prefix: of the topics and of the client ids; no spaces.
        group: members of shared subscriptions to the same messages, of 5.0, with a Receive Maximum of 1 to 5 each;
            0: there is none.
        groups: shared subscriptions among which the members are divided; each gets every message.
        restless: seconds after which subscribers and members drop their own connections, on average. They have wills,
            and subscribers change a subscription that overlaps the other one, as often. 0: nothing of that.
        promises: what is checked.
    """

    def __init__(
        self,
        directory: Path,
        ports: Sequence[int],
        *,
        publishers: int = 2,
        subscribers: int = 2,
        qos: int = 1,
        messages: int = 0,
        rate: float = 0.0,
        topics: int = 2,
        size: int = 0,
        version: int = 4,
        max_inflight: int = 20,
        ack_after: float = 0.0,
        keepalive: int = 30,
        prefix: str = "w",
        group: int = 2,
        groups: int = 1,
        restless: float = 8.0,
        promises: Promises = EVERYTHING,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.qos = qos
        self.messages = messages
        self.rate = rate
        self.promises = promises
        self.histories: list[History] = []
        self.nemesis = self.history(f"{prefix}-nemesis")
        """For whoever kills."""
        options: dict[str, Any] = {"version": version, "keepalive": keepalive}

        def will_of(name: str) -> ClientWill | None:
            return ClientWill(f"{prefix}-wills/{name}", qos=2) if restless else None

        self.publishers = [
            ChaosClient(
                f"{prefix}-p{number}",
                _from(ports, number),
                self.history(f"{prefix}-p{number}"),
                max_inflight=max_inflight,
                size=size,
                **options,
            )
            for number in range(publishers)
        ]
        self.subscribers = [
            ChaosClient(
                f"{prefix}-s{number}",
                _from(ports, number + 1),
                self.history(f"{prefix}-s{number}"),
                ack_after=ack_after,
                restless=restless,
                will=will_of(f"s{number}"),
                **options,
            )
            for number in range(subscribers)
        ]
        self.members = [
            ChaosClient(
                f"{prefix}-g{number}",
                _from(ports, number),
                self.history(f"{prefix}-g{number}"),
                ack_after=ack_after,
                restless=restless,
                will=will_of(f"g{number}"),
                receive_maximum=number % 5 + 1,
                **options | {"version": 5},
            )
            for number in range(group)
        ]
        self.watcher = ChaosClient(f"{prefix}-watcher", _from(ports, 0), self.history(f"{prefix}-watcher"), **options)
        """Gets the wills."""
        self._restless = restless
        self._groups = [self.members[number::groups] for number in range(groups if group else 0)]
        self._prefix = prefix
        self._topics = topics
        self._stopped = asyncio.Event()
        self._going = asyncio.Event()
        """Cleared while nothing is to be published."""
        self._going.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._changes: list[asyncio.Task[None]] = []

    def history(self, name: str) -> History:
        """One more history that is read at the end."""
        history = History(self.directory / f"{name}.jsonl")
        self.histories.append(history)
        return history

    @property
    def filter(self) -> str:
        """The topic filter of the subscribers."""
        return f"{self._prefix}/#"

    @property
    def clients(self) -> list[ChaosClient]:
        """All of them."""
        return [*self.publishers, *self.subscribers, *self.members, self.watcher]

    @property
    def acked(self) -> int:
        """How many messages are acknowledged."""
        return sum(client.acked for client in self.publishers)

    async def start(self) -> None:
        """Connect all, subscribe, and begin to publish."""
        await asyncio.gather(*(client.connect(PATIENCE) for client in self.clients))
        await self.watcher.subscribe(f"{self._prefix}-wills/#", 2, PATIENCE)
        await asyncio.gather(*(client.subscribe(self.filter, self.qos, PATIENCE) for client in self.subscribers))
        for number, group in enumerate(self._groups):
            share = f"$share/{self._prefix}-{number}/{self.filter}"
            await asyncio.gather(*(client.subscribe(share, self.qos, PATIENCE) for client in group))
        self._tasks = [
            asyncio.create_task(self._publish(number, client)) for number, client in enumerate(self.publishers)
        ]
        self._changes = [asyncio.create_task(self._change(client)) for client in self.subscribers if self._restless]

    async def _change(self, client: ChaosClient) -> None:
        """Subscribe and unsubscribe to half of what the client gets by its other subscription."""
        chance = random.Random(client.client_id)
        overlapping = f"{self._prefix}/+/0"
        while not self._stopped.is_set() and not self.published:
            await asyncio.sleep(chance.expovariate(1 / self._restless))
            await client.subscribe(overlapping, self.qos, PATIENCE)
            await asyncio.sleep(chance.expovariate(1 / self._restless))
            await client.unsubscribe(overlapping, PATIENCE)

    async def _publish(self, number: int, client: ChaosClient) -> None:
        began = time.monotonic()
        n = 0
        while not self._stopped.is_set() and (not self.messages or n < self.messages):
            await self._going.wait()
            if self._stopped.is_set():
                break
            n += 1
            await client.publish(f"{self._prefix}/{number}/{n % self._topics}", n, self.qos)
            if self.rate:
                await asyncio.sleep(max(began + n / self.rate - time.monotonic(), 0))

    async def still(self, timeout: float) -> None:
        """Publish no more until :meth:`go_on`, and wait until all is acknowledged and delivered, to groups too.

        Raises:
            AssertionError: that takes more than ``timeout`` seconds.
        """
        self._going.clear()

        def done() -> bool:
            open_ = [one.client_id for one in self.clients if one.unacknowledged or one.unreleased]
            assert not open_, f"handshakes are not complete: {open_}"
            assert self.has_all(), "a subscriber has not got everything"
            assert self.groups_have_all(), "a group has not got everything"
            return True

        await aeventually(done, timeout, what="messages that are acknowledged and delivered")

    def go_on(self) -> None:
        """Publish again after :meth:`still`."""
        self._going.set()

    @property
    def published(self) -> bool:
        """Whether the publishers have handed over all that they had to."""
        return all(task.done() for task in self._tasks)

    def stop(self) -> None:
        """Publish no more."""
        self._stopped.set()
        self._going.set()

    async def finish(self, timeout: float = 60.0) -> Verdict:
        """Wait until all is published and acknowledged, and all that was acknowledged is delivered; then judge.

        What is still missing after ``timeout`` seconds is lost, but nothing is before each wait has had its own time.
        """
        if not self.messages:
            self.stop()
        deadline = time.monotonic() + timeout
        least = min(timeout, LEAST)

        def left(own: float = least) -> float:
            return max(deadline - time.monotonic(), own)

        for task in self._tasks:
            try:
                async with asyncio.timeout(left(0.0)):
                    await asyncio.shield(task)
            except TimeoutError:
                task.cancel()
        await asyncio.gather(*(client.settled(left()) for client in self.publishers))
        unsettled = sum(client.unacknowledged for client in self.publishers)
        with contextlib.suppress(AssertionError):
            await aeventually(self.has_all, left())
        if self.promises.shared:
            with contextlib.suppress(AssertionError):
                await aeventually(self.groups_have_all, left(REDELIVERED))
        for client in self.clients:
            client.rest()
        with contextlib.suppress(AssertionError):
            await aeventually(self.has_wills, left(REDELIVERED))
        with contextlib.suppress(TimeoutError):  # what is on its way behind the last message has come
            async with asyncio.timeout(30):
                await asyncio.gather(*(client.ping() for client in self.clients), return_exceptions=True)
        # Of a client that has just come back: readers bring it, also behind the answer to the ping.
        with contextlib.suppress(AssertionError):
            await aeventually(self._finished, left(REDELIVERED if self.promises.shared else least))
        with contextlib.suppress(AssertionError):  # of connections that were lost meanwhile
            await aeventually(self.has_wills, left())
        await self.close()
        verdict = self.judge()
        verdict.figures["unacknowledged"] = unsettled
        return verdict

    def _finished(self) -> bool:
        """Whether sessions that are there have got what is owed; at QoS 1, others of a group may have got it."""
        return not any(client.owed for client in self.subscribers if client.present) and not any(
            client.owed_once for client in self.members if client.present
        )

    def has_all(self) -> bool:
        """Whether each subscriber has got all that is acknowledged; others of the messages come besides."""
        return all(self._has_all(client.delivered) for client in self.subscribers)

    def has_wills(self) -> bool:
        """Whether each will that is due has come; wills whose CONNACK was lost come besides."""
        return all(client.wills_due <= self.watcher.delivered for client in (*self.subscribers, *self.members))

    def groups_have_all(self) -> bool:
        """Whether the members of each group have got all that is acknowledged, together."""
        had = [set[Message]().union(*(client.delivered for client in group)) for group in self._groups]
        return all(map(self._has_all, had))

    def _has_all(self, delivered: set[Message]) -> bool:
        return len(delivered) >= self.acked and all(client.acknowledged <= delivered for client in self.publishers)

    async def close(self) -> None:
        """End the clients, with DISCONNECT."""
        self.stop()
        for task in (*self._tasks, *self._changes):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._changes, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self.clients))

    def events(self) -> list[Event]:
        """Everything that was written down."""
        for history in self.histories:
            history.flush()
        return read(history.path for history in self.histories)

    def judge(self) -> Verdict:
        """Return the verdict of the checker about the histories so far."""
        return check(self.events(), self.promises)


def _from(ports: Sequence[int], start: int) -> list[int]:
    start %= len(ports)
    return [*ports[start:], *ports[:start]]
