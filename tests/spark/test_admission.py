# SPDX-License-Identifier: Apache-2.0
"""Ends of batches by the number of messages, as JetStream counts them."""

import pytest

from pyspark_mqtt_nats import admission
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading import pull
from pyspark_mqtt_nats.reading.ranges import Snapshot

LENGTH = 10_000


@pytest.mark.parametrize(
    "matching",
    [range(1, LENGTH + 1), range(1, LENGTH + 1, 7), range(9000, LENGTH + 1), range(1, 50)],
    ids=["all", "some", "the last", "few"],
)
@pytest.mark.parametrize("most", [1, 40, 100])
@pytest.mark.parametrize("start", [1, 9500])
def test_a_batch_has_as_many_messages_as_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, matching: range, most: int, start: int
) -> None:
    """Not more, and if there are so many, not far fewer."""

    def count(connection: Connection, stream: str, subjects: tuple[str, ...], first: int) -> int:
        return sum(sequence >= first for sequence in matching)

    monkeypatch.setattr(pull, "count", count)
    options = Options.parse({"servers": "nats://127.0.0.1:4222", "topics": "a"})
    found = Snapshot("S", "", 1, LENGTH, start, LENGTH + 1, "limits", ())
    end = admission._by_count(Connection.__new__(Connection), options, found, most)
    within = [sequence for sequence in matching if start <= sequence < end]
    left = [sequence for sequence in matching if sequence >= max(start, end)]
    assert len(within) <= most
    assert len(within) >= int(most * admission._ENOUGH) or not left
