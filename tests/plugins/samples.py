# SPDX-License-Identifier: Apache-2.0
"""Plugins for tests, good and bad."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from mqtt_nats.hooks import CLIENT_CONNECTED, MESSAGE_PUBLISH, Connected, Continue, Drop, Published, Publishing
from mqtt_nats.plugins import NoOptions, Options, Plugin


class SuffixOptions(Options):
    """What is added."""

    suffix: str
    secret: str = ""


class Suffix(Plugin[SuffixOptions]):
    """Adds to every payload."""

    options_type = SuffixOptions
    unloaded = 0

    async def load(self) -> None:
        """Begin."""
        self.gateway.on(MESSAGE_PUBLISH, self._add)
        self.gateway.on(CLIENT_CONNECTED, self._greet)

    async def unload(self) -> None:
        """Count."""
        Suffix.unloaded += 1

    def _add(self, event: Publishing, message: Published | Drop) -> Continue[Published | Drop] | None:
        if isinstance(message, Drop):
            return None
        return Continue(replace(message, payload=message.payload + self.options.suffix.encode()))

    async def _greet(self, event: Connected) -> None:
        name = event.client.client_id
        await self.gateway.publish(f"greetings/{name}", b"welcome", 1, properties={"content_type": "text"})


class Taking:
    """Takes nothing really."""

    def target(self, topic: str) -> str:
        """The rest."""
        return topic.partition("/")[2]

    def take(self, taken: object, operation: object) -> None:
        """Lose it."""


class Failing(Plugin[NoOptions]):
    """Has hooks, a task and a topic when it fails."""

    ended = False

    async def load(self) -> None:
        """Fail."""
        self.gateway.on(MESSAGE_PUBLISH, lambda event, message: Drop())  # type: ignore[arg-type, return-value]
        self.gateway.take("$failing/", Taking())
        self.gateway.spawn(self._wait())
        await asyncio.sleep(0)
        raise RuntimeError("a secret")

    async def _wait(self) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            Failing.ended = True


class Waiting(Plugin[NoOptions]):
    """Waits for a task of its own that is cancelled, in all that it does."""

    async def load(self) -> None:
        """Begin."""
        self._task = self.gateway.spawn(self._wait())
        self.gateway.on(MESSAGE_PUBLISH, self._see)

    async def unload(self) -> None:
        """Wait for what has been cancelled already."""
        await self._task

    async def _see(self, event: Publishing, message: Published | Drop) -> None:
        await self._task

    async def _wait(self) -> None:
        await asyncio.sleep(1000)


class Hasty(Plugin[NoOptions]):
    """Cancels what it waits for while it is loaded."""

    async def load(self) -> None:
        """Fail."""
        task = self.gateway.spawn(asyncio.sleep(1000))
        task.cancel()
        await task


class Picky(Plugin[NoOptions]):
    """Does not like its options."""

    async def load(self) -> None:
        """Say so."""
        raise ValueError("the moon\nis full")


class Stubborn(Plugin[NoOptions]):
    """Fails when it ends."""

    async def load(self) -> None:
        """Begin."""
        self.gateway.on(MESSAGE_PUBLISH, lambda event, message: None)

    async def unload(self) -> None:
        """Fail."""
        raise RuntimeError


class NoPlugin:
    """Something else."""
