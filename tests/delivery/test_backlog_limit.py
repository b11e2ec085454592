# SPDX-License-Identifier: Apache-2.0
"""The oldest of too many messages are passed over, and no more than that."""

from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.delivery import slow_clients as overflowing
from mqtt_nats.delivery.states import DeliveryState
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.consumers import ConsumerRef
from tests.delivery.fakes import FakeDeliveryServices
from tests.sessions.fakes import FakeSettings


class BacklogSettings(FakeSettings):
    """At most six messages may wait for a session."""

    max_backlog = 6


class Bench:
    """A consumer of a session for which at most six messages may wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, perhaps: int = 0) -> None:
        self.pending = 10
        self.sent: list[bytes] = []
        self.given: list[int] = []
        self.handlers: dict[bytes, Any] = {b"1": None}
        self.source = SubscriptionState(1, 0, 10)
        self.services = FakeDeliveryServices()
        self.services.settings = BacklogSettings()
        self.services.fake_link.handlers = self.handlers
        self.side: Any = SimpleNamespace(
            client=SimpleNamespace(services=self.services, path=self.services.path, client_id="c"),
            state=DeliveryState.RESUMING,
            machine=SimpleNamespace(
                passed_over=lambda source, sequence, attempt, reply: self.given.append(sequence),
                perhaps=lambda sequence: sequence <= perhaps,
            ),
            arrival=lambda attachment: lambda subject, reply, headers, payload: self.sent.append(payload),
        )
        consumer = ConsumerRef("n", "deliver", "filter", 10)
        self.attachment = ConsumerBinding("a", consumer, self.source)
        self.attachment.listen(b"1", None)
        monkeypatch.setattr(overflowing, "consumer_info", self._consumer_info)

    async def _consumer_info(self, *_: object) -> Any:
        return SimpleNamespace(num_pending=self.pending)

    async def attach(self) -> None:
        await overflowing.pass_over(self.side, self.attachment)

    def arrive(self, number: int) -> None:
        reply = b"$JS.ACK.s.n.1.%d.%d.1795271066891006757.0" % (number, number)
        self.handlers[b"1"](b"a", reply, b"", b"%d" % number)


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
    monkeypatch.setattr(overflowing, "SENT_MOST", 2)
    await bench.attach()
    for number in range(1, 13):
        bench.source.place = number
        bench.arrive(number)
    assert bench.given == [3, 4]
    assert bench.sent == [b"%d" % number for number in (1, 2, *range(5, 13))]
