# SPDX-License-Identifier: Apache-2.0
"""Reasons for which JetStream refuses a store, as metrics and logs name them."""

from __future__ import annotations

from typing import Final

from mqtt_streams.api import ApiError

FULL: Final = "JetStream storage is full"

FULL_CODES: Final = frozenset({10002, 10023, 10047})
"""JetStream's error codes: the account's limit, the server's resources, or the server's storage is used up."""

REASONS: Final = ("storage_full", "stream_limit", "too_large", "not_permitted", "other")
"""Names of the reasons: the values of a metric's label."""

_CODES: Final = {10077: "stream_limit", 10054: "too_large"}
"""Reasons by JetStream's error code."""

_STATUS: Final = {403: "not_permitted", 413: "too_large"}
"""Reasons by the status of errors that have no code of JetStream."""

_EXPECTED: Final = frozenset({10071, 10164})
"""JetStream's error codes for a store that is conditional on a sequence."""

_EXPECTED_TEXTS: Final = frozenset({"maximum messages per subject exceeded"})
"""JetStream's text for a held publish whose packet identifier is in use; the code is that of other limits, too."""


class Refusals:
    """Number of stores that JetStream has refused, by reason."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(REASONS, 0)

    def count(self, error: ApiError) -> None:
        """Count a refusal, unless it is a part of the gateways' own protocol."""
        reason = reason_of(error)
        if reason:
            self.counts[reason] += 1


def reason_of(error: ApiError) -> str:
    """Return which of `REASONS` an error is; empty for a refusal that is part of the gateways' own protocol."""
    if error.err_code in FULL_CODES:
        return "storage_full"
    if error.err_code in _EXPECTED or error.description in _EXPECTED_TEXTS:
        return ""
    return _CODES.get(error.err_code) or _STATUS.get(error.code, "other")
