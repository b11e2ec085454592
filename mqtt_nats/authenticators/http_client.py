# SPDX-License-Identifier: Apache-2.0
"""HTTP clients of authenticators: no redirects, no proxy from the environment, answers of limited size."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import httpx

from mqtt_nats.base.errors import StartupError

# These loggers log each request at INFO.
for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)


def make_client(
    where: str, timeout: float, connections: int, ca: Path | None, cert: Path | None = None, key: Path | None = None
) -> httpx.AsyncClient:
    """Return an HTTP client; ``where`` is the beginning of error texts.

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
    """The answer is longer than the limit."""


async def fetch(client: httpx.AsyncClient, request: httpx.Request, most: int) -> tuple[int, bytes]:
    """Send a request and return status and body of the answer.

    Raises:
        httpx.HTTPError: there is no answer.
        TooLong: the body has more than ``most`` bytes.
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
