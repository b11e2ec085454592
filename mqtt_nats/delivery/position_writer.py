# SPDX-License-Identifier: Apache-2.0
"""The position of a durable session, written in batches.

Each write is conditional on the sequence of the write before it. Where two gateways take one session for theirs,
JetStream refuses one of their writes. See docs/internals/delivery.md#positions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import PendingStore, TooLarge
from mqtt_nats.backbone.pending_stores import sequence as stored_sequence
from mqtt_nats.codec import QuotaExceeded
from mqtt_nats.protocol.ack_tokens import OWED
from mqtt_nats.protocol.position import SessionPosition, Step
from mqtt_nats.sessions.record import claimed, name_position
from mqtt_nats.sessions.takeover import still_owner
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.error_codes import WRONG_LAST_SEQUENCE
from mqtt_streams.positions import Position, expected_block, position_subject
from mqtt_streams.sessions import Conflict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver

log = logging.getLogger("mqtt_nats.broker")

WRITE_ROUNDS_PER_S: Final = 10
"""Rounds per second in which changed positions are written."""

POSITIONS_PER_ROUND: Final = 20
"""Positions written in each round; more with many sessions, so that each is written once a second."""


NO_POSITION: Final = 0
"""Sequence of the position of a session for which none was found. One that is stored all the same, by an earlier owner
or for a former session, refuses the first write and is overwritten."""


class PositionOp(PendingStore):
    """The write of one position to JetStream."""

    __slots__ = ("position_writer",)

    def __init__(self, position_writer: PositionWriter) -> None:
        self.position_writer = position_writer

    def stored(self, ack: bytes) -> None:
        """Do the steps that depend on the stored position."""
        self.position_writer.stored(stored_sequence(ack))

    def waits(self) -> bool:
        """Return True: the session goes on, and its steps that depend on the position wait."""
        return True

    def failed(self, error: ApiError) -> None:
        """Handle a refusal: another connection has written the position, or JetStream cannot store it."""
        self.position_writer.failed(error)


class PositionWriter:
    """The writer of one durable session's position."""

    def __init__(self, client: Receiver, expected: int) -> None:
        self.client = client
        self.ledger = SessionPosition(client.delivery.writers.changed)
        self.live: set[str] = set()
        """Names of the consumers that the position replaces."""
        self.present: set[str] = set()
        """Names of those that may exist, in a session whose consumers are removed."""
        self.clean = False
        """Whether the connection has ended in order: it takes and sends no further message."""
        self.perhaps = 0
        """Stream sequence up to which the previous owner may have sent messages (they are sent with DUP); 0 = none."""
        self.unsent: list[int] = []
        """Stream sequences that were taken and never sent to the client."""
        self.most = -1
        """Stream sequence after which no message was sent to the client; -1 = not known."""
        self.strict = False
        """Whether a conflicting position stands; False = it is overwritten while this connection owns the session."""
        self.lost = False
        """Whether this writer has stopped for good."""
        self.moved = False
        """Whether it has stopped because the session has another owner."""
        _, v5 = claimed(client.record)
        self._id = v5.pos
        self._generation = v5.generation
        self._sequence = expected
        self._writing: bytes | None = None
        self._soon = False
        self._again = False
        self._waiters: list[asyncio.Future[bool]] = []
        """Futures of the callers of `flush` whose write has yet to begin."""
        self._served: list[asyncio.Future[bool]] = []
        """Futures of the callers of `flush` whose write is under way."""
        client.delivery.writers.add(self)

    def restore(self, position: Position) -> None:
        """Continue a position that is limited to the present stream; one that conflicts stands until `end_restore`."""
        self.ledger.restore(
            position.reached, dict(position.pending), dict(position.released), dict(position.identifiers)
        )
        self.strict = True
        self.perhaps = position.perhaps
        record, v5 = claimed(self.client.record)
        # A subscription that the record does not name was not granted: its gateway died before.
        known = {*(one.durable_name for one in record.cons.values()), *(one.name for one in v5.draining)}
        self.live = known.intersection(position.live)
        self.present = known.intersection(position.present)
        self.clean, self.unsent, self.most = position.clean, position.unsent, position.most

    def end_restore(self) -> None:
        """Overwrite a conflicting position from now on: the session is this connection's."""
        self.strict = False

    def go_on(self) -> None:
        """Remove from the position what the orderly end of a connection has noted there: the session goes on."""
        self.clean, self.unsent = False, []

    def expect_consumers(self, names: Iterable[str]) -> None:
        """Note that consumers may exist that the position replaces: their gateway may die before it removes them."""
        self.present.update(names)
        self.ledger.change()

    def miss_consumers(self, names: Iterable[str]) -> None:
        """Note that consumers that the position replaces do not exist."""
        self.present.difference_update(names)
        self.ledger.change()

    def forget_consumers(self, names: Iterable[str]) -> None:
        """Forget the deleted consumers of ended subscriptions: the position replaces them no more."""
        self.live.difference_update(names)
        self.miss_consumers(names)

    def confirm_sent(self) -> None:
        """Note that every message that the previous owner may have sent has come."""
        self.perhaps = 0

    def end_in_order(self, unsent: list[int], most: int) -> None:
        """Note that the connection has ended in order; a conflicting position stands.

        Args:
            unsent: stream sequences that were taken and never sent.
            most: stream sequence after which no message was sent; -1 = not known.
        """
        self.clean = self.strict = True
        self.unsent, self.most = unsent, most

    def hurry(self) -> None:
        """Write in the next turn of the event loop, or as soon as the write under way is stored."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self.write)

    def write(self) -> None:
        """Write the present position; while a write is under way, note that another write has to follow it."""
        self._soon = False
        if self.lost:
            return
        if self._writing is not None:
            self._again = True
            return
        self._again = False
        self._served, self._waiters = self._waiters, []
        services = self.client.services
        ledger = self.ledger
        side = self.client.durable_side
        if side is not None and side.live and side.position_writer is self:
            ledger.reach(self.client.delivery.feed.reached(side))
        self.look_back()
        reached, pending, released, identifiers = ledger.begin()
        position = Position(
            self._id,
            self._generation,
            sorted(self.live),
            self.clean,
            reached,
            pending,
            released,
            self.perhaps,
            self.unsent,
            services.identity.id,
            self.most if self.clean else -1,
            sorted(self.present),
            identifiers,
        ).encode()
        self._writing = position
        target = b"HPUB %b " % position_subject(self.client.hash).encode()
        try:
            services.nats.store.put(target, expected_block(self._sequence), position, PositionOp(self))
        except TooLarge as error:
            self.give_up()
            self.client.end_connection(QuotaExceeded(f"the position of the session cannot be stored: {error}"))
        services.nats.link.kick()

    def look_back(self) -> None:
        """Set `perhaps` to 0 once readers have brought every message up to it."""
        side = self.client.durable_side
        if self.perhaps and side is not None and side.position_writer is self and side.machine.past_all(self.perhaps):
            self.confirm_sent()

    def stored(self, sequence: int) -> None:
        """Record that the write under way is stored, and do the steps that waited for it."""
        self._sequence = sequence
        self._writing = None
        side = self.client.durable_side
        machine = side.machine if side is not None and self.client.alive else None
        for step, identifier in self.ledger.stored():
            if machine is None or side is None:
                continue
            if step is Step.RELEASE:
                side.pubrel_stored(identifier, OWED + b"%d" % identifier)
            elif step is Step.CONFIRM:
                machine.confirmed(identifier)
            elif step is Step.FREE:
                machine.free_packet_id(identifier)
            elif step is Step.ALLOCATED:
                machine.allocation_stored(identifier)
            else:
                machine.allocation_removed(identifier)
        self._tell(True)
        if self._again or self._waiters or self.ledger.urgent:
            self.write()

    def failed(self, error: ApiError) -> None:
        """Handle a refused write: find out who wrote meanwhile, or end the connection."""
        if error.err_code in WRONG_LAST_SEQUENCE:
            self.client.services.tasks.spawn(self._look(), f"position of {self.client.client_id}")
            return
        log.error("%s: the position of the session cannot be stored: %s", self.client, error)
        self.give_up()
        self.client.refused(error)

    async def _look(self) -> None:
        """Find out who wrote the stored position: this writer, before NATS was lost, or another connection."""
        client = self.client
        written = self._writing
        while not self.lost:
            try:
                found, sequence, _ = await client.services.streams.positions.load(client.hash)
            except (ApiError, NoResponders, RequestTimeout):
                await asyncio.sleep(0.25)
                continue
            known = found == written or self.strict or await still_owner(client)
            if known or client.taken or not client.alive:
                break
            await client.services.nats.online.wait()  # the owner is not known: the record could not be read
        if self.lost or written is None:
            return
        if found == written:
            self.stored(sequence)
        elif client.alive and not self.strict:
            # An earlier owner wrote it before it knew that the session had moved: its position is the older one.
            self._sequence = sequence
            target = b"HPUB %b " % position_subject(client.hash).encode()
            client.path.store.put(target, expected_block(sequence), written, PositionOp(self))
            client.path.link.kick()
        else:
            self.moved = client.alive or client.taken
            self.give_up()

    def end_if_moved(self) -> None:
        """End the connection as taken over when the session has moved; other failures have ended it already."""
        if self.moved:
            self.client.taken_over()

    async def flush(self) -> bool:
        """Write the position, and wait until it is stored; False when it cannot be stored: see :attr:`moved`."""
        return await self.begin_flush()

    def begin_flush(self) -> asyncio.Future[bool]:
        """Write the position now; return a future with the result of :meth:`flush`."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self.lost:
            waiter.set_result(False)
            return waiter
        self._waiters.append(waiter)
        self.ledger.change()
        self.write()
        return waiter

    def give_up(self) -> None:
        """Stop this writer for good; waiting callers get False."""
        self.lost = True
        self._writing = None
        self.client.delivery.writers.discard(self)
        self._served += self._waiters
        self._waiters = []
        self._tell(False)

    def _tell(self, done: bool) -> None:
        served, self._served = self._served, []
        for waiter in served:
            if not waiter.done():
                waiter.set_result(done)


async def begin_position(client: Receiver, side: DurableDelivery) -> None:
    """Give a session its first position: it has nothing but packet identifiers that are allocated to messages."""
    try:
        await name_position(client)
    except Conflict:
        client.taken_over()
        return
    except ApiError as error:
        client.refused(error)
        return
    if client.durable_side is not side or not client.alive:
        return
    if side.position_writer is None:
        side.store_position_with(PositionWriter(client, NO_POSITION))
    assert side.position_writer is not None
    known = side.position_writer.ledger.identifiers
    for sequence, identifier in side.machine.identifiers.allocated.items():
        if sequence not in known:
            side.allocate(sequence, identifier)


class PositionWriters:
    """The writers of one account."""

    def __init__(self) -> None:
        self._all: dict[SessionPosition, PositionWriter] = {}
        self._due: dict[SessionPosition, None] = {}
        """Changed positions, in the order in which they are written."""
        self.changed: Callable[[SessionPosition], None] = self._change
        """Called when a position changes; one object for all, since a newly bound method takes memory for each."""

    def add(self, writer: PositionWriter) -> None:
        """Add a writer that begins."""
        self._all[writer.ledger] = writer

    def discard(self, writer: PositionWriter) -> None:
        """Remove a writer that has stopped."""
        self._all.pop(writer.ledger, None)
        self._due.pop(writer.ledger, None)

    def _change(self, position: SessionPosition) -> None:
        if position in self._all:
            self._due[position] = None

    def following(self) -> list[PositionWriter]:
        """Take the next writers: so many that each changed position is written within about a second."""
        some = list(islice(self._due, max(POSITIONS_PER_ROUND, len(self._all) // WRITE_ROUNDS_PER_S)))
        for position in some:
            del self._due[position]
        return [self._all[position] for position in some if position.dirty]


async def write_changed_positions(writers: PositionWriters) -> None:
    """Write changed positions for as long as the gateway runs: ten times a second, with many sessions less often."""
    while True:
        await asyncio.sleep(1 / WRITE_ROUNDS_PER_S)
        for writer in writers.following():
            writer.write()
