# SPDX-License-Identifier: Apache-2.0
"""IP addresses and networks: what settings say of them, and looking them up."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, Generic, TypeVar

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
T = TypeVar("T")

EVERYBODY: Final = "all"

HOUSEHOLD: Final = 64
"""Bits of an IPv6 address that tell one customer from another; the rest is up to the customer."""


@lru_cache(4096)
def parse_host(host: str) -> Address | None:
    """An address as a socket names it, IPv4 in IPv6 as IPv4; None for what is no IP address."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found


def household(host: str) -> str:
    """What is counted as one address: an IPv4 address, or the first 64 bits of an IPv6 address."""
    found = parse_host(host)
    if isinstance(found, IPv6Address):
        return str(ip_network((found, HOUSEHOLD), strict=False).network_address)
    return host if found is None else str(found)


def parse_network(text: str) -> Network:
    """``10.0.0.0/8``, ``2001:db8::/32``, or a single address.

    Raises:
        ValueError: it is neither; the text says what is expected.
    """
    try:
        return ip_network(text.strip())
    except ValueError as error:
        if "host bits" in str(error):
            raise ValueError(f"{text!r} is an address in a network, not the network: {error}") from None
        raise ValueError(f"{text!r} is no network such as 10.0.0.0/8 or 2001:db8::/32") from None


class Rule:
    """``allow NETWORK``, ``deny NETWORK``, with ``all`` for everybody."""

    __slots__ = ("allow", "network")

    def __init__(self, text: str) -> None:
        verb, _, where = text.strip().partition(" ")
        if verb not in ("allow", "deny") or not where.strip():
            raise ValueError(f"{text!r}: expected `allow NETWORK` or `deny NETWORK`, such as `deny 10.0.0.0/8`")
        self.allow = verb == "allow"
        self.network = None if where.strip() == EVERYBODY else parse_network(where)

    def __call__(self, address: Address) -> bool:
        """Whether the rule is about an address."""
        network = self.network
        return network is None or (network.version == address.version and address in network)


def parse_rules(texts: tuple[str, ...]) -> tuple[Rule, ...]:
    """Rules in their order, of which the last is about everybody.

    Raises:
        ValueError: one cannot be read, or nothing is said of those who are in none.
    """
    rules = tuple(map(Rule, texts))
    if rules and rules[-1].network is not None:
        raise ValueError("the last entry must be `allow all` or `deny all`")
    return rules


def admitted(rules: tuple[Rule, ...], host: str) -> bool:
    """What the first rule about an address says; who has no IP address is only let in where there are no rules."""
    if not rules:
        return True
    address = parse_host(host)
    return address is not None and next((rule.allow for rule in rules if rule(address)), False)


class Networks(Generic[T]):
    """Something for each of some networks. Looking an address up takes a step for each length of prefix there is."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], dict[int, T]] = {}

    def put(self, network: Network, value: T) -> None:
        """Set what is kept for a network."""
        key = (network.version, network.prefixlen)
        self._found.setdefault(key, {})[int(network.network_address)] = value

    def remove(self, network: Network) -> None:
        """Keep nothing for a network."""
        key = (network.version, network.prefixlen)
        level = self._found.get(key, {})
        level.pop(int(network.network_address), None)
        if not level:
            self._found.pop(key, None)

    def covering(self, host: str) -> list[T]:
        """What is kept for the networks that an address is in."""
        address = parse_host(host) if self._found else None
        if address is None:
            return []
        number, bits = int(address), address.max_prefixlen
        return [
            level[found]
            for (version, length), level in self._found.items()
            if version == address.version and (found := number >> (bits - length) << (bits - length)) in level
        ]
