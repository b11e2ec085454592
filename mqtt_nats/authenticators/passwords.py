# SPDX-License-Identifier: Apache-2.0
"""Authenticator for users of a password file; passwords are verified in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mqtt_nats.access.authenticator import IGNORE, Allow, Credentials, Denied, Ignore
from mqtt_nats.access.passwords import PasswordUsers, load
from mqtt_nats.access.settings import PasswordSettings
from mqtt_nats.authenticators.admission_queue import Crowd
from mqtt_nats.codec import ReasonCode


class PasswordFile:
    """Authenticator for the users of ``settings.file``; ignores unknown users.

    Raises:
        StartupError: the file cannot be used.
    """

    def __init__(self, settings: PasswordSettings) -> None:
        self.name = settings.called
        self._file = settings.file
        self._users = PasswordUsers(load(settings.file))
        self._crowd = Crowd(settings.concurrency)
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="passwords")

    async def check(self, credentials: Credentials) -> Allow | Ignore | Denied:
        """Verify the password; an unknown user takes the same time."""
        user, password = credentials.username, credentials.password
        if user is None or password is None:
            return IGNORE
        users = self._users
        loop = asyncio.get_running_loop()
        found = await self._crowd.run(
            credentials.connection.host, lambda: loop.run_in_executor(self._threads, users.verify, user, password)
        )
        if found is not None:
            allow = Allow(user, valid=lambda: self._users.find(user) == found, tenant=found.tenant)
            if allow.valid():  # the file may have been reloaded meanwhile
                return allow
        elif users.find(user) is None:
            return IGNORE
        return Denied(f"user {user!r}: wrong password", ReasonCode.BAD_USER_NAME_OR_PASSWORD)

    def reload(self) -> Callable[[], None]:
        """Read the file again; the returned function puts it in force.

        Raises:
            StartupError: the file cannot be used.
        """
        users = PasswordUsers(load(self._file))

        def commit() -> None:
            self._users = users

        return commit

    async def keep(self) -> None:
        """Do nothing: there is no background work."""

    async def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
