# SPDX-License-Identifier: Apache-2.0
"""Bans known to this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple
from urllib.parse import quote

from mqtt_nats.base.networks import Networks, household, parse_network

KINDS: Final = ("client", "user", "address", "user-client", "address-client")

PAIRS: Final = KINDS[3:]


class Ban(NamedTuple):
    """Ban of a client id, a user name or a network, or of a client id of one user or address."""

    kind: str
    """One of `KINDS`."""
    value: str
    """Of kind `address`: a network in the form of `parse_network`; of a kind in `PAIRS`: a value of `pair`."""
    until: float
    """End of the ban, Unix time in seconds; 0 = no end."""
    reason: str = ""
    by: str = ""
    """Administrator or gateway that has set the ban."""

    def holds(self, now: float) -> bool:
        """Whether the ban is in force at Unix time ``now``."""
        return not self.until or self.until > now

    def __str__(self) -> str:
        return f"{self.kind} {self.value!r}"


def pair(client: str, user: str | None, host: str) -> tuple[str, str]:
    """Return kind and value of a ban of a client id of one user, or of the anonymous clients of one address.

    An admitted client may choose any client id, so the client id alone does not identify a user.
    """
    if user:
        return "user-client", f"{quote(user, safe='')}/{client}"
    return "address-client", f"{household(host)}/{client}"


def ban(kind: str, value: str, until: float, reason: str = "", by: str = "") -> Ban:
    """Return a checked ban for `Bans`.

    Raises:
        ValueError: the kind is unknown, or the value is empty or no network.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} cannot be banned: expected {', '.join(KINDS)}")
    if kind == "address":
        value = str(parse_network(value))
    elif not value:
        raise ValueError("an empty name cannot be banned")
    elif kind in PAIRS and not value.partition("/")[2]:
        raise ValueError(f"{value!r} is not {kind.upper().replace('-', '/')}")
    return Ban(kind, value, until, reason, by)


class Bans:
    """Bans by kind and value."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Ban] = {}
        self._networks: Networks[Ban] = Networks()

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Ban]:
        return iter(self._found.values())

    def get(self, kind: str, value: str) -> Ban | None:
        """Return the ban of this kind and value, also one that has ended; None without one."""
        return self._found.get((kind, value))

    def put(self, one: Ban) -> None:
        """Add a ban, or replace the ban of the same kind and value."""
        self._found[one.kind, one.value] = one
        if one.kind == "address":
            self._networks.put(parse_network(one.value), one)

    def remove(self, kind: str, value: str) -> None:
        """Lift a ban."""
        if self._found.pop((kind, value), None) is not None and kind == "address":
            self._networks.remove(parse_network(value))

    def expire(self, now: float) -> None:
        """Remove bans that have ended at Unix time ``now``."""
        for one in [one for one in self._found.values() if not one.holds(now)]:
            self.remove(one.kind, one.value)

    def find(
        self, now: float, *, client: str = "", user: str | None = None, host: str = "", proved: bool = False
    ) -> Ban | None:
        """Return a ban in force at Unix time ``now`` for one of the given names; None without one.

        Args:
            proved: the authentication is done: ``user`` is the authenticated user, or None for an anonymous client.
        """
        if not self._found:
            return None
        found = [self._found.get(("client", client)), self._found.get(("user", user)) if user else None]
        if proved:
            found.append(self._found.get(pair(client, user, host)))
        if host:
            found += self._networks.covering(host)
        return next((one for one in found if one is not None and one.holds(now)), None)
