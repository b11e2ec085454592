# SPDX-License-Identifier: Apache-2.0
"""The oldest of too many messages are passed over, and no more than that."""

from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.broker import overflowing
from mqtt_nats.session.delivery import Source


async def test_a_second_attempt_passes_over_what_is_still_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one was not answered: what it has done is not done twice."""
    pending = 10

    async def consumer_info(*_: object) -> Any:
        return SimpleNamespace(num_pending=pending)

    monkeypatch.setattr(overflowing, "consumer_info", consumer_info)
    sent: list[bytes] = []
    given: list[int] = []
    handlers: dict[bytes, Any] = {b"1": None}
    broker: Any = SimpleNamespace(
        settings=SimpleNamespace(max_backlog=6), inbox=None, link=SimpleNamespace(handlers=handlers), passed_over=0
    )
    side: Any = SimpleNamespace(
        client=SimpleNamespace(broker=broker, client_id="c"),
        falling=False,
        machine=SimpleNamespace(
            passed_over=lambda source, sequence, attempt, reply: given.append(sequence), perhaps=lambda sequence: False
        ),
        arrival=lambda attachment: lambda subject, reply, headers, payload: sent.append(payload),
    )
    source = Source(1, 0, 10)
    attachment: Any = SimpleNamespace(source=source, sid=b"1", consumer=SimpleNamespace(durable_name="n"))

    def arrive(number: int) -> None:
        handlers[b"1"](b"a", b"$JS.ACK.s.n.1.%d.%d.1795271066891006757.0" % (number, number), b"", b"%d" % number)

    await overflowing.pass_over(side, attachment)
    arrive(1)
    pending = 9
    await overflowing.pass_over(side, attachment)
    for number in range(2, 11):
        arrive(number)
    assert given == [1, 2, 3, 4]
    assert sent == [b"%d" % number for number in range(5, 11)]
    assert broker.passed_over == 4


async def test_what_a_dead_gateway_may_have_sent_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent again, as far as that may be much; what has come since is not passed over in its place."""

    async def consumer_info(*_: object) -> Any:
        return SimpleNamespace(num_pending=10)

    monkeypatch.setattr(overflowing, "consumer_info", consumer_info)
    monkeypatch.setattr(overflowing, "SENT_MOST", 2)
    sent: list[bytes] = []
    given: list[int] = []
    handlers: dict[bytes, Any] = {b"1": None}
    broker: Any = SimpleNamespace(
        settings=SimpleNamespace(max_backlog=6), inbox=None, link=SimpleNamespace(handlers=handlers), passed_over=0
    )
    side: Any = SimpleNamespace(
        client=SimpleNamespace(broker=broker, client_id="c"),
        falling=False,
        machine=SimpleNamespace(
            passed_over=lambda source, sequence, attempt, reply: given.append(sequence),
            perhaps=lambda sequence: sequence <= 10,
        ),
        arrival=lambda attachment: lambda subject, reply, headers, payload: sent.append(payload),
    )
    attachment: Any = SimpleNamespace(source=Source(1, 0, 10), sid=b"1", consumer=SimpleNamespace(durable_name="n"))
    await overflowing.pass_over(side, attachment)
    for number in range(1, 13):
        attachment.source.place = number
        handlers[b"1"](b"a", b"$JS.ACK.s.n.1.%d.%d.1795271066891006757.0" % (number, number), b"", b"%d" % number)
    assert given == [3, 4]
    assert sent == [b"%d" % number for number in (1, 2, *range(5, 13))]
