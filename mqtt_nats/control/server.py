# SPDX-License-Identifier: Apache-2.0
"""What a gateway answers to ``mqtt-nats ctl``: requests over NATS, on subjects that MQTT clients cannot reach."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from mqtt_nats.codec import MqttError
from mqtt_nats.control import actions as controlrules
from mqtt_nats.control import clients as controlclients
from mqtt_nats.control import trace as controltrace
from mqtt_nats.control.selection import Refusal, Total
from mqtt_nats.lifecycle.predecessor import PROCESS
from mqtt_nats.observability.report import reported
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.gateway_subjects import ASK, COUNTERS, LOOK, PLUGINS, WHO

if TYPE_CHECKING:
    from mqtt_nats.access.authenticator import Door
    from mqtt_nats.backbone.link import NatsConnection
    from mqtt_nats.gateway.broker import Broker
    from mqtt_nats.lifecycle.lease import Lease
    from mqtt_nats.transport.listener import Listener

log = logging.getLogger("mqtt_nats.audit")

Answering = Callable[["Control", dict[str, Any]], AsyncIterator[Any]]

ANSWERS: Final[dict[str, Answering]] = {
    **controlclients.ANSWERS,
    **controlrules.ANSWERS,
    **controltrace.ANSWERS,
}
"""What can be asked."""

PAGE_ITEMS: Final = 500
PAGE_BYTES: Final = 256 * 1024
"""Bounds of one message: NATS takes a megabyte, unless it was told otherwise."""

PAGE_SECONDS: Final = 1.0
"""Who has asked hears at least this often what has become of it, where there is anything to hear."""


class Powers(NamedTuple):
    """What the gateway around the broker can be asked for."""

    doors: Mapping[Listener, Door]
    """Its listeners, and who decides who gets in there."""
    stop: Callable[[], None] | None
    """Has it end in good order; None: that is not for who asks here, in the account of a tenant."""


class Control:
    """The subscriptions of one gateway."""

    def __init__(self, broker: Broker, lease: Lease, powers: Powers) -> None:
        self.broker = self._broker = broker
        self._lease = lease
        self.powers = powers
        self.traces: dict[str, controltrace.Trace] = {}
        """By the name that who wants to see it has given it."""
        self.traces_over: deque[str] = deque(maxlen=controltrace.TRACES_OVER)
        """Names of traces that have ended since their time or budget was over."""
        self.kicks: dict[str, float] = {}
        """When clients are left in peace that are being disconnected one after the other, by the name of that."""
        subscribe = broker.link.subscribe_raw
        self._sids = [(subscribe(WHO, self._who), WHO), (subscribe(LOOK, self._look), LOOK)]
        self._sids.append((subscribe(PLUGINS, self._plugins), PLUGINS))
        self._sids.append((subscribe(COUNTERS, partial(reported, broker)), COUNTERS))
        self._sids.append((subscribe(ASK, self._ask), ASK))

    def renew(self, link: NatsConnection) -> None:
        """Subscribe again after a reconnect."""
        for sid, subject in self._sids:
            link.renew(sid, subject)

    def _who(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if reply:
            body = orjson.dumps(self.state())
            self._broker.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
            self._broker.link.kick()

    def _plugins(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        plugins = self._broker.plugins
        if reply and plugins is not None:
            self._broker.spawn(self._answer(reply, plugins.asked(payload)), "plugins")

    async def _answer(self, reply: bytes, work: Coroutine[Any, Any, dict[str, Any] | None]) -> None:
        found = await work
        if found is not None:
            body = orjson.dumps({"id": self._broker.identity, **found})
            self._broker.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
            self._broker.link.kick()

    def _ask(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        try:
            question = orjson.loads(payload)
            what, gateway = question["ask"], question.get("gateway", "")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return
        if reply and gateway in ("", self._broker.identity):
            self._broker.spawn(self._respond(reply, str(what), question), f"answer to {what}")

    async def _respond(self, reply: bytes, what: str, question: dict[str, Any]) -> None:
        """Answer in pages, each when the server has taken the one before."""
        answering = ANSWERS.get(what)
        error = ""
        items: list[bytes] = []
        size, total = 0, None
        loop = asyncio.get_running_loop()
        sent = loop.time()
        most = min(PAGE_BYTES, self._broker.link.max_payload // 2)
        try:
            if answering is None:
                raise Refusal(f"this gateway does not know the question {what!r}: it may be older than who asks")
            async for item in answering(self, question):
                if isinstance(item, Total):
                    total = item.items
                else:
                    items.append(orjson.dumps(item))
                    size += len(items[-1])
                late = loop.time() - sent > PAGE_SECONDS
                if len(items) >= PAGE_ITEMS or size >= most or (late and items) or isinstance(item, Total):
                    self._page(reply, items, True, total)
                    items, size, sent = [], 0, loop.time()
                    await self._broker.link.fence()
        except Refusal as refusal:
            error = str(refusal)
        except (MqttError, ApiError, NoResponders, RequestTimeout) as failure:
            error = " ".join(str(failure).split()) or type(failure).__name__
        except TimeoutError:  # nobody is there to be answered
            return
        except Exception:
            log.exception("the question %r cannot be answered", what)
            error = "internal error: see the log of the gateway"
        self._page(reply, items, False, total, error)

    def _page(self, reply: bytes, items: list[bytes], more: bool, total: int | None, error: str = "") -> None:
        about = {"id": self._broker.identity, "more": more, "error": error, "of": total}
        self.tell(reply, b'%b,"items":[%b]}' % (orjson.dumps(about)[:-1], b",".join(items)))

    def tell(self, reply: bytes, body: bytes) -> None:
        """Send something to who has asked; NATS would end the connection over what is too large for it."""
        most = self._broker.link.max_payload
        if len(body) > most:
            text = f"an answer of {len(body)} bytes is larger than NATS takes ({most}): ask for less"
            body = orjson.dumps({"id": self._broker.identity, "more": False, "error": text, "of": None, "items": []})
        self._broker.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
        self._broker.link.kick()

    def listener_of(self, door: Door) -> str:
        """The address of the listener by which a client came in."""
        for listener, its in self.powers.doors.items():
            if its is door:
                return str(listener.bound[0]) if listener.bound else listener.settings.listen
        return ""

    def _look(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        self._lease.wake.set()

    def state(self) -> dict[str, Any]:
        """What the gateway is, and what it has."""
        broker = self._broker
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            **{key: value for key, value in self._lease.info.items() if key != PROCESS},
            "id": broker.identity,
            "time": time.time(),
            "lease": self._lease.ttl,
            "connections": len(broker.connections),
            "durable": sum(client.durable_side is not None for client in broker.clients.values()),
            "server": broker.link.server.get("server_name", ""),
            "cluster": broker.link.server.get("cluster", ""),
            "draining": broker.closing,
            "passed_over": broker.passed_over,
            "not_retained": broker.not_retained,
            "obstacle": broker.readiness.reason,
            "memory": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            "tasks": len(asyncio.all_tasks()),
            "cpu": usage.ru_utime + usage.ru_stime,
        }
