# SPDX-License-Identifier: Apache-2.0
"""Limits and storage of a JetStream account, read from `$JS.API.INFO`."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class AccountLimits(NamedTuple):
    """Limits of one account for streams with a given number of replicas; 0 = no limit.

    `consumers`: most consumers of one stream. `ack_pending`: largest `max_ack_pending` of one consumer.
    """

    consumers: int = 0
    ack_pending: int = 0


def account_limits(info: Mapping[str, Any], replicas: int) -> AccountLimits:
    """Return the limits in an answer to `$JS.API.INFO`, from the tier `R<replicas>` where the account has tiers."""
    tiers = info.get("tiers") or {}
    limits = (tiers.get(f"R{replicas}") or {}).get("limits") if tiers else info.get("limits")
    found = limits or {}
    return AccountLimits(_number(found.get("max_consumers")), _number(found.get("max_ack_pending")))


class AccountStorage(NamedTuple):
    """Bytes of file storage that an account uses, and may use (None = the account has no limit of its own)."""

    used: int
    allowed: int | None


def account_storage(info: Mapping[str, Any]) -> AccountStorage:
    """Return the file storage in an answer to `$JS.API.INFO`; the limits of an account's tiers are added up.

    nats-server does not tell clients the server's own limit, `max_file_store`.
    """
    tiers = (info.get("tiers") or {}).values()
    limits = [(one.get("limits") or {}).get("max_storage", -1) for one in tiers]
    limits = limits or [(info.get("limits") or {}).get("max_storage", -1)]
    allowed = None if any(one < 0 for one in limits) else sum(limits)
    return AccountStorage(_number(info.get("storage")), allowed)


def _number(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
