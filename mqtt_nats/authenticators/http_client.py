# SPDX-License-Identifier: Apache-2.0
"""HTTP clients of authenticators: they follow no redirect, use no proxy of the environment, and read only so much."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import httpx

from mqtt_nats.base.errors import StartupError

# They tell of each request.
for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)


def make_client(
    where: str, timeout: float, connections: int, ca: Path | None, cert: Path | None = None, key: Path | None = None
) -> httpx.AsyncClient:
    """A client; ``where`` is what an error begins with.

    Raises:
        StartupError: a file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
        if cert is not None:
            context.load_cert_chain(str(cert), None if key is None else str(key), lambda: "")
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or getattr(error, "reason", None) or type(error).__name__
        raise StartupError(f"{where}: the TLS files cannot be used: {reason}") from None
    return httpx.AsyncClient(
        verify=context,
        trust_env=False,
        follow_redirects=False,
        timeout=timeout,
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        headers={"User-Agent": "mqtt-nats", "Accept-Encoding": "identity"},
    )


class TooLong(Exception):
    """The answer is longer than it may be."""


async def fetch(client: httpx.AsyncClient, request: httpx.Request, most: int) -> tuple[int, bytes]:
    """Status and body of the answer.

    Raises:
        httpx.HTTPError: there is none.
        TooLong: it has more than ``most`` bytes.
    """
    response = await client.send(request, stream=True)
    try:
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            if len(body) > most:
                raise TooLong
        return response.status_code, bytes(body)
    finally:
        await response.aclose()
