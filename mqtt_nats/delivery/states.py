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
    """The reader or consumers from which the session gets stored messages."""

    NONE = "–"
    CONSUMERS = "its own consumers"
    READER = "the gateway's reader"
    CATCH_UP = "a catch-up reader"


class DeliveryState(Enum):
    """The state of the durable delivery to one client."""

    RESUMING = "resuming"
    """The consumers are attached, and pending messages are collected; nothing is sent yet."""
    PLAIN = "plain"
    """The session's own consumers bring the messages."""
    LIVE = "live"
    """The gateway's shared reader brings the messages of some or all subscriptions."""
    CATCHING_UP = "catching up"
    """A catch-up reader brings the messages that the shared reader has passed."""
    LEAVING = "leaving"
    """The session has left the shared reader, and its dormant consumers are not set to its position yet."""
    REATTACHING = "reattaching"
    """The consumers are set to the position and are being attached, while the client goes on."""
    STALLED = "stalled"
    """The client does not read: its messages are left to JetStream."""
    WAKING = "waking"
    """The client reads again: the consumers are attached, and the messages that were given up are collected."""
    ENDED = "ended"
    """The connection has left the session."""


class DeliveryEvent(Enum):
    """An event that may change the state of the delivery."""

    COLLECTED = "pending messages collected"
    JOINED = "becomes live"
    FAR_BEHIND = "is far behind"
    CATCH_UP_ENDED = "catch-up ends"
    LEFT_READER = "leaves the reader"
    CONSUMERS_SET = "consumers set"
    ATTACHED = "consumers attached"
    NOT_READING = "does not read"
    READS = "reads"
    GOES_ON = "goes on"
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

_LATE: Final = (_E.CONSUMERS_SET, _E.ATTACHED)
"""Ends of a job that moves a session to its consumers; the client may stop reading, or be gone, before them."""


def _row(state: DeliveryState, feed: Feed, following: dict[DeliveryEvent, DeliveryState], *, late: bool = False) -> Row:
    stays = dict.fromkeys(_LATE, state) if late else {}
    return Row(feed, {**following, **stays, _E.ENDED: _S.ENDED})


TABLE: Final[dict[DeliveryState, Row]] = {
    _S.RESUMING: _row(_S.RESUMING, Feed.CONSUMERS, {_E.COLLECTED: _S.PLAIN}),
    _S.PLAIN: _row(_S.PLAIN, Feed.CONSUMERS, {_E.JOINED: _S.LIVE, _E.NOT_READING: _S.STALLED}),
    # A live session that has further subscriptions joins once more for these.
    _S.LIVE: _row(
        _S.LIVE, Feed.READER, {_E.JOINED: _S.LIVE, _E.FAR_BEHIND: _S.CATCHING_UP, _E.LEFT_READER: _S.LEAVING}
    ),
    _S.CATCHING_UP: _row(_S.CATCHING_UP, Feed.CATCH_UP, {_E.CATCH_UP_ENDED: _S.LIVE}),
    _S.LEAVING: _row(_S.LEAVING, Feed.NONE, {_E.CONSUMERS_SET: _S.REATTACHING, _E.NOT_READING: _S.STALLED}),
    _S.REATTACHING: _row(_S.REATTACHING, Feed.CONSUMERS, {_E.ATTACHED: _S.PLAIN, _E.NOT_READING: _S.STALLED}),
    _S.STALLED: _row(_S.STALLED, Feed.NONE, {_E.READS: _S.WAKING}, late=True),
    _S.WAKING: _row(_S.WAKING, Feed.CONSUMERS, {_E.GOES_ON: _S.PLAIN}, late=True),
    _S.ENDED: _row(_S.ENDED, Feed.NONE, {}, late=True),
}
"""The feed of each state, and the state after each event that is possible in it."""

MAY_JOIN: Final = frozenset(one for one, row in TABLE.items() if _E.JOINED in row.following)
"""States in which subscriptions may become live."""

FROM_READER: Final = frozenset(one for one, row in TABLE.items() if row.feed in (Feed.READER, Feed.CATCH_UP))
"""States in which the shared reader, or a catch-up reader for it, brings messages."""

NOT_READING: Final = frozenset({_S.STALLED, _S.WAKING})
"""States in which nothing is sent since the client has not read."""


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
    """The consumers of a durable session, and the state of the delivery to its client."""

    def __init__(self, machine: DurableSender, former: int) -> None:
        super().__init__(machine, former)
        self.state = DeliveryState.RESUMING
        """State in the table of `states`; changed by :meth:`change` alone."""
        self.live = False
        """Whether the shared reader, or a catch-up reader, brings the messages of some or all subscriptions."""

    @property
    def stalled(self) -> bool:
        """Whether nothing is sent since the client has not read."""
        return self.state in NOT_READING

    def change(self, event: DeliveryEvent) -> None:
        """Go to the state after an event.

        Raises:
            ForbiddenTransition: the event is not possible in the present state.
        """
        self.state = after(self.state, event)
        self.live = self.state in FROM_READER

    def begin(self) -> None:
        """Begin a new session: no message is pending."""
        self.change(DeliveryEvent.COLLECTED)
        self.machine.begin()

    def start(self) -> None:
        """Send owed PUBRELs and the pending messages, which have come, then new ones."""
        self.change(DeliveryEvent.COLLECTED)
        self.machine.start()
