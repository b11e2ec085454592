# SPDX-License-Identifier: Apache-2.0
"""The stores of all streams, and the subjects of requests that remove records of them."""

from mqtt_streams.api import JetStream
from mqtt_streams.positions import PositionStore
from mqtt_streams.pubrel import PubrelStore
from mqtt_streams.qos2 import STREAM as HELD
from mqtt_streams.qos2 import Qos2Store
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.retained import RetainedStore
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.sessions import SessionStore
from mqtt_streams.shared import STREAM as SHARED
from mqtt_streams.shared import SharedStore
from mqtt_streams.timers import TimerStore
from mqtt_streams.wills import STREAM as WILLS
from mqtt_streams.wills import WillStore


class Streams:
    """The stores of one NATS account.

    Args:
        domain: JetStream domain of the account; empty = none.
    """

    def __init__(self, inbox: JetStream, domain: str) -> None:
        self.sessions = SessionStore(inbox, domain)
        self.retained = RetainedStore(inbox)
        self.held = Qos2Store(inbox)
        self.pubrels = PubrelStore(inbox)
        self.timers = TimerStore(inbox)
        self.wills = WillStore(inbox)
        self.groups = SharedStore(inbox)
        self.positions = PositionStore(inbox)
        self._api = inbox.api_prefix
        self.purge_sessions = self._purge(SESSIONS)
        self.purge_retained = self._purge(RETAINED)
        self.purge_wills = self._purge(WILLS)
        self.purge_shared = self._purge(SHARED)
        self.purge_held = self._purge(HELD)
        self.delete_held = self._delete(HELD)
        self.delete_assignment = self._delete(SHARED)

    def _purge(self, stream: str) -> bytes:
        """Return the subject of requests that remove a record with the former ones of its subject: `stored.up_to`."""
        return f"{self._api}.STREAM.PURGE.{stream}".encode()

    def _delete(self, stream: str) -> bytes:
        """Return the subject of requests that remove one record by its sequence, which has replaced no other."""
        return f"{self._api}.STREAM.MSG.DELETE.{stream}".encode()
