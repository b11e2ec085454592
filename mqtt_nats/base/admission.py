# SPDX-License-Identifier: Apache-2.0
"""Admission of connections at a listener: rules about addresses, bans, limits and rates of connections.

All checks precede the first read from the client. Behind a proxy the client's address is known later, so the checks of
addresses are separate (`Door.visit`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from mqtt_nats.base.bucket import Bucket, Buckets, depth
from mqtt_nats.base.networks import admitted, household, parse_rules

if TYPE_CHECKING:
    from mqtt_nats.base.limit_settings import ClientLimits


class Verdict(Enum):
    """Decision about a connection."""

    IN = "the connection is accepted"
    LATER = "the client is told to connect later"
    FULL = "the limit of connections is reached"
    CROWD = "too many connections from this address"
    RATE = "too many connections in a short time"
    RULES = "the address is denied"
    BANNED = "the address is banned"
    PROXY = "the peer is not a proxy of this listener"


class House:
    """Connection count and limit that all listeners of a process share."""

    def __init__(self, settings: ClientLimits) -> None:
        self.limit = settings.max_connections
        self.connections = 0

    @property
    def full(self) -> bool:
        """Whether the process has all the connections that it may have."""
        return self.limit is not None and self.connections >= self.limit

    def enter(self) -> None:
        """Count a connection."""
        self.connections += 1

    def leave(self) -> None:
        """Undo :meth:`enter` when a connection ends."""
        self.connections -= 1


class Pace:
    """Rate of connections. Connections beyond it are admitted for a refusal in CONNACK, up to the same rate again."""

    def __init__(self, rate: float, seconds: float) -> None:
        burst = depth(rate, seconds)
        self._in, self._told = Bucket(rate, burst, 0.0), Bucket(rate, burst, 0.0)

    def judge(self, now: float) -> Verdict:
        """Count a connection and return the decision about it."""
        if self._in.take(now):
            return Verdict.IN
        return Verdict.LATER if self._told.take(now) else Verdict.RATE


class Door:
    """Admission of connections at one listener.

    Args:
        settings: limits in force at the listener.
        addresses: the listener's own rules about addresses.
        limit: largest number of connections of the listener; None = as many as the process may have.
    """

    def __init__(self, house: House, settings: ClientLimits, addresses: tuple[str, ...], limit: int | None) -> None:
        self._house = house
        self._rules = (parse_rules(settings.addresses), parse_rules(addresses))
        self._limit = limit
        self._each = settings.max_connections_per_address
        self.banned: Callable[[str], bool] = lambda host: False
        """Whether an address is banned."""
        self.connections = 0
        """Number of open sockets, including sockets in the TLS handshake."""
        self._by_address: dict[str, int] = {}
        seconds = settings.rate_burst
        self._pace = None if settings.connect_rate is None else Pace(settings.connect_rate, seconds)
        rate = settings.connect_rate_per_address
        self._ins = None if rate is None else Buckets(rate, depth(rate, seconds))
        self._tolds = None if rate is None else Buckets(rate, depth(rate, seconds))

    @property
    def counts_addresses(self) -> bool:
        """Whether connections are counted by address, so that :meth:`depart` has to be called."""
        return self._each is not None or self._ins is not None

    def refuse_banned(self, banned: Callable[[str], bool]) -> None:
        """Refuse the addresses for which ``banned`` returns true."""
        self.banned = banned

    def admits(self, host: str) -> bool:
        """Whether the gateway's and the listener's rules both allow an address."""
        gateways, own = self._rules
        return admitted(gateways, host) and admitted(own, host)

    def enter(self, now: float) -> Verdict:
        """Count a connection from any address and return the decision about it."""
        if self._limit is not None and self.connections >= self._limit:
            return Verdict.FULL
        if self._house.full:
            return Verdict.FULL
        verdict = Verdict.IN if self._pace is None else self._pace.judge(now)
        if verdict in (Verdict.IN, Verdict.LATER):
            self.connections += 1
            self._house.enter()
        return verdict

    def leave(self) -> None:
        """Undo :meth:`enter` when a connection ends."""
        self.connections -= 1
        self._house.leave()

    def visit(self, host: str, now: float) -> Verdict:
        """Count a connection of an address. :meth:`depart` has to undo an admission (`IN`) or a refusal by `LATER`."""
        if not self.admits(host):
            return Verdict.RULES
        if self.banned(host):
            return Verdict.BANNED
        if not self.counts_addresses:
            return Verdict.IN
        key = household(host)
        count = self._by_address.get(key, 0)
        if self._each is not None and count >= self._each:
            return Verdict.CROWD
        verdict = Verdict.IN
        if self._ins is not None and self._tolds is not None and not self._ins.of(key, now).take(now):
            if not self._tolds.of(key, now).take(now):
                return Verdict.RATE
            verdict = Verdict.LATER
        self._by_address[key] = count + 1
        return verdict

    def depart(self, host: str) -> None:
        """Undo :meth:`visit` when a connection ends."""
        key = household(host)
        left = self._by_address.get(key, 0) - 1
        if left > 0:
            self._by_address[key] = left
        else:
            self._by_address.pop(key, None)
