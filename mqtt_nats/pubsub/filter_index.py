# SPDX-License-Identifier: Apache-2.0
"""Index of the topic filters of this gateway's clients, by topic, at a bounded cost whatever the filters are.

Theory of operation. A trie of levels is fast for ordinary filters, but clients can make it visit every level of every
filter: each ``+`` beside a literal doubles the branches. So there is no trie. A filter without wildcards is found by
its text. A filter with wildcards is filed under that of its literals under which the fewest filters are filed. A
topic is looked up by each of its first `DEPTH` levels, and compared with the filters filed there. More than
`COMPARED_SINGLY_MOST` filters are compared `BLOCK` at a time: a block has, for each level, the set of its filters that
allow a literal there, as the bits of an integer, and a topic takes one ``&`` per level for all of them.

A match costs at most `DEPTH` lookups, and for each full block and each place where a filter may be filed one operation
on 1024 bits per level. Filters of more than `DEPTH` levels have one place, filters without literals another.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

T = TypeVar("T")

DEPTH: Final = 16
"""Maximum number of levels of a filter that is filed under a literal; longer filters share one place."""

COMPARED_SINGLY_MOST: Final = 8
"""Number of filters in one place up to which they are compared one by one."""

BLOCK_BITS: Final = 10
BLOCK: Final = 1 << BLOCK_BITS
"""Number of filters that are compared at once."""


OVERLAPS_MAX: Final = 8
"""Maximum number of a session's filters with consumers that match one topic: JetStream sends a message for each."""

COMPARISONS_MAX: Final = 100_000
"""Maximum number of filter levels compared for that limit in one SUBSCRIBE packet."""


class _Block:
    """Block of up to `BLOCK` filters; bit ``n`` of each integer stands for filter ``n``."""

    __slots__ = ("ending", "literals", "rest", "single", "used")

    def __init__(self) -> None:
        self.used = 0
        self.literals: list[dict[str, int]] = []
        """Filters with a literal at a level, by level and literal."""
        self.single: list[int] = []
        """Filters with ``+`` at a level, by level."""
        self.ending: list[int] = [0]
        """Filters that end without ``#``, by number of levels."""
        self.rest: list[int] = [0]
        """Filters that end with ``#``, by number of levels before ``#``."""

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

    def remove(self, bit: int, levels: list[str], rest: bool) -> None:
        """Remove a filter of this block."""
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
        """Return the filters that match; with ``hidden``, without filters that begin with a wildcard."""
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
        """Return the filters that share a topic with another filter, given as levels without ``#``."""
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
    """Place: the filters that are filed under one literal, or under none."""

    __slots__ = ("blocks", "levels", "rests", "slots", "values")

    def __init__(self) -> None:
        self.values: list[T] = []
        self.levels: list[list[str]] = []
        """Levels of each filter, without ``#``."""
        self.rests: list[bool] = []
        """Whether ``#`` follows, for each filter."""
        self.slots: dict[str, int] | None = None
        """Index of each filter in these lists, by filter; None while there are at most `COMPARED_SINGLY_MOST`."""
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
        elif slot >= COMPARED_SINGLY_MOST:
            self.slots = {}
            for each in range(slot + 1):
                self.slots[_text(self.levels[each], self.rests[each])] = each
                self._into_block(each)

    def find(self, topic_filter: str, levels: list[str], rest: bool) -> int:
        """Return the slot of a filter; -1: the filter is not here."""
        if self.slots is not None:
            return self.slots.get(topic_filter, -1)
        for slot in range(len(self.values)):
            if self.rests[slot] == rest and self.levels[slot] == levels:
                return slot
        return -1

    def remove(self, slot: int) -> None:
        """Remove a filter; the last filter takes its slot, so that all blocks but the last are full."""
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
        self.blocks[slot >> BLOCK_BITS].remove(1 << (slot & (BLOCK - 1)), self.levels[slot], self.rests[slot])

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
        """Return how many filters share a topic with another filter."""
        if self.slots is None:
            return len(self.meeting(levels, rest))
        return sum(block.meet(levels, rest).bit_count() for block in self.blocks)

    def meeting(self, levels: list[str], rest: bool) -> list[int]:
        """Return the slots of the filters that share a topic with another filter."""
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
    """Filters with wildcards, with a count of overlaps that costs as much as a match."""

    __slots__ = ("_place",)

    def __init__(self) -> None:
        self._place: _Place[None] = _Place()

    def add(self, topic_filter: str) -> None:
        """Add a filter, if it is not there."""
        levels, rest = _levels(topic_filter)
        self._place.put(topic_filter, levels, rest, None)

    def remove(self, topic_filter: str) -> None:
        """Remove a filter, if it is there."""
        levels, rest = _levels(topic_filter)
        _remove(self._place, topic_filter, levels, rest)

    def count(self, topic_filter: str) -> int:
        """Return how many filters share a topic with this filter."""
        levels, rest = _levels(topic_filter)
        return self._place.meet(levels, rest)


class OverlapLimit:
    """Limit on filters that match the same topic: a filter with which a topic would match more is refused.

    Filters that overlap each other in pairs are all matched by one topic. To find the largest number of such filters,
    topics are tried level by level, with the filters left at each level, and only while more are left than allowed.
    """

    __slots__ = ("_comparisons", "_most", "_place")

    def __init__(self, most: int = OVERLAPS_MAX, comparisons: int = COMPARISONS_MAX) -> None:
        """``comparisons``: maximum number of compared levels, for all filters together."""
        self._most = most
        self._comparisons = comparisons
        self._place: _Place[int] = _Place()
        """Number of times that each filter was added."""

    def add(self, topic_filter: str) -> None:
        """Add a filter, whatever it overlaps; a filter that is there counts once more."""
        levels, rest = _levels(topic_filter)
        self._add(topic_filter, levels, rest)

    def add_if_fits(self, topic_filter: str) -> bool:
        """Add a filter; False: a topic would match too many, or the comparisons do not suffice to tell."""
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
        """Return whether no topic matches too many of these filters."""
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
    """Return the levels of a filter, without ``#``, and whether ``#`` follows."""
    levels = topic_filter.split("/")
    rest = levels[-1] == "#"
    if rest:
        levels.pop()
    return levels, rest


class FilterIndex(Generic[T]):
    """Map of topic filters to values. The module docstring gives the cost of :meth:`match`."""

    __slots__ = ("_exact", "_long", "_open", "_places")

    def __init__(self) -> None:
        self._exact: dict[str, T] = {}
        """Values of filters without wildcards, by filter."""
        self._places: list[dict[str, _Place[T]]] = [{} for _ in range(DEPTH)]
        """Places of filters with wildcards and literals, by level and literal."""
        self._open: _Place[T] = _Place()
        """Filters of wildcards alone."""
        self._long: _Place[T] = _Place()
        """Filters of more than `DEPTH` levels."""

    def add(self, topic_filter: str, value: T) -> None:
        """Add or replace the ``value`` of a legal topic filter."""
        if "+" not in topic_filter and "#" not in topic_filter:
            self._exact[topic_filter] = value
            return
        levels, rest = _levels(topic_filter)
        self._place(topic_filter, levels, rest).put(topic_filter, levels, rest, value)

    def _place(self, topic_filter: str, levels: list[str], rest: bool) -> _Place[T]:
        """Return the place of a filter; a new filter goes under the literal with the fewest filters."""
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
        """Remove a filter, if it is there."""
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
        """Return the values of all filters that match a topic name, which is taken as it is.

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
        """Return the number of filters."""
        filed = sum(len(place.values) for places in self._places for place in places.values())
        return len(self._exact) + filed + len(self._open.values) + len(self._long.values)


def _remove(place: _Place[T], topic_filter: str, levels: list[str], rest: bool) -> bool:
    """Remove a filter; False: the filter is not here."""
    slot = place.find(topic_filter, levels, rest)
    if slot < 0:
        return False
    place.remove(slot)
    return True
