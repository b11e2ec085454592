# SPDX-License-Identifier: Apache-2.0
"""Messages wait for a leader that does not answer for a moment; docs/internals/backbone.md#elections."""

from __future__ import annotations

import pytest

from mqtt_nats.backbone import pending_stores
from tests.backbone.bench import Bench
from tests.harness.waiting import aeventually

HELD = b"$MQTT.qos2.in.token.1"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time in seconds, which a test moves on."""
    time = [100.0]
    monkeypatch.setattr(pending_stores, "monotonic", lambda: time[0])
    return time


async def test_messages_wait_while_a_leader_is_silent(now: list[float]) -> None:
    """It may be about to go, and has dropped the first message: the next leader would store the others before."""
    bench = Bench()
    bench.store.trust(60.0, 3)
    bench.put("dropped")
    now[0] += 0.04
    bench.put("soon")
    now[0] += 0.02
    bench.put("later")
    bench.put("held", subject=HELD)
    assert bench.sent() == ["dropped", "soon", "held"]
    bench.store.elected("$MQTT_msgs")
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["dropped"]
    bench.answer("dropped")
    assert bench.sent() == ["soon", "later"]


async def test_messages_go_on_with_an_answer(now: list[float]) -> None:
    """A slow leader is no silent one. Streams without replicas do not change their leader."""
    bench = Bench()
    bench.put("1")
    now[0] += 9.0
    bench.put("2")
    assert bench.sent() == ["1", "2"]
    bench.store.trust(60.0, 3)
    bench.put("3")
    now[0] += 0.06
    bench.put("4")
    bench.put("5")
    assert bench.sent() == ["3"]
    bench.answer("3")
    assert bench.sent() == ["4", "5"]
    now[0] += 0.04
    bench.put("6")
    now[0] += 0.04
    bench.put("7")
    assert bench.sent() == ["6", "7"]


async def test_retained_copies_wait_for_their_own_leader(now: list[float]) -> None:
    """One that was dropped and is stored after its successor would be the topic's retained message for good."""
    bench = Bench()
    bench.store.trust(60.0, 3)
    bench.put("dropped", subject=b"$MQTT.rmsgs.s")
    now[0] += 0.06
    bench.put("successor", subject=b"$MQTT.rmsgs.s")
    bench.put("message")
    assert bench.sent() == ["dropped", "message"]
    bench.answer("message")
    assert bench.sent() == [], "an answer of another stream"
    bench.store.elected("$MQTT_rmsgs")
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["dropped"]
    bench.answer("dropped")
    assert bench.sent() == ["successor"]
    now[0] += 0.06
    bench.put("later", subject=b"$MQTT.rmsgs.s")
    now[0] += 1.1
    bench.put("overdue", subject=b"$MQTT.rmsgs.s")
    bench.store.tick(2.0)
    assert bench.sent() == ["later", "overdue"]


async def test_withheld_copies_do_not_overtake_those_that_wait(now: list[float]) -> None:
    """The withheld ones came later."""
    bench = Bench()
    bench.store.trust(60.0, 3)
    bench.put("unanswered", subject=b"$MQTT.rmsgs.s")
    now[0] += 0.06
    for name in ("waiting", "withheld"):
        bench.put(name, subject=b"$MQTT.rmsgs.s")
    bench.store.withhold(bench.op("withheld"))
    bench.store.let_go(set())
    assert bench.sent() == ["unanswered"]
    bench.answer("unanswered")
    assert bench.sent() == ["waiting", "withheld"]


async def test_messages_do_not_wait_for_a_lost_one_for_long(now: list[float]) -> None:
    """It was lost on its way to a leader that is there."""
    bench = Bench()
    bench.store.trust(60.0, 3)
    bench.put("lost")
    now[0] += 0.06
    bench.put("later")
    bench.store.tick(0.5)
    assert bench.sent() == ["lost"]
    now[0] += 1.0
    bench.store.tick(1.5)
    assert bench.sent() == ["later"]
    bench.store.tick(3.0)
    assert bench.sent() == []


async def test_messages_do_not_wait_for_a_denied_one(now: list[float]) -> None:
    """Nothing answers a message that NATS permissions do not allow."""
    bench = Bench()
    bench.store.trust(60.0, 3)
    bench.put("denied", subject=b"$MQTT.msgs.denied")
    now[0] += 0.06
    bench.put("later")
    assert bench.sent() == ["denied"]
    bench.store.denied(b"$MQTT.msgs.denied")
    assert bench.sent() == ["later"]


async def test_messages_do_not_wait_any_longer_without_replicas(now: list[float]) -> None:
    """The streams have been changed to one replica: what waits goes on, and a later silence begins anew."""
    bench = Bench()
    bench.store.trust(60.0, 3)
    bench.put("unanswered")
    now[0] += 0.06
    bench.put("waiting")
    assert bench.sent() == ["unanswered"]
    bench.store.trust(60.0, 1)
    assert bench.sent() == ["waiting"]
    bench.store.trust(60.0, 3)
    bench.put("later")
    assert bench.sent() == ["later"]
