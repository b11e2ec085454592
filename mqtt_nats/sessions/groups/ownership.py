# SPDX-License-Identifier: Apache-2.0
"""QoS 2 messages of a group that may belong to a member already, until the one that is given them has looked.

Later messages wait behind the checked ones, so that all keep their order. All waiting messages have their places in the
client's window: otherwise the member would ask for more and more messages, and give them back unsent.
See docs/internals/sessions.md#shared-subscriptions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.base import server_clock as natstime
from mqtt_streams.consumers import parse_ack
from mqtt_streams.shared import IN_TIME_NS

if TYPE_CHECKING:
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.sessions.groups.member import Membership
    from mqtt_nats.sessions.services import Services
    from mqtt_nats.sessions.session import Session

NAK: Final = b"-NAK"

CLOCK_INEXACT_S: Final = 1.0
"""Most seconds by which the gateway's estimate of nats-server's time may be wrong."""


class Waiting(NamedTuple):
    """A message that waits for its ownership check, or behind one.

    ``number`` is its stream sequence, ``qos`` the QoS at which it is to be sent, ``doubtful`` whether it needs a check,
    ``arrived`` when it came (nanoseconds since 1970, nats-server's clock).
    """

    message: Stored
    number: int
    qos: int
    reply: bytes
    doubtful: bool
    arrived: int


class OwnershipChecks:
    """The messages of one member that wait for ownership checks, in the order in which they came."""

    __slots__ = ("_member", "waiting")

    def __init__(self, member: Membership) -> None:
        self._member = member
        self.waiting: list[Waiting] = []  # a deque would take 700 bytes more for every member

    def add(self, message: Stored, number: int, qos: int, reply: bytes, doubtful: bool) -> None:
        """Add a message; it is checked or sent after the messages before it."""
        self.waiting.append(Waiting(message, number, qos, reply, doubtful, int(natstime.now() * 1e9)))
        if len(self.waiting) == 1:
            self._member.client.do(self._look())

    def give_back(self) -> list[bytes]:
        """Drop the waiting messages of a member that leaves; return their acknowledgement subjects."""
        found = [one.reply for one in self.waiting]
        self.waiting.clear()
        return found

    async def _look(self) -> None:
        member = self._member
        client = member.client
        services = client.services
        waiting = self.waiting
        while waiting:
            one = waiting[0]
            owner = None
            if one.doubtful:
                owner = await retry_until_answered(client, partial(member.owner, one.number, one.message))
            if not waiting or waiting[0] is not one:  # given back meanwhile
                return
            del waiting[0]
            if owner is not None:
                answer(services, one.reply, b"")
            elif natstime.now() * 1e9 - one.arrived > IN_TIME_NS:
                continue  # JetStream may deliver the message to another member before this one has sent it
            elif place_of(client):
                member.send_or_assign(one.message, one.number, one.qos, one.reply, one.arrived)
                services.path.round.start()
            else:
                answer(services, one.reply, NAK)
        member.ask()


def answer(services: Services, reply: bytes, body: bytes) -> None:
    """Answer a delivery of JetStream: an empty ``body`` acknowledges, `NAK` gives back, ``+WPI`` asks for time."""
    services.nats.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
    services.nats.link.kick()


def confirmed_at(services: Services, reply: bytes, arrived: int) -> float:
    """Return the time for the token of an assignment whose acknowledgement is confirmed now (loop time in seconds).

    0 where the message may be at another member, too: it was delivered before, or it came (``arrived``, nanoseconds
    since 1970) before the last election or reconnect, after which the group may have had it delivered again.
    """
    ack = parse_ack(reply)
    since = natstime.converted(services.nats.linked) + CLOCK_INEXACT_S
    return 0.0 if ack is None or ack.delivered > 1 or arrived < since * 1e9 else services.clock.now


def place_of(client: Session) -> int:
    """Return how many further messages could be sent to a client now."""
    if client.write_buffer.clogged:
        return 0
    if client.consumers is not None:
        return client.consumers.machine.room
    return client.regular_side.room if client.regular_side is not None else 0


def room_of(client: Session) -> int:
    """Return how many further messages a client can take now, besides those that wait for ownership checks."""
    waiting = sum(len(member.doubtful.waiting) for member in (client.shares or {}).values())
    return max(place_of(client) - waiting, 0)
