# SPDX-License-Identifier: Apache-2.0
"""Retained messages: one store, two listeners."""

from functools import partial

import pytest
from nats.aio.client import Client as NatsClient

from tests.harness.waiting import aeventually, eventually
from tests.interop.support import BOTH_WAYS, Message, Pahos, unique


@BOTH_WAYS
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_set_replace_and_clear(paho: Pahos, here: str, there: str, qos: int) -> None:
    topic = unique("ret/a.b/")
    publisher = paho(here, unique("pub"))
    live = [paho(side, unique("live")) for side in (here, there)]
    for client in live:
        client.subscribe(topic, 2)

    for payload in (b"first", b"second"):
        publisher.publish(topic, payload, qos, retain=True)
        for client in live:
            client.expect(Message(topic, payload, qos, False))
        for side in (here, there):
            late = paho(side, unique("late"))
            late.subscribe("ret/#" if side == there else topic, 2)
            late.expect(Message(topic, payload, qos, True))
            late.unsubscribe("ret/#" if side == there else topic)

    publisher.publish(topic, b"", qos, retain=True)
    for client in live:
        client.expect(Message(topic, b"", qos, False))

    def left(side: str) -> list[Message]:
        late = paho(side, unique("late"))
        late.subscribe(topic, 2)
        late.fence()
        late.close()
        return late.messages

    assert left("gateway") == []
    eventually(lambda: not left("nats-server"), what="the listener to hear of it")  # by a consumer


@BOTH_WAYS
async def test_a_tombstone_is_removed_by_who_wrote_it(
    paho: Pahos, nats_client: NatsClient, here: str, there: str
) -> None:
    topic = unique("ret/tomb")
    subject = f"$MQTT.rmsgs.{topic.replace('/', '.')}"
    publisher = paho(here, unique("pub"))
    publisher.publish(topic, b"x", 1, retain=True)
    stream = nats_client.jetstream()

    async def stored() -> int:
        info = await stream.stream_info("$MQTT_rmsgs", subjects_filter=subject)
        return sum((info.state.subjects or {}).values())

    assert await stored() == 1
    paho(there, unique("pub")).publish(topic, b"y", 1, retain=True)
    assert await stored() == 1
    publisher.publish(topic, b"", 1, retain=True)

    async def gone() -> bool:
        return await stored() == 0

    await aeventually(gone)


def retained_is(paho: Pahos, side: str, message: Message) -> bool:
    """Whether a new subscription of the topic gets this message, and no other one."""
    late = paho(side, unique("late"))
    late.subscribe(message.topic, 0)
    late.fence()
    late.close()
    return late.messages == [message]


@BOTH_WAYS
def test_who_was_connected_all_the_time_replaces_the_other_sides(paho: Pahos, here: str, there: str) -> None:
    topic = unique("ret/turns")
    publishers = [paho(here, unique("pub")), paho(there, unique("pub"))]
    for turn in range(6):
        publishers[turn % 2].publish(topic, b"%d" % turn, turn % 3, retain=True)
        for side in (here, there):
            # A publish at QoS 0 is not acknowledged, and nats-server's listener reads the other side's later.
            eventually(partial(retained_is, paho, side, Message(topic, b"%d" % turn, 0, True)))
