# SPDX-License-Identifier: Apache-2.0
"""Who is let in at a listener: rules about addresses, bans, and how many there are already.

Everything here happens before a byte of the client is read. Behind a proxy an address is known a little later, so
what is about it is asked separately.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from mqtt_nats.base.bucket import Bucket, Buckets, depth
from mqtt_nats.base.networks import admitted, household, parse_rules

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings
    from mqtt_nats.transport.listener_settings import ListenerSettings


class Verdict(Enum):
    """What becomes of a connection."""

    IN = "it is let in"
    LATER = "it is told to come later"
    FULL = "the listener is full"
    CROWD = "too many connections from its address"
    RATE = "too many connections in a short time"
    RULES = "its address is denied"
    BANNED = "its address is banned"
    PROXY = "it is no proxy of this listener"


class House:
    """What all listeners of a process share."""

    def __init__(self, settings: Settings) -> None:
        self.limit = settings.max_connections
        self.connections = 0


class Pace:
    """A rate of connections. Who is over it is told so; who comes faster than one can tell is not."""

    def __init__(self, rate: float, seconds: float) -> None:
        burst = depth(rate, seconds)
        self._in, self._told = Bucket(rate, burst, 0.0), Bucket(rate, burst, 0.0)

    def judge(self, now: float) -> Verdict:
        """Count a connection."""
        if self._in.take(now):
            return Verdict.IN
        return Verdict.LATER if self._told.take(now) else Verdict.RATE


class Door:
    """One listener's admission.

    Args:
        settings: those that hold at the listener.
        own: what is set for it alone.
    """

    def __init__(self, house: House, settings: Settings, own: ListenerSettings) -> None:
        self._house = house
        self._rules = (parse_rules(settings.addresses), parse_rules(own.addresses))
        self._limit = own.max_connections
        self._each = settings.max_connections_per_address
        self.banned: Callable[[str], bool] = lambda host: False
        """Whether an address is banned."""
        self.connections = 0
        """Sockets that are open, also those whose TLS handshake is not complete."""
        self._by_address: dict[str, int] = {}
        seconds = settings.rate_burst
        self._pace = None if settings.connect_rate is None else Pace(settings.connect_rate, seconds)
        rate = settings.connect_rate_per_address
        self._ins = None if rate is None else Buckets(rate, depth(rate, seconds))
        self._tolds = None if rate is None else Buckets(rate, depth(rate, seconds))

    @property
    def counts_addresses(self) -> bool:
        """Whether connections of an address are counted, so whether :meth:`depart` has anything to undo."""
        return self._each is not None or self._ins is not None

    def admits(self, host: str) -> bool:
        """Whether the rules let an address in; all of them have to."""
        return all(admitted(rules, host) for rules in self._rules)

    def enter(self, now: float) -> Verdict:
        """Count a connection, whoever it is from."""
        house = self._house
        if self._limit is not None and self.connections >= self._limit:
            return Verdict.FULL
        if house.limit is not None and house.connections >= house.limit:
            return Verdict.FULL
        verdict = Verdict.IN if self._pace is None else self._pace.judge(now)
        if verdict in (Verdict.IN, Verdict.LATER):
            self.connections += 1
            house.connections += 1
        return verdict

    def leave(self) -> None:
        """The reverse of :meth:`enter`."""
        self.connections -= 1
        self._house.connections -= 1

    def visit(self, host: str, now: float) -> Verdict:
        """Count a connection of an address; to be undone by :meth:`depart` where it is let in, or told."""
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
        """The reverse of :meth:`visit`."""
        key = household(host)
        left = self._by_address.get(key, 0) - 1
        if left > 0:
            self._by_address[key] = left
        else:
            self._by_address.pop(key, None)
