# SPDX-License-Identifier: Apache-2.0
"""The budget of memory that the shares of clients have together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.base.bucket import KEPT_FREE, MemoryBudget, Share


class Cache:
    """A share, and how often it was emptied."""

    def __init__(self, budget: MemoryBudget, limit: int | None = None) -> None:
        self.emptied = 0
        self.share = Share(budget, self._empty, limit)

    def _empty(self) -> None:
        self.emptied += 1


def test_a_share_that_is_full_is_emptied() -> None:
    budget = MemoryBudget(1000, 100)
    one, other = Cache(budget), Cache(budget)
    other.share.add(50)
    for _ in range(10):
        one.share.add(30)
    assert one.emptied == 3
    assert one.share.used <= 100
    assert other.emptied == 0, "others lose nothing by it"
    assert budget.used == one.share.used + other.share.used


def test_where_all_is_full_the_oldest_makes_room() -> None:
    budget = MemoryBudget(250, 100)
    caches = [Cache(budget) for _ in range(4)]
    for cache in caches:
        cache.share.add(80)
    assert [cache.emptied for cache in caches] == [1, 0, 0, 0]
    caches[0].share.add(80)
    assert [cache.emptied for cache in caches] == [1, 1, 0, 0]
    assert budget.used <= 250


def test_what_is_kept_has_a_limit_beyond_what_everybody_may_keep() -> None:
    budget = MemoryBudget(3 * KEPT_FREE, 2 * KEPT_FREE)
    one, two, three = Cache(budget), Cache(budget), Cache(budget)
    one.share.add(KEPT_FREE)
    assert two.share.count_kept(2 * KEPT_FREE)
    assert not two.share.count_kept(1), "its own limit"
    assert not three.share.count_kept(KEPT_FREE + 1), "that of all"
    assert three.share.count_kept(KEPT_FREE)
    assert one.share.count_kept(KEPT_FREE), "so much may everybody keep"
    assert one.emptied == 1, "what is kept takes the place of what can be forgotten"
    for cache in (one, two, three):
        cache.share.return_all()
    assert (budget.used, budget.kept) == (0, 0)


OPERATIONS = st.lists(st.tuples(st.sampled_from("akfe"), st.integers(0, 3), st.integers(-50_000, 50_000)), max_size=60)


@given(OPERATIONS)
def test_the_sums_are_right_whatever_is_done(operations: list[tuple[str, int, int]]) -> None:
    budget = MemoryBudget(100_000, 60_000)
    caches = [Cache(budget) for _ in range(4)]
    for kind, who, size in operations:
        share = caches[who].share
        if kind == "a":
            share.add(size)
        elif kind == "k":
            share.count_kept(max(size, -share.kept))
        elif kind == "f":
            share.forget()
        else:
            share.return_all()
        assert budget.used == sum(one.share.used for one in caches)
        assert budget.kept == sum(one.share.kept for one in caches)
        assert all(one.share.used >= 0 <= one.share.kept for one in caches)
        assert budget.used <= 100_000
        assert budget.kept <= 100_000 + 4 * KEPT_FREE
