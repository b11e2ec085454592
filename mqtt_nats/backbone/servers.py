# SPDX-License-Identifier: Apache-2.0
"""Where nats-servers may be: the configured URLs, the addresses behind their names, what servers announce.

Names are looked up again in every round of attempts, since the servers behind one (a headless service of Kubernetes)
change. What a server announces in ``connect_urls`` takes the place of what was announced before; addresses that are
announced no more are still tried, one in a round, because a server that is cut off announces itself only.
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

from nats.aio.client import Client, Srv

log = logging.getLogger("mqtt_nats.nats")

LOOKUP: Final = 5.0
"""Seconds in which a name must be resolved."""

FORMER_MOST: Final = 64
"""Addresses that are remembered although they are not announced any more."""


class Servers:
    """The servers of one connection.

    Args:
        urls: as configured; they are never forgotten.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._configured = [Client._parse_server_uri(url) for url in urls]
        self._announced: list[str] = []
        self._former: list[str] = []
        self._found: dict[str, list[str]] = {}
        self._size = 0
        self.last: Srv | None = None
        """The server of the last connection: it is tried after all others."""
        self.unresolved: OSError | None = None
        """Why a name could not be looked up in the last round."""

    @property
    def known(self) -> list[str]:
        """``host:port`` of all that are configured or announced."""
        return sorted({_join(uri.hostname or "", uri.port or 0) for uri in self._configured} | set(self._announced))

    @property
    def size(self) -> int:
        """Servers of the cluster, as far as they are announced, or configured under addresses of their own."""
        return max(len(self._announced), self._size)

    def announced(self, addresses: Iterable[str]) -> None:
        """Take note of what a server says of its cluster: ``host:port`` each."""
        now = list(dict.fromkeys(addresses))
        gone = [one for one in self._announced if one not in now]
        self._former = [one for one in [*gone, *self._former] if one not in now][:FORMER_MOST]
        self._announced = now

    async def round(self) -> list[Srv]:
        """Everything worth an attempt now, in the order of the attempts."""
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
        """The configured URL from which announced servers have what is not announced: scheme and login."""
        return next((uri for uri in self._configured if uri.username is not None), self._configured[0])

    async def _add(self, found: dict[str, Srv], uri: ParseResult) -> None:
        """Add the servers at a URL, under their addresses; a name stays the one that its certificate must have."""
        host, port = uri.hostname or "", uri.port or 0
        login, at, _ = uri.netloc.rpartition("@")
        for address in await self._lookup(host, port):
            where = _join(address, port)
            if where not in found:
                found[where] = Srv(uri._replace(netloc=f"{login}{at}{where}"), tls_name=self._name(host))

    def _name(self, host: str) -> str:
        """What the certificate of a server is for: an announced address says nothing of it."""
        if not _is_address(host):
            return host
        names = (uri.hostname or "" for uri in self._configured)
        own = any(uri.hostname == host for uri in self._configured)
        return host if own else next((name for name in names if not _is_address(name)), host)

    async def _lookup(self, host: str, port: int) -> list[str]:
        """The addresses of a host; those of the last time when nobody can tell."""
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
    """All addresses of a name; OSError when there are none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


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
