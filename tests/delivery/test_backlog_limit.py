# SPDX-License-Identifier: Apache-2.0
"""The oldest of too many messages are passed over, and no more than that."""

import pytest

from mqtt_nats.delivery import backlog_limit
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.consumers import ConsumerInfo, ConsumerRef
from tests.delivery.fakes import FakeDeliveryServices, FakeDeliverySettings, FakeReceiver
from tests.sessions.fakes import FakeSide, as_side, consumer_state


class BacklogSettings(FakeDeliverySettings):
    """At most six messages may wait for a session."""

    def __init__(self) -> None:
        super().__init__()
        self.max_backlog = 6


class Bench:
    """A consumer of a session for which at most six messages may wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, perhaps: int = 0) -> None:
        self.pending = 10
        self.source = SubscriptionState(1, 0, 10)
        self.services = FakeDeliveryServices()
        self.services.settings = BacklogSettings()
        self.side = FakeSide(FakeReceiver(self.services))
        self.side.machine.sources.append(self.source)
        self.side.machine.sent_perhaps(perhaps)
        consumer = ConsumerRef("n", "deliver", "filter", 10)
        self.binding = ConsumerBinding("a", consumer, self.source)
        self.binding.listen(self.services.fake_link.subscribe_raw(b"deliver", lambda *_: None), None)
        monkeypatch.setattr(backlog_limit, "consumer_info", self._consumer_info)

    @property
    def sent(self) -> list[bytes]:
        """Payloads of the messages that were not passed over."""
        return self.side.fake_arrived

    @property
    def given(self) -> list[int]:
        """Sequences of the messages that were passed over: they were acknowledged."""
        acks = [call[1] for call in self.side.fake_ports.calls if call[0] == "ack"]
        return [int(ack.split(b".")[5]) for ack in acks if isinstance(ack, bytes)]

    async def _consumer_info(self, *_: object) -> ConsumerInfo:
        return consumer_state(num_pending=self.pending)

    async def attach(self) -> None:
        await backlog_limit.pass_over(as_side(self.side), self.binding)

    def arrive(self, number: int) -> None:
        reply = b"$JS.ACK.s.n.1.%d.%d.1795271066891006757.0" % (number, number)
        self.services.fake_link.fake_bring(b"deliver", b"%d" % number, reply=reply)


async def test_a_second_attempt_passes_over_what_is_still_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one was not answered: what it has done is not done twice."""
    bench = Bench(monkeypatch)
    await bench.attach()
    bench.arrive(1)
    bench.pending = 9
    await bench.attach()
    for number in range(2, 11):
        bench.arrive(number)
    assert bench.given == [1, 2, 3, 4]
    assert bench.sent == [b"%d" % number for number in range(5, 11)]
    assert bench.services.counters.passed_over == 4


async def test_what_a_dead_gateway_may_have_sent_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent again, as far as that may be much; what has come since is not passed over in its place."""
    bench = Bench(monkeypatch, perhaps=10)
    monkeypatch.setattr(backlog_limit, "SENT_MOST", 2)
    await bench.attach()
    for number in range(1, 13):
        bench.source.place = number
        bench.arrive(number)
    assert bench.given == [3, 4]
    assert bench.sent == [b"%d" % number for number in (1, 2, *range(5, 13))]


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
    bench = Bench(monkeypatch, perhaps)

    async def count_from(inbox: object, stream: str, subject: str, start: int) -> int:
        return sum(sequence >= start for sequence in stored)

    async def state() -> dict[str, int]:
        return {"last_seq": stored[-1]}

    monkeypatch.setattr(backlog_limit, "count_from", count_from)
    monkeypatch.setattr(backlog_limit, "SENT_MOST", 3)
    monkeypatch.setattr(bench.services.head, "state", state)
    side = as_side(bench.side)
    await backlog_limit._limit(side.client, side, 0, 6, bench.binding)
    binding = bench.binding
    assert [one for one in stored if not binding.resent < one <= binding.since] == given
    assert bench.services.counters.passed_over == passed
