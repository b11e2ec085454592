# SPDX-License-Identifier: Apache-2.0
"""The oldest of too many messages are passed over, and no more than that."""

from typing import Any

import pytest

from mqtt_nats.delivery import backlog_limit
from mqtt_nats.delivery.backlog_limit import limit_backlog
from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.consumers import ConsumerRef
from tests.delivery.fakes import FakeDeliveryServices, FakeDeliverySettings, FakePositionWriter, FakeReceiver, Side
from tests.protocol.recorder import Recorder
from tests.sessions.fakes import as_client


class BacklogSettings(FakeDeliverySettings):
    """At most six messages may wait for a session."""

    def __init__(self) -> None:
        super().__init__()
        self.max_backlog = 6


class Bench:
    """A session with a subscription for which at most six messages may wait, and what JetStream has stored."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stored: range, perhaps: int = 0) -> None:
        self.stored = stored
        self.source = SubscriptionState(1, 0)
        self.services = FakeDeliveryServices()
        self.services.settings = BacklogSettings()
        self.client = FakeReceiver(self.services)
        self.machine = DurableSender(10, Recorder())
        self.machine.sources.append(self.source)
        self.machine.sent_perhaps(perhaps)
        self.binding = ConsumerBinding("a", ConsumerRef("n", "deliver", "filter", 10), self.source)
        self.writer = FakePositionWriter()
        self.side: Any = Side(
            self.machine, client=self.client, bindings={"n": self.binding}, position_writer=self.writer
        )
        monkeypatch.setattr(backlog_limit, "count_from", self._count_from)
        monkeypatch.setattr(backlog_limit, "SENT_MOST", 3)
        monkeypatch.setattr(self.services.head, "state", self._state)

    async def _count_from(self, inbox: object, stream: str, subject: str, start: int) -> int:
        return sum(sequence >= start for sequence in self.stored)

    async def _state(self) -> dict[str, int]:
        return {"last_seq": self.stored[-1]}

    async def limit(self) -> None:
        await limit_backlog(as_client(self.client), self.side)

    @property
    def given(self) -> list[int]:
        """Sequences of the messages after the position that are not passed over."""
        binding, reached = self.binding, self.writer.ledger.reached
        return [one for one in self.stored if one > reached and not binding.resent < one <= binding.since]


@pytest.mark.parametrize(
    ("stored", "perhaps", "passed", "given"),
    [
        (range(1, 7), 0, 0, [1, 2, 3, 4, 5, 6]),
        (range(1, 11), 0, 4, [5, 6, 7, 8, 9, 10]),
        (range(10, 110, 10), 0, 4, [50, 60, 70, 80, 90, 100]),
        (range(1, 11), 2, 2, [1, 2, 5, 6, 7, 8, 9, 10]),
        (range(1, 11), 10, 1, [1, 2, 3, 5, 6, 7, 8, 9, 10]),
        (range(1, 101), 1, 93, [1, *range(95, 101)]),
    ],
    ids=["as many", "more", "with gaps", "two were sent", "all may have been sent", "many"],
)
async def test_readers_pass_over_the_oldest(
    monkeypatch: pytest.MonkeyPatch, stored: range, perhaps: int, passed: int, given: list[int]
) -> None:
    """What a dead gateway may have sent is sent again, as far as that may be much (three messages here)."""
    bench = Bench(monkeypatch, stored, perhaps)
    await bench.limit()
    assert bench.given == given
    assert bench.services.counters.passed_over == passed
    await bench.limit()
    assert bench.services.counters.passed_over == passed, "what was passed over is not counted twice"


async def test_what_is_complete_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, range(1, 11))
    bench.writer.ledger.reached = 3
    await bench.limit()
    assert (bench.given, bench.services.counters.passed_over) == ([5, 6, 7, 8, 9, 10], 1)


@pytest.mark.parametrize("why", ["no limit", "no position", "ended"])
async def test_no_message_is_passed_over(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """A subscription that has ended brings no new messages."""
    bench = Bench(monkeypatch, range(1, 11))
    if why == "no limit":
        bench.services.settings.max_backlog = None
    elif why == "no position":
        bench.side.position_writer = None
    else:
        bench.source.end_at(20)
    await bench.limit()
    assert (len(bench.given), bench.services.counters.passed_over) == (10, 0)
