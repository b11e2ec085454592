# SPDX-License-Identifier: Apache-2.0
"""Connection of one client: bytes to packets, CONNECT deadline, keepalive, back-pressure."""

from __future__ import annotations

import asyncio
import itertools
import logging
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol, cast

from mqtt_nats.codec import Decoder, Limits, MqttError, Packet, PublishRun, ReasonCode
from mqtt_nats.transport.large_reads import begin
from mqtt_nats.transport.socket_state import ClientSocket, silence
from mqtt_nats.transport.turns import CLOCK_STEP as CLOCK_STEP
from mqtt_nats.transport.turns import GROWTH, KEPT, MOVED, PACKETS, SLICE_S, STANDSTILL
from mqtt_nats.transport.turns import Clock as Clock
from mqtt_nats.transport.turns import Hold as Hold
from mqtt_nats.transport.write_buffer import FlushRound, WriteBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from mqtt_nats.transport.listener_settings import ConnectionSettings

log = logging.getLogger("mqtt_nats.connection")

_numbers = itertools.count(1)

# Unsent bytes in the socket's buffer from which a client's messages wait outside, and at which they go on.
WRITE_HIGH_WATER = 256 * 1024
WRITE_LOW_WATER = 64 * 1024

# Seconds in which a connection that is being closed may send its pending bytes.
CLOSE_LINGER_S: Final = 5.0

# Bytes of one read after which a client waits until other clients have had a slice.
BULK: Final = 128 * 1024

# Maximum bytes parsed together with CONNECT: packets take up to forty times the memory of their bytes.
EARLY_MOST: Final = 4096


class Handler(Protocol):
    """Handler of a connection's packets and events."""

    def packets(self, packets: list[Packet]) -> None:
        """Handle the packets of one read, in order. May raise MqttError, with which the connection ends."""

    def broken(self, error: MqttError) -> None:
        """Handle a protocol violation of the client: the connection must be ended."""

    def lost(self) -> None:
        """Handle the end: the socket is closed, and all packets have been passed on."""


class Connection(ClientSocket):
    """Connection of one client: the asyncio protocol of its socket. All times are loop times, in seconds."""

    __slots__ = (
        "_again",
        "_clock",
        "_ending",
        "_gone",
        "_holds",
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
        "number",
        "opened",
        "seen",
        "settings",
        "write_buffer",
    )

    def __init__(
        self,
        limits: Limits,
        round_: FlushRound,
        settings: ConnectionSettings,
        clock: Clock,
        made: Callable[[Connection], Handler | None],
    ) -> None:
        super().__init__()
        self._waits = False
        """Whether the connection waits for its slice of a turn."""
        self._gone = False
        """Whether the socket is closed while packets that were read before are still to be handled."""
        self._ending = False
        """Whether the gateway closes the connection: no further packets are handled."""
        self.decoder = Decoder(limits)
        self.write_buffer = WriteBuffer(round_, settings.max_outbound_bytes)
        self.settings = settings
        """Settings in force at its listener."""
        self.number = next(_numbers)
        """Number of the connection within this process, from 1."""
        self.handler: Handler | None = None
        self.keepalive = 0.0
        """Keep alive in seconds: the client must send a packet within 1.5 times this [MQTT-3.1.2-24]; 0 = no limit."""
        self.opened = self.alive = clock.now
        self.seen: tuple[Callable[[list[Packet]], None], ...] = ()
        """Functions called with all received packets before the packets are handled."""
        self._clock, self._made = clock, made
        self._holds = 0
        self._kept = b""
        self._unsent = 0
        self._turns = round_.turns
        self._rest: list[Packet] | None = None
        """Packets that wait for the client's next slice; None = no such packets, as of most clients."""
        self._again: list[Packet] | None = None
        """Packets that were handled once, had to wait, and come before `_rest`; None = no such packets."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the connection of a new client."""
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass
        transport.set_write_buffer_limits(WRITE_HIGH_WATER, WRITE_LOW_WATER)
        self.write_buffer.send_by(transport.write)
        self.handler = self._made(self)
        if self.handler is None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse a read and handle its packets."""
        handler = self.handler
        if handler is None:
            return
        now = self.heard()
        if self._holds & KEPT:
            self._kept += data
            return
        until = self._turns.until(now, self)
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
            self._wait(False)  # else libuv would read up to 32 times while there is data
        if len(data) > EARLY_MOST and decoder.large and not self.metered:
            begin(self)

    @property
    def metered(self) -> bool:
        """Whether the read bytes or messages are counted for a rate."""
        return False

    def large(self, run: PublishRun) -> None:
        """Handle a PUBLISH that was read into a buffer of its own."""
        handler = self.handler
        if handler is None:
            return
        if self._holds & KEPT:
            self._kept += bytes(run.raw)
            return
        self._take(handler, b"", run, monotonic() + SLICE_S)
        self._wait(False)

    def read_by(self, other: asyncio.BufferedProtocol | None) -> None:
        """Make another object the protocol of the socket; None: this connection again."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if not self._holds:
            transport.pause_reading()  # libuv chooses its callbacks when reading starts
        transport.set_protocol(other or cast(asyncio.BaseProtocol, self))
        if not self._holds:
            transport.resume_reading()

    def heard(self) -> float:
        """Note that the client has sent data; return the system's monotonic time in seconds."""
        clock = self._clock
        self.alive = clock.now
        now = monotonic()
        if now - clock.read > STANDSTILL:
            clock.stood_still()
        return now

    def _wait(self, fresh: bool) -> None:
        """Wait for a slice after other clients; ``fresh``: no packet was handled in the client's present slice."""
        if not self._waits and not self._ending:
            self._waits = True
            self.hold(Hold.TURN)
            self._turns.wait(self, fresh, new=not self.decoder.version)

    def go_on(self, until: float) -> None:
        """Use the client's slice, until a time of the system's monotonic clock in seconds."""
        self._waits = False
        handler = self.handler
        if handler is None or self._holds & MOVED:
            return
        self._serve_again(handler, until)
        if self._again is None:
            packets, self._rest = self._rest, None
            if packets is not None:
                self._rest = self._serve(handler, packets, until)
        self._read_on()

    def handle_again(self, packets: list[Packet], way: Handler | None, error: MqttError | None) -> None:
        """Handle packets that had to wait, before the packets that arrived after them.

        Args:
            way: handler of the packets if the socket is closed.
            error: protocol violation behind the packets; no packets behind it are handled.
        """
        if self._ending:
            if way is not None:
                way.lost()
            return
        if self.handler is None:
            self.handler, self._gone = way, True
        handler = self.handler
        if handler is None:
            return
        if error is not None:
            self._rest, self._kept = None, b""
            self.decoder.fail(error)
        self._again = [*packets, *(self._again or () if error is None else ())] or None
        until = self._turns.until(monotonic(), self)
        if not until or self._holds & MOVED:
            self._wait(True)
        else:
            self._serve_again(handler, until)
            self._read_on()

    def _serve_again(self, handler: Handler, until: float) -> None:
        packets = self._take_again()
        if packets:
            left = self._serve(self.inner(handler), packets, until)
            self._again = [*(self._again or ()), *(left or ())] or None  # packets that came back had arrived before

    def _take_again(self) -> list[Packet] | None:
        packets, self._again = self._again, None
        return packets

    def _read_on(self) -> None:
        """After some packets were handled: wait for a slice to handle the rest, or read on."""
        if self._ending:
            return
        if self._again or self._rest:
            self._turns.exceeded(self)
            self._wait(False)
            return
        if self.decoder.error is not None and self.handler is not None:
            self.handler.broken(self.decoder.error)
        if self._waits:
            return
        if self._holds & Hold.TURN:
            self.release(Hold.TURN)
        if self._gone and not self.keeps:
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
        self._rest = self._serve(handler, packets, until)
        self._read_on()

    def _serve(self, handler: Handler, packets: list[Packet], until: float) -> list[Packet] | None:
        """Handle packets until the time is over; return those for the client's next slice, None = none is left."""
        try:
            done = self._handle(handler, packets, until)
        except MqttError as error:
            self._rest = None
            handler.broken(error.with_traceback(None))  # frames of a traceback would keep the data
            return None
        except Exception:
            log.exception("a client's packet could not be handled")
            self._rest = None
            handler.broken(MqttError("internal error", ReasonCode.UNSPECIFIED_ERROR))
            return None
        return None if self._ending or done == len(packets) else packets[done:]

    def _handle(self, handler: Handler, packets: list[Packet], until: float) -> int:
        """Handle packets until the time is over; return how many are done."""
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
        """Handle the messages of a run until the time is over; return the messages that are left."""
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
        """Parse CONNECT; keep the data behind CONNECT unparsed until CONNECT is answered."""
        start = 0
        while start < len(data) and not self._holds & KEPT and self.handler is not None:
            Connection.data_received(self, data[start : start + EARLY_MOST])
            start += EARLY_MOST
        self._kept += data[start:]

    def eof_received(self) -> bool:
        """Close a half-closed connection: it is of no use."""
        return False

    def pause_writing(self) -> None:
        """Keep outgoing data: the client does not read."""
        self.write_buffer.clog()

    def resume_writing(self) -> None:
        """Send the kept data: the client reads again."""
        self.write_buffer.unclog()
        if not self.write_buffer.clogged:
            self.release(Hold.OUTBOUND)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the socket is closed. Thousands may close at once, and each may have thousands of filters."""
        self.write_buffer.shut()
        if self._turns.may_end(self):
            self.socket_closed()
        else:
            self.transport = None

    def socket_closed(self) -> None:
        """End the connection, whose socket is closed; packets that were read before are handled first."""
        if self.keeps and not self._ending:
            self._gone = True
            self.transport = None
        else:
            self._lose()

    def _lose(self) -> None:
        """End the connection: the socket is closed, and no packet is left."""
        self._gone = False
        if self.handler is not None:
            self.handler.lost()
        self.handler = None
        self.uncount()
        self.transport = None

    # -- its client -----------------------------------------------------------------------------

    def expect_packets(self, keep_alive: float) -> None:
        """Set the keep alive in seconds; 0 = no limit."""
        self.keepalive = keep_alive

    def restart_timeout(self, now: float) -> None:
        """Begin the connect timeout anew at ``now``, loop time in seconds."""
        self.opened = now

    def watch(self, see: Callable[[list[Packet]], None]) -> None:
        """Call ``see`` with all received packets before the packets are handled."""
        self.seen += (see,)

    def unwatch(self, see: Callable[[list[Packet]], None]) -> None:
        """Call ``see`` no more."""
        self.seen = tuple(one for one in self.seen if one != see)

    def hand_to(self, handler: Handler) -> None:
        """Give the packets to another handler from now on."""
        self.handler = handler

    def move(self, round_: FlushRound, clock: Clock) -> None:
        """Use the flush round, turns and clock of another account."""
        self.write_buffer.move(round_)
        self._clock = clock
        self._turns = round_.turns

    def inner(self, otherwise: Handler) -> Handler:
        """Return the handler behind the counter, for packets that were counted before."""
        return self.handler or otherwise

    def hold(self, why: int) -> None:
        """Stop reading until :meth:`release` was called for every reason to hold."""
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
            self._turns.wait(self, True, new=not self.decoder.version)
            return
        if self._kept and not self._holds & (KEPT | MOVED):
            kept, self._kept = self._kept, b""
            if why == Hold.STANDSTILL:
                self.data_received(kept)
            else:
                Connection.data_received(self, kept)  # this data was counted when it arrived
            if self._gone and not self.keeps:
                self._lose()
        if not self._holds and self.transport is not None and not self.transport.is_closing():
            self.alive = self._clock.now
            self.transport.resume_reading()

    @property
    def keeps(self) -> bool:
        """Whether data or packets that were read are still to be handled."""
        return bool(self._kept or self._rest or self._again)

    @property
    def holds(self) -> int:
        """Reasons not to read, as bits of `Hold`; 0 = the client is read from."""
        return self._holds

    def expired(self, now: float, connect_timeout: float) -> bool:
        """Return whether the client has been silent for too long."""
        if self._holds & ~Hold.OUTBOUND:
            return False
        if self._holds and self.transport is not None:
            # Nothing is read from the client: a client that takes data is alive.
            unsent = self.transport.get_write_buffer_size()
            if unsent < self._unsent:
                self.alive = now
            self._unsent = unsent
        if not self.decoder.version:
            return now - self.opened > connect_timeout + CLOCK_STEP
        return now > self.silent_until

    @property
    def silent_until(self) -> float:
        """Loop time in seconds until which the client may send nothing; infinite = no keep alive."""
        return self.alive + self.keepalive * 1.5 + CLOCK_STEP if self.keepalive else inf

    def close(self) -> None:
        """Write the pending data and close; a client that does not read is cut off."""
        transport = self.transport
        self._end_reading()
        if transport is None or transport.is_closing():
            return
        if self.write_buffer.clogged:
            transport.abort()
            return
        self.write_buffer.flush()
        if transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(CLOSE_LINGER_S, transport.abort)
        transport.close()
        self.write_buffer.send_by(None)  # with TLS, closing takes until the client has agreed

    def abort(self) -> None:
        """Close at once; the pending data is lost."""
        self._end_reading()
        if self.transport is not None:
            self.transport.abort()

    def _end_reading(self) -> None:
        """Drop all packets and data that were read."""
        self._ending = True
        self._rest, self._again, self._kept = None, None, b""
        if self._gone:
            self._gone = False
            asyncio.get_running_loop().call_soon(self._lose)

    @property
    def silence(self) -> float:
        """Seconds since the client's last bytes arrived, read or not."""
        found = None if self.transport is None else silence(self.transport)
        return asyncio.get_running_loop().time() - self.alive if found is None else found
