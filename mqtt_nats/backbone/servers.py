# SPDX-License-Identifier: Apache-2.0
"""Addresses of nats-servers: configured URLs, the addresses of their names, and announced addresses.

Names are looked up again in every round of attempts, since the servers behind a name (a headless service of
Kubernetes) change. A server's announcement in ``connect_urls`` replaces the previous one. Addresses that are no longer
announced are still tried, one in a round, because a server that is cut off announces itself only.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Final
from urllib.parse import ParseResult, urlparse

from nats.aio.client import Srv

log = logging.getLogger("mqtt_nats.nats")

LOOKUP: Final = 5.0
"""Maximum seconds for the lookup of a name."""

FORMER_MOST: Final = 64
"""Maximum number of remembered addresses that are no longer announced."""


DEFAULT_PORT: Final = 4222
"""Port of a nats-server whose URL has none."""


class Servers:
    """Servers to which one connection may connect.

    Args:
        urls: configured URLs with scheme and host; they are never forgotten.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._configured = [_with_port(urlparse(url)) for url in urls]
        self._announced: list[str] = []
        self._former: list[str] = []
        self._found: dict[str, list[str]] = {}
        self._size = 0
        self.last: Srv | None = None
        """Server of the last connection, tried after all others; None = no connection yet."""
        self.unresolved: OSError | None = None
        """Error of a name lookup in the last round; None = all names were resolved."""

    @property
    def known(self) -> list[str]:
        """``host:port`` of all configured and announced servers."""
        return sorted({_join(uri.hostname or "", uri.port or 0) for uri in self._configured} | set(self._announced))

    @property
    def size(self) -> int:
        """Number of servers in the cluster, as announced, or as configured under different addresses."""
        return max(len(self._announced), self._size)

    def connected_to(self, server: Srv | None) -> None:
        """Note the server of the present connection: it is tried last after that has ended."""
        self.last = server

    def announced(self, addresses: Iterable[str]) -> None:
        """Note the ``host:port`` addresses that a server announces for its cluster."""
        now = list(dict.fromkeys(addresses))
        gone = [one for one in self._announced if one not in now]
        self._former = [one for one in [*gone, *self._former] if one not in now][:FORMER_MOST]
        self._announced = now

    async def round(self) -> list[Srv]:
        """Return the servers to try in this round, in the order of the attempts."""
        self.unresolved = None
        found: dict[str, Srv] = {}
        for uri in self._configured:
            await self._add(found, uri)
        self._size = len(found)
        base = self._base()
        for address in self._announced:
            await self._add(found, _announced_uri(address, base))
        order = list(found.values())
        random.shuffle(order)
        if self.last is not None:
            last = self.last.uri.netloc
            order.sort(key=lambda server: server.uri.netloc == last)
        if self._former:
            self._former.append(former := self._former.pop(0))
            more: dict[str, Srv] = {}
            await self._add(more, _announced_uri(former, base))
            order.extend(server for address, server in more.items() if address not in found)
        return order

    def _base(self) -> ParseResult:
        """Return the configured URL whose scheme and login are used for announced servers."""
        return next((uri for uri in self._configured if uri.username is not None), self._configured[0])

    async def _add(self, found: dict[str, Srv], uri: ParseResult) -> None:
        """Add the servers of a URL by address; the certificate is still checked against the URL's name."""
        host, port = uri.hostname or "", uri.port or 0
        login, at, _ = uri.netloc.rpartition("@")
        for address in await self._lookup(host, port):
            where = _join(address, port)
            if where not in found:
                found[where] = Srv(uri._replace(netloc=f"{login}{at}{where}"), tls_name=self._name(host))

    def _name(self, host: str) -> str:
        """Return the name to check in a server's certificate: an announced address does not contain it."""
        if not _is_address(host):
            return host
        names = (uri.hostname or "" for uri in self._configured)
        own = any(uri.hostname == host for uri in self._configured)
        return host if own else next((name for name in names if not _is_address(name)), host)

    async def _lookup(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host; if the lookup fails, the addresses of the last lookup."""
        if _is_address(host):
            return [host]
        try:
            async with asyncio.timeout(LOOKUP):
                self._found[host] = await resolve(host, port)
        except (OSError, TimeoutError, UnicodeError) as error:
            reason = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or error
            self.unresolved = OSError(f"the name {host} cannot be looked up: {reason}")
            log.debug("%s", self.unresolved)
        return self._found.get(host, [])


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses of a name; raises OSError when there are none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _with_port(uri: ParseResult) -> ParseResult:
    return uri._replace(netloc=f"{uri.netloc.rstrip(':')}:{DEFAULT_PORT}") if uri.port is None else uri


def _announced_uri(address: str, base: ParseResult) -> ParseResult:
    login, at, _ = base.netloc.rpartition("@")
    return urlparse(f"{base.scheme}://{login}{at}{address}")


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ip_address(host)
        return True
    return False


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
