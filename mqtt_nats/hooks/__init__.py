# SPDX-License-Identifier: Apache-2.0
"""Hooks: callbacks of plugins and applications at named points of the gateway; see docs/hooks.md.

A hook is added by ``hooks.add(MESSAGE_PUBLISH, callback)`` with a gateway's ``hooks``, or ``gateway.on(...)`` in a
plugin.
"""

from mqtt_nats.hooks.chain import Continue as Continue
from mqtt_nats.hooks.chain import Decision as Decision
from mqtt_nats.hooks.chain import Entry as Entry
from mqtt_nats.hooks.chain import HookFailed as HookFailed
from mqtt_nats.hooks.chain import Notice as Notice
from mqtt_nats.hooks.chain import Stop as Stop
from mqtt_nats.hooks.events import Acked as Acked
from mqtt_nats.hooks.events import Answered as Answered
from mqtt_nats.hooks.events import Authorizing as Authorizing
from mqtt_nats.hooks.events import ClientView as ClientView
from mqtt_nats.hooks.events import Connected as Connected
from mqtt_nats.hooks.events import Connecting as Connecting
from mqtt_nats.hooks.events import Delivered as Delivered
from mqtt_nats.hooks.events import Disconnected as Disconnected
from mqtt_nats.hooks.events import Drop as Drop
from mqtt_nats.hooks.events import Dropped as Dropped
from mqtt_nats.hooks.events import Published as Published
from mqtt_nats.hooks.events import Publishing as Publishing
from mqtt_nats.hooks.events import Refused as Refused
from mqtt_nats.hooks.events import Session as Session
from mqtt_nats.hooks.events import Subscribed as Subscribed
from mqtt_nats.hooks.events import Subscribing as Subscribing
from mqtt_nats.hooks.events import Unsubscribed as Unsubscribed
from mqtt_nats.hooks.events import Unsubscribing as Unsubscribing
from mqtt_nats.hooks.events import Wanted as Wanted
from mqtt_nats.hooks.points import CLIENT_AUTHENTICATE as CLIENT_AUTHENTICATE
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE as CLIENT_AUTHORIZE
from mqtt_nats.hooks.points import CLIENT_CONNECT as CLIENT_CONNECT
from mqtt_nats.hooks.points import CLIENT_CONNECTED as CLIENT_CONNECTED
from mqtt_nats.hooks.points import CLIENT_DISCONNECTED as CLIENT_DISCONNECTED
from mqtt_nats.hooks.points import CLIENT_SUBSCRIBE as CLIENT_SUBSCRIBE
from mqtt_nats.hooks.points import CLIENT_UNSUBSCRIBE as CLIENT_UNSUBSCRIBE
from mqtt_nats.hooks.points import MESSAGE_ACKED as MESSAGE_ACKED
from mqtt_nats.hooks.points import MESSAGE_ANSWERED as MESSAGE_ANSWERED
from mqtt_nats.hooks.points import MESSAGE_DELIVERED as MESSAGE_DELIVERED
from mqtt_nats.hooks.points import MESSAGE_DROPPED as MESSAGE_DROPPED
from mqtt_nats.hooks.points import MESSAGE_PUBLISH as MESSAGE_PUBLISH
from mqtt_nats.hooks.points import SESSION_CREATED as SESSION_CREATED
from mqtt_nats.hooks.points import SESSION_DISCARDED as SESSION_DISCARDED
from mqtt_nats.hooks.points import SESSION_RESUMED as SESSION_RESUMED
from mqtt_nats.hooks.points import SESSION_SUBSCRIBED as SESSION_SUBSCRIBED
from mqtt_nats.hooks.points import SESSION_TAKEN_OVER as SESSION_TAKEN_OVER
from mqtt_nats.hooks.points import SESSION_TERMINATED as SESSION_TERMINATED
from mqtt_nats.hooks.points import SESSION_UNSUBSCRIBED as SESSION_UNSUBSCRIBED
from mqtt_nats.hooks.points import Verdict as Verdict
from mqtt_nats.hooks.registry import Hooks as Hooks
