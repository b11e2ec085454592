# SPDX-License-Identifier: Apache-2.0
"""Which subjects of a stream are read: the part that NATS evaluates, and what is left for us."""

from collections.abc import Callable, Sequence

from mqtt_streams.subjects import starts_with_wildcard, visible_to_wildcard


def covers(outer: str, inner: str) -> bool:
    """Whether everything that the subject filter `inner` matches is matched by `outer` too."""
    wide, narrow = outer.split("."), inner.split(".")
    for index, token in enumerate(wide):
        if index >= len(narrow):
            return False
        if token == ">":
            return True
        if narrow[index] == ">" or (token != "*" and token != narrow[index]):
            return False
    return len(wide) == len(narrow)


def without_covered(subjects: Sequence[str]) -> list[str]:
    """The filters that are needed, since JetStream refuses one that another one covers."""
    kept: list[str] = []
    for subject in dict.fromkeys(subjects):
        if not any(covers(other, subject) for other in kept):
            kept = [other for other in kept if not covers(subject, other)]
            kept.append(subject)
    return kept


def visible(subjects: Sequence[str], prefix: str) -> Callable[[str], bool] | None:
    """Tells whether a subject (without prefix) that NATS has matched is one of the topics asked for; None: all are.

    A filter that starts with `+` shows no topic that starts with `$` [MQTT-4.7.2-1], which NATS knows nothing of.
    """
    bare = [subject.removeprefix(prefix) for subject in subjects]
    if not any(map(starts_with_wildcard, bare)):
        return None
    named = [subject for subject in bare if not starts_with_wildcard(subject)]

    def check(subject: str) -> bool:
        return visible_to_wildcard(subject) or any(covers(one, subject) for one in named)

    return check
