# SPDX-License-Identifier: Apache-2.0
"""Log of each message at level `debug`: publish, delivery, acknowledgement and drop, with the clients.

It consists of hooks that are added only at this log level, so it has no cost otherwise.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.base.logs import about
from mqtt_nats.hooks.events import Acked, Delivered, Drop, Dropped, Published, Publishing
from mqtt_nats.hooks.points import MESSAGE_ACKED, MESSAGE_DELIVERED, MESSAGE_DROPPED, MESSAGE_PUBLISH

if TYPE_CHECKING:
    from mqtt_nats.hooks.registry import Hooks

log = logging.getLogger("mqtt_nats.messages")

OWNER: Final = "log"

LAST: Final = -2_000_000_000
"""Priority of the hooks: they run after all other hooks, and see the final message."""


def follow(hooks: Hooks) -> None:
    """Add the hooks of the message log if the log level is `debug`, else remove them; called again after a change."""
    hooks.remove_all(OWNER)
    if not log.isEnabledFor(logging.DEBUG):
        return
    hooks.add(MESSAGE_PUBLISH, _published, priority=LAST, owner=OWNER)
    hooks.add(MESSAGE_DELIVERED, _delivered, priority=LAST, owner=OWNER)
    hooks.add(MESSAGE_ACKED, _acked, priority=LAST, owner=OWNER)
    hooks.add(MESSAGE_DROPPED, _dropped, priority=LAST, owner=OWNER)


def _published(event: Publishing, message: Published | Drop) -> None:
    if isinstance(message, Published):
        what = "has a will" if event.will else "publishes"
        ids = _ids(message.message_id)
        log.debug("%s %s on %r at QoS %d", event.client, what, message.topic, message.qos, extra=ids)


def _delivered(event: Delivered) -> None:
    again = " again" if event.dup else ""
    ids = _ids(event.message_id)
    log.debug("%s is sent a message on %r at QoS %d%s", event.client, event.topic, event.qos, again, extra=ids)


def _acked(event: Acked) -> None:
    if event.message is not None:
        what = "refuses" if event.failed else "has"
        ids = _ids(event.message.message_id)
        log.debug("%s %s the message on %r", event.client, what, event.message.topic, extra=ids)


def _dropped(event: Dropped) -> None:
    text = "%s: a message on %r at QoS %d is dropped: %s"
    log.debug(text, event.client, event.topic, event.qos, event.reason, extra=_ids(event.message_id))


def _ids(message_id: str) -> dict[str, object]:
    return about(message_id=message_id) if message_id else {}
