# SPDX-License-Identifier: Apache-2.0
"""IP addresses and networks: parsing, rules about addresses, look-up by address."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, Generic, TypeVar

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
T = TypeVar("T")

EVERYBODY: Final = "all"

HOUSEHOLD: Final = 64
"""Prefix length of IPv6 addresses that identifies one customer; the customer chooses the other bits."""


@lru_cache(4096)
def parse_host(host: str) -> Address | None:
    """Return the address in a socket's host, IPv4 in IPv6 as IPv4; None for text that is no IP address."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found


@lru_cache(4096)
def household(host: str) -> str:
    """Return the unit in which addresses are counted: an IPv4 address, or the first 64 bits of an IPv6 address."""
    found = parse_host(host)
    if isinstance(found, IPv6Address):
        return str(ip_network((found, HOUSEHOLD), strict=False).network_address)
    return host if found is None else str(found)


def parse_network(text: str) -> Network:
    """Parse ``10.0.0.0/8``, ``2001:db8::/32``, or a single address.

    Raises:
        ValueError: the text is no network; the error names the expected form.
    """
    try:
        return ip_network(text.strip())
    except ValueError as error:
        if "host bits" in str(error):
            raise ValueError(f"{text!r} is an address in a network, not the network: {error}") from None
        raise ValueError(f"{text!r} is not a network such as 10.0.0.0/8 or 2001:db8::/32") from None


class Rule:
    """Rule about addresses: ``allow NETWORK`` or ``deny NETWORK``; ``all`` is any address."""

    __slots__ = ("allow", "network")

    def __init__(self, text: str) -> None:
        verb, _, where = text.strip().partition(" ")
        if verb not in ("allow", "deny") or not where.strip():
            raise ValueError(f"{text!r}: expected `allow NETWORK` or `deny NETWORK`, such as `deny 10.0.0.0/8`")
        self.allow = verb == "allow"
        self.network = None if where.strip() == EVERYBODY else parse_network(where)

    def __call__(self, address: Address) -> bool:
        """Whether the rule applies to an address."""
        network = self.network
        return network is None or (network.version == address.version and address in network)


def parse_rules(texts: tuple[str, ...]) -> tuple[Rule, ...]:
    """Parse ordered rules, of which the last applies to all addresses.

    Raises:
        ValueError: a rule cannot be read, or the last rule does not apply to all addresses.
    """
    rules = tuple(map(Rule, texts))
    if rules and rules[-1].network is not None:
        raise ValueError("the last entry must be `allow all` or `deny all`")
    return rules


def admitted(rules: tuple[Rule, ...], host: str) -> bool:
    """Whether the first applicable rule allows an address; a peer without IP address is allowed only without rules."""
    if not rules:
        return True
    address = parse_host(host)
    return address is not None and next((rule.allow for rule in rules if rule(address)), False)


class Networks(Generic[T]):
    """Values by network. Looking up an address takes one step for each distinct prefix length."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], dict[int, T]] = {}

    def put(self, network: Network, value: T) -> None:
        """Set the value of a network."""
        key = (network.version, network.prefixlen)
        self._found.setdefault(key, {})[int(network.network_address)] = value

    def remove(self, network: Network) -> None:
        """Remove the value of a network."""
        key = (network.version, network.prefixlen)
        level = self._found.get(key, {})
        level.pop(int(network.network_address), None)
        if not level:
            self._found.pop(key, None)

    def covering(self, host: str) -> list[T]:
        """Return the values of the networks that contain an address."""
        address = parse_host(host) if self._found else None
        if address is None:
            return []
        number, bits = int(address), address.max_prefixlen
        return [
            level[found]
            for (version, length), level in self._found.items()
            if version == address.version and (found := number >> (bits - length) << (bits - length)) in level
        ]
