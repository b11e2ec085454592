# SPDX-License-Identifier: Apache-2.0
"""How many sessions become live at the same time."""

from typing import Any

import pytest

from mqtt_nats.broker import joining
from mqtt_nats.broker.grounding import AT_ONCE
from mqtt_nats.broker.joining import Turns


def test_the_next_begins_when_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "JOINING_MOST", 3)
    begun: list[Any] = []
    turns = Turns(lambda client: begun.append(client) if turns.take(client, 1) else None)
    clients: list[Any] = ["a", "b", "c", "d", "e", "f"]
    for client in clients:
        turns.take(client, 1)
    assert [client in turns for client in clients] == [True, True, True, False, False, False]
    turns.end("d")  # type: ignore[arg-type]  # it has gone while it waited
    assert begun == []
    turns.end("a")  # type: ignore[arg-type]
    turns.end("a")  # type: ignore[arg-type]
    assert begun == ["e"]
    turns.end("e")  # type: ignore[arg-type]
    assert begun == ["e", "f"]


def test_one_that_asks_for_much_counts_for_what_it_asks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "JOINING_MOST", AT_ONCE)
    turns = Turns(lambda client: None)
    many: Any = "many"
    one: Any = "one"
    assert turns.take(many, 10 * AT_ONCE)
    assert not turns.take(one, 1)
    turns.end(many)
    assert turns.take(one, 1)
