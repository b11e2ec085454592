# SPDX-License-Identifier: Apache-2.0
"""Who is banned, as far as this process knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple
from urllib.parse import quote

from mqtt_nats.base.networks import Networks, household, parse_network

KINDS: Final = ("client", "user", "address", "user-client", "address-client")

PAIRS: Final = KINDS[3:]


class Ban(NamedTuple):
    """A client id, a user name or a network that may not connect, or a client id of a user or an address."""

    kind: str
    """One of `KINDS`."""
    value: str
    """For an address a network, as `parse_network` writes it; for a client id of somebody what `pair` says."""
    until: float
    """Unix time in seconds; 0 = for good."""
    reason: str = ""
    by: str = ""
    """Who has set it."""

    def holds(self, now: float) -> bool:
        """Whether it has not ended at Unix time ``now``."""
        return not self.until or self.until > now

    def __str__(self) -> str:
        return f"{self.kind} {self.value!r}"


def pair(client: str, user: str | None, host: str) -> tuple[str, str]:
    """Kind and value of a ban of a client id as used by a user, or by anonymous clients of an address.

    Anybody who is let in may choose a client id, so by itself it says nothing about whose client it is.
    """
    if user:
        return "user-client", f"{quote(user, safe='')}/{client}"
    return "address-client", f"{household(host)}/{client}"


def ban(kind: str, value: str, until: float, reason: str = "", by: str = "") -> Ban:
    """A ban that can be put into `Bans`.

    Raises:
        ValueError: there is no such kind, or the value is no network, or empty.
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
    """Bans by what they are about."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Ban] = {}
        self._networks: Networks[Ban] = Networks()

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Ban]:
        return iter(self._found.values())

    def get(self, kind: str, value: str) -> Ban | None:
        """The ban about this, whether it has ended or not."""
        return self._found.get((kind, value))

    def put(self, one: Ban) -> None:
        """Add a ban, or another end for one that there is."""
        self._found[one.kind, one.value] = one
        if one.kind == "address":
            self._networks.put(parse_network(one.value), one)

    def remove(self, kind: str, value: str) -> None:
        """Lift a ban."""
        if self._found.pop((kind, value), None) is not None and kind == "address":
            self._networks.remove(parse_network(value))

    def expire(self, now: float) -> None:
        """Forget what has ended at Unix time ``now``."""
        for one in [one for one in self._found.values() if not one.holds(now)]:
            self.remove(one.kind, one.value)

    def find(
        self, now: float, *, client: str = "", user: str | None = None, host: str = "", proved: bool = False
    ) -> Ban | None:
        """The ban that keeps somebody out at Unix time ``now``, of those about what is given.

        Args:
            proved: ``user`` is known, or known to be nobody.
        """
        if not self._found:
            return None
        found = [self._found.get(("client", client)), self._found.get(("user", user)) if user else None]
        if proved:
            found.append(self._found.get(pair(client, user, host)))
        if host:
            found += self._networks.covering(host)
        return next((one for one in found if one is not None and one.holds(now)), None)
