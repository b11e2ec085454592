# SPDX-License-Identifier: Apache-2.0
"""Which subscriptions a question selects by their filters."""

from __future__ import annotations

from typing import Any

import pytest

from mqtt_nats.control.filter_selection import filter_test, pattern_test

FILTERS = ("a/b", "a/+", "#", "$SYS/#", "$share/g/a/b", "$share/g/c", "$share/g", "a.b")


@pytest.mark.parametrize(
    ("question", "found"),
    [
        ({}, FILTERS),
        ({"topic": "", "filter": "", "shared": False}, FILTERS),
        ({"topic": "a/b"}, ("a/b", "a/+", "#", "$share/g/a/b")),
        ({"topic": "$SYS/x"}, ("$SYS/#",)),  # [MQTT-4.7.2-1] (3.1.1, 5.0)
        ({"shared": True}, ("$share/g/a/b", "$share/g/c")),
        ({"filter": "a/?"}, ("a/b", "a/+")),
        ({"filter": "*a/b"}, ("a/b", "$share/g/a/b")),
        ({"filter": "a.b"}, ("a.b",)),
        ({"filter": "$share/*", "topic": "c"}, ("$share/g/c",)),
        ({"shared": True, "topic": "other"}, ()),
    ],
)
def test_all_that_a_question_asks_holds(question: dict[str, Any], found: tuple[str, ...]) -> None:
    texts = [text for text in FILTERS if text != "$share/g"]  # no session has a shared subscription without a filter
    assert [text for text in texts if filter_test(question)(text)] == [text for text in found if text in texts]


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("", "anything", True),
        ("lamp", "lamp", True),
        ("lamp", "lamps", False),
        ("lamp", "a lamp", False),
        ("lamp*", "lamp/1\n2", True),
        ("l?mp", "lamp", True),
        ("l?mp", "lmp", False),
        ("[ab]", "a", True),
        ("(a", "(a", True),
        ("a+", "aa", False),
    ],
)
def test_a_pattern_is_about_the_whole_text(pattern: str, text: str, fits: bool) -> None:
    assert pattern_test(pattern)(text) is fits
