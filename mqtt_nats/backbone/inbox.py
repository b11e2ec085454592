# SPDX-License-Identifier: Apache-2.0
"""Inbox of the gateway: JetStream's replies are matched by the last token of their subject.

A token is used once, so a late reply cannot be taken for the reply to another request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable

from mqtt_nats.backbone.link import NatsConnection
from mqtt_streams.api import ApiError, NoResponders, Reply, RequestTimeout
from mqtt_streams.gateway_subjects import GATEWAYS

Waiter = Callable[[bytes, bytes], None]
"""``waiter(headers, payload)``: called once for the reply."""

NO_RESPONDERS = b"NATS/1.0 503"
STREAM_NOT_FOUND = b'"err_code":10059,'

# Precision of request time-outs in seconds.
SWEEP = 0.1


class RequestInbox:
    """Inbox for replies to requests, over one subscription of a :class:`NatsConnection`.

    The class implements :class:`mqtt_streams.api.JetStream`.
    """

    def __init__(self, link: NatsConnection, api_prefix: str = "$JS.API") -> None:
        self.link = link
        self.api_prefix = api_prefix
        self._max_ack_pending = 0
        self.prefix = b"_INBOX." + secrets.token_hex(11).encode() + b"."
        self.waiters: dict[bytes, Waiter] = {}
        self.unheard = False
        """Whether a request had no responders: its stream has no leader, or is gone. The flag's reader resets it."""
        self._literal: dict[str, asyncio.Future[Reply]] = {}
        self._deadlines: dict[asyncio.Future[Reply], tuple[float, str, float]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # The loop is kept: before Python 3.12 `get_running_loop` is a system call each time.
        self._length = len(self.prefix)
        self._count = 0
        self._sid = link.subscribe_raw(self.prefix + b"*", self._arrived)

    @property
    def max_ack_pending(self) -> int:
        """Largest ``max_ack_pending`` of a consumer that the account allows; 0 = no limit."""
        return self._max_ack_pending

    def limit(self, max_ack_pending: int) -> None:
        """Limit ``max_ack_pending`` of new consumers to the maximum of the account; 0 = no limit."""
        self._max_ack_pending = max_ack_pending

    def renew(self) -> None:
        """Subscribe again after a reconnect; must be the first frame on the new connection."""
        self.link.renew(self._sid, self.prefix + b"*")

    def token(self) -> bytes:
        """Return a reply token that was never used before."""
        self._count += 1
        return b"%x" % self._count

    def _arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        token = subject[self._length :]
        waiter = self.waiters.pop(token, None)
        if waiter is not None:
            waiter(headers, payload)

    def literal(self, subject: bytes, headers: bytes, payload: bytes) -> None:
        """Deliver a reply that arrived on a reply subject chosen by the caller of :meth:`request`."""
        future = self._literal.get(subject.decode())
        if future is not None and not future.done():
            future.set_result(Reply(subject.decode(), headers, payload))

    async def request(
        self, subject: str, payload: bytes = b"", headers: bytes = b"", *, timeout: float = 5.0, reply: str = ""
    ) -> Reply:
        """Send a request and return its reply.

        Raises:
            NoResponders: no service listens on ``subject``.
            RequestTimeout: no reply in ``timeout`` seconds, or the connection is down; the outcome is unknown.
            ApiError: the request exceeds ``max_payload``, for which the server would end the connection.
        """
        link = self.link
        if len(headers) + len(payload) > link.max_payload:
            raise ApiError(413, 0, f"a request of {len(headers) + len(payload)} bytes; NATS takes {link.max_payload}")
        if not link.online:
            raise RequestTimeout(f"not connected to NATS: {subject}")
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        token = b""
        if reply:
            target = reply.encode()
            self._literal[reply] = future
        else:
            token = self.token()
            target = self.prefix + token

            def arrived(headers: bytes, payload: bytes) -> None:
                if not future.done():
                    future.set_result(Reply("", headers, payload))

            self.waiters[token] = arrived
        link.out.append(frame(subject.encode(), target, headers, payload))
        link.kick()
        self._deadlines[future] = (loop.time() + timeout, subject, timeout)
        if self._sweeper is None:
            self._sweeper = loop.call_later(SWEEP, self._sweep)
        try:
            answer = await future
        finally:
            self._deadlines.pop(future, None)
            if reply:
                self._literal.pop(reply, None)
            else:
                self.waiters.pop(token, None)
        if answer.headers.startswith(NO_RESPONDERS) and not answer.payload:
            self.unheard = self.unheard or not subject.startswith(GATEWAYS)
            raise NoResponders(subject)
        if STREAM_NOT_FOUND in answer.payload[:200]:
            self.unheard = True
        return answer

    def _sweep(self) -> None:
        """Fail the requests whose time-out has passed; one timer serves all requests, since most are answered."""
        assert self._loop is not None
        loop = self._loop
        now = loop.time()
        for future, (deadline, subject, timeout) in list(self._deadlines.items()):
            if now >= deadline and not future.done():
                future.set_exception(RequestTimeout(f"no reply in {timeout:g} s: {subject}"))
        self._sweeper = loop.call_later(SWEEP, self._sweep) if self._deadlines else None

    async def stream(self, subject: str, payload: bytes = b"", *, timeout: float = 5.0) -> AsyncGenerator[Reply, None]:
        """Send a request and yield its replies until the caller stops.

        Raises:
            RequestTimeout: ``timeout`` seconds passed without a reply.
        """
        replies: deque[Reply] = deque()
        come = asyncio.Event()

        def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
            if not replies:
                come.set()
            replies.append(Reply(subject.decode(errors="surrogateescape"), headers, payload, reply.decode()))

        # A subscription of its own: messages of a pull consumer arrive under their stream subject.
        inbox = b"%bs%b" % (self.prefix[:-1], self.token())
        sid = self.link.subscribe_raw(inbox, arrived)
        self.link.out.append(frame(subject.encode(), inbox, b"", payload))
        self.link.kick()
        try:
            while True:
                if not replies:  # else a reply is there already
                    come.clear()
                    try:
                        async with asyncio.timeout(timeout):
                            await come.wait()
                    except TimeoutError:
                        raise RequestTimeout(f"no reply in {timeout:g} s: {subject}") from None
                answer = replies.popleft()
                if answer.headers.startswith(NO_RESPONDERS) and not answer.payload:
                    self.unheard = True
                    raise NoResponders(subject)
                yield answer
        finally:
            self.link.unsubscribe_raw(sid)


def frame(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> bytes:
    """Return a complete PUB or HPUB frame."""
    if headers:
        size = len(headers)
        return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, size, size + len(payload), headers, payload)
    return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload)
