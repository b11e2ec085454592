# SPDX-License-Identifier: Apache-2.0
"""Note of the QoS 2 messages that were in flight to a durable session's client when its connection ended.

Pending messages come again on each resume. When retention removes one of them, JetStream takes it out of the pending
messages without a trace, but the client still knows its packet identifier. So the messages in flight are noted when
the connection ends. Why: docs/internals/protocol.md#suspect-identifiers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mqtt_nats.backbone.pending_stores import IgnoredStore
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
    """Store the sequences of QoS 2 messages that the client may know and has not completed, at the connection's end."""
    machine = side.machine
    known = [delivery for delivery in machine.queued if delivery.dup]
    known += machine.inflight.values()
    # A message of a shared subscription has its assignment as a note. A retained message has no `reply`.
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
    """Return the packet identifiers of noted messages that do not come again: the client has to give them up first.

    Called when all pending messages have come again.
    """
    if found is None:
        return []
    side.find_note(found.seq)
    if side.replaced is not None:  # every identifier is suspect
        return []
    inbox = client.broker.inbox
    # A message that is in the stream and not pending is complete: the note is an old one.
    lost = [
        one
        for one in missing(side.machine, [one for one in found.sequences if one > 0])
        if await stored.get_sequence(inbox, MESSAGES, one) is None
    ]
    if lost:
        log.warning("%s: %d messages in flight were removed from the stream", client, len(lost))
    for sequence in lost:
        side.machine.suspect(sequence, sequence)
    replaced = [-one for one in found.sequences if one < 0 and not await _comes(client, -one)]
    taken = {delivery.id for delivery in side.machine.queued if delivery.dup} | side.machine.releases.keys()
    others = {retained_id(sequence) for sequence in replaced} - taken
    return [packet_id(sequence) for sequence in lost] + sorted(others)


async def _comes(client: Client, sequence: int) -> bool:
    """Whether a retained message is sent again: it is still retained, and its replay goes on."""
    record = client.record
    if record is None or record.v5 is None or not any(cursor <= sequence for cursor in record.v5.replay.values()):
        return False
    return await stored.get_sequence(client.broker.inbox, RETAINED, sequence) is not None


def missing(machine: DurableSender, sequences: list[int]) -> list[int]:
    """Return the sequences that have not come again and whose packet identifier no other message has.

    A message that was sent later under the identifier owns it: the client had given the identifier up before.
    """
    come = {delivery.sequence for delivery in machine.queued}
    taken = {delivery.id for delivery in machine.queued if delivery.dup} | machine.releases.keys()
    return [one for one in sequences if one not in come and packet_id(one) not in taken]
