# SPDX-License-Identifier: Apache-2.0
"""Carrying over sessions to a gateway, from a list of clients, with the messages that wait for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import Subscription
from mqtt_nats.ctl.migration.transfer.mosquitto_db import EXPIRY_NEVER, Database, Session, Waiting
from mqtt_nats.ctl.migration.transfer.mqtt_client import Broker, connected
from mqtt_nats.ctl.migration.transfer.publisher import Carried, Publisher

SESSIONS_AT_ONCE: Final = 20

USERS_AT_ONCE: Final = 50
"""Most connections to publish, each for one user."""

SESSIONS_OF_ONE: Final = 20
"""Most sessions for which one stored message is."""

FILTERS_AT_ONCE: Final = 100
"""Most filters in one SUBSCRIBE."""

NO_RETAINED: Final = 2
"""Retain Handling with which SUBSCRIBE brings no retained messages: the client has had them at the old broker."""

AUDIENCE: Final = "mqtt-nats migrate"
TOKEN_S: Final = 600
"""Seconds for which a token is valid."""


def read_key(path: Path) -> bytes:
    """Return the secret of a file that :func:`make_key` has made; raises StartupError."""
    from jwt import PyJWKSet, PyJWTError  # not needed for other commands

    try:
        (key,) = PyJWKSet.from_json(path.read_text(encoding="ascii")).keys
        secret = key.key
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    except (PyJWTError, ValueError, UnicodeDecodeError):
        secret = None
    if not isinstance(secret, bytes):
        raise StartupError(f"{path} has not the one key that `mqtt-nats migrate key` writes")
    return secret


def make_key(secret: bytes) -> str:
    """Return the text of a key file (JWKS) for tokens that are signed with ``secret``."""
    from base64 import urlsafe_b64encode

    coded = urlsafe_b64encode(secret).decode().rstrip("=")
    return json.dumps({"keys": [{"kty": "oct", "alg": "HS256", "kid": "migration", "k": coded}]}) + "\n"


def key_settings(path: Path) -> str:
    """Return the part of a `gateway.toml` that accepts tokens of the key, on a listener for this machine only."""
    return f"""[[authenticators]]
type = "jwt"
name = "migration"
keys = {json.dumps(str(path))}
algorithms = "HS256"
audience = {json.dumps(AUDIENCE)}

[[listeners]]
listen = "127.0.0.1:18830"
authenticators = ["migration"]
allow_anonymous = true
carried_messages = true
"""


def credentials(secret: bytes | None, broker: Broker) -> Callable[[str | None], Broker]:
    """Return a function that returns the broker with the credentials of a user (None: anonymous).

    Args:
        secret: key of the tokens; None: everything is done without credentials.
    """

    def of(user: str | None) -> Broker:
        if secret is None or user is None:
            return broker
        import jwt

        claims = {"sub": user, "aud": AUDIENCE, "exp": int(time.time()) + TOKEN_S}
        token = jwt.encode(claims, secret, "HS256", {"kid": "migration"})
        return replace(broker, user=user, password=token.encode())

    return of


async def carry_sessions(
    database: Database, broker: Callable[[str | None], Broker], sessions: Carried, messages: Carried
) -> None:
    """Make durable sessions with their subscriptions at a gateway, and have the messages stored that wait for them.

    A session that is there stays as it is. Each message is for the sessions that it waits for, and for no others.

    Args:
        broker: the gateway with the credentials of a user.
        sessions: result for sessions.
        messages: result for messages.

    Raises:
        StartupError: the gateway cannot be reached, or stores no messages for some sessions only.
    """
    for line in database.lost:
        messages.lose(line)
    messages.expect(len(database.messages))
    making = _Making(database.sessions, broker, sessions)
    without: Counter[str] = Counter()
    """Number of messages by client id whose session could not be made."""
    async with AsyncExitStack() as stack:
        publishers = _Publishers(broker, messages, stack)
        if database.messages:
            await publishers.check(database.messages[0].user)
        await making.make(list(making.left))
        for waiting in database.messages:
            clients = [one for one in waiting.clients if one in making.made]
            if clients:
                await publishers.publish(waiting, clients)
            elif making.failed.isdisjoint(waiting.clients):
                messages.kept(1)
            without.update(making.failed.intersection(waiting.clients))
        await publishers.finish()
    for client_id, count in without.items():
        messages.lose(f"session {client_id!r}: {count} waiting, since the session is not carried over")


class _Publishers:
    """Connections of the users who have published the messages; one of them is in use at a time."""

    def __init__(self, broker: Callable[[str | None], Broker], carried: Carried, stack: AsyncExitStack) -> None:
        self._broker, self._carried, self._stack = broker, carried, stack
        self._open: dict[str | None, Publisher] = {}
        self._last: Publisher | None = None

    async def check(self, user: str | None) -> None:
        """Check as a user that the gateway stores messages for some sessions only; raises StartupError."""
        async with connected(self._broker(user), 5) as connection:
            if not connection.carries:
                where = connection.broker
                raise StartupError(
                    f"{where} would give waiting messages to others, too: use the listener that `migrate key` prints"
                )

    async def publish(self, waiting: Waiting, clients: list[str]) -> None:
        """Have a message stored for these clients when those of other users are stored; a refusal is a loss."""
        try:
            publisher = await self._of(waiting.user)
        except StartupError as error:
            self._carried.lose(f"{waiting.message.key[2:].decode('utf-8', 'replace')}: {error}")
            return
        if publisher is not self._last:
            await self.finish()
            self._last = publisher
        for at in range(0, len(clients), SESSIONS_OF_ONE):
            await publisher.publish_for(waiting.message, clients[at : at + SESSIONS_OF_ONE])

    async def finish(self) -> None:
        """Wait until all messages are stored."""
        if self._last is not None:
            await self._last.finish()

    async def _of(self, user: str | None) -> Publisher:
        found = self._open.get(user)
        if found is None:
            if len(self._open) >= USERS_AT_ONCE:
                await self.finish()
                await self._stack.aclose()
                self._open.clear()
                self._last = None
            connection = await self._stack.enter_async_context(connected(self._broker(user), 5))
            found = self._open[user] = Publisher(connection, self._carried)
        return found


class _Making:
    """Sessions that are made at the gateway, some of them at the same time."""

    def __init__(
        self, sessions: Mapping[str, Session], broker: Callable[[str | None], Broker], carried: Carried
    ) -> None:
        self.left = dict(sessions)
        """Sessions that are still to be made, by client id."""
        self.made: set[str] = set()
        """Client ids of the new sessions: not of those that were there."""
        self.failed: set[str] = set()
        """Client ids of the sessions that could not be made."""
        self._broker, self._carried = broker, carried
        self._free = asyncio.Semaphore(SESSIONS_AT_ONCE)

    async def make(self, client_ids: Iterable[str]) -> None:
        """Make the sessions of these client ids; what the gateway refuses is a loss."""
        async with asyncio.TaskGroup() as group:
            for client_id in client_ids:
                group.create_task(self._carry(client_id, self.left.pop(client_id)))

    async def _carry(self, client_id: str, session: Session) -> None:
        async with self._free:
            try:
                await self._make(client_id, session, self._broker(session.user))
            except StartupError as error:
                self.failed.add(client_id)
                self._carried.lose(f"session {client_id!r}: {error}")

    async def _make(self, client_id: str, session: Session, broker: Broker) -> None:
        expiry = EXPIRY_NEVER if session.expiry is None else session.expiry
        async with connected(broker, 5, client_id, clean=False, expiry=expiry) as connection:
            if connection.present:
                self._carried.kept(1)
                return
            for identifier, filters in _subscriptions(session):
                codes = await connection.subscribe(filters, identifier)
                for one, code in zip(filters, codes, strict=False):
                    if code >= 0x80:
                        text = f"session {client_id!r}: the subscription {one.topic_filter!r} is refused"
                        self._carried.lose(text)
        if session.expiry is None and not session.options:
            # The session of a 3.1.1 client ends as such sessions do: 5.0 was for SUBSCRIBE without retained messages.
            async with connected(broker, 4, client_id, clean=False):
                pass
        self.made.add(client_id)
        self._carried.done()


def _subscriptions(session: Session) -> Iterator[tuple[int, list[Subscription]]]:
    """Yield subscriptions that fit into one SUBSCRIBE, with their identifier (0: none)."""
    grouped: dict[int, list[Subscription]] = {}
    for topic_filter, qos in session.subscriptions.items():
        one, identifier = session.options.get(topic_filter, (Subscription(topic_filter, qos), 0))
        grouped.setdefault(identifier, []).append(replace(one, retain_handling=NO_RETAINED))
    for identifier, filters in grouped.items():
        for at in range(0, len(filters), FILTERS_AT_ONCE):
            yield identifier, filters[at : at + FILTERS_AT_ONCE]
