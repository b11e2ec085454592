# SPDX-License-Identifier: Apache-2.0
"""Admission of connections at a listener: rules about addresses, bans, limits and rates of connections.

All checks precede the first read from the client. Behind a proxy the client's address is known later. So the
checks of the address and the rates are separate (`ListenerAdmission.admit_address`). The rates count only connections
from permitted addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.base.bucket import Buckets, depth
from mqtt_nats.base.networks import admitted, household, parse_rules

if TYPE_CHECKING:
    from mqtt_nats.base.limit_settings import ClientLimits


CONNECT_WAIT_MOST_S: Final = 4.0
"""Most seconds for which CONNECT waits for `connect_rate`: with the time to answer, CONNACK comes within five."""


class Verdict(Enum):
    """Decision about a connection."""

    ADMITTED = "the connection is accepted"
    CONNACK_REFUSAL = "the connection is accepted only for a refusal in CONNACK: too many came in a short time"
    FULL = "the limit of connections is reached"
    CROWD = "too many connections from this address"
    RATE = "too many connections in a short time"
    RULES = "the address is denied"
    BANNED = "the address is banned"
    PROXY = "the peer is not a proxy of this listener"

    @property
    def closes(self) -> bool:
        """Whether the connection is closed before its first byte is read."""
        return self not in (Verdict.ADMITTED, Verdict.CONNACK_REFUSAL)


class Admission(NamedTuple):
    """Decision about a connection, and the time at which CONNECT is handled if the connection is accepted."""

    verdict: Verdict
    due: float = 0.0
    """Seconds of the clock of the caller; 0 = at once."""


ADMITTED: Final = Admission(Verdict.ADMITTED)
CONNACK_REFUSAL: Final = Admission(Verdict.CONNACK_REFUSAL)


class ConnectionLimit:
    """Connection count and limit that all listeners of a process share."""

    def __init__(self, settings: ClientLimits) -> None:
        self.limit = settings.max_connections
        self.connections = 0

    @property
    def full(self) -> bool:
        """Whether the process has all the connections that it may have."""
        return self.limit is not None and self.connections >= self.limit

    def add(self) -> None:
        """Count a connection."""
        self.connections += 1

    def remove(self) -> None:
        """Undo :meth:`add` when a connection ends."""
        self.connections -= 1


class ConnectRate:
    """Rate of connections, for each key: a burst is let in at once, further connections are handled at the rate.

    A connection that would wait longer than `CONNECT_WAIT_MOST_S` is admitted for a refusal in CONNACK, at the same
    rate and with the same burst. Any further connection is closed.

    Args:
        rate: connections per second.
        seconds: time in which as many connections as the burst has come at the rate.
    """

    def __init__(self, rate: float, seconds: float) -> None:
        self._burst = depth(rate, seconds)
        self._turns = Buckets(rate, self._burst + rate * CONNECT_WAIT_MOST_S)
        self._refusals = Buckets(rate, self._burst)

    def admit(self, key: str, now: float) -> Admission:
        """Count a connection at ``now``, and return the decision about it."""
        turns = self._turns.of(key, now)
        if turns.add_if_room(now):
            wait = (turns.level(now) - self._burst) / turns.rate
            return Admission(Verdict.ADMITTED, now + wait) if wait > 0 else ADMITTED
        told = self._refusals.of(key, now).add_if_room(now)
        return CONNACK_REFUSAL if told else Admission(Verdict.RATE)


class ListenerAdmission:
    """Admission of connections at one listener.

    Args:
        settings: limits in force at the listener.
        addresses: the listener's own rules about addresses.
        limit: largest number of connections of the listener; None = as many as the process may have.
    """

    def __init__(
        self, process: ConnectionLimit, settings: ClientLimits, addresses: tuple[str, ...], limit: int | None
    ) -> None:
        self._process = process
        self._rules = (parse_rules(settings.addresses), parse_rules(addresses))
        self._limit = limit
        self._each = settings.max_connections_per_address
        self.banned: Callable[[str], bool] = lambda host: False
        """Whether an address is banned."""
        self.connections = 0
        """Number of open sockets, including sockets in the TLS handshake."""
        self._by_address: dict[str, int] = {}
        seconds = settings.rate_burst
        self._rate = None if settings.connect_rate is None else ConnectRate(settings.connect_rate, seconds)
        rate = settings.connect_rate_per_address
        self._rate_of_each = None if rate is None else ConnectRate(rate, seconds)

    @property
    def counts_addresses(self) -> bool:
        """Whether connections are counted by address, so that :meth:`release_address` has to be called."""
        return self._each is not None or self._rate_of_each is not None

    def refuse_banned(self, banned: Callable[[str], bool]) -> None:
        """Refuse the addresses for which ``banned`` returns true."""
        self.banned = banned

    def admits(self, host: str) -> bool:
        """Whether the gateway's and the listener's rules both allow an address."""
        gateways, own = self._rules
        return admitted(gateways, host) and admitted(own, host)

    def admit_connection(self) -> bool:
        """Count a connection from any address; False: the listener, or the process, has as many as it may have."""
        if self._process.full or (self._limit is not None and self.connections >= self._limit):
            return False
        self.connections += 1
        self._process.add()
        return True

    def release_connection(self) -> None:
        """Undo :meth:`admit_connection` when a connection ends."""
        self.connections -= 1
        self._process.remove()

    def admit_address(self, host: str, now: float) -> Admission:
        """Count a connection of an address, and return the decision; :meth:`release_address` has to undo an admission.

        The connection counts in the rate of the listener, too.

        Args:
            now: seconds of a monotonic clock.
        """
        if not self.admits(host):
            return Admission(Verdict.RULES)
        if self.banned(host):
            return Admission(Verdict.BANNED)
        if not self.counts_addresses:
            return ADMITTED if self._rate is None else self._rate.admit("", now)
        key = household(host)
        count = self._by_address.get(key, 0)
        if self._each is not None and count >= self._each:
            return Admission(Verdict.CROWD)
        admission = self._count_in_rates(key, now)
        if not admission.verdict.closes:
            self._by_address[key] = count + 1
        return admission

    def _count_in_rates(self, key: str, now: float) -> Admission:
        """Count a connection in the rate of its address, and unless that rate refuses it in the rate of the listener.

        So other clients do not wait for connections from an address that exceeds its rate.
        """
        of_address = ADMITTED if self._rate_of_each is None else self._rate_of_each.admit(key, now)
        if self._rate is None or of_address.verdict is not Verdict.ADMITTED:
            return of_address
        of_all = self._rate.admit("", now)
        return max(of_address, of_all, key=lambda each: each.due) if of_all.verdict is Verdict.ADMITTED else of_all

    def release_address(self, host: str) -> None:
        """Undo :meth:`admit_address` when a connection ends."""
        key = household(host)
        left = self._by_address.get(key, 0) - 1
        if left > 0:
            self._by_address[key] = left
        else:
            self._by_address.pop(key, None)
