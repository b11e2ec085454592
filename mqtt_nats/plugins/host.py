# SPDX-License-Identifier: Apache-2.0
"""Interface of a gateway for plugins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from mqtt_nats.backbone.pending_stores import TooLarge
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.client.message_hooks import arrange
from mqtt_nats.client.subscribe import subscribe
from mqtt_nats.codec import MqttError, PacketTooLarge, Properties, ReasonCode, Subscribe, Subscription
from mqtt_nats.hooks.chain import TIMEOUT, Decider, Decision, Entry, Notice, Observer, Point
from mqtt_nats.hooks.events import ClientView, client_of
from mqtt_nats.ingress.interceptors import Taken, Taker
from mqtt_nats.ingress.publish_properties import extras
from mqtt_nats.ingress.scheduled import schedule
from mqtt_nats.ingress.server_publish import Awaited, check_size, inject

if TYPE_CHECKING:
    from mqtt_nats.backbone.pending_stores import CountedStore
    from mqtt_nats.client.account import Account
    from mqtt_nats.client.client import Client

E = TypeVar("E")
V = TypeVar("V")


class Host:
    """Interface of a gateway for one plugin. Hooks, tasks and takers begun here end when the plugin is unloaded."""

    def __init__(self, account: Account, owner: str) -> None:
        self._account = account
        self._owner = owner
        self._taken: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def identity(self) -> str:
        """Id of the gateway."""
        return self._account.services.identity.id

    @overload
    def on(
        self, point: Decision[E, V], callback: Decider[E, V], *, priority: int = 0, timeout: float = TIMEOUT
    ) -> Entry: ...
    @overload
    def on(self, point: Notice[E], callback: Observer[E], *, priority: int = 0, timeout: float = TIMEOUT) -> Entry: ...
    def on(self, point: Point, callback: Callable[..., Any], *, priority: int = 0, timeout: float = TIMEOUT) -> Entry:
        """Add a hook; arguments as for :meth:`mqtt_nats.hooks.Hooks.add`."""
        add: Callable[..., Entry] = self._account.services.hooks.add
        return add(point, callback, priority=priority, timeout=timeout, owner=self._owner)

    def off(self, entry: Entry) -> None:
        """Remove a hook."""
        self._account.services.hooks.remove(entry)

    async def publish(
        self, topic: str, payload: bytes, qos: int = 0, retain: bool = False, properties: Properties | None = None
    ) -> None:
        """Publish a message; return when it is stored, at QoS 0 without retain at once.

        Hooks of ``message.publish`` and access rules are not applied.

        Raises:
            MqttError: the topic is not for clients, or the message is too large.
            ApiError: JetStream does not store it.
        """
        account = self._account
        encoded = topic.encode()
        route = account.services.path.table.route(len(encoded).to_bytes(2) + encoded)
        more = extras(properties) if properties else None
        check_size(account.services.path, route, payload, b"", more)
        operation = Awaited()
        try:
            inject(account.ingress, route, payload, qos, retain, b"", more, b"", operation)
        except TooLarge as error:
            raise PacketTooLarge(str(error)) from None
        account.services.nats.link.kick()
        account.services.path.round.start()
        if operation.remaining:
            await operation.done

    def subscribe(self, client: ClientView, *subscriptions: Subscription) -> None:
        """Subscribe a client as if by a SUBSCRIBE packet of its own; no SUBACK is sent.

        Subscriptions that the rules do not allow are refused and logged. Hooks of ``client.subscribe`` do not run.
        """
        one = cast("Client", client_of(client))
        one.do(subscribe(one, Subscribe(0, subscriptions)))

    def disconnect(self, client: ClientView, reason: ReasonCode, text: str) -> None:
        """End a connection; a 5.0 client gets reason code and text."""
        cast("Client", client_of(client)).end_connection(MqttError(text, reason))

    def clients(self) -> list[ClientView]:
        """Return the clients connected to this gateway."""
        return [ClientView(one) for one in self._account.services.registry.clients.values()]

    def spawn(self, work: Coroutine[Any, Any, None], name: str = "") -> asyncio.Task[None]:
        """Run a coroutine as a task; an exception is logged and ends only this task."""
        task = self._account.services.tasks.spawn(work, f"{self._owner} {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def take(self, beginning: str, taker: Taker) -> None:
        """Pass messages whose topics begin with ``beginning`` (whole levels, a slash at the end) to ``taker``.

        Raises:
            ValueError: these topics have a taker already.
        """
        self._account.ingress.takers.add(beginning, taker)
        self._taken.append(beginning)
        arrange(self._account)

    def schedule(self, taken: Taken, seconds: float, operation: CountedStore) -> None:
        """Publish a taken message after ``seconds``, by a timer in JetStream that does not depend on this gateway.

        Raises:
            TooLarge: the message is too large for NATS.
        """
        schedule(self._account.services.path, taken, natstime.now() + seconds, operation)

    def withdraw(self) -> None:
        """End all hooks, takers and tasks of the plugin."""
        self._account.services.hooks.remove_all(self._owner)
        for beginning in self._taken:
            self._account.ingress.takers.remove(beginning)
        self._taken.clear()
        arrange(self._account)
        for task in self._tasks:
            task.cancel()
