# SPDX-License-Identifier: Apache-2.0
"""The state of one subscription: from where readers bring its messages, and whether they do."""

from __future__ import annotations

import pytest

from mqtt_nats.protocol.inflight import SubscriptionState


@pytest.mark.parametrize(
    ("end", "whole", "served"), [(None, False, True), (9, True, True), (9, False, False), (0, False, False)]
)
def test_readers_serve_subscriptions_that_have_not_ended_or_were_lowered(
    end: int | None, whole: bool, served: bool
) -> None:
    assert SubscriptionState(1, 1, end=end, whole=whole).is_served is served


@pytest.mark.parametrize("lowered", [True, False])
def test_a_subscription_that_ends_while_it_is_served(lowered: bool) -> None:
    """Its end does not go back; one that was lowered stays so."""
    one = SubscriptionState(1, 1)
    one.end_at(9, whole=lowered)
    assert one.is_served is lowered
    one.end_at(5)
    assert (one.end, one.is_served) == (9, lowered)


def test_a_subscription_begins_after_what_it_was_given() -> None:
    """Readers do not bring a message twice."""
    one = SubscriptionState(1, 8)
    one.begin_after(7)
    assert one.last == 7
    one.deliver_to(20)
    one.begin_after(7)
    assert one.last == 20
