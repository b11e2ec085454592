# SPDX-License-Identifier: Apache-2.0
"""Checked reading of values from a stored JSON object, whose values may have any type."""

import re
from typing import Any, Final

MAX_SEQUENCE: Final = 2**63 - 1

_TOKEN: Final = r"(?:[^.*> \t\r\n\f\v\0\x7f]+|\*)"
_SUBJECT: Final = re.compile(rf"(?:{_TOKEN}(?:\.{_TOKEN})*(?:\.>)?|>)")


class PoisonedRecord(Exception):
    """A stored record cannot be used; the text gives the reason. `seq`: the record's stream sequence, 0 = not known."""

    seq = 0


class Fields:
    """Reader that takes typed values out of a JSON object; raises PoisonedRecord, with the place, for a wrong value."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise PoisonedRecord(f"{where} is not a JSON object")
        self.values: dict[str, Any] = dict(value)
        self.where = where

    def fail(self, key: str, expected: str) -> PoisonedRecord:
        return PoisonedRecord(f"{self.where}: {key if key.isidentifier() else repr(key[:64])} is not {expected}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.pop(key, default)
        if not isinstance(value, str):
            raise self.fail(key, "a string")
        return value

    def optional_text(self, key: str) -> str | None:
        if self.values.get(key) is None:
            self.values.pop(key, None)
            return None
        return self.text(key)

    def flag(self, key: str) -> bool:
        value = self.values.pop(key, False)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def number(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.values.pop(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(key, f"a whole number from {low} to {high}")
        return value

    def optional_number(self, key: str, low: int, high: int) -> int | None:
        if self.values.get(key) is None:
            self.values.pop(key, None)
            return None
        return self.number(key, low, high)

    def items(self, key: str) -> dict[str, Any]:
        value = self.values.pop(key, None)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(key, "a JSON object")
        return value

    def numbers(self, key: str) -> dict[str, int]:
        inner = Fields(self.items(key), f"{self.where}: {key}")
        return {name: inner.number(name, 0, MAX_SEQUENCE) for name in list(inner.values)}


def is_subject(text: str) -> bool:
    """Whether NATS accepts a text as a subject to subscribe."""
    return _SUBJECT.fullmatch(text) is not None


def is_literal(text: str) -> bool:
    """Whether a text is a subject without wildcards."""
    return is_subject(text) and "*" not in text and ">" not in text


def is_token(text: str) -> bool:
    """Whether a text is one token of a subject."""
    return is_literal(text) and "." not in text
