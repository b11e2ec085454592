# SPDX-License-Identifier: Apache-2.0
"""Takers: which topics they have, and for how long."""

from __future__ import annotations

import pytest

from mqtt_nats.backbone.pending_stores import CountedStore
from mqtt_nats.ingress.interceptors import Taken, Takers


class Taker:
    """A taker that takes nothing."""

    def target(self, topic: str) -> str:
        return topic

    def take(self, taken: Taken, operation: CountedStore) -> None:
        raise AssertionError("no message was published")


def test_a_topic_has_the_taker_of_its_beginning() -> None:
    takers, later, other = Takers(), Taker(), Taker()
    assert not takers
    takers.add("$delayed/", later)
    takers.add("a/b/", other)
    assert takers
    assert [takers.of(topic) for topic in ("$delayed/1/a", "$delayed/", "a/b/c")] == [later, later, other]
    assert [takers.of(topic) for topic in ("$delayed", "$delayedly/a", "a/b", "b/a/b/", "")] == [None] * 5


def test_a_topic_of_a_packet_is_known_by_its_bytes() -> None:
    takers, later = Takers(), Taker()
    takers.add("später/", later)
    key = "später/a".encode()
    assert takers.of_key(len(key).to_bytes(2) + key) is later
    assert takers.of_key(b"\x00\x01a") is None


@pytest.mark.parametrize("beginning", ["a", "", "$delayed/x", "$delayed/"])
def test_a_beginning_is_whole_levels_and_has_one_taker(beginning: str) -> None:
    takers, first = Takers(), Taker()
    takers.add("$delayed/", first)
    with pytest.raises(ValueError, match="is taken, or does not end with a slash"):
        takers.add(beginning, Taker())
    assert takers.of("$delayed/1/a") is first
    assert takers.of("a") is None


def test_messages_of_a_taker_that_has_ended_are_published_again() -> None:
    takers = Takers()
    takers.add("$delayed/", Taker())
    takers.remove("other/")
    assert takers.of("$delayed/1/a") is not None
    takers.remove("$delayed/")
    assert takers.of("$delayed/1/a") is None
    assert not takers
    takers.add("$delayed/", Taker())
