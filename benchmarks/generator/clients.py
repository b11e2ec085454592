# SPDX-License-Identifier: Apache-2.0
"""MQTT clients of the load generator: non-blocking sockets, one epoll loop, bulk work per read."""

from __future__ import annotations

import errno
import select
import socket
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.generator import answers, packets
from benchmarks.generator.answers import Limits, RefusedError
from benchmarks.generator.answers import LoadError as LoadError
from benchmarks.generator.packets import Batch, DeliveryError, Layout, Verifier

_READ = 256 * 1024
_SAMPLES = 1_000_000
_KEEP_ALIVE = 600  # seconds; nothing is sent to keep a connection alive, a run is shorter


class Connection:
    """Non-blocking socket with the bytes that are not written yet, and the beginning of an incomplete packet."""

    def __init__(self, loop: Loop, sock: socket.socket, name: str) -> None:
        self.loop, self.sock, self.name = loop, sock, name
        self.fd = sock.fileno()
        self.out = bytearray()
        self.rest = b""

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Write now what the socket takes, the rest when it is writable again."""
        if self.out:
            self.out += data
            return
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise LoadError(f"{self.name}: connection lost ({error})") from None
        if sent < len(data):
            self.out += memoryview(data)[sent:]
            self.loop.want_write(self, True)

    def flush(self) -> None:
        """Write on; the socket is writable."""
        out, self.out = self.out, bytearray()
        self.send(out)
        if not self.out:
            self.loop.want_write(self, False)
            self.drained()

    def fill(self) -> int:
        """Read into the loop's buffer behind the unfinished packet; the number of bytes there now."""
        loop, kept = self.loop, len(self.rest)
        view = loop.view
        if kept:
            loop.buffer[:kept] = self.rest
            view = view[kept:]
        try:
            got = self.sock.recv_into(view)
        except BlockingIOError:
            return kept
        except OSError as error:
            raise LoadError(f"{self.name}: connection lost ({error})") from None
        if not got:
            raise LoadError(f"{self.name}: closed by the broker")
        return kept + got

    def keep(self, start: int, end: int) -> None:
        """Keep the unfinished packet ``buffer[start:end]`` for the next read."""
        self.rest = bytes(self.loop.view[start:end]) if start < end else b""

    def drained(self) -> None:
        """Go on after all output is written."""

    @abstractmethod
    def readable(self) -> None:
        """Read from the socket, which has something to read."""


class Loop:
    """Level-triggered epoll over connections that share one read buffer."""

    def __init__(self, largest_packet: int = 0) -> None:
        self.buffer = bytearray(max(_READ, 2 * largest_packet + _READ))
        self.view = memoryview(self.buffer)
        self.epoll = select.epoll()
        self.connections: dict[int, Connection] = {}
        self.ready: set[Publisher] = set()

    def add(self, connection: Connection, *, writing: bool = False) -> None:
        """Watch a connection, or hand its descriptor to a successor."""
        mask = select.EPOLLIN | (select.EPOLLOUT if writing else 0)
        if connection.fd in self.connections:
            self.epoll.modify(connection.fd, mask)
        else:
            self.epoll.register(connection.fd, mask)
        self.connections[connection.fd] = connection

    def want_write(self, connection: Connection, wanted: bool) -> None:
        """Ask for (or no longer for) `Connection.flush` calls."""
        self.epoll.modify(connection.fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def turn(self, timeout: float) -> None:
        """Handle what is ready, waiting at most ``timeout`` seconds (to the microsecond), then let publishers send."""
        if 0 < timeout < 0.005:
            select.select([self.epoll], [], [], timeout)  # epoll itself counts whole milliseconds
            timeout = 0
        for fd, event in self.epoll.poll(timeout):
            connection = self.connections[fd]
            if event & select.EPOLLOUT:
                connection.flush()
                connection = self.connections[fd]
            if event & ~select.EPOLLOUT:
                connection.readable()
        if self.ready:
            ready, self.ready = self.ready, set()
            for publisher in ready:
                publisher.pump()

    def close(self) -> None:
        """DISCONNECT and close every connection."""
        for connection in self.connections.values():
            if not connection.out:
                try:
                    connection.sock.send(b"\xe0\x00")
                except OSError:
                    pass
            connection.sock.close()
        self.connections.clear()
        self.epoll.close()


@dataclass(frozen=True)
class Client:
    """First packets of a client; ``topic_filter`` empty = it does not subscribe.

    ``clean``: in 5.0 also, its session ends with the connection. ``version``: 4 for MQTT 3.1.1, 5 for 5.0.
    """

    client_id: str
    topic_filter: str = ""
    qos: int = 0
    clean: bool = True
    version: int = 4
    user: str | None = None
    password: str = field(default="", repr=False)
    session_expiry: int = 3600  # seconds, in 5.0, of a session that is not clean


class Greeting(Connection):
    """From connect() to CONNACK, or to SUBACK where the client subscribes."""

    def __init__(self, loop: Loop, sock: socket.socket, client: Client) -> None:
        super().__init__(loop, sock, client.client_id)
        self.client = client
        self.done = False
        self.present = False
        self.limits: Limits | None = None
        self.out += self.hello()
        loop.add(self, writing=True)

    def hello(self) -> bytes:
        """Return the bytes that are sent first."""
        client = self.client
        return packets.connect(
            client.client_id,
            clean=client.clean,
            keep_alive=_KEEP_ALIVE,
            version=client.version,
            session_expiry=0 if client.clean else client.session_expiry,
            user=client.user,
            password=client.password,
        )

    def readable(self) -> None:
        end = self.fill()
        start = 0
        while not self.done and (found := answers.packet_at(self.loop.view, start, end)) is not None:
            kind, body, start = found
            try:
                self._handle(kind, body)
            except RefusedError as error:
                raise LoadError(f"{self.name}: {error}") from None
        self.keep(start, end)

    def _handle(self, kind: int, body: bytes) -> None:
        client = self.client
        if self.limits is not None:
            answers.suback(kind, body, client.version, client.qos)
            self.done = True
            return
        self.present, self.limits = answers.connack(kind, body, client.version)
        if 0 < self.limits.keep_alive < _KEEP_ALIVE:
            raise LoadError(f"{self.name}: the broker asks for a keep-alive of {self.limits.keep_alive} s")
        if client.topic_filter:
            self.send(packets.subscribe(client.topic_filter, client.qos, client.version))
        else:
            self.done = True


def connect_all(
    loop: Loop,
    address: tuple[str, int],
    clients: Sequence[Client],
    *,
    timeout: float,
    at_once: int = 100,
    kind: type[Greeting] = Greeting,
) -> list[Greeting]:
    """Connect and subscribe all clients, at most ``at_once`` under way; in the order of ``clients``."""
    deadline = time.monotonic() + timeout
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    family, _, _, _, peer = min(found, key=lambda one: one[0] != socket.AF_INET)  # IPv4 where the name has both
    greetings: list[Greeting] = []
    pending: list[Greeting] = []
    while len(greetings) < len(clients) or pending:
        while len(greetings) < len(clients) and len(pending) < at_once:
            sock = socket.socket(family)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = sock.connect_ex(peer)
            if code not in (0, errno.EINPROGRESS):
                sock.close()
                raise LoadError(f"cannot connect: {errno.errorcode[code]}")
            greetings.append(kind(loop, sock, clients[len(greetings)]))
            pending.append(greetings[-1])
        loop.turn(0.1)
        pending = [each for each in pending if not each.done]
        if time.monotonic() > deadline:
            raise LoadError(f"{len(pending)} clients not connected and subscribed after {timeout:.0f} s")
    return greetings


class Holder(Connection):
    """A client with many subscriptions that nothing is published to; ``left`` counts the SUBACKs that are to come."""

    def __init__(self, greeting: Greeting, filters: Sequence[str], at_once: int) -> None:
        super().__init__(greeting.loop, greeting.sock, greeting.name)
        self._parts = [filters[at : at + at_once] for at in range(0, len(filters), at_once)]
        self._version = greeting.client.version
        self.left = len(self._parts)
        self.loop.add(self)
        self._next()

    def _next(self) -> None:
        if self._parts:
            self.send(packets.subscribe_many(self._parts.pop(0), 0, self._version))

    def readable(self) -> None:
        end = self.fill()
        found = answers.packet_at(self.loop.view, 0, end)
        if found is None:
            self.keep(0, end)
            return
        kind, body, after = found
        if kind != answers.SUBACK or any(code > 2 for code in body[3 if self._version == 5 else 2 :]) or after != end:
            raise LoadError(f"{self.name}: subscriptions refused (packet 0x{kind:02x}: {body[:8].hex(' ')})")
        self.keep(end, end)
        self.left -= 1
        self._next()


class Idle(Connection):
    """A client that expects nothing more."""

    def readable(self) -> None:
        end = self.fill()
        raise LoadError(f"{self.name}: unexpected packet {bytes(self.loop.view[: min(end, 8)]).hex(' ')}")


class Subscriber(Connection):
    """Verifies, acknowledges and counts what arrives on a connection that has subscribed.

    ``samples`` are delivery times in ns of the messages that carry the time at which they were sent. ``done[i]`` counts
    the i-th publisher's completed deliveries: received (QoS 0, 1) or released (QoS 2).
    """

    def __init__(self, greeting: Greeting, verifier: Verifier, samples: list[int]) -> None:
        super().__init__(greeting.loop, greeting.sock, greeting.name)
        self.verifier = verifier
        self.samples = samples
        self.publishers: tuple[Publisher, ...] = ()
        self.done = [0] * len(verifier.expected) if verifier.layout.qos == 2 else verifier.expected
        self._unreleased: dict[bytes, int] = {}
        self.loop.add(self)
        if greeting.rest:
            self.loop.buffer[: len(greeting.rest)] = greeting.rest
            self.handle(len(greeting.rest))

    def read_from(self, publisher: Publisher) -> None:
        """Wake a publisher when messages have arrived."""
        self.publishers += (publisher,)

    def readable(self) -> None:
        end = self.fill()
        now = time.monotonic_ns()
        self.handle(end)
        if self._stamp and len(self.samples) < _SAMPLES:
            self.samples.append(now - self._stamp)

    def handle(self, end: int) -> None:
        """Take what is in the loop's buffer up to ``end``."""
        layout, data = self.verifier.layout, self.loop.buffer
        self._stamp = 0
        if layout.qos == 2:
            start = self._handle_exactly_once(end)
        else:
            count = end // layout.size
            start = count * layout.size
            if count:
                self._stamp = self.stamp(0, count)
                self.verifier.take(data, 0, count)
                if layout.qos:
                    self.send(packets.acks(packets.PUBACK, layout, data, 0, count))
            elif end >= len(layout.head) and (layout.head[0] ^ data[0]) & ~packets.DUP:
                raise DeliveryError(f"{self.name}: unexpected packet {data[: min(end, 8)].hex(' ')}")
        if start < end or self.rest:
            self.keep(start, end)
        self.loop.ready.update(self.publishers)

    def stamp(self, start: int, count: int) -> int:
        """The time in the first of ``count`` messages that has one (ns), 0 if none has."""
        layout = self.verifier.layout
        return packets.stamp_of(layout, self.loop.buffer, start, start + count * layout.size)

    def _handle_exactly_once(self, end: int) -> int:
        """PUBLISH and PUBREL packets in any mixture; where the unfinished packet starts."""
        layout, data, verifier = self.verifier.layout, self.loop.buffer, self.verifier
        size, replies, start, unreleased = layout.size, bytearray(), 0, self._unreleased
        while end - start >= 4:
            if data[start] == packets.PUBREL:
                if data[start + 1] != 2:
                    found = answers.packet_at(data, start, end)
                    if found is None:
                        break
                    if layout.version == 4 or found[1][2:3] >= b"\x80":
                        raise DeliveryError(f"{self.name}: unexpected PUBREL {found[1].hex(' ')}")
                    after = found[2]
                else:
                    after = start + 4
                packet_id = bytes(data[start + 2 : start + 4])
                source = unreleased.pop(packet_id, None)
                if source is None:
                    raise DeliveryError(f"{self.name}: PUBREL for packet id {packet_id.hex()}, which is not in flight")
                self.done[source] += 1
                replies += b"\x70\x02" + packet_id
                start = after
                continue
            if end - start < size:
                if data[start] & ~packets.DUP != layout.head[0]:
                    raise DeliveryError(f"{self.name}: unexpected packet {data[start : start + 4].hex(' ')}")
                break
            self._stamp = self._stamp or packets.stamp_of(layout, data, start, start + size)
            verifier.take(data, start, 1)
            packet_id = bytes(data[start + layout.packet_id : start + layout.packet_id + 2])
            if packet_id in unreleased:
                raise DeliveryError(f"{self.name}: packet id {packet_id.hex()} used again before its PUBREL")
            unreleased[packet_id] = verifier.source_of(data, start)
            replies += b"\x50\x02" + packet_id
            start += size
        if replies:
            self.send(replies)
        return start


class Publisher(Connection):
    """Sends numbered messages: at most ``window`` unacknowledged and ``lag`` not yet completed by all subscribers.

    At QoS 0 messages go out ``lag // 10`` at a time, at QoS 1 and 2 whenever an acknowledgement makes room. The window
    is never above the Receive Maximum of a 5.0 broker.
    """

    def __init__(
        self,
        greeting: Greeting,
        layout: Layout,
        source: int,
        lanes: Sequence[tuple[list[int], int]],
        *,
        window: int,
        lag: int,
        stamp_every: int,
        paced: bool = False,
    ) -> None:
        """``lanes``: `Subscriber.done` and index of each; ``stamp_every``: batches per stamp; ``paced``: see `pump`."""
        super().__init__(greeting.loop, greeting.sock, greeting.name)
        limits = greeting.limits or Limits()
        if layout.qos > limits.maximum_qos or layout.size > limits.packet_size:
            raise LoadError(
                f"{self.name}: the broker takes QoS {limits.maximum_qos}, {limits.packet_size} bytes at most"
            )
        window = min(window, limits.receive_maximum)
        self.layout = layout
        self.lanes = lanes
        self.window, self.lag = window, lag
        self.quantum = max(1, lag // 10)
        self.sent = self.acked = self.received = 0
        self.limit: int | None = None
        self.paced = paced
        self._batch = Batch(layout, source, self.quantum if layout.qos == 0 else min(window, lag))
        self._stamp_every, self._until_stamp = stamp_every, 1
        self._releasing: set[bytes] = set()
        self._lane, self._cleared, self._needed = 0, 0, 0
        self.loop.add(self)

    def drained(self) -> None:
        self.loop.ready.add(self)

    def stop(self) -> None:
        """Send no more messages."""
        self.limit = self.sent

    def pump(self) -> None:
        """Send what the windows allow; a paced publisher leaves it to the caller of :meth:`send_some`."""
        if not self.paced:
            while not self.out and self.send_some(self.quantum) and self.lag > 1:
                pass

    def send_some(self, most: int) -> int:
        """Send up to ``most`` messages as one batch if the windows allow; how many were sent."""
        if self.layout.qos:
            most = min(most, self.window - self.sent + self.acked)
        if self.limit is not None:
            most = min(most, self.limit - self.sent)
        if most < 1 or not self._all_reached(self.sent + most - self.lag):
            return 0
        self._until_stamp -= 1
        stamp = 0
        if not self._until_stamp:
            self._until_stamp = self._stamp_every
            stamp = time.monotonic_ns()
        data = self._batch.fill(self.sent, most, stamp)
        self.send(data)
        count = len(data) // self.layout.size
        self.sent += count
        return count

    def _all_reached(self, needed: int) -> bool:
        """Whether every subscriber has ``needed`` messages; goes on at the one that had not the last time."""
        if needed <= 0:
            return True
        if needed != self._needed:
            self._needed, self._cleared = needed, 0
        lanes, lane = self.lanes, self._lane
        while self._cleared < len(lanes):
            counts, index = lanes[lane]
            if counts[index] < needed:
                self._lane = lane
                return False
            self._cleared += 1
            lane = lane + 1 if lane + 1 < len(lanes) else 0
        return True

    def settled(self) -> bool:
        """Whether all that was sent is acknowledged and received by every subscriber."""
        return (
            not self.out
            and (not self.layout.qos or self.acked == self.sent)
            and all(counts[index] == self.sent for counts, index in self.lanes)
        )

    def readable(self) -> None:
        end = self.fill()
        data = self.loop.buffer
        if self.layout.qos == 0:
            raise LoadError(f"{self.name}: unexpected packet {data[: min(end, 8)].hex(' ')}")
        short = used = end & ~3
        if self.layout.version == 5:
            short, used = answers.shorten(data, end)
        count = short // 4
        if self.layout.qos == 1:
            packets.ack_count(packets.PUBACK, data, count, self.acked)
            self.acked += count
        else:
            self._handle_exactly_once(count)
        self.keep(used, end)
        self.loop.ready.add(self)

    def _handle_exactly_once(self, count: int) -> None:
        data, releases = self.loop.buffer, bytearray()
        for start in range(0, count * 4, 4):
            packet_id = bytes(data[start + 2 : start + 4])
            if data[start] == packets.PUBREC:
                if int.from_bytes(packet_id) != self.received % packets.PID_PERIOD + 1:
                    raise DeliveryError(f"{self.name}: PUBREC {packet_id.hex()} is not for message {self.received}")
                self.received += 1
                self._releasing.add(packet_id)
                releases += b"\x62\x02" + packet_id
            elif data[start] == packets.PUBCOMP and packet_id in self._releasing:
                self._releasing.remove(packet_id)
                self.acked += 1
            else:
                raise DeliveryError(f"{self.name}: unexpected packet {data[start : start + 4].hex(' ')}")
        if releases:
            self.send(releases)
