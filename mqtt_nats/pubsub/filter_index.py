# SPDX-License-Identifier: Apache-2.0
"""The topic filters of this gateway's clients, found by topic, at a cost that is bounded whatever the filters are.

Theory of operation. A trie of levels is fast for ordinary filters, and can be made to visit every level of every
filter: each ``+`` beside a literal doubles the branches. So there is no trie. A filter without wildcards is found by
its text. A filter with wildcards is filed under one of its literals, the one under which the fewest are filed. A topic
is looked up by each of its first `DEPTH` levels, and what is filed there is compared with it. Where that is more than
`FEW` filters, they are compared `BLOCK` at a time: a block has, for each level, the set of its filters that allow a
literal there, as the bits of an integer, and a topic takes one ``&`` per level for all of them.

A match costs at most `DEPTH` lookups, and for each full block and each place where a filter may be filed one operation
on 1024 bits per level. Filters of more than `DEPTH` levels, and those without literals, have one place for each kind.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

T = TypeVar("T")

DEPTH: Final = 16
"""Levels of a filter that is filed under a literal; longer filters share one place."""

FEW: Final = 8
"""Filters of one place that are compared one after the other."""

BLOCK_BITS: Final = 10
BLOCK: Final = 1 << BLOCK_BITS
"""Filters that are compared at once."""


OVERLAPS_MAX: Final = 8
"""Filters of one session with consumers of their own that match the same topic: JetStream sends a message for each."""

COMPARISONS_MAX: Final = 100_000
"""Levels of filters that are compared for that in one SUBSCRIBE packet."""


class _Block:
    """Up to `BLOCK` filters; bit ``n`` of each integer stands for filter ``n``."""

    __slots__ = ("ending", "literals", "rest", "single", "used")

    def __init__(self) -> None:
        self.used = 0
        self.literals: list[dict[str, int]] = []
        """By level: the filters that have a literal there."""
        self.single: list[int] = []
        """By level: those that have ``+`` there."""
        self.ending: list[int] = [0]
        """By number of levels: those that end there."""
        self.rest: list[int] = [0]
        """By number of levels: those that end there with ``#`` as one level more."""

    def put(self, bit: int, levels: list[str], rest: bool) -> None:
        """Add a filter."""
        count = len(levels)
        while len(self.single) < count:
            self.literals.append({})
            self.single.append(0)
            self.ending.append(0)
            self.rest.append(0)
        self.used |= bit
        for depth in range(count):
            level = levels[depth]
            if level == "+":
                self.single[depth] |= bit
            else:
                literals = self.literals[depth]
                literals[level] = literals.get(level, 0) | bit
        if rest:
            self.rest[count] |= bit
        else:
            self.ending[count] |= bit

    def take(self, bit: int, levels: list[str], rest: bool) -> None:
        """Remove a filter that is here."""
        count = len(levels)
        self.used ^= bit
        for depth in range(count):
            level = levels[depth]
            if level == "+":
                self.single[depth] ^= bit
            else:
                literals = self.literals[depth]
                left = literals[level] ^ bit
                if left:
                    literals[level] = left
                else:
                    del literals[level]
        if rest:
            self.rest[count] ^= bit
        else:
            self.ending[count] ^= bit

    def match(self, levels: list[str], hidden: bool) -> int:
        """The filters that match; ``hidden``: not those that begin with a wildcard."""
        live = self.used
        rests = self.rest
        found = 0
        if hidden:
            live &= ~(rests[0] | self.single[0]) if self.single else ~rests[0]
        single = self.single
        literals = self.literals
        known = len(single)
        count = len(levels)
        for depth in range(min(known, count)):
            rest = rests[depth]
            if rest:
                found |= live & rest
            here = literals[depth].get(levels[depth])
            live &= single[depth] if here is None else single[depth] | here
            if not live:
                return found
        if count <= known:
            return found | live & (self.ending[count] | rests[count])
        return found | live & rests[known]

    def meet(self, levels: list[str], rest: bool) -> int:
        """The filters that a topic may match together with another filter, given as levels without ``#``."""
        live = self.used
        found = 0
        known, count = len(self.single), len(levels)
        for depth in range(min(known, count)):
            rests = self.rest[depth]
            found |= live & rests
            live &= ~(rests | self.ending[depth])
            level = levels[depth]
            if level != "+":
                live &= self.single[depth] | self.literals[depth].get(level, 0)
            if not live:
                return found
        if count > known:
            return found | live & self.rest[known]
        return found | live if rest else found | live & (self.ending[count] | self.rest[count])


class _Place(Generic[T]):
    """The filters that are filed under one literal, or under none."""

    __slots__ = ("blocks", "levels", "rests", "slots", "values")

    def __init__(self) -> None:
        self.values: list[T] = []
        self.levels: list[list[str]] = []
        """The levels of each filter, without ``#``."""
        self.rests: list[bool] = []
        """Whether ``#`` follows."""
        self.slots: dict[str, int] | None = None
        """Where each filter is in these lists, once there are more than a few."""
        self.blocks: list[_Block] = []

    def put(self, topic_filter: str, levels: list[str], rest: bool, value: T) -> None:
        """Add a filter, or replace its value."""
        slot = self.find(topic_filter, levels, rest)
        if slot >= 0:
            self.values[slot] = value
            return
        slot = len(self.values)
        self.values.append(value)
        self.levels.append(levels)
        self.rests.append(rest)
        if self.slots is not None:
            self.slots[topic_filter] = slot
            self._into_block(slot)
        elif slot >= FEW:
            self.slots = {}
            for each in range(slot + 1):
                self.slots[_text(self.levels[each], self.rests[each])] = each
                self._into_block(each)

    def find(self, topic_filter: str, levels: list[str], rest: bool) -> int:
        """Where a filter is; -1: it is not here."""
        if self.slots is not None:
            return self.slots.get(topic_filter, -1)
        for slot in range(len(self.values)):
            if self.rests[slot] == rest and self.levels[slot] == levels:
                return slot
        return -1

    def remove(self, slot: int) -> None:
        """Remove a filter; the last one takes its slot, so that all blocks but the last are full."""
        last = len(self.values) - 1
        if self.slots is not None:
            self._from_block(slot)
            del self.slots[_text(self.levels[slot], self.rests[slot])]
            if slot != last:
                self._from_block(last)
        if slot != last:
            self.values[slot] = self.values[last]
            self.levels[slot] = self.levels[last]
            self.rests[slot] = self.rests[last]
            if self.slots is not None:
                self.slots[_text(self.levels[slot], self.rests[slot])] = slot
                self._into_block(slot)
        del self.values[last], self.levels[last], self.rests[last]
        if not last & (BLOCK - 1) and self.slots is not None:
            del self.blocks[last >> BLOCK_BITS]

    def _into_block(self, slot: int) -> None:
        index = slot >> BLOCK_BITS
        if index == len(self.blocks):
            self.blocks.append(_Block())
        self.blocks[index].put(1 << (slot & (BLOCK - 1)), self.levels[slot], self.rests[slot])

    def _from_block(self, slot: int) -> None:
        self.blocks[slot >> BLOCK_BITS].take(1 << (slot & (BLOCK - 1)), self.levels[slot], self.rests[slot])

    def match(self, levels: list[str], hidden: bool, found: list[T]) -> None:
        """Add the values of the filters that match to ``found``."""
        values = self.values
        if self.slots is None:
            for slot, wanted in enumerate(self.levels):
                if _matches(wanted, self.rests[slot], levels, hidden):
                    found.append(values[slot])
            return
        start = 0
        for block in self.blocks:
            bits = block.match(levels, hidden)
            if bits:
                text = f"{bits:b}"
                size = start + len(text) - 1
                at = text.find("1")
                while at >= 0:
                    found.append(values[size - at])
                    at = text.find("1", at + 1)
            start += BLOCK

    def meet(self, levels: list[str], rest: bool) -> int:
        """How many of the filters a topic may match together with another one."""
        if self.slots is None:
            return len(self.meeting(levels, rest))
        return sum(block.meet(levels, rest).bit_count() for block in self.blocks)

    def meeting(self, levels: list[str], rest: bool) -> list[int]:
        """Where these filters are."""
        if self.slots is None:
            return [slot for slot, wanted in enumerate(self.levels) if _meet(wanted, self.rests[slot], levels, rest)]
        found: list[int] = []
        for number, block in enumerate(self.blocks):
            bits = block.meet(levels, rest)
            while bits:
                lowest = bits & -bits
                found.append((number << BLOCK_BITS) + lowest.bit_length() - 1)
                bits ^= lowest
        return found


def _text(levels: list[str], rest: bool) -> str:
    text = "/".join(levels)
    return text if not rest else f"{text}/#" if levels else "#"


def _matches(wanted: list[str], rest: bool, levels: list[str], hidden: bool) -> bool:
    count = len(wanted)
    if count > len(levels) if rest else count != len(levels):
        return False
    if hidden and (not count or wanted[0] == "+"):
        return False
    for depth in range(count):
        level = wanted[depth]
        if level != levels[depth] and level != "+":
            return False
    return True


def _meet(one: list[str], one_rest: bool, other: list[str], other_rest: bool) -> bool:
    fewer = min(len(one), len(other))
    for depth in range(fewer):
        left, right = one[depth], other[depth]
        if left != right and left != "+" and right != "+":
            return False
    return (len(one) == fewer or other_rest) and (len(other) == fewer or one_rest)


class Overlaps:
    """Filters with wildcards, of which some may overlap others: how many that are is counted like a match."""

    __slots__ = ("_place",)

    def __init__(self) -> None:
        self._place: _Place[None] = _Place()

    def add(self, topic_filter: str) -> None:
        """Put a filter in, where it is not there."""
        levels, rest = _levels(topic_filter)
        self._place.put(topic_filter, levels, rest, None)

    def remove(self, topic_filter: str) -> None:
        """Take a filter out, where it is there."""
        levels, rest = _levels(topic_filter)
        _remove(self._place, topic_filter, levels, rest)

    def count(self, topic_filter: str) -> int:
        """How many filters a topic may match that matches this one."""
        levels, rest = _levels(topic_filter)
        return self._place.meet(levels, rest)


class OverlapLimit:
    """Filters of which no topic matches more than so many: one with which a topic would match more is not let in.

    Filters that overlap each other in pairs are all matched by one topic. To find how many that are at most, topics are
    tried level by level, each time with those filters that are left, and only where these are more than there may be.
    """

    __slots__ = ("_comparisons", "_most", "_place")

    def __init__(self, most: int = OVERLAPS_MAX, comparisons: int = COMPARISONS_MAX) -> None:
        """``comparisons``: of levels, for all filters that are looked at."""
        self._most = most
        self._comparisons = comparisons
        self._place: _Place[int] = _Place()
        """With how often each filter is there."""

    def add(self, topic_filter: str) -> None:
        """Put a filter in, whatever it overlaps; one that is there counts once more."""
        levels, rest = _levels(topic_filter)
        self._add(topic_filter, levels, rest)

    def take(self, topic_filter: str) -> bool:
        """Put a filter in; False: a topic would match too many, or nobody can tell with so many comparisons."""
        levels, rest = _levels(topic_filter)
        self._add(topic_filter, levels, rest)
        place = self._place
        slots = place.meeting(levels, rest)
        if self._weight(slots) <= self._most or self._fit(slots):
            return True
        slot = place.find(topic_filter, levels, rest)
        if place.values[slot] > 1:
            place.values[slot] -= 1
        else:
            place.remove(slot)
        return False

    def _add(self, topic_filter: str, levels: list[str], rest: bool) -> None:
        slot = self._place.find(topic_filter, levels, rest)
        self._place.put(topic_filter, levels, rest, 1 if slot < 0 else self._place.values[slot] + 1)

    def _weight(self, slots: list[int]) -> int:
        values = self._place.values
        weight = 0
        for slot in slots:
            weight += values[slot]
        return weight

    def _fit(self, slots: list[int]) -> bool:
        """Whether no topic matches too many of these."""
        place, most = self._place, self._most
        left = [(slots, 0)]
        while left:
            slots, depth = left.pop()
            ending = always = 0
            onward: list[int] = []
            literals: dict[str, list[int]] = {}
            for slot in slots:
                levels = place.levels[slot]
                if depth < len(levels):
                    if levels[depth] == "+":
                        onward.append(slot)
                    else:
                        literals.setdefault(levels[depth], []).append(slot)
                elif place.rests[slot]:
                    always += place.values[slot]
                    onward.append(slot)
                else:
                    ending += place.values[slot]
            if always + ending > most:
                return False
            weight = self._weight(onward)
            if weight == always and not literals:
                continue
            for some in list(literals.values()) or [[]]:
                if weight + self._weight(some) > most:
                    self._comparisons -= len(onward) + len(some)
                    if self._comparisons < 0:
                        return False
                    left.append((onward + some, depth + 1))
        return True


def _levels(topic_filter: str) -> tuple[list[str], bool]:
    """The levels of a filter, without ``#``, and whether there is one."""
    levels = topic_filter.split("/")
    rest = levels[-1] == "#"
    if rest:
        levels.pop()
    return levels, rest


class FilterIndex(Generic[T]):
    """Maps topic filters to values. What :meth:`match` may cost is told at the top of the module."""

    __slots__ = ("_exact", "_long", "_open", "_places")

    def __init__(self) -> None:
        self._exact: dict[str, T] = {}
        """Filters without wildcards."""
        self._places: list[dict[str, _Place[T]]] = [{} for _ in range(DEPTH)]
        """Filters with wildcards and literals, by level and literal."""
        self._open: _Place[T] = _Place()
        """Filters of wildcards alone."""
        self._long: _Place[T] = _Place()
        """Filters of more than `DEPTH` levels."""

    def add(self, topic_filter: str, value: T) -> None:
        """Put ``value`` under a legal topic filter."""
        if "+" not in topic_filter and "#" not in topic_filter:
            self._exact[topic_filter] = value
            return
        levels, rest = _levels(topic_filter)
        self._place(topic_filter, levels, rest).put(topic_filter, levels, rest, value)

    def _place(self, topic_filter: str, levels: list[str], rest: bool) -> _Place[T]:
        """Where a filter is, or is to be: under the literal under which the fewest are."""
        if len(levels) > DEPTH:
            return self._long
        best = -1
        fewest = 0
        for depth in range(len(levels)):
            level = levels[depth]
            if level == "+":
                continue
            place = self._places[depth].get(level)
            if place is None:
                size = 0
            elif place.find(topic_filter, levels, rest) >= 0:
                return place
            else:
                size = len(place.values)
            if best < 0 or size < fewest:
                best, fewest = depth, size
        if best < 0:
            return self._open
        places = self._places[best]
        level = levels[best]
        place = places.get(level)
        if place is None:
            place = places[level] = _Place()
        return place

    def remove(self, topic_filter: str) -> None:
        """Remove a filter, where it is there."""
        if "+" not in topic_filter and "#" not in topic_filter:
            self._exact.pop(topic_filter, None)
            return
        levels, rest = _levels(topic_filter)
        if len(levels) > DEPTH:
            _remove(self._long, topic_filter, levels, rest)
            return
        if _remove(self._open, topic_filter, levels, rest):
            return
        for depth in range(len(levels)):
            places = self._places[depth]
            place = places.get(levels[depth])
            if place is not None and _remove(place, topic_filter, levels, rest):
                if not place.values:
                    del places[levels[depth]]
                return

    def match(self, topic: str) -> list[T]:
        """The values of all filters that match a topic name, which is taken as it is.

        [MQTT-3.3.2-3] [MQTT-4.7.3-4] (3.1.1, 5.0)

        Wildcards in the first level do not match a topic that starts with ``$`` [MQTT-4.7.2-1].
        """
        found: list[T] = []
        exact = self._exact.get(topic)
        if exact is not None:
            found.append(exact)
        levels = topic.split("/")
        hidden = topic[:1] == "$"
        count = len(levels)
        places = self._places
        for depth in range(min(count, DEPTH)):
            place = places[depth].get(levels[depth])
            if place is not None:
                place.match(levels, hidden, found)
        if self._open.values:
            self._open.match(levels, hidden, found)
        if count > DEPTH and self._long.values:
            self._long.match(levels, hidden, found)
        return found

    def __len__(self) -> int:
        """How many filters there are."""
        filed = sum(len(place.values) for places in self._places for place in places.values())
        return len(self._exact) + filed + len(self._open.values) + len(self._long.values)


def _remove(place: _Place[T], topic_filter: str, levels: list[str], rest: bool) -> bool:
    """Remove a filter; False: it is not here."""
    slot = place.find(topic_filter, levels, rest)
    if slot < 0:
        return False
    place.remove(slot)
    return True
