# SPDX-License-Identifier: Apache-2.0
"""Late assignments: QoS 2 messages of groups that were assigned after the session's next connection had looked.

The assignment was on its way to JetStream when the connection ended. The gateway of that connection has not sent the
message; it names the record to all gateways, and the present owner sends the message. See
docs/internals/sessions.md#shared-subscriptions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mqtt_nats.backbone.pending_stores import IgnoredStore
from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.sessions.shared_subscribe import send_assigned
from mqtt_streams.gateway_subjects import ASSIGNED
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.stored import get_sequence

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.gateway.broker import Broker


class LateAssignments:
    """Late assignments of which this gateway informs other gateways, or is informed."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        broker.reconnect.subscribe(ASSIGNED, self._heard)

    def tell(self, name: str, record: int) -> None:
        """Announce an assignment to a client whose connection here has ended.

        Args:
            name: of the client, as `registered_as` has it.
            record: sequence of the assignment in ``$MQTT_shared``.
        """
        link = self._broker.link
        body = b"%d %b" % (record, name.encode())
        link.out.append(b"PUB %b %d\r\n%b\r\n" % (ASSIGNED, len(body), body))
        link.kick()
        self._told(name, record)  # a connection to NATS does not get its own messages

    def _heard(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        record, _, name = payload.partition(b" ")
        if record.isdigit() and len(record) < 20:
            self._told(name.decode("utf-8", "replace"), int(record))

    def _told(self, name: str, record: int) -> None:
        client = self._broker.clients.get(name)
        if client is not None and client.alive and client.durable:
            client.do(_look(client, record))


async def _look(client: Client, record: int) -> None:
    """Send the message of a late assignment, unless this connection knows the assignment; runs after the resume."""
    broker = client.broker
    side = client.durable_side
    if side is None or record in (side.assigned or ()):
        return
    assignments, _ = await retry_until_answered(client, partial(broker.groups.assigned, client.hash))
    one = next((one for one in assignments if one.seq == record), None)
    if one is None or one.subscription not in (client.shares or {}):  # the next resume handles an ended subscription
        return
    found = await retry_until_answered(client, partial(get_sequence, broker.inbox, MESSAGES, one.message_seq))
    if not client.alive:
        return
    side.know_assignments([record])
    if found is None:  # the message was removed from the stream, and never sent to the client
        broker.drop_assignment(b"%d" % record, IgnoredStore())
    else:
        send_assigned(client, side, one, found, dup=False)
        broker.round.start()
    broker.link.kick()
