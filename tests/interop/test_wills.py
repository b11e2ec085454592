# SPDX-License-Identifier: Apache-2.0
"""Wills of clients on one listener reach subscribers on the other."""

import pytest

from tests.interop.support import BOTH_WAYS, Message, Pahos, unique


@BOTH_WAYS
@pytest.mark.parametrize(("qos", "retain"), [(0, False), (1, True), (2, False)])
def test_a_will_crosses(paho: Pahos, here: str, there: str, qos: int, retain: bool) -> None:
    topic = unique("will/")
    watchers = [paho(side, unique("watch")) for side in (here, there)]
    for watcher in watchers:
        watcher.subscribe(topic, 2)
    dying = paho(here, unique("dying"), will=Message(topic, b"gone", qos, retain))
    dying.crash()
    for watcher in watchers:
        watcher.expect(Message(topic, b"gone", qos, False))
    for side in (here, there):
        late = paho(side, unique("late"))
        late.subscribe(topic, 2)
        late.fence()
        assert late.messages == ([Message(topic, b"gone", qos, True)] if retain else [])


@BOTH_WAYS
def test_no_will_after_a_disconnect(paho: Pahos, here: str, there: str) -> None:
    topic = unique("will/")
    watcher = paho(there, unique("watch"))
    watcher.subscribe(topic, 2)
    paho(here, unique("leaving"), will=Message(topic, b"gone", 1, False)).close()
    paho(here, unique("pub")).publish(topic, b"after", 1)
    watcher.expect(Message(topic, b"after", 1, False))
