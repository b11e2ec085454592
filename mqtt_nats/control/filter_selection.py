# SPDX-License-Identifier: Apache-2.0
"""Selection of subscriptions by their topic filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import translate
from re import compile as compile_pattern
from typing import Any, Final

SHARE: Final = "$share/"
"""Beginning of the filter of a shared subscription."""


def pattern_test(pattern: str) -> Callable[[str], bool]:
    """Return a test whether a text is like a pattern: * stands for any characters, ? for one. Empty: every text is.

    The caller bounds the length: a pattern of n characters may take n² steps to compile.
    """
    if not pattern:
        return lambda text: True
    fits = compile_pattern(translate(pattern)).fullmatch
    return lambda text: fits(text) is not None


def filter_test(question: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a test whether a subscription's filter is selected: by ``topic``, ``filter`` (a pattern), ``shared``."""
    tests: list[Callable[[str], bool]] = []
    if topic := question.get("topic"):
        tests.append(lambda text: _reaches(text, topic))
    if pattern := question.get("filter"):
        tests.append(pattern_test(pattern))
    if question.get("shared"):
        tests.append(lambda text: text.startswith(SHARE))
    return lambda text: all(test(text) for test in tests)


def _reaches(topic_filter: str, topic: str) -> bool:
    """Whether a subscription, perhaps a shared one, matches a topic."""
    from mqtt_nats.codec import matches  # ctl imports this module, and no codec

    if topic_filter.startswith(SHARE):
        topic_filter = topic_filter.split("/", 2)[2]
    return bool(topic_filter) and matches(topic_filter, topic)
