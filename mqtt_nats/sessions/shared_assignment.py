# SPDX-License-Identifier: Apache-2.0
"""QoS 2 messages of groups that have become a durable session's when its next connection had looked for them already.

What says so was on its way to JetStream when the connection ended. Its gateway has not sent the message, and tells
whoever has the session now. See docs/internals/rules.md#shared-subscriptions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mqtt_nats.backbone.pending import IgnoredStore
from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.sessions.shared_subscribe import send_assigned
from mqtt_streams.gateway_subjects import ASSIGNED
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.stored import get_sequence

if TYPE_CHECKING:
    from mqtt_nats.backbone.link import NatsConnection
    from mqtt_nats.client.client import Client
    from mqtt_nats.gateway.broker import Broker


class LateAssignments:
    """Those of which one gateway tells, or is told."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._sid = broker.link.subscribe_raw(ASSIGNED, self._heard)

    def renew(self, link: NatsConnection) -> None:
        """Subscribe again after a reconnect."""
        link.renew(self._sid, ASSIGNED)

    def tell(self, name: str, record: int) -> None:
        """A message was made a client's whose connection here has ended; ``name`` is that of `registered_as`."""
        link = self._broker.link
        body = b"%d %b" % (record, name.encode())
        link.out.append(b"PUB %b %d\r\n%b\r\n" % (ASSIGNED, len(body), body))
        link.kick()
        self._told(name, record)  # a connection does not hear itself

    def _heard(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        record, _, name = payload.partition(b" ")
        if record.isdigit() and len(record) < 20:
            self._told(name.decode("utf-8", "replace"), int(record))

    def _told(self, name: str, record: int) -> None:
        client = self._broker.clients.get(name)
        if client is not None and client.alive and client.durable:
            client.do(_look(client, record))


async def _look(client: Client, record: int) -> None:
    """Send a message unless this connection knows of it; its session is resumed by now."""
    broker = client.broker
    side = client.durable_side
    if side is None or record in (side.assigned or ()):
        return
    assignments, _ = await retry_until_answered(client, partial(broker.groups.assigned, client.hash))
    one = next((one for one in assignments if one.seq == record), None)
    if one is None or one.subscription not in (client.shares or {}):  # what has ended is seen to at the next resume
        return
    found = await retry_until_answered(client, partial(get_sequence, broker.inbox, MESSAGES, one.message_seq))
    if not client.alive:
        return
    side.assigned = {record, *(side.assigned or ())}
    if found is None:  # the stream has let it go, and the client was not sent it
        broker.drop_assignment(b"%d" % record, IgnoredStore())
    else:
        send_assigned(client, side, one, found, dup=False)
        broker.round.start()
    broker.link.kick()
