# SPDX-License-Identifier: Apache-2.0
"""Authenticator that asks an HTTP service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx

from mqtt_nats.access.answers import ANSWER_MOST, question, verdict
from mqtt_nats.access.authenticator import IGNORE, Allow, Credentials, Denied, Ignore
from mqtt_nats.access.settings import HttpSettings
from mqtt_nats.authenticators.admission_queue import Crowd
from mqtt_nats.authenticators.http_client import TooLong, fetch, make_client
from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import ReasonCode

if TYPE_CHECKING:
    from pathlib import Path


class Callback:
    """Authenticator that asks ``settings.url``; ignores clients without user name and password.

    Raises:
        StartupError: a file cannot be used.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self.name = settings.called
        self._settings = settings
        self._crowd = Crowd(settings.concurrency)
        where = f"authenticator {self.name}"
        self._client = make_client(
            where, settings.timeout, settings.concurrency, settings.tls_ca, settings.tls_cert, settings.tls_key
        )
        self._token = _read_token(where, settings.token_file)

    async def check(self, credentials: Credentials) -> Allow | Ignore | Denied:
        """Ask the service; a time-out or a wrong answer denies the client."""
        if credentials.username is None and credentials.password is None:
            return IGNORE
        body = question(credentials)
        if body is None:
            return Denied("the password is not UTF-8", ReasonCode.BAD_USER_NAME_OR_PASSWORD)
        return await self._crowd.run(credentials.connection.host, lambda: self._ask(body, credentials))

    async def _ask(self, body: bytes, credentials: Credentials) -> Allow | Ignore | Denied:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = self._client.build_request("POST", self._settings.url, content=body, headers=headers)
        try:
            async with asyncio.timeout(self._settings.timeout):
                status, answer = await fetch(self._client, request, ANSWER_MOST)
        except (httpx.HTTPError, TimeoutError, TooLong) as error:
            return Denied(f"the service does not answer correctly: {type(error).__name__}")
        return verdict(status, answer, credentials)

    def reload(self) -> Callable[[], None]:
        """Read the token file again; the returned function puts the token in force.

        Raises:
            StartupError: the file cannot be read.
        """
        token = _read_token(f"authenticator {self.name}", self._settings.token_file)

        def commit() -> None:
            self._token = token

        return commit

    async def keep_current(self) -> None:
        """Do nothing: there is no background work."""

    async def close(self) -> None:
        """Close the connections of the HTTP client."""
        await self._client.aclose()


def _read_token(where: str, file: Path | None) -> str:
    if file is None:
        return ""
    try:
        token = file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise StartupError(f"{where}: cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable() or " " in token:
        raise StartupError(f"{where}: {file} must have one line of ASCII without spaces")
    return token
