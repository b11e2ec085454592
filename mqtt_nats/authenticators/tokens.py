# SPDX-License-Identifier: Apache-2.0
"""Authenticator for JSON Web Tokens in place of passwords; the keys come from a file or from a URL."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Final

from mqtt_nats.access.authenticator import IGNORE, Allow, Credentials, Denied, Ignore
from mqtt_nats.access.settings import TokenSettings
from mqtt_nats.access.tokens import KEYS_BYTES, BadToken, Keys, check_claims, parse_keys, read_head, verify
from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import ReasonCode

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("mqtt_nats.access")

# Least seconds between two requests to a URL, also when tokens with unknown keys arrive.
FETCH_PAUSE_LEAST_S: Final = 10.0

# Time-out of a request to a URL, in seconds.
FETCH_TIMEOUT_S: Final = 5.0

# Seconds since the last good answer of a URL after which its keys are dropped.
KEYS_KEPT_S: Final = 86_400.0


class FileKeys:
    """Keys from a file.

    Raises:
        StartupError: the file cannot be used.
    """

    def __init__(self, settings: TokenSettings) -> None:
        self._settings = settings
        self.keys = self._load()

    def _load(self) -> Keys:
        path = Path(self._settings.keys)
        try:
            return parse_keys(path.read_bytes(), self._settings.algorithms)
        except OSError as error:
            raise StartupError(f"cannot read the keys in {path}: {error.strerror}") from None
        except ValueError as error:
            raise StartupError(f"the keys in {path} cannot be used: {error}") from None

    async def renewed(self) -> bool:
        """Return False: a file is read again by `reload` only."""
        return False

    def reload(self) -> Callable[[], None]:
        """Read the file again; the returned function puts it in force."""
        keys = self._load()

        def commit() -> None:
            self.keys = keys

        return commit

    async def keep_current(self) -> None:
        """Do nothing: there is no background work."""

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


class RemoteKeys:
    """Keys from a URL. Before its first good answer, and a day after its last one, there are no keys.

    Args:
        changed: called when a key was removed.

    Raises:
        StartupError: a file cannot be used.
    """

    def __init__(self, settings: TokenSettings, changed: Callable[[], None]) -> None:
        from mqtt_nats.authenticators.http_client import make_client  # imported only for URLs

        self.keys = Keys()
        self._settings = settings
        self._changed = changed
        self._client: httpx.AsyncClient = make_client(
            f"authenticator {settings.called}", FETCH_TIMEOUT_S, 2, settings.tls_ca
        )
        self._wanted = asyncio.Event()
        self._done = asyncio.Event()
        """Set when the running or next request has ended; then replaced by a new event."""
        self._reading = True  # `keep_current` begins with a request
        self._read = -FETCH_PAUSE_LEAST_S
        self._good = monotonic()

    async def keep_current(self) -> None:
        """Read the URL at intervals."""
        while True:
            self._reading = True
            self._wanted.clear()
            await self._fetch()
            self._read = monotonic()
            self._reading = False
            done, self._done = self._done, asyncio.Event()
            done.set()
            try:
                # Without keys the next request comes after the shortest pause.
                async with asyncio.timeout(self._settings.refresh if self.keys.fingerprints else FETCH_PAUSE_LEAST_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    async def renewed(self) -> bool:
        """Read the URL again, at the earliest `FETCH_PAUSE_LEAST_S` after its last request; return whether it was."""
        if not self._reading:
            if monotonic() - self._read < FETCH_PAUSE_LEAST_S:
                return False
            self._wanted.set()
        await self._done.wait()
        return True

    async def _fetch(self) -> None:
        from mqtt_nats.authenticators.http_client import fetch

        settings = self._settings
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                status, body = await fetch(self._client, self._client.build_request("GET", settings.keys), KEYS_BYTES)
            if status != 200:
                raise ValueError(f"status {status}")
            keys = parse_keys(body, settings.algorithms)
        except ValueError as error:
            self._failed(str(error))
        except Exception as error:  # every failure is retried
            self._failed(type(error).__name__)
        else:
            self._good = monotonic()
            self._use(keys)

    def _failed(self, why: str) -> None:
        log.warning(
            "authenticator %r: no keys can be read from %s: %s", self._settings.called, self._settings.keys, why
        )
        if monotonic() - self._good > KEYS_KEPT_S:
            self._use(Keys())

    def _use(self, keys: Keys) -> None:
        lost = self.keys.fingerprints - keys.fingerprints
        self.keys = keys
        if lost:
            self._changed()

    def reload(self) -> Callable[[], None]:
        """Return a function that starts the next request at once."""
        return self._wanted.set

    async def close(self) -> None:
        """Close the connections of the HTTP client."""
        await self._client.aclose()


class Tokens:
    """Authenticator for clients whose password is a token; ignores other passwords and tokens of another issuer.

    Args:
        changed: called when accepted tokens may not be valid any more.

    Raises:
        StartupError: a file cannot be used.
    """

    def __init__(self, settings: TokenSettings, changed: Callable[[], None]) -> None:
        self.name = settings.called
        self._settings = settings
        self._source: FileKeys | RemoteKeys = (
            RemoteKeys(settings, changed) if "://" in settings.keys else FileKeys(settings)
        )
        self.reload = self._source.reload
        self.keep_current = self._source.keep_current
        self.close = self._source.close

    async def check(self, credentials: Credentials) -> Allow | Ignore | Denied:
        """Verify the token in the password."""
        password, source = credentials.password, self._source
        if password is None:
            return IGNORE
        try:
            head = read_head(password, self._settings)
            if head is None:
                return IGNORE
            keys = source.keys.find(head)
            if not keys and await source.renewed():
                keys = source.keys.find(head)
            claims, key = verify(password, head, keys)
            found = check_claims(claims, self._settings, credentials.client_id, time())
        except BadToken as error:
            return Denied(f"the token is not accepted: {error}", ReasonCode.BAD_USER_NAME_OR_PASSWORD)
        return Allow(
            found.user,
            found.groups,
            found.rules,
            found.expires,
            lambda: key.fingerprint in source.keys.fingerprints,
            found.tenant,
        )
