# SPDX-License-Identifier: Apache-2.0
"""QoS 2 messages that a durable session's client had half-way when its connection ended.

While they are pending they come again, however often. Retention may remove them before the client does: JetStream then
takes them out of what is pending, and nothing tells that they were there, but the client still knows their identifiers.
So what was half-way is noted when the connection ends. Why: docs/internals/rules.md#suspect-identifiers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mqtt_nats.backbone.pending import IgnoredStore
from mqtt_nats.protocol.durable_sender import packet_id
from mqtt_nats.protocol.unsequenced import retained_id
from mqtt_streams import stored
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.shared import HalfWay, halfway_subject

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.protocol.durable_sender import DurableSender

log = logging.getLogger("mqtt_nats.broker")


def note(client: Client, side: DurableDelivery) -> None:
    """The connection has ended: store what its client may know and has not had whole."""
    machine = side.machine
    known = [delivery for delivery in machine.queued if delivery.dup]
    known += machine.inflight.values()
    # Of a message of a group the assignment is the note; what is retained has nothing to acknowledge.
    sequences = sorted({one.sequence for one in known if one.qos == 2 and (one.sequence > 0 or not one.reply)})
    broker = client.broker
    if sequences:
        target = b"HPUB %b " % halfway_subject(client.hash).encode()
        broker.store.put(target, b"NATS/1.0\r\n\r\n", b",".join(b"%d" % one for one in sequences), IgnoredStore())
    elif side.noted:
        broker.drop_assignment(b"%d" % side.noted, IgnoredStore())
    else:
        return
    broker.link.kick()


async def gone(client: Client, side: DurableDelivery, found: HalfWay | None) -> list[int]:
    """The identifiers of what was half-way and does not come again; the machine uses none before the client lets it go.

    Called when everything that is pending has come.
    """
    if found is None:
        return []
    side.noted = found.seq
    if side.replaced is not None:  # every identifier is looked at
        return []
    inbox = client.broker.inbox
    # What is still there, and not pending, is complete: the note is an old one.
    lost = [
        one
        for one in missing(side.machine, [one for one in found.sequences if one > 0])
        if await stored.get_sequence(inbox, MESSAGES, one) is None
    ]
    if lost:
        log.warning("%s: %d messages that it had half-way were removed from the stream", client, len(lost))
    for sequence in lost:
        side.machine.suspect(sequence, sequence)
    replaced = [-one for one in found.sequences if one < 0 and not await _comes(client, -one)]
    taken = {delivery.id for delivery in side.machine.queued if delivery.dup} | side.machine.releases.keys()
    others = {retained_id(sequence) for sequence in replaced} - taken
    return [packet_id(sequence) for sequence in lost] + sorted(others)


async def _comes(client: Client, sequence: int) -> bool:
    """Whether a retained message is sent again: it is what is retained still, and its replay goes on."""
    record = client.record
    if record is None or record.v5 is None or not any(cursor <= sequence for cursor in record.v5.replay.values()):
        return False
    return await stored.get_sequence(client.broker.inbox, RETAINED, sequence) is not None


def missing(machine: DurableSender, sequences: list[int]) -> list[int]:
    """Those of which the client may still know the identifier, and nothing else has it.

    What was sent under the identifier later has it now: the client had let it go before.
    """
    come = {delivery.sequence for delivery in machine.queued}
    taken = {delivery.id for delivery in machine.queued if delivery.dup} | machine.releases.keys()
    return [one for one in sequences if one not in come and packet_id(one) not in taken]
