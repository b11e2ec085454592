# SPDX-License-Identifier: Apache-2.0
"""Users of a file, by the password in CONNECT, which is verified in a thread."""

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
    """The users of ``settings.file``. Those who are not in it are left to the next authenticator.

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
        """Verify the password; that of a user who does not exist takes as long."""
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
            if allow.valid():  # the file may have been read again meanwhile
                return allow
        elif users.find(user) is None:
            return IGNORE
        return Denied(f"user {user!r}: wrong password", ReasonCode.BAD_USER_NAME_OR_PASSWORD)

    def reload(self) -> Callable[[], None]:
        """Read the file again; what is returned puts it in force.

        Raises:
            StartupError: it cannot be used.
        """
        users = PasswordUsers(load(self._file))

        def commit() -> None:
            self._users = users

        return commit

    async def keep(self) -> None:
        """Nothing to be done meanwhile."""

    async def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
