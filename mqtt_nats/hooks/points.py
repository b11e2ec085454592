# SPDX-License-Identifier: Apache-2.0
"""Points at which callbacks run; docs/hooks.md describes each of them."""

from __future__ import annotations

from typing import Any, Final

from mqtt_nats.access.authenticator import Allow, Credentials, Denied, Ignore
from mqtt_nats.codec import ReasonCode, Subscription
from mqtt_nats.hooks import events
from mqtt_nats.hooks.chain import Decision, Notice, Point

Verdict = Allow | Ignore | Denied


def _is_verdict(_: Any, new: Any) -> bool:
    return isinstance(new, Verdict)


def _is_reason(_: Any, new: Any) -> bool:
    return isinstance(new, ReasonCode)


def _is_bool(_: Any, new: Any) -> bool:
    return isinstance(new, bool)


def _is_message(_: Any, new: Any) -> bool:
    return isinstance(new, events.Published | events.Drop)


def _are_subscriptions(old: Any, new: Any) -> bool:
    return _as_many(old, new) and all(isinstance(one, Subscription | events.Refused) for one in new)


def _are_filters(old: Any, new: Any) -> bool:
    return _as_many(old, new) and all(isinstance(one, str) for one in new)


def _as_many(old: Any, new: Any) -> bool:
    return isinstance(new, tuple) and len(new) == len(old)


CLIENT_CONNECT: Final = Decision[events.Connecting, ReasonCode]("client.connect", _is_reason, strict=True)
CLIENT_AUTHENTICATE: Final = Decision[Credentials, Verdict]("client.authenticate", _is_verdict, strict=True)
CLIENT_AUTHORIZE: Final = Decision[events.Authorizing, bool]("client.authorize", _is_bool, strict=True, waits=False)
CLIENT_CONNECTED: Final = Notice[events.Connected]("client.connected")
CLIENT_DISCONNECTED: Final = Notice[events.Disconnected]("client.disconnected")
CLIENT_SUBSCRIBE: Final = Decision[events.Subscribing, events.Wanted](
    "client.subscribe", _are_subscriptions, strict=True
)
CLIENT_UNSUBSCRIBE: Final = Decision[events.Unsubscribing, tuple[str, ...]]("client.unsubscribe", _are_filters)
SESSION_CREATED: Final = Notice[events.Session]("session.created")
SESSION_RESUMED: Final = Notice[events.Session]("session.resumed")
SESSION_TAKEN_OVER: Final = Notice[events.Session]("session.taken_over")
SESSION_DISCARDED: Final = Notice[events.Session]("session.discarded")
SESSION_TERMINATED: Final = Notice[events.Session]("session.terminated")
SESSION_SUBSCRIBED: Final = Notice[events.Subscribed]("session.subscribed")
SESSION_UNSUBSCRIBED: Final = Notice[events.Unsubscribed]("session.unsubscribed")
MESSAGE_PUBLISH: Final = Decision[events.Publishing, events.Published | events.Drop](
    "message.publish", _is_message, strict=True
)
MESSAGE_ANSWERED: Final = Notice[events.Answered]("message.answered")
MESSAGE_DELIVERED: Final = Notice[events.Delivered]("message.delivered")
MESSAGE_ACKED: Final = Notice[events.Acked]("message.acked")
MESSAGE_DROPPED: Final = Notice[events.Dropped]("message.dropped")

POINTS: Final[tuple[Point, ...]] = tuple(one for one in list(globals().values()) if isinstance(one, Decision | Notice))
