# SPDX-License-Identifier: Apache-2.0
"""NATS connection of the gateway: the message path is the gateway's own, everything else is nats-py's.

nats-py connects, authenticates, negotiates TLS, discovers servers and reconnects. Once a
connection is up, :class:`NatsConnection` takes over its transport: arriving frames are parsed in bulk and
passed to plain functions; frames to send are appended to one list that is written once per loop turn.
nats-py's own commands (its subscriptions, pings) go through the same transport, in order.

The class overrides private methods of :class:`nats.aio.client.Client`; the minor version is pinned
in ``pyproject.toml`` and ``tests/backbone/test_link.py`` fails when one of them is renamed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

from nats.aio.client import Client, Srv
from nats.aio.errors import ErrStaleConnection
from nats.aio.transport import TcpTransport
from nats.errors import Error as NatsError
from nats.errors import NoServersError, UnexpectedEOF

from mqtt_nats.backbone.frames import denied
from mqtt_nats.backbone.servers import Servers
from mqtt_nats.backbone.transport import STANDSTILL, NatsTransport
from mqtt_nats.base.logs import once
from mqtt_nats.base.loopback import unpace
from mqtt_nats.base.server_clock import elapsed

log = logging.getLogger("mqtt_nats.nats")

Handler = Callable[[bytes, bytes, bytes, bytes], None]
"""``handler(subject, reply, headers, payload)``; ``reply`` and ``headers`` may be empty.

A :class:`mqtt_nats.backbone.transport.RunHandler` gets plain messages in a row at once.
"""

# From so many bytes, in all and on average, frames are passed to the socket one by one: joining them would copy them.
# With TLS each frame would become a record of its own, so they are always joined.
LARGE_FRAMES_BYTES = 64 * 1024
LARGE_FRAME_BYTES = 1024

# From so many frames a write before the end of the turn pays: nats-server works while the next client is read. A third
# of that does not pay where each client sends one message at a time.
ENOUGH: Final = 100

# From this many unsent bytes in the socket the gateway stops reading from publishers.
WRITE_HIGH_WATER = 4 * 1024 * 1024
WRITE_LOW_WATER = 1024 * 1024

# Maximum seconds for a server's greeting, and for sending the rest when the connection is closed.
CONNECT_TIMEOUT = LINGER = 5.0

# Seconds for which messages of an ended subscription may still arrive.
ON_ITS_WAY: Final = 2.0

# Seconds between two rounds of attempts to connect, and after a connection that lasted no longer.
ROUND_PAUSE = 0.25


class NatsConnection(Client):
    """A NATS connection with a synchronous data path.

    ``out`` is the list of frames to be sent at the end of this loop turn: callers append complete
    protocol frames and call :meth:`kick` once. Frames appended while the connection is down are
    dropped; a caller that needs a delivery keeps its frames (see :mod:`mqtt_nats.backbone.acked_publisher`).
    """

    def __init__(self, servers: Servers | None = None) -> None:
        super().__init__()
        self.known = servers
        """Known nats-servers; None = this connection is never opened."""
        self._round: list[Srv] | None = None
        self._was_connected = False
        self._since = 0.0
        """Loop time in seconds at which the last connection was established."""
        self.failures: list[Exception] = []
        """Errors of the first attempts to connect, except unreachable servers."""
        self.handlers: dict[bytes, Handler] = {}
        self.out: list[bytes | memoryview] = []  # never replaced: other modules use this list, too
        self.wire: NatsTransport | None = None
        self._last_wire: NatsTransport | None = None
        self.heard = elapsed()
        """Time of the last data from the server, by :func:`elapsed` (seconds)."""
        self.ticked = elapsed()
        """Time at which the event loop was last known to run, by :func:`elapsed` (seconds)."""
        self.on_standstill: Callable[[], None] = lambda: None
        """Called after a standstill longer than `STANDSTILL`, before anything is handled or sent."""
        self.stopped = False
        """Whether frames are collected but not sent; see :meth:`stop`."""
        self.writable = True
        self.online = False
        self.on_writable: Callable[[bool], None] | None = None
        self.on_wire: list[Callable[[bool], None]] = []
        """``on_wire(up)``: frames are sent from now on (True), or are dropped (False); in this order."""
        self.on_denied: Callable[[bool, bytes], None] | None = None
        """``on_denied(publish, subject)``: the server does not allow a publish (True) or a subscription (False)."""
        self.scheduled = False
        """Whether a write of ``out`` is scheduled for the end of the turn."""
        self._foreign: asyncio.Queue[tuple[int, bytes, bytes, bytes, bytes]] | None = None
        self._foreign_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flush_waiters: list[asyncio.Future[bool]] = []

    # -- the data path -----------------------------------------------------------------------

    @property
    def server(self) -> dict[str, Any]:
        """INFO of the last connected nats-server; empty before the first connection."""
        return self._server_info

    def go_online(self) -> None:
        """Note that requests may be sent: the subscription for their answers is renewed."""
        self.online = True

    def report(self, denied: Callable[[bool, bytes], None], writable: Callable[[bool], None] | None = None) -> None:
        """Set whom to tell that the server denies a subject, or takes no more data (False) and takes data again."""
        self.on_denied, self.on_writable = denied, writable

    def call_on_wire(self, changed: Callable[[bool], None]) -> None:
        """Call ``changed(True)`` before the first frame on a new connection, ``changed(False)`` when it is lost."""
        self.on_wire.append(changed)

    def _tell_wire(self, up: bool) -> None:
        for changed in self.on_wire:
            changed(up)

    def call_on_standstill(self, noticed: Callable[[], None]) -> None:
        """Call ``noticed`` after a standstill longer than `STANDSTILL`, before anything is handled or sent."""
        self.on_standstill = noticed

    def tick(self) -> None:
        """Note that the event loop runs."""
        self.ticked = elapsed()

    def hear(self, now: float) -> None:
        """Note that the server has sent data at ``now``, by :func:`elapsed` in seconds."""
        self.heard = now

    def take_data(self, writable: bool) -> None:
        """Note whether the server takes data fast enough, and report it."""
        self.writable = writable
        if self.on_writable is not None:
            self.on_writable(writable)

    def drop_wire(self, wire: NatsTransport) -> None:
        """Note that a transport is closed."""
        if self.wire is wire:
            self.wire = None
            self._tell_wire(False)

    def hold_frames(self) -> None:
        """Send nothing until :meth:`go_on`."""
        self.stopped = True

    def kick(self) -> None:
        """Schedule a write of ``out`` for the end of this loop turn."""
        if not self.scheduled and self._loop is not None:
            self.scheduled = True
            self._loop.call_soon(self.write_out)

    def push(self) -> None:
        """Write ``out`` now if it has enough frames for nats-server to begin with, else like :meth:`kick`."""
        if len(self.out) >= ENOUGH:
            self.write_out()
        else:
            self.kick()

    def write_out(self) -> None:
        """Write the collected frames."""
        self.scheduled = False
        out = self.out
        if out:
            if elapsed() - self.ticked > STANDSTILL:
                self.on_standstill()
            if self.stopped:
                return
            wire = self.wire
            if wire is not None:
                if len(out) == 1:
                    wire.transport.write(out[0])
                elif not wire.secure and sum(map(len, out)) > max(LARGE_FRAMES_BYTES, len(out) * LARGE_FRAME_BYTES):
                    wire.transport.writelines(out)
                else:
                    wire.transport.write(b"".join(out))
            out.clear()

    def subscribe_raw(self, subject: bytes, handler: Handler, queue: bytes = b"") -> bytes:
        """Subscribe without a task or queue; return the subscription id.

        The caller subscribes again after a reconnect: nats-py does not know this subscription.
        """
        self._sid += 1
        sid = b"%d" % self._sid
        self.handlers[sid] = handler
        self.out.append(b"SUB %b %b %b\r\n" % (subject, queue, sid) if queue else b"SUB %b %b\r\n" % (subject, sid))
        self.kick()
        return sid

    def withdraw(self, frames: Iterable[bytes]) -> None:
        """Do not write these frames, as far as they have not been written yet."""
        withdrawn = {id(frame) for frame in frames}
        self.out[:] = [frame for frame in self.out if id(frame) not in withdrawn]

    def renew(self, sid: bytes, subject: bytes) -> None:
        """Send the subscription ``sid`` again after a reconnect."""
        self.out.append(b"SUB %b %b\r\n" % (subject, sid))
        self.kick()

    def unsubscribe_raw(self, sid: bytes) -> None:
        """End a subscription made by :meth:`subscribe_raw`; its handler is not called any more."""
        if self.handlers.pop(sid, None) is not None:
            self.out.append(b"UNSUB %b\r\n" % sid)
            self.kick()

    def unsubscribe_later(self, sid: bytes) -> None:
        """As :meth:`unsubscribe_raw`, but messages on their way still go to the handler, for `ON_ITS_WAY` seconds."""
        self.out.append(b"UNSUB %b\r\n" % sid)
        self.kick()
        asyncio.get_running_loop().call_later(ON_ITS_WAY, self.handlers.pop, sid, None)

    async def fence(self, timeout: float = 5.0) -> None:
        """Return when the server has handled everything sent so far (PING/PONG).

        Calls of one loop turn share one PING, and the first one's ``timeout`` (seconds).

        Raises:
            TimeoutError: the server did not answer, or the connection is down.
        """
        if self.wire is None:
            raise TimeoutError("not connected to NATS")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        if not self._flush_waiters:
            loop.call_soon(self._send_fence, timeout)
        self._flush_waiters.append(future)
        await future

    def _send_fence(self, timeout: float) -> None:
        waiters, self._flush_waiters = self._flush_waiters, []
        loop = asyncio.get_running_loop()
        shared: asyncio.Future[bool] = loop.create_future()

        def done(pong: asyncio.Future[bool]) -> None:
            timer.cancel()
            for waiter in waiters:
                if waiter.done():
                    continue
                if pong.cancelled():
                    waiter.set_exception(TimeoutError("NATS did not answer a ping"))
                else:
                    waiter.set_result(True)

        timer = loop.call_later(timeout, shared.cancel)
        shared.add_done_callback(done)
        self._pongs.append(shared)
        self.out.append(b"PING\r\n")
        self.kick()

    async def stop(self, timeout: float) -> None:
        """Send nothing but a PING until its PONG: everything that the server sent before the PONG has arrived then.

        Raises:
            TimeoutError: no PONG, or the connection is down; still nothing is sent until :meth:`go_on`.
        """
        self.stopped = True
        wire = self.wire
        if wire is None:
            raise TimeoutError("not connected to NATS")
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # The futures behind this place belong to PINGs that have not been sent.
        self._pongs.insert(len(self._pongs) - self.out.count(b"PING\r\n"), pong)
        wire.transport.write(b"PING\r\n")
        try:
            async with asyncio.timeout(timeout):
                await pong
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if pong.cancelled() and not (task is not None and task.cancelling()):
                raise TimeoutError("the connection to NATS was lost") from None
            raise

    def go_on(self) -> None:
        """End :meth:`stop`: send the collected frames."""
        self.stopped = False
        self.write_out()

    # -- nats-py's own protocol ----------------------------------------------------------------

    def control(self, line: bytes) -> None:
        """Handle a protocol line that is not a message."""
        if line == b"PING":
            self.out.append(b"PONG\r\n")
            self.kick()
        elif line == b"PONG":
            self._pings_outstanding = 0
            if self._pongs:
                future = self._pongs.pop(0)
                self._pongs_received += 1
                if not future.done():
                    future.set_result(True)
        elif line.startswith(b"INFO "):
            info: dict[str, Any] = json.loads(line[5:])
            self._server_info.update(info)
            self._max_payload = info.get("max_payload", self._max_payload)
            self._spawn(self._process_info(info))
        elif line.startswith(b"-ERR"):
            # Without delay: answers to all frames that were sent after the refused command come later.
            refused = denied(line)
            if refused is not None and self.on_denied is not None:
                self.on_denied(*refused)
            self._spawn(self._process_err(line[5:].decode("utf-8", "replace").strip().lower()))
        elif not line.startswith(b"+OK"):
            log.error("NATS sent an unknown protocol line: %r", line[:100])
            self._spawn(self._process_op_err(UnexpectedEOF()))

    def foreign(self, sid: int, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Pass a message of one of nats-py's own subscriptions to nats-py, in order."""
        if sid in self._subs and self._foreign is not None:
            self._foreign.put_nowait((sid, subject, reply, headers, payload))

    async def _pump_foreign(self, queue: asyncio.Queue[tuple[int, bytes, bytes, bytes, bytes]]) -> None:
        while True:
            sid, subject, reply, headers, payload = await queue.get()
            await self._process_msg(sid, subject, reply, payload, headers or None)  # type: ignore[arg-type]

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._control_tasks.add(task)
        task.add_done_callback(self._control_tasks.discard)

    @property
    def _control_tasks(self) -> set[asyncio.Future[Any]]:
        tasks: set[asyncio.Future[Any]] = self.__dict__.setdefault("_tasks", set())
        return tasks

    async def _select_next_server(self) -> None:
        """Connect to the next server of this round of attempts, or begin a new round.

        Raises:
            NoServersError: the first connection failed on all servers.
        """
        assert self.known is not None
        if self._was_connected and asyncio.get_running_loop().time() - self._since < ROUND_PAUSE:
            await asyncio.sleep(ROUND_PAUSE)  # the server ended the last connection at once, probably over a frame
        while True:
            if not self._round:
                if self._round is not None:
                    if not self._was_connected:
                        raise NoServersError
                    await asyncio.sleep(ROUND_PAUSE)
                self._round = await self.known.round()
                continue
            server = self._round.pop(0)
            try:
                await self._connect_to_server(server)
            except (OSError, NatsError, TimeoutError) as error:
                log.debug("nats-server at %s: %r", server.uri.netloc.rpartition("@")[2], error)
                continue
            self._current_server = server
            return

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Note the announced servers, which nats-py would never forget. Refuse to log in without a required TLS."""
        if initial_connection and (self.options.get("tls") is not None or info.get("tls_required")):
            if not (info.get("tls_required") or info.get("tls_available")):
                raise NatsError("the server offers no TLS, which tls:// or a nats_tls_* setting asks for")
            reader: Any = getattr(self._transport, "_io_reader", None)
            if reader is not None and reader._buffer:  # these bytes would count as received under TLS
                raise NatsError("the server sends data between INFO and the TLS handshake")
            self._server_info["tls_required"] = True
        if self.known is not None and info.get("connect_urls"):
            self.known.announced(info["connect_urls"])
        others = {name: value for name, value in info.items() if name != "connect_urls"}
        await super()._process_info(others, initial_connection)

    async def _process_connect_init(self) -> None:
        """Take over the transport in the same step in which nats-py connects it, so that no bytes go past it."""
        former = self._last_wire
        if former is not None and not former.closed.done():
            former.transport.abort()  # an attempt that nats-py has given up, but not closed
        try:
            await super()._process_connect_init()
        except BaseException as error:
            if not self._was_connected and isinstance(error, Exception):
                self.failures.append(error)
            if self._transport is not None:
                # nats-py leaves a refused connection open, or waits for ever for the end of its TLS.
                self._transport.close()  # type: ignore[no-untyped-call]
                self._transport = None
            if self._was_connected and isinstance(error, Exception):
                text = str(error) or type(error).__name__
                log.warning("nats-server cannot be used: %s", text, extra=once(text))
                raise NatsError(text) from error  # errors of other types, as of a file, would end nats-py's attempts
            raise
        transport = self._transport
        if not isinstance(transport, TcpTransport) or transport._io_writer is None or transport._io_reader is None:
            raise NatsError("nats: a WebSocket transport cannot carry the data path; use nats:// or tls://")
        self._loop = asyncio.get_running_loop()
        raw: Any = transport._io_writer.transport
        reader: Any = transport._io_reader
        if raw.is_closing() or reader.at_eof():
            raise UnexpectedEOF
        assert self.known is not None
        self.known.connected_to(self._current_server)
        self._round = None
        self._was_connected = True
        self._since = self._loop.time()
        self._last_wire = wire = NatsTransport(self, raw, raw.get_protocol())
        self.out.clear()
        raw.set_protocol(wire)
        if (peer := raw.get_extra_info("peername")) is not None:
            unpace(raw.get_extra_info("socket"), peer[0])
        raw.set_write_buffer_limits(WRITE_HIGH_WATER, WRITE_LOW_WATER)
        early: bytearray = reader._buffer
        self.wire = wire
        self.writable = True
        self._tell_wire(True)
        if self._foreign is None:
            self._foreign = asyncio.Queue()
            self._foreign_task = asyncio.create_task(self._pump_foreign(self._foreign), name="nats-py messages")
        if early:
            wire.data_received(bytes(early))
            early.clear()
        if not raw.is_reading():
            raw.resume_reading()

    async def _read_loop(self) -> None:
        """Wait for the end of the connection; `NatsTransport` does the reading."""
        wire = self._last_wire
        if wire is None:
            return
        error = await asyncio.shield(wire.closed)
        if wire is self._last_wire:
            await self._process_op_err(error if error is not None else UnexpectedEOF())

    def _lose_wire(self) -> None:
        if self.wire is not None:
            self._tell_wire(False)
        self.wire = None
        self.online = self.stopped = False
        self.out.clear()
        for future in self._pongs:
            if not future.done():
                future.cancel()
        self._pongs.clear()

    async def _process_err(self, err_msg: str) -> None:
        """Log a refused command; reconnect after an error that ends the connection, and never give up."""
        if "permissions violation" in err_msg or "invalid" in err_msg:
            log.error("NATS refused a command: %s", err_msg, extra=once(err_msg))
            await self._error_cb(NatsError(f"nats: {err_msg}"))
            return
        log.warning("NATS closes the connection: %s", err_msg)
        await self._process_op_err(ErrStaleConnection() if "stale" in err_msg else NatsError(f"nats: {err_msg}"))

    async def _process_op_err(self, e: Exception) -> None:
        """Abort the connection at once: a server that hangs would never take the data for which nats-py waits."""
        if self._last_wire is not None:
            self._last_wire.transport.abort()
        self._lose_wire()
        await super()._process_op_err(e)

    async def _send_command(self, cmd: bytes, priority: bool = False) -> None:
        self.out.append(cmd)
        self.kick()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def _flusher(self) -> None:
        return

    async def _ping_interval(self) -> None:
        """Ping the server when it has sent nothing for the interval: any data from the server shows that it answers."""
        interval = wait = float(self.options["ping_interval"])
        while True:
            await asyncio.sleep(wait)
            silent = elapsed() - self.heard
            wait = interval - silent if silent < interval else interval
            if silent < interval:
                self._pings_outstanding = 0
            elif self.is_connected:
                self._pings_outstanding += 1
                if self._pings_outstanding > self.options["max_outstanding_pings"]:
                    return await self._process_op_err(ErrStaleConnection())
                await self._send_ping()

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        if future is None:
            future = asyncio.get_running_loop().create_future()
        self._pongs.append(future)
        self.out.append(b"PING\r\n")
        self.kick()

    async def flush(self, timeout: float = 10) -> None:
        """Wait for a round trip to the server; see :meth:`fence`."""
        await self.fence(timeout)

    async def close(self) -> None:
        """Write the collected frames and end the connection for good."""
        self.write_out()
        if self._foreign_task is not None:
            self._foreign_task.cancel()
        if self.wire is not None:
            asyncio.get_running_loop().call_later(LINGER, self.wire.transport.abort)
        await super().close()
        self._lose_wire()
