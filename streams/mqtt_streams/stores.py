# SPDX-License-Identifier: Apache-2.0
"""The stores of all streams, and the subjects of requests that remove single messages of them."""

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
        self.delete_session = self._delete(SESSIONS)
        self.delete_retained = self._delete(RETAINED)
        self.delete_will = self._delete(WILLS)
        self.delete_shared = self._delete(SHARED)
        self.delete_held = self._delete(HELD)
        self.purge_held = f"{self._api}.STREAM.PURGE.{HELD}".encode()

    def _delete(self, stream: str) -> bytes:
        """Return the subject of requests that remove one message of a stream."""
        return f"{self._api}.STREAM.MSG.DELETE.{stream}".encode()
