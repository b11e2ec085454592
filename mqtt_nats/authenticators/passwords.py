# SPDX-License-Identifier: Apache-2.0
"""Authenticator for users of a password file; passwords are verified in threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from mqtt_nats.access.authenticator import IGNORE, Allow, Credentials, Denied, Ignore
from mqtt_nats.access.passwords import PasswordHash, PasswordUsers, load, replace_hashes
from mqtt_nats.access.settings import PasswordSettings, parse_cost
from mqtt_nats.authenticators.admission_queue import Crowd
from mqtt_nats.authenticators.verified_passwords import VerifiedPasswords
from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import ReasonCode

log = logging.getLogger("mqtt_nats.access")

RETRY_PAUSE: Final = 60.0
"""Seconds between two attempts to write replaced hashes to a file that cannot be written."""

WRITE_PAUSE: Final = 1.0
"""Seconds in which replaced hashes are collected before the file is written once for all of them."""


class PasswordFile:
    """Authenticator for the users of ``settings.file``; ignores unknown users.

    A password that was verified is accepted without another computation for a short time (`VerifiedPasswords`). A hash
    by a scheme of another broker is replaced by Argon2id once its password was
    verified; :meth:`keep_current` writes the file.

    Raises:
        StartupError: the file cannot be used.
    """

    def __init__(self, settings: PasswordSettings) -> None:
        self.name = settings.called
        self._file = settings.file
        self._cost = parse_cost(settings.cost)
        self._users = PasswordUsers(load(settings.file))
        self._verified = VerifiedPasswords()
        self._replaced: dict[str, tuple[PasswordHash, PasswordHash]] = {}
        """By user: the hash of the file, and the one in its place."""
        self._unwritten = asyncio.Event()
        self._crowd = Crowd(settings.concurrency)
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="passwords")

    async def check(self, credentials: Credentials) -> Allow | Ignore | Denied:
        """Verify the password; an unknown user takes the same time."""
        user, password = credentials.username, credentials.password
        if user is None or password is None:
            return IGNORE
        users = self._users
        present = users.find(user)
        if present is not None and self._verified.fits(user, password, present):
            return self._allow(user, present)
        loop = asyncio.get_running_loop()
        found = await self._crowd.run(
            credentials.connection.host,
            lambda: loop.run_in_executor(self._threads, self._verify, users, user, password),
        )
        if found is not None:
            allow = self._allow(user, self._replace(user, *found))
            if allow.valid():  # the file may have been reloaded meanwhile
                self._verified.add(user, password, found[1])
                return allow
        elif users.find(user) is None:
            return IGNORE
        return Denied(f"user {user!r}: wrong password", ReasonCode.BAD_USER_NAME_OR_PASSWORD)

    def _verify(self, users: PasswordUsers, user: str, password: bytes) -> tuple[PasswordHash, PasswordHash] | None:
        """Return the hash that the password fits, and what takes its place; None for a wrong password. In a thread."""
        found = users.verify(user, password)
        if found is None:
            return None
        return found, found.replaced(password, self._cost) if found.foreign else found

    def _allow(self, user: str, found: PasswordHash) -> Allow:
        return Allow(user, valid=lambda: self._users.find(user) == found, tenant=found.tenant)

    def _replace(self, user: str, old: PasswordHash, new: PasswordHash) -> PasswordHash:
        """Put a replaced hash in force, to be written later; return the hash of the user."""
        if old != new and self._users.find(user) == old:
            self._users.replace(user, old, new)
            self._replaced[user] = old, new
            self._unwritten.set()
        return new

    def reload(self) -> Callable[[], None]:
        """Read the file again; the returned function puts it in force.

        Raises:
            StartupError: the file cannot be used.
        """
        users = PasswordUsers(load(self._file))

        def commit() -> None:
            # A hash that could not be written yet is replaced again, so that its connections stay.
            kept = {name: pair for name, pair in self._replaced.items() if users.find(name) == pair[0]}
            for name, (old, new) in kept.items():
                users.replace(name, old, new)
            self._users, self._replaced = users, kept

        return commit

    async def keep_current(self) -> None:
        """Write replaced hashes to the file, those of `WRITE_PAUSE` at once."""
        said = False
        while True:
            await self._unwritten.wait()
            await asyncio.sleep(WRITE_PAUSE)
            self._unwritten.clear()
            written = dict(self._replaced)
            try:
                await asyncio.to_thread(replace_hashes, self._file, written)
            except StartupError as error:
                if not said:
                    log.warning("authenticator %s: hashes of other brokers stay in the file: %s", self.name, error)
                said = True
                await asyncio.sleep(RETRY_PAUSE)
                self._unwritten.set()
                continue
            said = False
            log.info("%s: hashes of other brokers that Argon2id has replaced: %d", self._file, len(written))
            self._replaced = {name: pair for name, pair in self._replaced.items() if pair != written.get(name)}

    async def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
