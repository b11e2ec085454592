# SPDX-License-Identifier: Apache-2.0
"""How many sessions become live at the same time, and what their consumers bring meanwhile."""

from typing import Any

import pytest

from mqtt_nats.backbone.batch import BATCH_REQUESTS_MOST
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.shared_reader import promotion as joining
from mqtt_nats.shared_reader.promotion import Promotion, PromotionLimit, rest
from mqtt_streams.messages import subscription_consumer


def test_the_next_begins_when_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "JOINING_MOST", 3)
    begun: list[Any] = []
    turns = PromotionLimit(lambda client: begun.append(client) if turns.begin_or_wait(client, 1) else None)
    clients: list[Any] = ["a", "b", "c", "d", "e", "f"]
    for client in clients:
        turns.begin_or_wait(client, 1)
    assert [client in turns for client in clients] == [True, True, True, False, False, False]
    turns.end_promotion("d")  # type: ignore[arg-type]  # it has gone while it waited
    assert begun == []
    turns.end_promotion("a")  # type: ignore[arg-type]
    turns.end_promotion("a")  # type: ignore[arg-type]
    assert begun == ["e"]
    turns.end_promotion("e")  # type: ignore[arg-type]
    assert begun == ["e", "f"]


def test_a_promotion_that_cannot_begin_does_not_keep_others_from_theirs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is the session whose promotion has ended concerned: it may have to be undone."""
    monkeypatch.setattr(joining, "JOINING_MOST", 1)
    begun: list[Any] = []

    def begin(client: Any) -> None:
        if client == "b":
            raise ValueError("on purpose")
        begun.append(client)

    turns = PromotionLimit(begin)
    clients: list[Any] = ["a", "b", "c"]
    for client in clients:
        turns.begin_or_wait(client, 1)
    turns.end_promotion(clients[0])
    assert begun == ["c"]
    assert "b: its promotion did not begin" in caplog.text


def test_one_that_asks_for_much_counts_for_what_it_asks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "JOINING_MOST", BATCH_REQUESTS_MOST)
    turns = PromotionLimit(lambda client: None)
    many: Any = "many"
    one: Any = "one"
    assert turns.begin_or_wait(many, 10 * BATCH_REQUESTS_MOST)
    assert not turns.begin_or_wait(one, 1)
    turns.end_promotion(many)
    assert turns.begin_or_wait(one, 1)


@pytest.mark.parametrize(
    ("pending", "number", "passed"),
    [(None, 1, True), (None, 2, False), (5, 6, True), (5, 4, True), (5, 8, False)],
    ids=["first", "not the first", "first since", "told late", "not the first since"],
)
def test_what_is_dropped_is_missing_where_a_session_does_not_become_live(
    pending: int | None, number: int, passed: bool
) -> None:
    """Also where it is the first that a consumer brings: what follows is not taken before it has come again."""
    source = SubscriptionState(1, 5, 100)
    if pending is not None:
        source.attached(0, pending, False)
    consumer = subscription_consumer("hash", "a", name_nuid="n", deliver_nuid="d", max_ack_pending=100, start_seq=5)
    binding = ConsumerBinding("a", consumer, source)
    joining = Promotion([binding], 10)
    taken: list[bytes] = []
    handler = rest(joining, binding, lambda subject, reply, headers, payload: taken.append(payload))
    handler(b"$MQTT.msgs.a", b"$JS.ACK.$MQTT_msgs.n.1.11.%d.1.0" % number, b"", b"dropped")
    assert (joining.dropped, joining.wrong, binding in joining.passed) == (True, not passed, passed)
    assert taken == []
    assert not source.follows(number + 1)
    assert source.follows(number)
