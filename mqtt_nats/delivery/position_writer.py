# SPDX-License-Identifier: Apache-2.0
"""The position of a durable session, written in batches.

Each write is conditional on the one before it, so that of two gateways that hold a session for theirs one is told.
See docs/internals/rules.md#positions.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending import PendingStore, TooLarge
from mqtt_nats.backbone.pending import sequence as stored_sequence
from mqtt_nats.codec import QuotaExceeded
from mqtt_nats.protocol.ack_tokens import OWED, TAKEN
from mqtt_nats.protocol.position import SessionPosition, Step
from mqtt_nats.sessions.ownership import still_owner
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.positions import Position, expected_block, position_subject
from mqtt_streams.sessions import WRONG_LAST_SEQUENCE

if TYPE_CHECKING:
    from mqtt_nats.backbone.link import NatsConnection
    from mqtt_nats.client.client import Client
    from mqtt_nats.gateway.broker import Broker

log = logging.getLogger("mqtt_nats.broker")

STEPS: Final = 10
"""Times per second at which positions are written."""

FRESH: Final = 0.5
"""Seconds after something was asked in which what it has shown is sure: half of what others wait for this gateway."""

PROOFS: Final = 3
"""Answers that may take longer than that, one after the other; then it is gone on all the same."""

AT_ONCE: Final = 20
"""Positions written at each of them; more where there are so many that each is written once a second."""


class PositionOp(PendingStore):
    """A write of a position."""

    __slots__ = ("keeper",)

    def __init__(self, keeper: PositionWriter) -> None:
        self.keeper = keeper

    def stored(self, ack: bytes) -> None:
        """What depends on it may be done."""
        self.keeper.stored(stored_sequence(ack))

    def failed(self, error: ApiError) -> None:
        """Somebody else has written, or it cannot be stored."""
        self.keeper.failed(error)


class Fresh:
    """When something was asked that shows whose a session is.

    Nobody else sets its consumers for a while, unless this gateway's connection to NATS is lost: others are told then.
    """

    __slots__ = ("_at", "_link", "_wire")

    def __init__(self, link: NatsConnection) -> None:
        self._link = link
        self._wire = link.wire
        self._at = asyncio.get_running_loop().time()

    def __bool__(self) -> bool:
        passed = asyncio.get_running_loop().time() - self._at
        return passed < FRESH and self._wire is not None and self._wire is self._link.wire


class PositionWriter:
    """Writes the position of one session."""

    def __init__(self, client: Client, expected: int) -> None:
        self.client = client
        self.ledger = SessionPosition()
        self.live: set[str] = set()
        """Consumers for which the position speaks."""
        self.taking = False
        """What the shared reader brings is taken."""
        self.clean = False
        """Nothing more is taken or sent."""
        self.perhaps = 0
        """Up to this sequence an earlier connection may have sent what consumers have yet to bring; 0: nothing."""
        self.unsent: list[int] = []
        """What was taken, or was brought by consumers, and was never sent."""
        self.most = -1
        """After this sequence nothing was sent; -1: that is not known."""
        self.strict = False
        """Whoever has written meanwhile is right."""
        self.lost = False
        """Nothing is written any more."""
        self.moved = False
        """Because the session is somebody else's."""
        record = client.record
        assert record is not None
        assert record.v5 is not None
        self._id = record.v5.pos
        self._generation = record.v5.generation
        self._sequence = expected
        self._writing: bytes | None = None
        self._begun: Fresh | None = None
        self._proof: Fresh | None = None
        """Of the last write that was stored."""
        self._soon = False
        self._again = False
        self._waiters: list[asyncio.Future[bool]] = []
        """Those who wait for a write that has yet to begin."""
        self._served: list[asyncio.Future[bool]] = []
        """Those who wait for the one under way."""
        client.broker.keepers.add(self)

    def forget(self, mark: bytes) -> None:
        """What was `TAKEN`, or `OWED`, is complete."""
        if mark.startswith(TAKEN):
            self.ledger.done(int(mark[1:]))
        else:
            self.ledger.free(int(mark[1:]))

    def hurry(self) -> None:
        """Write at the end of this turn of the loop, or as soon as the write that is under way is stored."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self.write)

    def write(self) -> None:
        """Write the position as it is now; nothing while a write is under way, which another one then follows."""
        self._soon = False
        if self.lost:
            return
        if self._writing is not None:
            self._again = True
            return
        self._again = False
        self._served, self._waiters = self._waiters, []
        broker = self.client.broker
        ledger = self.ledger
        side = self.client.durable_side
        if self.taking and broker.live is not None and side is not None:
            ledger.reached = max(ledger.reached, broker.live.reached(side))
        self.look_back()
        reached, pending, released = ledger.begin()
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
            broker.identity,
            self.most if self.clean else -1,
        ).encode()
        self._writing = position
        self._begun = Fresh(broker.link)
        target = b"HPUB %b " % position_subject(self.client.hash).encode()
        try:
            broker.store.put(target, expected_block(self._sequence), position, PositionOp(self))
        except TooLarge as error:
            self.give_up()
            self.client.end(QuotaExceeded(f"its position cannot be stored: {error}"))
        broker.link.kick()

    def look_back(self) -> None:
        """See whether consumers have brought all that an earlier connection may have sent."""
        side = self.client.durable_side
        if self.perhaps and side is not None and side.keeper is self and side.machine.past_all(self.perhaps):
            self.perhaps = 0

    def stored(self, sequence: int) -> None:
        """The write that was under way is stored."""
        self._sequence = sequence
        self._writing = None
        self._proof = self._begun
        side = self.client.durable_side
        machine = side.machine if side is not None and self.client.alive else None
        for step, identifier in self.ledger.stored():
            if machine is None or side is None:
                continue
            if step is Step.RELEASE:
                side.pubrel_stored(identifier, OWED + b"%d" % identifier)
            elif step is Step.CONFIRM:
                machine.confirmed(identifier)
            else:
                machine.freed(identifier)
        self._tell(True)
        if self._again or self._waiters or self.ledger.urgent:
            self.write()

    def failed(self, error: ApiError) -> None:
        """The write was refused."""
        if error.err_code in WRONG_LAST_SEQUENCE:
            self.client.broker.spawn(self._look(), f"position of {self.client.client_id}")
            return
        log.error("%s: its position cannot be stored: %s", self.client, error)
        self.give_up()
        self.client.refused(error)

    async def _look(self) -> None:
        """Somebody has written: we ourselves, before the connection was lost, or another gateway."""
        client = self.client
        written = self._writing
        while not self.lost:
            try:
                found, sequence, _ = await client.broker.positions.load(client.hash)
            except (ApiError, NoResponders, RequestTimeout):
                await asyncio.sleep(0.25)
                continue
            known = found == written or self.strict or await still_owner(client)
            if known or client.taken or not client.alive:
                break
            await client.broker.online.wait()  # nobody could tell
        if self.lost or written is None:
            return
        if found == written:
            self.stored(sequence)
        elif client.alive and not self.strict:
            # An earlier owner, who did not know yet: what it says is older.
            self._sequence = sequence
            target = b"HPUB %b " % position_subject(client.hash).encode()
            client.broker.store.put(target, expected_block(sequence), written, PositionOp(self))
            client.broker.link.kick()
        else:
            self.moved = client.alive or client.taken
            self.give_up()

    def left(self) -> None:
        """What cannot be stored ends the connection; with a session that has moved nothing more is done."""
        if self.moved:
            self.client.taken_over()

    async def flush(self) -> bool:
        """Write, and wait until what there is now is stored; False when that cannot be: see :attr:`moved`."""
        if self.lost:
            return False
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.ledger.dirty = True
        self.write()
        return await waiter

    async def sure(self) -> bool:
        """Whether the session is ours, as a write of a moment ago has shown, or one now; see :meth:`flush`."""
        for _ in range(PROOFS):
            if self._proof:
                break
            if not await self.flush():
                return False
        return not self.lost

    def give_up(self) -> None:
        """Write nothing any more."""
        self.lost = True
        self._writing = None
        self.client.broker.keepers.discard(self)
        self._served += self._waiters
        self._waiters = []
        self._tell(False)

    def _tell(self, done: bool) -> None:
        served, self._served = self._served, []
        for waiter in served:
            if not waiter.done():
                waiter.set_result(done)


async def keep(broker: Broker) -> None:
    """Write what has changed, for as long as the gateway runs: ten times a second, with many sessions less often."""
    turn: list[PositionWriter] = []
    while True:
        await asyncio.sleep(1 / STEPS)
        if not turn:
            turn = [keeper for keeper in broker.keepers if keeper.ledger.dirty]
        count = max(AT_ONCE, len(broker.keepers) // STEPS)
        some, turn = turn[:count], turn[count:]
        for keeper in some:
            if keeper.ledger.dirty:
                keeper.write()
