# SPDX-License-Identifier: Apache-2.0
"""Inbox of the gateway: JetStream's replies are matched by the last token of their subject.

A token is used once, so a late reply cannot be taken for the reply to another request. Requests that met an election,
or were sent on a lost connection, get no reply; see docs/internals/backbone.md#elections.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable

from mqtt_nats.backbone.frames import stream_of
from mqtt_nats.backbone.link import NatsConnection
from mqtt_streams.api import ApiError, NoResponders, Reply, RequestTimeout
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.gateway_subjects import GATEWAYS, new_inbox

Waiter = Callable[[bytes, bytes], None]
"""``waiter(headers, payload)``: called once for the reply."""

PULL = ".CONSUMER.MSG.NEXT."

DELIVERY = b"$JS.ACK."
"""Beginning of the reply subject of a consumer's message."""

NO_RESPONDERS = b"NATS/1.0 503"
_NOT_FOUND = b'"err_code":%d,' % STREAM_NOT_FOUND

# Precision of request time-outs in seconds.
SWEEP = 0.1

# Requests that may be carried out twice: they read, or set a consumer to what they say. The group is the stream, or
# the stream and its consumer.
REPEATABLE = re.compile(r"\S+?\.(?:STREAM\.INFO|STREAM\.MSG\.GET|CONSUMER\.INFO|CONSUMER\.(?:DURABLE\.)?CREATE)\.(.+)")

# Requests that change a consumer, and may not be carried out twice. The group is the stream and its consumer.
CHANGES = re.compile(r"\S+?\.CONSUMER\.(?:DELETE|RESET|PAUSE)\.(.+)")

# Seconds in which a former leader's answer still arrives after the election of the next.
FORMER_LEADER_ANSWER_S = 0.25

# Seconds after an election in which others may be under way, and seconds without a reply after which a request is sent
# again meanwhile: no advisory tells of the leader of metadata.
OTHER_ELECTIONS_S = 15.0
REQUEST_REPEAT_S = 0.5

# Seconds after the election of its own leader in which a request is sent again after `FORMER_LEADER_ANSWER_S`.
LEADER_ANNOUNCED_S = 1.0


class _Request:
    """A request that has no reply yet.

    ``sent`` and ``deadline`` are loop times in seconds, ``timeout`` is in seconds.
    """

    __slots__ = ("deadline", "frame", "sent", "subject", "timeout")

    def __init__(self, sent: float, timeout: float, subject: str, frame: bytes) -> None:
        self.sent = sent
        self.timeout = timeout
        self.deadline = sent + timeout
        self.subject = subject
        self.frame = frame

    def repeat(self, now: float) -> bytes:
        """Note that the request is sent again, and return its frame."""
        self.sent = now
        return self.frame

    def shorten(self, deadline: float) -> None:
        """Set an earlier deadline."""
        self.deadline = min(self.deadline, deadline)


class _Replies:
    """Replies that wait for the reader of a :meth:`RequestInbox.stream`."""

    __slots__ = ("_link", "come", "ended", "lost", "replies", "subject")

    def __init__(self, link: NatsConnection, subject: str) -> None:
        self._link = link
        self.subject = subject
        self.ended = False
        """Whether the reader takes no more replies."""
        self.replies: deque[Reply] = deque()
        self.come = asyncio.Event()
        self.lost = False
        """Whether no more replies come: the leader that had the request is gone, or the connection."""

    def arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Add a reply."""
        if self.ended:
            self._give_back(reply)
            return
        if not self.replies:
            self.come.set()
        self.replies.append(Reply(subject.decode(errors="surrogateescape"), headers, payload, reply.decode()))

    def lose(self) -> None:
        """End the wait for replies."""
        self.lost = True
        self.come.set()

    def give_back_unread(self) -> None:
        """Give messages that the reader has not taken back to their consumer, and those that still arrive."""
        self.ended = True
        while self.replies:
            self._give_back(self.replies.popleft().reply.encode())

    def _give_back(self, reply: bytes) -> None:
        if reply.startswith(DELIVERY):
            self._link.out.append(b"PUB %b 4\r\n-NAK\r\n" % reply)
            self._link.kick()


class RequestInbox:
    """Inbox for replies to requests, over one subscription of a :class:`NatsConnection`.

    The class implements :class:`mqtt_streams.api.TellingJetStream`.
    """

    def __init__(self, link: NatsConnection, api_prefix: str = "$JS.API") -> None:
        self.link = link
        self.api_prefix = api_prefix
        self._max_ack_pending = 0
        self.prefix = new_inbox()
        self.waiters: dict[bytes, Waiter] = {}
        self.unheard = False
        """Whether a request had no responders: its stream has no leader, or is gone. The flag's reader resets it."""
        self._literal: dict[str, asyncio.Future[Reply]] = {}
        self._deadlines: dict[asyncio.Future[Reply], _Request] = {}
        self._streams: set[_Replies] = set()
        self._elected: dict[str, float] = {}
        """Loop time in seconds of the election of a leader, by ``stream`` or ``stream.consumer``."""
        self._unsettled = 0.0
        """Loop time in seconds until which leaders may be missing."""
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
        """Subscribe again after a reconnect; must be the first frame on the new connection.

        Requests of the former connection get no reply: they are sent again, or fail.
        """
        self.link.renew(self._sid, self.prefix + b"*")
        now = asyncio.get_running_loop().time()
        for request in self._deadlines.values():
            if REPEATABLE.match(request.subject):
                self.link.out.append(request.repeat(now))
            else:
                request.shorten(now)
        for replies in self._streams:
            replies.lose()

    def elected(self, stream: str, consumer: str) -> None:
        """Handle the election of a leader of ``stream``, or of its ``consumer`` unless that is empty."""
        now = asyncio.get_running_loop().time()
        if not consumer:  # a new consumer has its first leader elected, too: that says nothing of others
            self._unsettled = now + OTHER_ELECTIONS_S
        self._elected[f"{stream}.{consumer}" if consumer else stream] = now
        if not consumer:
            return
        pulled = f"{PULL}{stream}.{consumer}"
        for replies in self._streams:
            if replies.subject.endswith(pulled):
                replies.lose()

    def forget_unheard(self) -> None:
        """Reset `unheard`: the state of the streams is being requested."""
        self.unheard = False

    def note_unheard(self) -> None:
        """Note that a stream has no leader, or is gone."""
        self.unheard = True

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
        loop = self._loop = self._loop or asyncio.get_running_loop()
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
        request = _Request(loop.time(), timeout, subject, frame(subject.encode(), target, headers, payload))
        self._deadlines[future] = request
        link.out.append(request.frame)
        link.kick()
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
        if _NOT_FOUND in answer.payload[:200]:
            self.unheard = True
        return answer

    def tell(self, subject: bytes, payload: bytes) -> None:
        """Publish a message that nobody answers."""
        self.link.out.append(b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload))
        self.link.kick()

    def _sweep(self) -> None:
        """Fail the requests whose time-out has passed; one timer serves all requests, since most are answered."""
        assert self._loop is not None
        loop = self._loop
        now = loop.time()
        if self._elected or now < self._unsettled:
            self._repeat(now)
        for future, request in list(self._deadlines.items()):
            if now >= request.deadline and not future.done():
                future.set_exception(RequestTimeout(f"no reply in {request.timeout:g} s: {request.subject}"))
        self._sweeper = loop.call_later(SWEEP, self._sweep) if self._deadlines else None

    def _repeat(self, now: float) -> None:
        """Send requests again that a new leader has not had; those that may not be repeated fail."""
        self._elected = {name: at for name, at in self._elected.items() if now - at < LEADER_ANNOUNCED_S}
        for future, request in self._deadlines.items():
            waited = now - request.sent
            if future.done() or waited < FORMER_LEADER_ANSWER_S:
                continue
            known = REPEATABLE.match(request.subject)
            name = known[1] if known is not None else stream_of(request.frame).decode()
            if known is not None and ((waited > REQUEST_REPEAT_S and now < self._unsettled) or name in self._elected):
                self.link.out.append(request.repeat(now))
            elif known is None:
                changed = CHANGES.match(request.subject)
                consumer = changed[1] if changed is not None else ""
                if request.sent <= max(self._elected.get(name, -1.0), self._elected.get(consumer, -1.0)):
                    request.shorten(now)
        self.link.kick()

    async def stream(self, subject: str, payload: bytes = b"", *, timeout: float = 5.0) -> AsyncGenerator[Reply, None]:
        """Send a request and yield its replies until the caller stops.

        Raises:
            RequestTimeout: ``timeout`` seconds passed without a reply, or the leader or the connection was lost.
        """
        replies = _Replies(self.link, subject)
        # A subscription of its own: messages of a pull consumer arrive under their stream subject.
        inbox = b"%bs%b" % (self.prefix[:-1], self.token())
        sid = self.link.subscribe_raw(inbox, replies.arrived)
        self._streams.add(replies)
        self.link.out.append(frame(subject.encode(), inbox, b"", payload))
        self.link.kick()
        try:
            while True:
                if not replies.replies:  # else a reply is there already
                    await self._next(replies, timeout)
                answer = replies.replies.popleft()
                if answer.headers.startswith(NO_RESPONDERS) and not answer.payload:
                    self.unheard = True
                    raise NoResponders(subject)
                yield answer
        finally:
            self._streams.discard(replies)
            replies.give_back_unread()
            if PULL in subject:
                self.link.unsubscribe_later(sid)
            else:
                self.link.unsubscribe_raw(sid)

    async def _next(self, replies: _Replies, timeout: float) -> None:
        """Wait for the next reply of a stream.

        Raises:
            RequestTimeout: none came in ``timeout`` seconds, or none can come any more.
        """
        replies.come.clear()
        try:
            async with asyncio.timeout(0 if replies.lost else timeout):
                await replies.come.wait()
        except TimeoutError:
            raise RequestTimeout(f"no reply in {timeout:g} s: {replies.subject}") from None
        if not replies.replies:
            raise RequestTimeout(f"the leader, or the connection, has gone: {replies.subject}")


def frame(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> bytes:
    """Return a complete PUB or HPUB frame."""
    if headers:
        size = len(headers)
        return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, size, size + len(payload), headers, payload)
    return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload)
