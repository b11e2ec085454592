# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats ctl`` in a gateway: answers to requests over NATS, on subjects that MQTT clients cannot reach."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from mqtt_nats.codec import MqttError
from mqtt_nats.control import actions as controlrules
from mqtt_nats.control import audit as controlaudit
from mqtt_nats.control import clients as controlclients
from mqtt_nats.control import trace as controltrace
from mqtt_nats.control.audit import AuditTrail
from mqtt_nats.control.report import reported
from mqtt_nats.control.selection import Refusal, Total
from mqtt_nats.lifecycle.predecessor import PROCESS
from mqtt_nats.observability.history import History
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.gateway_subjects import ASK, COUNTERS, LOOK, PLUGINS, WHO

if TYPE_CHECKING:
    from mqtt_nats.access.authenticator import Door
    from mqtt_nats.client.account import Account
    from mqtt_nats.config.worker_identity import WorkerIdentity
    from mqtt_nats.plugins.manager import Plugins
    from mqtt_nats.transport.listener import Listener

log = logging.getLogger("mqtt_nats.audit")

Answering = Callable[["Control", dict[str, Any]], AsyncGenerator[Any, None]]

ANSWERS: Final[dict[str, Answering]] = {
    **controlclients.ANSWERS,
    **controlrules.ANSWERS,
    **controltrace.ANSWERS,
    "audit": controlaudit.answer,
}
"""Answering functions by the name of the question."""

PAGE_ITEMS: Final = 500
PAGE_BYTES: Final = 256 * 1024
"""Bounds of one message; NATS allows a megabyte unless `max_payload` is set."""

PAGE_SECONDS: Final = 1.0
"""Seconds after which a page with fewer items is sent."""


class Powers(NamedTuple):
    """Parts of the gateway outside the account that requests may use."""

    doors: Mapping[Listener, Door]
    """Listeners of the gateway, each with its authentication."""
    stop: Callable[[], None] | None
    """Stops the gateway in good order; None in the account of a tenant, where it is not allowed."""
    audit_trail: AuditTrail | None = None
    """AuditTrail of administrators; None in the account of a tenant."""
    history: History | None = None
    """The last hour; None in the account of a tenant."""


class Control:
    """Subscriptions of one gateway for requests, and the state of traces and disconnections in progress."""

    def __init__(self, account: Account, plugins: Plugins, place: WorkerIdentity, powers: Powers) -> None:
        self.account = account
        self._plugin_manager = plugins
        self.powers = powers
        self.traces: dict[str, controltrace.Trace] = {}
        """Running traces by the name that the viewer has chosen."""
        self.traces_over: deque[str] = deque(maxlen=controltrace.TRACES_OVER)
        """Names of traces that have ended because their time or budget was used up."""
        self.kicks: dict[str, float] = {}
        """Loop time in seconds at which a disconnection of many clients stops without renewal, by its name."""
        subscribe = account.services.nats.reconnect.subscribe
        subscribe(WHO, self._who)
        subscribe(LOOK, self._look)
        subscribe(PLUGINS, self._plugins)
        subscribe(COUNTERS, partial(reported, account, place))
        subscribe(ASK, self._ask)

    def _who(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if reply:
            body = orjson.dumps(self.state())
            self.account.services.nats.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
            self.account.services.nats.link.kick()

    def _plugins(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if reply:
            self.account.services.tasks.spawn(self._answer(reply, self._plugin_manager.asked(payload)), "plugins")

    async def _answer(self, reply: bytes, work: Coroutine[Any, Any, dict[str, Any] | None]) -> None:
        found = await work
        if found is not None:
            body = orjson.dumps({"id": self.account.services.identity.id, **found})
            self.account.services.nats.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
            self.account.services.nats.link.kick()

    def _ask(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        try:
            question = orjson.loads(payload)
            what, gateway = question["ask"], question.get("gateway", "")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return
        if reply and gateway in ("", self.account.services.identity.id):
            self.account.services.tasks.spawn(self._respond(reply, str(what), question), f"answer to {what}")

    async def _respond(self, reply: bytes, what: str, question: dict[str, Any]) -> None:
        """Answer in pages; each page is made when nats-server has taken the page before."""
        answering = ANSWERS.get(what)
        error = ""
        items: list[bytes] = []
        size, total = 0, None
        loop = asyncio.get_running_loop()
        sent = loop.time()
        most = min(PAGE_BYTES, self.account.services.nats.link.max_payload // 2)
        try:
            if answering is None:
                raise Refusal(f"this gateway does not know the request {what!r}: it may be older than the command")
            async with aclosing(answering(self, question)) as found:
                async for item in found:
                    if isinstance(item, Total):
                        total = item.items
                    else:
                        items.append(orjson.dumps(item))
                        size += len(items[-1])
                    late = loop.time() - sent > PAGE_SECONDS
                    if len(items) >= PAGE_ITEMS or size >= most or (late and items) or isinstance(item, Total):
                        self._page(reply, items, True, total)
                        items, size, sent = [], 0, loop.time()
                        await self.account.services.nats.link.fence()
        except Refusal as refusal:
            error = str(refusal)
        except (MqttError, ApiError, NoResponders, RequestTimeout) as failure:
            error = " ".join(str(failure).split()) or type(failure).__name__
        except TimeoutError:  # nats-server takes nothing, so the requester cannot be answered
            return
        except Exception:
            log.exception("the request %r failed", what)
            error = "internal error: see the log of the gateway"
        self._page(reply, items, False, total, error)

    def _page(self, reply: bytes, items: list[bytes], more: bool, total: int | None, error: str = "") -> None:
        about = {"id": self.account.services.identity.id, "more": more, "error": error, "of": total}
        self.tell(reply, b'%b,"items":[%b]}' % (orjson.dumps(about)[:-1], b",".join(items)))

    def tell(self, reply: bytes, body: bytes) -> None:
        """Send an answer; one above `max_payload` is replaced by an error, as nats-server would end the connection."""
        most = self.account.services.nats.link.max_payload
        if len(body) > most:
            text = f"an answer of {len(body)} bytes is larger than NATS takes ({most}): ask for less"
            body = orjson.dumps(
                {"id": self.account.services.identity.id, "more": False, "error": text, "of": None, "items": []}
            )
        self.account.services.nats.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
        self.account.services.nats.link.kick()

    def listener_of(self, door: Door) -> str:
        """Return the address of a client's listener, given by its authentication; "" for none."""
        for listener, its in self.powers.doors.items():
            if its is door:
                return str(listener.bound[0]) if listener.bound else listener.settings.listen
        return ""

    def _look(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        self.account.lease.wake.set()

    def state(self) -> dict[str, Any]:
        """Return the description and the present state of the gateway."""
        account = self.account
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            **{key: value for key, value in self.account.lease.info.items() if key != PROCESS},
            "id": account.services.identity.id,
            "time": time.time(),
            "lease": self.account.lease.ttl,
            "connections": len(account.registry.connections),
            "durable": sum(client.durable_side is not None for client in account.registry.clients.values()),
            "server": account.services.nats.link.server.get("server_name", ""),
            "cluster": account.services.nats.link.server.get("cluster", ""),
            "draining": account.registry.closing,
            "passed_over": account.services.counters.passed_over,
            "not_retained": account.services.counters.not_retained,
            "obstacle": account.readiness.reason,
            "memory": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            "tasks": len(asyncio.all_tasks()),
            "cpu": usage.ru_utime + usage.ru_stime,
        }
