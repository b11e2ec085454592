# SPDX-License-Identifier: Apache-2.0
"""One client's connection: bytes to packets, CONNECT deadline, keepalive, back-pressure."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from mqtt_nats.codec import Decoder, Limits, MqttError, Packet, PublishRun, ReasonCode
from mqtt_nats.transport.large_reads import begin
from mqtt_nats.transport.write_buffer import Outlet, Round

if TYPE_CHECKING:
    from collections.abc import Callable

    from mqtt_nats.config.settings import Settings

log = logging.getLogger("mqtt_nats.connection")

_numbers = itertools.count(1)

# A client that does not read may hold this much in its socket's buffer before its messages wait outside.
WRITE_HIGH_WATER = 256 * 1024
WRITE_LOW_WATER = 64 * 1024

# A connection that is being closed has this long to take what is still to be sent (seconds).
LINGER: Final = 5.0

# The clock is read this often (seconds), so something may be this much newer than its time says.
CLOCK_STEP: Final = 0.5


# An event loop whose clock was not read for this long has stood still (seconds): rules.md#standstill.
STANDSTILL: Final = 1.0 + CLOCK_STEP

ESTABLISHED: Final = b"\x01"
"""The state, in Linux's words, of a TCP connection that neither side has closed."""

# A client that sends this much at once (bytes) waits until the others have had a turn.
BULK: Final = 128 * 1024

# Of what comes with CONNECT this much is looked at (bytes): packets take up to forty times the memory of their bytes.
EARLY_MOST: Final = 4096


class Hold:
    """Why nothing is read from a client: bits, plain integers for speed."""

    HANDSHAKE: Final = 1
    """Its CONNECT is being answered."""
    WINDOW: Final = 2
    """Too much of what it sent is not stored yet."""
    NATS: Final = 4
    """NATS takes nothing."""
    OUTBOUND: Final = 8
    """It does not read what it asked for."""
    JOBS: Final = 16
    """It asks for more than is being done."""
    TURN: Final = 32
    """It has had its turn."""
    LEASE: Final = 64
    """Its session may be somebody else's."""
    STANDSTILL: Final = 128
    """The gateway stood still: the same, for all."""
    RATE: Final = 256
    """It has sent more than it may in such a time."""
    HOOKS: Final = 512
    """An async hook looks at what it has published."""


KEPT: Final = Hold.STANDSTILL | Hold.HANDSHAKE
"""While one of these holds, what is read is kept as it is."""


class Handler(Protocol):
    """What a connection reports to."""

    def packets(self, packets: list[Packet]) -> None:
        """Handle the packets of one read, in order. May raise MqttError: the connection ends with it."""

    def broken(self, error: MqttError) -> None:
        """The client violated the protocol; the connection must be ended."""

    def lost(self) -> None:
        """The socket is closed. Called once, last."""


class Connection:
    """The protocol of a client's socket, as asyncio has it. All times are the event loop's, in seconds."""

    __slots__ = (
        "_clock",
        "_holds",
        "_host",
        "_kept",
        "_made",
        "_unsent",
        "alive",
        "decoder",
        "handler",
        "keepalive",
        "left",
        "number",
        "opened",
        "outlet",
        "seen",
        "settings",
        "source",
        "surplus",
        "transport",
    )

    def __init__(
        self,
        limits: Limits,
        round_: Round,
        settings: Settings,
        clock: Clock,
        made: Callable[[Connection], Handler | None],
    ) -> None:
        self.decoder = Decoder(limits)
        self.outlet = Outlet(round_, settings.max_outbound_bytes)
        self.settings = settings
        """Those that hold at its listener."""
        self.number = next(_numbers)
        """Which of this process's connections it is."""
        self.transport: asyncio.Transport | None = None
        self.handler: Handler | None = None
        self.keepalive = 0.0
        """The client must send something within 1.5 times this [MQTT-3.1.2-24]; 0 = for ever."""
        self.opened = self.alive = clock.now
        self.left: Callable[[], None] | None = None
        """Called once, when the socket is closed: who counts connections has set it."""
        self.source: tuple[str, int] | None = None
        """Address and port of the client, where it is not the one that the socket is connected to."""
        self.surplus = False
        """There are too many connections: its CONNECT is refused."""
        self.seen: tuple[Callable[[list[Packet]], None], ...] = ()
        """Who is told of every packet that comes, before it is handled."""
        self._clock = clock
        self._made = made
        self._holds = 0
        self._host: str | None = None
        self._kept = b""
        self._unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        transport.set_write_buffer_limits(WRITE_HIGH_WATER, WRITE_LOW_WATER)
        self.outlet.send = transport.write
        self.handler = self._made(self)
        if self.handler is None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse a read and hand its packets on."""
        handler = self.handler
        if handler is None:
            return
        self.heard()
        if self._holds & KEPT:
            self._kept += data
            return
        decoder = self.decoder
        if len(data) > EARLY_MOST:
            if not decoder.version:
                self._greeted(data)
                return
            if len(data) > BULK:
                self._yield_turn()
        self._take(handler, data, None)
        if len(data) > EARLY_MOST and decoder.large and not self.metered:
            begin(self)

    @property
    def metered(self) -> bool:
        """Whether it is counted what is read."""
        return False

    def large(self, run: PublishRun) -> None:
        """Hand a PUBLISH on that was read into a buffer of its own."""
        handler = self.handler
        if handler is None:
            return
        if self._holds & KEPT:
            self._kept += bytes(run.raw)
            return
        self._yield_turn()
        self._take(handler, b"", run)

    def read_by(self, other: asyncio.BufferedProtocol | None) -> None:
        """Have another take the place of the connection as the protocol of its socket; None: have it back."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if not self._holds:
            transport.pause_reading()  # what libuv calls is settled when reading starts
        transport.set_protocol(other or cast(asyncio.BaseProtocol, self))
        if not self._holds:
            transport.resume_reading()

    def heard(self) -> None:
        """Something has come from the client."""
        clock = self._clock
        self.alive = clock.now
        if monotonic() - clock.read > STANDSTILL:
            clock.stood_still()

    def _yield_turn(self) -> None:
        """Let others have theirs: libuv would go on up to 32 times while there is data; seconds, for small packets."""
        self.hold(Hold.TURN)
        asyncio.get_running_loop().call_soon(self.release, Hold.TURN)

    def _take(self, handler: Handler, data: bytes, run: PublishRun | None) -> None:
        if self.decoder.error is not None:  # it was told, and nothing is read any more
            return
        decoder = self.decoder
        try:
            packets: list[Packet] = decoder.feed(data) if run is None else [run]
            if packets:
                for see in self.seen:
                    see(packets)
                handler.packets(packets)
        except MqttError as error:
            handler.broken(error.with_traceback(None))  # whose frames would keep what was read
            return
        except Exception:
            log.exception("a client's packet could not be handled")
            handler.broken(MqttError("internal error", ReasonCode.UNSPECIFIED_ERROR))
            return
        if decoder.error is not None:
            handler.broken(decoder.error)

    def _greeted(self, data: bytes) -> None:
        """CONNECT and what comes with it, which waits as it is until CONNECT is answered."""
        start = 0
        while start < len(data) and not self._holds & KEPT and self.handler is not None:
            Connection.data_received(self, data[start : start + EARLY_MOST])
            start += EARLY_MOST
        self._kept += data[start:]

    def eof_received(self) -> bool:
        """A half-closed connection is of no use: close it."""
        return False

    def pause_writing(self) -> None:
        """The client does not read."""
        self.outlet.clog()

    def resume_writing(self) -> None:
        """The client reads again."""
        self.outlet.unclog()
        if not self.outlet.clogged:
            self.release(Hold.OUTBOUND)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self.outlet.shut()
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.lost()
        left, self.left = self.left, None
        if left is not None:
            left()
        self.transport = None

    def move(self, round_: Round, clock: Clock) -> None:
        """Be written to in another round, and go by another clock."""
        self.outlet.move(round_)
        self._clock = clock

    def inner(self, otherwise: Handler) -> Handler:
        """Who handles what was read, and counted, before."""
        return self.handler or otherwise

    def hold(self, why: int) -> None:
        """Read nothing more until :meth:`release` is called for every reason to hold."""
        if not self._holds and self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
        self._holds |= why

    def release(self, why: int) -> None:
        """Remove one reason not to read."""
        if not self._holds & why:
            return
        self._holds &= ~why
        if self._kept and not self._holds & KEPT:
            kept, self._kept = self._kept, b""
            if why == Hold.STANDSTILL:
                self.data_received(kept)
            else:
                Connection.data_received(self, kept)  # it was counted when it came
        if not self._holds and self.transport is not None and not self.transport.is_closing():
            self.alive = self._clock.now
            self.transport.resume_reading()

    @property
    def held(self) -> bool:
        """True while nothing is read."""
        return bool(self._holds)

    def expired(self, now: float, connect_timeout: float) -> bool:
        """True when the client has been silent for too long."""
        if self._holds & ~Hold.OUTBOUND:
            return False
        if self._holds and self.transport is not None:
            # Nothing is read from it, so what it takes says that it is there.
            unsent = self.transport.get_write_buffer_size()
            if unsent < self._unsent:
                self.alive = now
            self._unsent = unsent
        if not self.decoder.version:
            return now - self.opened > connect_timeout + CLOCK_STEP
        return self.keepalive > 0 and now - self.alive > self.keepalive * 1.5 + CLOCK_STEP

    def close(self) -> None:
        """Write what is pending and close; a client that does not read is cut off."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self.outlet.clogged:
            transport.abort()
            return
        self.outlet.flush()
        if transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(LINGER, transport.abort)
        transport.close()
        self.outlet.send = None  # with TLS, closing takes until the other side has agreed

    def abort(self) -> None:
        """Close at once; what is pending is lost."""
        if self.transport is not None:
            self.transport.abort()

    @property
    def hung_up(self) -> bool:
        """Whether the client has closed its connection; while reading is held that is not heard of otherwise."""
        raw: Any = self.transport.get_extra_info("socket") if self.transport is not None else None
        if raw is None or raw.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
            return False
        try:
            state: bytes = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        except OSError:
            return True
        return state != ESTABLISHED

    @property
    def host(self) -> str:
        """IP address of the client; empty where it has none."""
        if self.source is not None:
            return self.source[0]
        if self._host is None:
            name = self._address()
            if name is None:
                return ""
            self._host = str(name[0])  # kept, since to ask is a system call
        return self._host

    @property
    def peer(self) -> str:
        """Address of the client, for logs."""
        name = self._address()
        return "unknown" if name is None else f"{name[0]}:{name[1]}"

    def _address(self) -> tuple[Any, ...] | None:
        if self.source is not None:
            return self.source
        name: Any = self.transport.get_extra_info("peername") if self.transport is not None else None
        return name if isinstance(name, tuple) and len(name) > 1 else None


class Clock:
    """The event loop's time, read once per tick: precise enough for deadlines, free for the message path."""

    __slots__ = ("now", "read", "stood_still")

    def __init__(self, now: float) -> None:
        self.now = now
        self.read = monotonic()
        """When it was read last, in seconds of the system's own monotonic clock."""
        self.stood_still: Callable[[], None] = lambda: None
        """Called by who finds that it was not read for longer than `STANDSTILL`."""
