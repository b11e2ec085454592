# SPDX-License-Identifier: Apache-2.0
"""Jobs of a client that wait for NATS, run one after the other, and the order of its packets.

A client has a task only while it has jobs. Packets behind a SUBSCRIBE or UNSUBSCRIBE wait until that packet has taken
effect at this gateway. Packets behind a PUBLISH whose packet identifier is being released wait for PUBCOMP. The end of
the connection waits for all these packets. See :mod:`mqtt_nats.transport.packet_order`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.base.errors import ends_task
from mqtt_nats.codec import MqttError, Packet, PingReq, Publish, ReasonCode
from mqtt_nats.delivery.receiver import Receiver
from mqtt_nats.ingress.qos2 import Inbound
from mqtt_nats.sessions.session import State
from mqtt_nats.transport.connection import Connection, Handler, Hold
from mqtt_nats.transport.packet_order import PacketOrder, passes
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout

if TYPE_CHECKING:
    from mqtt_nats.client.account import Account
    from mqtt_nats.client.authentication import Authentication

log = logging.getLogger("mqtt_nats.broker")

JOBS_MOST: Final = 100
"""Waiting jobs (SUBSCRIBE, UNSUBSCRIBE, repairs) of a client; beyond this nothing is read from the client."""

JOBS_LOW: Final = 50


class JobRunner(Receiver):
    """A connection with its jobs and the order of its packets; abstract: `Client` handles the packets."""

    __slots__ = (
        "_idle",
        "_jobs",
        "_order",
        "_task",
        "account",
        "authentication",
    )

    def __init__(self, account: Account, connection: Connection) -> None:
        super().__init__(connection, account.ingress, account.delivery)
        self.account = account
        self.authentication: Authentication | None = None
        """Enhanced authentication; None = CONNECT names no authentication method."""
        self._order: PacketOrder | None = None
        self._idle: bool | None = None
        """Whether the task waits for NATS or JetStream; None = the task has not begun and must not be cancelled:
        its cleanup would not run."""
        self._jobs: deque[Coroutine[Any, Any, None]] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        """True when no further packets are handled: the connection has ended, or DISCONNECT has come."""
        return self.state is State.ENDED or self.sent_disconnect

    @property
    def unserved(self) -> bool:
        """True while packets of the client wait and will still be handled."""
        waits = self._order is not None or self.connection.keeps or (self.sent_disconnect and self.busy)
        return waits and self.alive and not self.taken

    @property
    def ended_by_client(self) -> bool:
        """True when the client itself has ended the connection."""
        return self.sent_disconnect or self.connection.hung_up

    def move(self, account: Account) -> None:
        """Belong to another account from now on."""
        self.account, self.services, self.path = account, account.services, account.services.path
        self.ingress, self.delivery = account.ingress, account.delivery

    # -- implemented by Client ------------------------------------------------------------------

    @abstractmethod
    def packets(self, packets: list[Packet]) -> None:
        """Handle packets, in order."""

    @abstractmethod
    def handle(self, packet: Packet) -> None:
        """Handle a packet other than PUBLISH."""

    @abstractmethod
    def broken(self, error: MqttError) -> None:
        """End the connection: the client violated the protocol, or cannot be served."""

    @abstractmethod
    def fall_silent(self) -> None:
        """Stop the deliveries of the session: no message reaches the client any more."""

    @abstractmethod
    def lost(self, way: Handler | None = None) -> None:
        """End the client, whose socket is closed; ``way`` gets waiting packets."""

    @abstractmethod
    def leave(self) -> None:
        """Forget the client's state in this gateway and leave its session; the last step."""

    @property
    def inbound(self) -> Inbound:
        """QoS 2 publishes of the client; made with the first one, since most clients have none."""
        if self.qos2 is None:
            self.qos2 = Inbound()
        return self.qos2

    # -- packets --------------------------------------------------------------------------------

    def wait(self, packets: list[Packet]) -> None:
        """Queue packets until the packets before them have taken effect; handle at once those that need not wait."""
        self.order.add([one for one in packets if not self._passes(one)])
        for packet in packets:
            if self._passes(packet):
                self.handle(packet)

    def _passes(self, packet: Packet) -> bool:
        """Whether a packet is handled before the waiting packets."""
        if self.state is State.RESUMING:
            return isinstance(packet, PingReq)
        return self.state is State.LIVE and passes(packet)

    def resuming(self) -> None:
        """Read from the client after CONNACK, while its session is resumed: PINGREQ is answered, other packets wait."""
        if self.state is not State.OPENING:
            return
        self.state = State.RESUMING
        for packet in self._order.pings() if self._order is not None else ():
            self.handle(packet)
        self.connection.release(Hold.HANDSHAKE)

    def reuses(self, packet: Publish) -> bool:
        """Whether a PUBLISH at QoS 2 has to wait for the PUBCOMP of the one before it [MQTT-4.3.3-12] (5.0)."""
        if self.qos2 is None or not self.qos2.machine.releasing(packet.packet_id):
            return False
        self.order.reuse(packet.packet_id)
        return True

    def holds_up(self, packet: Packet) -> bool:
        """Whether a packet has to wait, with all packets behind it, or is not handled any more."""
        return self.ended or self.waits or (isinstance(packet, Publish) and packet.qos == 2 and self.reuses(packet))

    def proceed(self) -> None:
        """Handle the waiting packets, unless a packet before them has not taken effect yet."""
        order = self._order
        if order is None or order.requested or self.state is not State.LIVE:
            return
        if order.identifier and self.inbound.machine.releasing(order.identifier):
            return
        self._order = None
        packets = order.take_packets()
        if packets or order.error is not None or order.gone:
            self.connection.handle_again(packets, order.way, order.error)
        if not self.unserved:
            self.account.claims.served(self.hash)

    def outlasts(self, way: Handler | None) -> bool:
        """Whether packets before the end of the connection are still to be handled; the end then waits for them."""
        order = self._order
        if self.taken or not self.services.nats.online.is_set() or (order is not None and order.gone):
            return False
        if self.state is State.OPENING and self.authentication is not None:
            return False
        # No packet waits; a running job goes on without the connection.
        if (order is None or order.empty) and not (self.sent_disconnect and self.busy):
            return False
        self.order.leave(way or self.connection.inner(self))
        self.fall_silent()
        return True

    # -- jobs -----------------------------------------------------------------------------------

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Queue a job, which runs after the client's earlier jobs."""
        if self.state is State.ENDED:
            work.close()
            return
        if self._jobs is None:
            self._jobs = deque()
        self._jobs.append(work)
        if len(self._jobs) > JOBS_MOST:
            self.connection.hold(Hold.JOBS)
        if self._task is None:
            self._task = self.services.tasks.spawn_safe(self._work(), self.client_id or "a client")

    def crowded(self) -> bool:
        """Whether jobs wait behind the running one."""
        return bool(self._jobs)

    @property
    def busy(self) -> bool:
        """True while the client has jobs."""
        return self._task is not None

    @property
    def order(self) -> PacketOrder:
        """Queue of waiting packets; made with the first one, since most clients have none."""
        if self._order is None:
            self._order = PacketOrder(self.connection)
        return self._order

    @property
    def waits(self) -> bool:
        """True while packets of the client wait for a packet before them."""
        return self._order is not None

    def request(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Queue the job of a SUBSCRIBE or UNSUBSCRIBE; packets behind it wait until :meth:`in_force`."""
        self.order.request()
        self.do(self.obey(work))

    async def obey(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the job of the oldest SUBSCRIBE or UNSUBSCRIBE."""
        if self._order is not None:
            self._order.obey()
        try:
            await work()
        finally:
            self.in_force()

    def in_force(self) -> None:
        """Let the packets behind the running request go on: it has taken effect at this gateway."""
        if self._order is not None:
            self._order.took_effect()
            self.proceed()

    async def _work(self) -> None:
        self._idle, jobs = False, self._jobs
        assert jobs is not None
        try:
            while jobs and self.alive:
                try:
                    if not self.services.nats.online.is_set():
                        await self.connected()
                    await jobs.popleft()
                except MqttError as error:
                    self.end_connection(error)
                except (ApiError, RequestTimeout, NoResponders, TimeoutError) as error:
                    self.end_connection(MqttError(str(error), ReasonCode.SERVER_UNAVAILABLE))
                except (Exception, asyncio.CancelledError) as failure:
                    if ends_task(failure):
                        raise failure
                    if self.alive:
                        log.exception("%s: a job failed", self)
                        self.end_connection(MqttError("internal error", ReasonCode.UNSPECIFIED_ERROR))
                if len(jobs) < JOBS_LOW:
                    self.connection.release(Hold.JOBS)
        finally:
            self._task = self._idle = self._jobs = None
            for job in jobs:
                job.close()
            if not self.alive:
                self.leave()
            else:
                self.proceed()

    async def connected(self) -> None:
        """Wait, in a job, until NATS is connected; the end of the client cancels the wait."""
        if not self.services.nats.online.is_set():
            await self.idle(self.services.nats.online.wait())

    async def idle(self, waiting: Coroutine[Any, Any, object]) -> None:
        """Wait for NATS or JetStream; in a job of the client, the end of the client cancels the wait."""
        if self._task is not asyncio.current_task():
            await waiting
            return
        self._idle = True
        try:
            if self._order is not None and self._order.gone:
                self.lost()
            await waiting
        finally:
            self._idle = False
