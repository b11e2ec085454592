# SPDX-License-Identifier: Apache-2.0
"""A page of a list is that of the whole list, sorted, while a bounded number of entries is in memory."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.control.list_page import SPARE_ENTRIES, ListPage


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers())),
    st.integers(0, 20),
    st.integers(0, 20),
    st.booleans(),
)
def test_a_page_is_a_part_of_the_sorted_list(
    entries: list[tuple[int, int]], offset: int, limit: int, reverse: bool
) -> None:
    page = ListPage[tuple[int, int]](offset, limit, lambda one: one, reverse=reverse)
    for one in entries:
        page.add(one)
    whole = sorted(entries, reverse=reverse)
    assert page.entries() == whole[offset : offset + limit if limit else None]
    assert page.total == len(entries)


class Counted(ListPage[int]):
    """A page that notes how many entries it held at most."""

    most = 0

    def add(self, entry: int) -> None:
        super().add(entry)
        self.most = max(self.most, len(self._held))


def test_a_long_list_is_never_in_memory() -> None:
    numbers = list(range(50_000))
    Random(1).shuffle(numbers)
    page = Counted(40, 10, lambda one: one)
    for one in numbers:
        page.add(one)
    assert page.entries() == list(range(40, 50))
    assert page.total == 50_000
    assert page.most <= 2 * 50 + SPARE_ENTRIES
