# SPDX-License-Identifier: Apache-2.0
"""Retained messages for a new subscription.

They are read page by page, as fast as the client takes them. Until they are sent, the subscription's new
messages wait, so that the last message a client gets on a topic is the newest. To a durable session those
at QoS 1 and 2 are sent under identifiers derived from their own sequence, and a cursor in the session record
tells the next gateway where to go on.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.broker.record import save_record
from mqtt_nats.pubsub.message import Message, Stored
from mqtt_nats.pubsub.table import Gate
from mqtt_nats.session.durable import retained_id
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.retained import RetainedMessage
from mqtt_streams.sessions import Conflict
from mqtt_streams.subjects import wire_topic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mqtt_nats.broker.client import Client
    from mqtt_nats.session.delivery import Source

log = logging.getLogger("mqtt_nats.broker")

# Few enough to be sent at once, together with SUBACK.
INLINE: Final = 64

# How long a replay waits before it looks again whether the client has room (seconds).
ROOM_STEP: Final = 0.002

# New messages kept back per subscription while retained ones are sent (bytes).
GATE_BYTES: Final = 4 * 1024 * 1024


class Replay:
    """The retained messages of one NATS subject of one subscription."""

    def __init__(self, client: Client, topic_filter: str, key: str, subject: str, qos: int, start: int = 0) -> None:
        self.client = client
        self.filter = topic_filter
        self.key = key
        """Key of the consumer in the session record."""
        self.qos = qos
        self.again = start > 0
        """A replay that an earlier connection had begun: the client may have some of the messages."""
        self.page: list[RetainedMessage] = []
        self.complete = False
        """The first page is all there is."""
        self.cursor = start
        self._literal = "" if "*" in subject or ">" in subject else subject
        self._pages: AsyncIterator[list[RetainedMessage]] = client.broker.retained.matching(subject, start)

    async def first_page(self) -> None:
        """Read the first page.

        Raises:
            ApiError, NoResponders, RequestTimeout: the stream does not answer.
        """
        if self._literal:
            message = await self.client.broker.retained.get(self._literal)
            self.page = [] if message is None or message.seq < self.cursor else [message]
            self.complete = True
            return
        page = await anext(self._pages, None)
        if page is None:
            self.complete = True
            return
        self.page = page
        if len(page) <= INLINE:
            following = await anext(self._pages, None)
            if following is None:
                self.complete = True
            else:
                self.page = page + following

    @property
    def source(self) -> Source | None:
        """The consumer whose new messages wait for this replay."""
        side = self.client.durable_side
        record = self.client.record
        if side is None or record is None or self.key not in record.cons:
            return None
        return side.attachments[record.cons[self.key].durable_name].source

    @property
    def stored(self) -> bool:
        """True when the session record has to know how far the replay is."""
        return self.client.durable_side is not None and self.qos > 0

    def send(self, message: RetainedMessage) -> None:
        """Send one retained message."""
        topic = wire_topic(message.subject.encode())
        if topic is None:
            return
        client = self.client
        encoded = topic.encode()
        key = len(encoded).to_bytes(2, "big") + encoded
        qos = min(message.qos, self.qos)
        side = client.durable_side
        source = self.source
        if qos and side is not None and source is not None:
            identifier = retained_id(message.seq)
            body = Stored(message.subject, key, message.payload, message.qos, identifier, retain=True)
            side.machine.replay(source, message.seq, qos, body, self.again)
            return
        found = Message(key, message.payload, qos, retain=True)
        if qos:
            client.take(found, qos)
        else:
            client.outlet.write(found.zero())

    def finish(self) -> None:
        """Everything is written: let the new messages go."""
        source = self.source
        side = self.client.durable_side
        if source is not None and side is not None:
            side.machine.release_held(source)

    async def room(self) -> bool:
        """Wait until the client can take more; False when it is gone."""
        client = self.client
        while client.alive:
            regular = client.regular_side
            side = client.durable_side
            waiting = len(regular.queue) if regular is not None else side.machine.replaying if side is not None else 0
            if not client.outlet.clogged and not waiting:
                return True
            await asyncio.sleep(ROOM_STEP)
        return False

    async def run(self) -> None:
        """Send page after page."""
        client = self.client
        try:
            while self.page:
                for message in self.page:
                    if not await self.room():
                        return
                    self.send(message)
                self.cursor = self.page[-1].seq + 1
                if self.stored:
                    client.do(self._note(self.cursor))
                self.page = [] if self.complete else await anext(self._pages, [])
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.error(
                "client %r: the retained messages of %r were not all sent: %s", client.client_id, self.filter, error
            )
        if self.stored:
            client.do(self._note(None))

    async def _note(self, cursor: int | None) -> None:
        """Write the cursor once everything before it is acknowledged; None = the replay is complete."""
        side = self.client.durable_side
        record = self.client.record
        assert side is not None
        assert record is not None
        assert record.v5 is not None
        while side.machine.retained_inflight:
            if not self.client.alive:
                return
            await asyncio.sleep(ROOM_STEP)
        if self.key not in record.cons:
            return
        if cursor is None:
            if record.v5.replay.pop(self.key, None) is None:
                return
        else:
            record.v5.replay[self.key] = cursor
        try:
            await save_record(self.client, self.client.epoch)
        except Conflict:
            self.client.taken_over()


async def prepare(client: Client, replays: list[Replay]) -> None:
    """Note in the session record which replays begin, before the first of their messages is sent.

    Raises:
        Conflict: the session belongs to somebody else.
    """
    record = client.record
    begun = [
        replay
        for replay in replays
        if replay.stored and any(message.qos for message in replay.page) and not replay.again
    ]
    if begun and record is not None and record.v5 is not None:
        for replay in begun:
            record.v5.replay[replay.key] = 1
        await save_record(client, client.epoch)


def start_replays(client: Client, replays: list[Replay]) -> None:
    """Send what fits at once, and the rest as the client takes it."""
    gated: dict[str, list[Replay]] = {}
    for replay in replays:
        if replay.complete and not (replay.stored and any(message.qos for message in replay.page)):
            for message in replay.page:
                replay.send(message)
            replay.finish()
        else:
            gated.setdefault(replay.filter, []).append(replay)
    for topic_filter, group in gated.items():
        found = client.broker.table.filters.get(topic_filter)
        if found is None or found not in client.filters:
            continue
        if client.gates is None:
            client.gates = {}
        client.gates[found] = Gate(GATE_BYTES)
        client.broker.spawn(_run(client, topic_filter, group), f"retained messages for {client.client_id}")
    if gated:
        client.broker.table.touch()


async def _run(client: Client, topic_filter: str, group: list[Replay]) -> None:
    for replay in group:
        await replay.run()
    found = client.broker.table.filters.get(topic_filter)
    gate = client.gates.pop(found, None) if client.gates and found is not None else None
    if gate is not None and client.alive:
        client.broker.table.touch()
        for message, qos in gate.waiting:
            client.deliver(message, qos)
    for replay in group:
        replay.finish()
