# SPDX-License-Identifier: Apache-2.0
"""Identity of ``$MQTT_msgs``: a stream that was created anew, or restored from a backup, and the sessions in it.

Other messages have the known sequences then, and packet identifiers follow from sequences. See
docs/internals/sessions.md#replaced-streams.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.protocol.durable_sender import ID_SPACE
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.generations import GenerationStore, Lower
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import V5

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.gateway.broker import Broker

log = logging.getLogger("mqtt_nats.broker")

CATCH_UP: Final = 2.0
"""Seconds after which a new leader of the stream must have all messages that the former leader had."""

ADVISORIES: Final = f"$JS.EVENT.ADVISORY.STREAM.*.{MESSAGES}".encode()


class StreamIdentity:
    """The identity of the ``$MQTT_msgs`` that the gateway knows."""

    def __init__(self, broker: Broker) -> None:
        self.id = ""
        """Id of the stream's mark; empty until the first check."""
        self.floor = 0
        """Stream sequence up to which the messages are those of the stream before; 0 = none."""
        self._broker = broker
        self._store = GenerationStore(broker.inbox, natstime.elapsed)
        broker.reconnect.subscribe(ADVISORIES, self._advised)
        broker.reconnect.register(Phase.REQUESTS, self._begin_look)

    def _advised(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        self._begin_look()

    def _begin_look(self) -> None:
        self._broker.spawn(self._look(), "generation")

    async def _look(self) -> None:
        try:
            await self.check()
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("stream %s: %s", MESSAGES, error)

    async def check(self) -> None:
        """Check whether the stream was replaced; end the connections of durable sessions that count in the former one.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        broker = self._broker
        try:
            mark = await self._store.look(broker.new_nuid())
        except Lower as error:
            log.debug("%s", error)
            await asyncio.sleep(CATCH_UP)
            mark = await self._store.look(broker.new_nuid(), error.last)
        if mark is None:
            return
        natstime.learn(*self._store.heard)
        if mark.id == self.id:
            return
        known, self.id, self.floor = self.id, mark.id, mark.floor
        if not known:
            return
        if broker.live is not None:
            broker.live.reader.begin_anew()
        log.error("stream %s was replaced: its messages up to sequence %d are older ones", MESSAGES, mark.floor)
        for client in list(broker.clients.values()):
            v5 = client.record.v5 if client.record is not None else None
            if client.durable_side is None and v5 is not None:
                v5.count_anew(mark.floor)
            elif v5 is not None and v5.generation != mark.id:
                client.end(MqttError("stream $MQTT_msgs was replaced", ReasonCode.SERVER_BUSY))


def adopt(client: Client, side: DurableDelivery) -> None:
    """Continue a session in the present stream: its own, or the one that has replaced it."""
    generation = client.broker.generation
    assert client.record is not None
    v5 = client.record.v5
    assert v5 is not None
    if v5.generation != generation.id and generation.id:
        if v5.generation:
            log.warning("%s: its session continues with a new stream %s", client, MESSAGES)
            side.replace_stream(generation.floor)
            if 2 in client.record.subs.values() or v5.draining or v5.was or v5.shared:
                v5.suspect_from(generation.floor + 1)
            v5.count_anew(generation.floor)
        v5.count_in(generation.id)
        side.change_record()
    if v5.fresh:
        side.machine.replaced(v5.fresh - 1)


def settle(v5: V5, last: int) -> None:
    """End the suspicion of identifiers once sequence ``last`` shows that all were used in the present stream."""
    if v5.fresh and last >= v5.fresh + ID_SPACE:
        v5.suspect_from(0)
