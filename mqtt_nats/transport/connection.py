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
from mqtt_nats.transport.turns import SLICE_S
from mqtt_nats.transport.turns import Clock as Clock
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


KEPT: Final = Hold.STANDSTILL | Hold.HANDSHAKE | Hold.TURN
"""While one of these holds, what is read is kept as it is."""

MOVED: Final = Hold.STANDSTILL | Hold.LEASE
"""While one of these holds, nothing more is handled of what was read before: the session may be somebody else's."""

PACKETS: Final = 16
"""Packets that are handled without a look at the time, and messages of a run before the first look."""

GROWTH: Final = 4
"""Many times more messages of a run are handled before the next look."""


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
        "_ending",
        "_gone",
        "_holds",
        "_host",
        "_kept",
        "_made",
        "_rest",
        "_turns",
        "_unsent",
        "_waits",
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
        self._turns = round_.turns
        self._rest: list[Packet] = []
        """Packets that wait for the client's next turn."""
        self._waits = False
        """It waits for its turn."""
        self._gone = False
        """The socket is closed; what was read before is handled first."""
        self._ending = False
        """The gateway closes the connection: nothing more is handled."""

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
        now = self.heard()
        if self._holds & KEPT:
            self._kept += data
            return
        until = self._turns.until(now)
        if not until:
            self._kept += data
            self._wait(True)
            return
        decoder = self.decoder
        if len(data) > EARLY_MOST and not decoder.version:
            self._greeted(data)
            return
        self._take(handler, data, None, until)
        if len(data) > BULK:
            self._wait(False)  # libuv would go on up to 32 times while there is data
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
        self._take(handler, b"", run, monotonic() + SLICE_S)
        self._wait(False)

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

    def heard(self) -> float:
        """Something has come from the client; returns the time of the system's monotonic clock."""
        clock = self._clock
        self.alive = clock.now
        now = monotonic()
        if now - clock.read > STANDSTILL:
            clock.stood_still()
        return now

    def _wait(self, fresh: bool) -> None:
        """Let others have their turn; ``fresh``: nothing has been handled in this client's."""
        if not self._waits and not self._ending:
            self._waits = True
            self.hold(Hold.TURN)
            self._turns.wait(self, fresh)

    def go_on(self, until: float) -> None:
        """It is the client's turn, up to a time of the system's monotonic clock."""
        self._waits = False
        handler = self.handler
        if handler is None or self._holds & MOVED:
            return
        packets, self._rest = self._rest, []
        if packets:
            self._serve(handler, packets, until)
        if self._waits:
            return
        self.release(Hold.TURN)
        if self._gone and not self._waits:
            self._lose()

    def _take(self, handler: Handler, data: bytes, run: PublishRun | None, until: float) -> None:
        packets: list[Packet] = self.decoder.feed(data) if run is None else [run]
        if packets and self.seen:
            try:
                for see in self.seen:
                    see(packets)
            except Exception:
                log.exception("a client's packet could not be handled")
                handler.broken(MqttError("internal error", ReasonCode.UNSPECIFIED_ERROR))
                return
        self._serve(handler, packets, until)

    def _serve(self, handler: Handler, packets: list[Packet], until: float) -> None:
        """Handle packets while there is time; those that are left wait for the client's next turn."""
        try:
            done = self._handle(handler, packets, until)
        except MqttError as error:
            handler.broken(error.with_traceback(None))  # whose frames would keep what was read
            return
        except Exception:
            log.exception("a client's packet could not be handled")
            handler.broken(MqttError("internal error", ReasonCode.UNSPECIFIED_ERROR))
            return
        if self._ending:
            return
        if done < len(packets):
            self._rest = packets[done:]
            self._wait(False)
        elif self.decoder.error is not None:
            handler.broken(self.decoder.error)

    def _handle(self, handler: Handler, packets: list[Packet], until: float) -> int:
        """Hand packets on until a time; how many are done."""
        at, count = 0, len(packets)
        while at < count:
            end = min(at + PACKETS, count)
            for place in range(at, end):
                packet = packets[place]
                if isinstance(packet, PublishRun) and packet.count > PACKETS:
                    end = place
                    break
            if end == at:
                run = packets[at]
                assert isinstance(run, PublishRun)
                left = self._handle_run(handler, run, until)
                if left is not None:
                    packets[at] = left
                    return at
                end += 1
            else:
                handler.packets(packets if end - at == count else packets[at:end])
            at = end
            if at < count and (self._ending or monotonic() >= until):
                break
        return at

    def _handle_run(self, handler: Handler, run: PublishRun, until: float) -> PublishRun | None:
        """Hand the messages of a run on until a time; those that are left."""
        done, count, several = 0, run.count, PACKETS
        while True:
            part = min(several, count - done)
            handler.packets([run.part(done, part)])
            done += part
            if done == count:
                return None
            if self._ending or monotonic() >= until:
                return run.part(done, count - done)
            several *= GROWTH

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
        """The socket is closed; what was read before is handled first."""
        self.outlet.shut()
        if self._holds & Hold.TURN and (self._rest or self._kept) and not self._ending:
            self._gone = True
            self.transport = None
        else:
            self._lose()

    def _lose(self) -> None:
        self._rest, self._kept = [], b""
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
        self._turns = round_.turns

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
        if self._holds & Hold.TURN and not self._waits and not self._holds & MOVED:
            self._waits = True
            self._turns.wait(self, True)
            return
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
        self._end_reading()
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
        self._end_reading()
        if self.transport is not None:
            self.transport.abort()

    def _end_reading(self) -> None:
        """Handle nothing more of what was read."""
        self._ending = True
        self._rest, self._kept = [], b""
        if self._gone:
            self._gone = False
            asyncio.get_running_loop().call_soon(self._lose)

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
