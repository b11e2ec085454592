# SPDX-License-Identifier: Apache-2.0
"""Handover of the positions of sessions whose connection has ended.

The next owner of such a session, in this gateway or in another, waits for the final position: it says which messages
were sent. See docs/internals/delivery.md#positions.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import all_done, parts
from mqtt_nats.backbone.pending_stores import IgnoredStore
from mqtt_nats.delivery.dormant_consumers import first_incomplete, set_consumers
from mqtt_nats.delivery.position_recovery import end_shared_delivery
from mqtt_nats.delivery.states import DeliveryEvent
from mqtt_nats.protocol.durable_sender import SEQUENCE_EVER
from mqtt_nats.sessions.pubrel_consumer import ATTACH_POLL_S
from mqtt_nats.sessions.record import claimed
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import delete_consumer
from mqtt_streams.gateway_subjects import LEFT
from mqtt_streams.hashing import name_hash
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import pubrel_block, pubrel_subject
from mqtt_streams.sessions import PoisonedRecord

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.position_writer import PositionWriter
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.sessions.services import Services

log = logging.getLogger("mqtt_nats.broker")

FAREWELL: Final = 2.0
"""Seconds for which a session waits until its previous connection in this gateway has handed the position over."""

CONSUMERS_SET_AT_ONCE: Final = 64
"""Sessions whose consumers are set at the same time; the bound keeps the answers of nats-server fast."""

UNSENT_NAMED_MOST: Final = 15_000
"""Most unsent messages that a position names: more than wait for a session after its handover to the shared reader.

A message that is not named has DUP when it comes again, and is sent without regard to the window."""

ELSEWHERE: Final = 1.0
"""Seconds for which a session waits for the handover by another gateway, which may stand still."""


class PositionHandover:
    """Sessions of one gateway whose positions are being handed over."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Handovers that are under way, by the hash of the client id."""
        self._subjects: set[bytes] = set()
        """Subjects of this gateway: one for each id that it has had."""
        self.turns = asyncio.Semaphore(CONSUMERS_SET_AT_ONCE)
        self.named()

    def named(self) -> None:
        """Subscribe for a new id of the gateway; positions that name a former id stay this gateway's."""
        subject = (LEFT + self._services.identity.id).encode()
        self._subjects.add(subject)
        self._services.nats.reconnect.subscribe(subject, self._asked)

    def add(self, client_hash: str, task: asyncio.Task[None]) -> None:
        """Register the handover of a session; the gateway does not end before `task` has."""
        self._tasks[client_hash] = self._services.tasks.await_at_end(task)

        def forget(task: asyncio.Task[None]) -> None:
            if self._tasks.get(client_hash) is task:
                del self._tasks[client_hash]

        task.add_done_callback(forget)

    async def over(self, client_hash: str) -> None:
        """Wait until this gateway has handed a session over, at most `FAREWELL` seconds."""
        task = self._tasks.get(client_hash)
        if task is not None:
            await asyncio.wait([task], timeout=FAREWELL)

    async def elsewhere(self, name: str, gateway: str) -> bool:
        """Wait until another gateway has handed a session over; False when it does not answer, or is this gateway.

        Args:
            name: of the session's client, as `registered_as` has it.
            gateway: id of the other gateway.
        """
        subject = LEFT + gateway
        if not (gateway.isascii() and gateway.isalnum()) or subject.encode() in self._subjects:
            return False
        try:
            await self._services.nats.inbox.request(subject, name.encode(), timeout=ELSEWHERE)
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("gateway %s has not released the session of %r: %s", gateway, name, error)
            return False
        return True

    def _asked(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if reply:
            name = payload.decode("utf-8", "replace")
            self._services.tasks.spawn(self._answer(reply, name), f"end of the session of {name}")

    async def _answer(self, reply: bytes, name: str) -> None:
        services = self._services
        client_hash = name[1:] if name[:1] == "\0" else name_hash(name)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ELSEWHERE
        while loop.time() < deadline:
            if client_hash in self._tasks:
                await self.over(client_hash)
            elif name not in services.registry.clients:
                break
            else:  # the takeover signal is still on its way to this gateway
                await asyncio.sleep(ATTACH_POLL_S)
        services.nats.link.out.append(b"PUB %b 0\r\n\r\n" % reply)
        services.nats.link.kick()


def leave_position(client: Receiver, side: DurableDelivery) -> None:
    """Hand the session's position over after the end of its connection."""
    services = client.services
    position_writer = side.position_writer
    end_shared_delivery(side)
    client.delivery.feed.forget(client)
    side.change(DeliveryEvent.ENDED)
    if position_writer is None or position_writer.lost:
        return
    machine = side.machine
    most = max(machine.most, position_writer.ledger.reached) if machine.begun else machine.most
    position_writer.end_in_order(sorted(machine.unsent())[:UNSENT_NAMED_MOST], most if most < SEQUENCE_EVER else -1)
    kept = [one for one in side.bindings.values() if not one.removed]
    consumers = [(one.consumer.durable_name, one.source.start) for one in kept]
    # Begun at once: in the task, a write of changed positions might come before it.
    work = _farewell(client, position_writer, consumers, position_writer.begin_flush())
    client.delivery.handover.add(client.hash, services.tasks.spawn(work, f"position of {client.client_id}"))


async def _farewell(
    client: Receiver, position_writer: PositionWriter, consumers: list[tuple[str, int]], flushed: asyncio.Future[bool]
) -> None:
    try:
        if await flushed and not client.taken:
            async with client.delivery.handover.turns:
                await _for_listener(client, position_writer, consumers)
    except (ApiError, NoResponders, RequestTimeout, PoisonedRecord) as error:
        log.debug("%s: its consumers keep their positions: %s", client, error)
    finally:
        position_writer.give_up()


async def _for_listener(client: Receiver, position_writer: PositionWriter, consumers: list[tuple[str, int]]) -> None:
    """Store PUBRELs and set consumers for nats-server's MQTT listener, which does not know positions.

    Consumers that are left of a session that needs none are deleted.

    Args:
        consumers: names of the consumers, each with the first stream sequence of its subscription.
    """
    services, inbox = client.services, client.services.nats.inbox
    consumerless = claimed(client.record)[1].consumerless
    ledger = position_writer.ledger
    released = {} if consumerless else ledger.released
    if not (released or consumers) or not await _is_ours(client):
        return
    for identifier, sequence in released.items():
        target = b"HPUB %b " % pubrel_subject(client.hash).encode()
        services.nats.store.put(target, pubrel_block(identifier, sequence), b"", IgnoredStore())
    services.nats.link.kick()
    if consumerless:
        for some in parts(consumers):
            await all_done(delete_consumer(inbox, MESSAGES, name) for name, _ in some)
            position_writer.miss_consumers(name for name, _ in some)
        if consumers:
            await position_writer.flush()
    elif client.delivery.resets:
        for some in parts(consumers):
            await set_consumers(inbox, some, first_incomplete(ledger))


async def _is_ours(client: Receiver) -> bool:
    """Whether no other connection has claimed the session meanwhile: its consumers show another position then."""
    found = await client.services.streams.sessions.load(client.hash, client.client_id)
    return found is not None and found[1] == client.epoch
