# SPDX-License-Identifier: Apache-2.0
"""CONNECTs that wait for an authenticator: no address delays those of others."""

from __future__ import annotations

import pytest

from mqtt_nats.authenticators.authentication_queue import AuthenticationQueue, source_of


def drained(queue: AuthenticationQueue[str]) -> list[str]:
    return [item for _ in range(len(queue)) if (item := queue.next()) is not None]


def test_sources_take_turns() -> None:
    queue: AuthenticationQueue[str] = AuthenticationQueue(10)
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        assert queue.add(item[0], item) is None
    assert drained(queue) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert queue.next() is None


def test_the_source_that_floods_loses_its_own() -> None:
    queue: AuthenticationQueue[str] = AuthenticationQueue(3)
    for item in ("a1", "a2", "b1"):
        queue.add(item[0], item)
    assert queue.add("c", "c1") == "a2"
    assert queue.add("c", "c2") == "c2", "the new item, and none that has waited"
    assert drained(queue) == ["a1", "b1", "c1"]


def test_a_client_that_has_gone_waits_no_more() -> None:
    queue: AuthenticationQueue[str] = AuthenticationQueue(3)
    queue.add("a", "a1")
    queue.remove("a", "a1")
    queue.remove("a", "a1")
    assert (len(queue), queue.next()) == (0, None)


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::9", "2001:db8:1:2::"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("fe80::1%eth0", "fe80::"),
        ("a name", "a name"),
    ],
)
def test_the_network_of_one_customer_is_one_source(host: str, source: str) -> None:
    assert source_of(host) == source
