# SPDX-License-Identifier: Apache-2.0
"""States of the durable delivery to one client, as a table: which feed brings messages, and what may happen next.

`DurableDelivery` is in one state at a time, and changes the state by `change` alone. The diagram in
docs/internals/delivery.md is made from this table.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from mypy_extensions import mypyc_attr

from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.sessions.consumer_binding import SessionConsumers


class Feed(Enum):
    """The reader from which the session gets stored messages."""

    NONE = "–"
    READER = "the gateway's reader"
    CATCH_UP = "a catch-up reader"


class DeliveryState(Enum):
    """The state of the durable delivery to one client."""

    OPENING = "opening"
    """The position is read, and messages in flight are fetched; nothing is sent yet."""
    LIVE = "live"
    """The gateway's shared reader brings the messages."""
    CATCHING_UP = "catching up"
    """A catch-up reader brings the messages that the shared reader has passed."""
    NOT_READING = "not reading"
    """The client does not read: it gets nothing until it reads again."""
    ENDED = "ended"
    """The connection has left the session."""


class DeliveryEvent(Enum):
    """An event that may change the state of the delivery."""

    OPENED = "session opened"
    FAR_BEHIND = "is behind the reader"
    CATCH_UP_ENDED = "catch-up ends"
    STOPS_READING = "client does not read"
    READS_AGAIN = "client reads again"
    ENDED = "connection ends"


class Row(NamedTuple):
    """A state's row of the table."""

    feed: Feed
    following: dict[DeliveryEvent, DeliveryState]
    """The state after each event that is possible."""


class ForbiddenTransition(Exception):
    """An event that is not possible in the present state: an error of the gateway."""


_S = DeliveryState
_E = DeliveryEvent


def _row(feed: Feed, following: dict[DeliveryEvent, DeliveryState]) -> Row:
    return Row(feed, {**following, _E.ENDED: _S.ENDED})


TABLE: Final[dict[DeliveryState, Row]] = {
    _S.OPENING: _row(Feed.NONE, {_E.OPENED: _S.LIVE}),
    _S.LIVE: _row(Feed.READER, {_E.FAR_BEHIND: _S.CATCHING_UP, _E.STOPS_READING: _S.NOT_READING}),
    _S.CATCHING_UP: _row(Feed.CATCH_UP, {_E.CATCH_UP_ENDED: _S.LIVE}),
    _S.NOT_READING: _row(Feed.NONE, {_E.READS_AGAIN: _S.LIVE}),
    _S.ENDED: _row(Feed.NONE, {}),
}
"""The feed of each state, and the state after each event that is possible in it."""

FROM_READER: Final = frozenset(one for one, row in TABLE.items() if row.feed is not Feed.NONE)
"""States in which the shared reader, or a catch-up reader for it, brings messages."""


def after(state: DeliveryState, event: DeliveryEvent) -> DeliveryState:
    """Return the state after an event.

    Raises:
        ForbiddenTransition: the event is not possible in this state.
    """
    found = TABLE[state].following.get(event)
    if found is None:
        raise ForbiddenTransition(f"durable delivery is {state.value}: not possible is {event.value!r}")
    return found


@mypyc_attr(allow_interpreted_subclasses=True)
class StatefulDelivery(SessionConsumers):
    """The subscriptions of a durable session, and the state of the delivery to its client."""

    def __init__(self, machine: DurableSender, former: int) -> None:
        super().__init__(machine, former)
        self.state = DeliveryState.OPENING
        """State in the table of `states`; changed by :meth:`change` alone."""
        self.live = False
        """Whether the shared reader, or a catch-up reader, brings the messages."""

    @property
    def stalled(self) -> bool:
        """Whether nothing is sent since the client has not read."""
        return self.state is DeliveryState.NOT_READING

    def change(self, event: DeliveryEvent) -> None:
        """Go to the state after an event.

        Raises:
            ForbiddenTransition: the event is not possible in the present state.
        """
        self.state = after(self.state, event)
        self.live = self.state in FROM_READER

    def begin(self) -> None:
        """Begin a new session: no message is pending."""
        self.change(DeliveryEvent.OPENED)
        self.machine.begin()

    def start(self) -> None:
        """Send owed PUBRELs and the messages in flight, which are fetched, then new ones."""
        self.change(DeliveryEvent.OPENED)
        self.machine.start()
